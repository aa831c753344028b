"""The graphs of one loss. A microbatch has another graph if its types, shapes or answers differ.

The answers are those to the questions that the code asks about the microbatch's values.

    the same but for whole numbers     cut where the first one is
    another way altogether             cut between the same parameters (with a mask, or without)

A stage runs the piece of its microbatch. All workers find the same piece, because it depends on the
microbatch alone.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import fx

from agent.errors import CannotRecord, Misuse
from agent.pipeline.stages.cut import build
from agent.pipeline.stages.stage_parts import Piece
from agent.pipeline.tracing.analysis import Facts, cut_points, examine
from agent.pipeline.tracing.recording.constants import CONSTANT
from agent.pipeline.tracing.recording.trace import FIXED, LOOKS

VARIANTS_MAX = 64  # the number kept; the one unused for longest is recorded again if needed
Shapes = tuple[Any, ...]
Anchor = tuple[str, int]  # what of the model a node uses, and how often it was used before


class Variant:
    """A graph, and the microbatches that it computes.

    These are all, or those that have the same types, shapes and answers as the example.
    """

    def __init__(
        self, graph: fx.GraphModule, facts: Facts, example: Sequence[torch.Tensor]
    ) -> None:
        self.graph, self.facts, self.example = graph, facts, tuple(example)
        self.fixed = FIXED in graph.meta
        self.kinds, self._shapes = kinds_of(example), shapes_of(example)

    @cached_property
    def form(self) -> str:
        return form_of(self.graph)

    def holds(self, cuts: Sequence[int]) -> bool:
        """Return whether it may be cut after these nodes."""
        return {point.after for point in cut_points(self.facts)}.issuperset(cuts)

    def fits(self, batch: Sequence[torch.Tensor]) -> bool:
        if not self.fixed:
            return True
        if kinds_of(batch) != self.kinds or shapes_of(batch) != self._shapes:
            return False
        looks = self.graph.meta.get(LOOKS)
        return looks is None or not looks.differs(batch)


class Variants:
    """All graphs of one loss. `record` makes the graph of a microbatch that fits none of them.

    A graph that holds for all shapes is compared with the function by `compare` at the first
    microbatch of other types, because code that asks for a type `is` asks in silence.
    """

    def __init__(
        self,
        first: Variant,
        record: Callable[[Sequence[torch.Tensor]], fx.GraphModule],
        compare: Callable[[Variant, Sequence[torch.Tensor]], None],
    ) -> None:
        self.first, self._record, self._compare = first, record, compare
        self._others: list[Variant] = []  # the last used comes first
        self._compared = {first.kinds}

    def of(self, batch: Sequence[torch.Tensor]) -> Variant:
        if self.first.fits(batch):
            if not self.first.fixed and (kinds := kinds_of(batch)) not in self._compared:
                self._compare(self.first, batch)
                self._compared.add(kinds)
            return self.first
        known = (variant for variant in self._others if variant.fits(batch))
        found = next(known, None) or self._recorded(batch)
        left = [each for each in self._others if each is not found]
        self._others = [found, *left[: VARIANTS_MAX - 1]]
        return found

    def begun_with(self, first: Variant) -> "Variants":
        """Return the same variants with a different one as the first."""
        found = Variants(first, self._record, self._compare)
        found._others = [each for each in (self.first, *self._others) if each is not first]
        return found

    def _recorded(self, batch: Sequence[torch.Tensor]) -> Variant:
        """Record a graph; memory that is shared or not depends on types, so facts do too."""
        graph = self._record(batch)
        form, kinds = form_of(graph), kinds_of(batch)
        alike = (each for each in (self.first, *self._others) if each.kinds == kinds)
        known = (each.facts for each in alike if each.form == form)
        return Variant(graph, next(known, None) or examine(graph, batch), batch)


def kinds_of(batch: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    """Return the types of tensors and numbers, which code may go by."""
    return tuple(
        (leaf.dtype, leaf.layout) if isinstance(leaf, torch.Tensor) else type(leaf)
        for leaf in batch
    )


def shapes_of(batch: Sequence[torch.Tensor]) -> Shapes:
    """Return the shapes of tensors, and the numbers, which are numbers in the graph as well."""
    return tuple(tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else leaf for leaf in batch)


def form_of(graph: fx.GraphModule) -> str:
    """Return what a graph computes as text, but for whole numbers."""
    return "\n".join(
        f"{node.op} {node.name} {_name(node.target)} {_form(node.args)} {_form(node.kwargs)}"
        for node in graph.graph.nodes
    )


def _name(target: Any) -> str:
    if isinstance(target, str):
        return target
    return f"{getattr(target, '__module__', '')}.{getattr(target, '__qualname__', target)}"


def _form(value: Any) -> str:
    match value:
        case list() | tuple():
            return f"{type(value).__name__}({', '.join(map(_form, value))})"
        case dict():
            return f"dict({', '.join(f'{key}: {_form(each)}' for key, each in value.items())})"
        case slice() | range():
            return f"{type(value).__name__}{_form((value.start, value.stop, value.step))}"
        case int() if not isinstance(value, bool):
            return "#"
    return repr(value)


# --- where a different graph is cut -----------------------------------------------------------------


class Pieces:
    """The stages of all variants, where the first one is cut after these nodes."""

    def __init__(self, first: Variant, cuts: Sequence[int]) -> None:
        self._first, self._cuts = first, tuple(cuts)
        self._found = WeakKeyDictionary[Variant, tuple[Piece, ...]]()
        self.first = self._found[first] = build(first.graph, first.facts, cuts)

    def of(self, variant: Variant) -> tuple[Piece, ...]:
        found = self._found.get(variant)
        if found is None:
            found = self._found[variant] = self._built(variant)
        return found

    def _built(self, variant: Variant) -> tuple[Piece, ...]:
        """Cut a variant, and refuse it if a stage would need weights that it does not have."""
        if variant.form == self._first.form and variant.holds(self._cuts):
            return build(variant.graph, variant.facts, self._cuts)
        try:
            cuts = _cuts_like(variant, self._first, self._cuts)
            pieces = build(variant.graph, variant.facts, cuts)
        except (Misuse, CannotRecord, _NoPlace) as error:
            raise _unlike("it cannot be cut where that is") from error
        for piece, other in zip(pieces, self.first, strict=True):
            there = {id(tensor) for _, tensor in _used(other.module)}
            extra = [name for name, tensor in _used(piece.module) if id(tensor) not in there]
            if extra:
                raise _unlike(f"stage {piece.index} would need {extra[0]}, which it does not have")
            if _tied(piece) != _tied(other):
                raise _unlike("it shares other weights between stages")
        return pieces


class _NoPlace(Exception):  # noqa: N818 - the code that catches it explains it
    """The graph has no cut in the place where the first graph has one."""


def _cuts_like(variant: Variant, first: Variant, cuts: Sequence[int]) -> list[int]:
    """Return cuts between the same uses of parameters and modules, as far after them."""
    where = {anchor: at for at, anchor in _anchors(variant.graph)}
    points = [point.after for point in cut_points(variant.facts)]
    known = [(at, where[anchor]) for at, anchor in _anchors(first.graph) if anchor in where]
    found = []
    for cut in cuts:
        low = max((pair for pair in known if pair[0] <= cut), default=(0, 0))
        _, end = min((pair for pair in known if pair[0] > cut), default=(0, variant.facts.nodes))
        wanted = low[1] + cut - low[0]
        between = [point for point in points if low[1] <= point < end]
        if not between:
            raise _NoPlace
        found.append(min(between, key=lambda point: (abs(point - wanted), point)))
    if any(b <= a for a, b in itertools.pairwise(found)):
        raise _NoPlace
    return found


def _anchors(graph: fx.GraphModule) -> Iterator[tuple[int, Anchor]]:
    """Yield the nodes that use something of the model's."""
    before = Counter[str]()
    for at, node in enumerate(graph.graph.nodes):
        if node.op in ("call_module", "get_attr") and not _is_constant(str(node.target)):
            yield at, (str(node.target), before[str(node.target)])
            before[str(node.target)] += 1


def _is_constant(name: str) -> bool:
    """Return whether it belongs to the graph, not to the model."""
    return name.startswith(CONSTANT)


def _used(module: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    tensors = [*module.named_parameters(), *module.named_buffers()]
    return [(name, tensor) for name, tensor in tensors if not _is_constant(name)]


def _tied(piece: Piece) -> tuple[Any, ...]:
    return piece.before.tied, piece.after.tied, dict(piece.tied), set(piece.names)


def _unlike(why: str) -> CannotRecord:
    return CannotRecord(
        f"session.backward(loss_of, microbatches): a microbatch is computed in another way than the recorded one, and {why}, since loss_of asks "
        "how large its inputs are, or what is in them: make all alike, or train with depth 1"
    )
