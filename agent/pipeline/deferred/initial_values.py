"""Initial values, made only where they are owned.

A model that is too large for one process is built on the meta device: its constructor runs, and
what it would have computed is recorded instead. The record is played back once, and each tensor is
dropped as soon as no later operation needs it. So the random stream ends where it does on a single
device, and its state before every draw is known. After that any part of the model can be born
later, in any order: the operations that lead to it are done again, and draw what they would have
drawn.

Until then a parameter is away: see `agent.tensors.absent`. It is the same object before and after, so
that an optimizer may have it already.
"""

import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import torch
from torch.nn.parameter import is_lazy
from torch.utils import swap_tensors
from torch.utils._pytree import tree_map_only

from agent.errors import Misuse
from agent.pipeline.deferred.tape import (
    CannotPlayBack,
    Constants,
    Known,
    Tape,
    TapeLine,
    inits_written,
)
from agent.store.memory import set_malloc
from agent.tensors.absent import is_away, nothing
from agent.tensors.device import CPU

# Large blocks go back to the system when they are freed. Kept in the heap, they are of no use as soon
# as a little lies between them, so a process that makes one tensor after the other would grow to the
# size of the model. Memory is worth more than time where a model is this large.
MALLOC = {-1: 1 << 24, -2: 1 << 17, -3: 1 << 22}  # M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD
BUILT = "build it as usual instead of handing it over unbuilt"

Model = TypeVar("Model", bound=torch.nn.Module)


class Unborn(Generic[Model]):
    """A model whose parameters have no values yet, and how to make them.

    What has few numbers (buffers, tensors that a module keeps for itself) is born at once. `used`
    is called when the model is about to be run or saved.
    """

    def __init__(self, factory: Callable[[], Model]) -> None:
        set_malloc(MALLOC)
        if (default := torch.get_default_device()) != CPU:
            raise CannotPlayBack(
                f"torch.set_default_device({str(default)!r}) has values drawn on that device, which cannot be done in "
                f"parts: bring the model there with .to(...) within the function, or {BUILT}"
            )
        stream, tape = torch.get_rng_state(), Tape()
        self.model = _built(factory, tape)
        if not torch.equal(torch.get_rng_state(), stream):
            raise CannotPlayBack(
                "the model's constructor draws random numbers on a device that it names itself, out of "
                f"turn with the others: leave the device out, or {BUILT}"
            )
        if any(is_lazy(param) for param in self.model.parameters()):
            raise CannotPlayBack(
                f"the model has lazy modules, which have no shapes yet: give them their sizes, or {BUILT}"
            )
        self.used: Callable[[], None] = _too_early
        self._lines, self._roots = tape.lines, tape.roots
        # Kept, because an operation that is shared among other threads rounds differently.
        self._threads = torch.get_num_threads()
        self._params = [param for param in self.model.parameters() if param.is_meta]
        beside = list(_beside(self.model))
        self._known: dict[int, Known] = {id(t): tape.known(t) for t in (*self._params, *beside)}
        self._places = {one: tape.place_of(known) for one, known in self._known.items()}
        self._refuse_views(beside)
        self._refuse_other_parameters()
        tape.forget()
        self._begin(beside)
        self.model.register_forward_pre_hook(lambda *_: self.used())
        self.model.register_state_dict_pre_hook(lambda *_: self.used())  # type: ignore[no-untyped-call]

    def _refuse_views(self, beside: Iterable[torch.Tensor]) -> None:
        memories = {self._roots[self._known[id(param)].number] for param in self._params}
        if any(self._roots[self._known[id(tensor)].number] in memories for tensor in beside):
            raise CannotPlayBack(
                f"the model keeps a view of one of its parameters beside it: make it in forward, or {BUILT}"
            )

    def _refuse_other_parameters(self) -> None:
        """Refuse devices on which `.to(...)` makes new parameters, because that ends ties.

        A single process would train a different model than the one that is built here.
        """
        if torch.__future__.get_swap_module_params_on_conversion():
            return
        for place in {self._places[id(param)] for param in self._params} - {CPU}:
            there = torch.empty(0, device=place)
            if not torch._has_compatible_shallow_copy_type(torch.empty(0, device=CPU), there):
                raise CannotPlayBack(
                    f".to({str(place)!r}) makes new parameters there, and ends ties: say torch.__future__."
                    f"set_swap_module_params_on_conversion(True) before it, or {BUILT}"
                )

    def _begin(self, beside: Sequence[torch.Tensor]) -> None:
        """Play the whole record once, and keep what is small."""
        small = [param for param in self._params if param.numel() <= 1]
        wanted = {self._known[id(tensor)].number for tensor in (*beside, *small)}
        real = _played(self._lines, wanted, _note_draws)
        with _weights_listed_anew(self.model):
            self._swap((*beside, *self._params), wanted, real)

    def _swap(
        self, tensors: Iterable[torch.Tensor], wanted: set[int], real: dict[int, torch.Tensor]
    ) -> None:
        for tensor in tensors:
            known = self._known[id(tensor)]
            if known.number in wanted:
                value = self._made(tensor, real)
            else:
                value = nothing(tensor, self._places[id(tensor)])
            if isinstance(tensor, torch.nn.Parameter):
                value = torch.nn.Parameter(value, tensor.requires_grad)
            try:
                swap_tensors(tensor, value)  # type: ignore[no-untyped-call]
            except RuntimeError as error:
                raise CannotPlayBack(
                    f"something besides the model holds on to one of its tensors ({error}): {BUILT}"
                ) from error

    def _made(self, tensor: torch.Tensor, real: dict[int, torch.Tensor]) -> torch.Tensor:
        """Return what has been played for a tensor, on its device."""
        known, place = self._known[id(tensor)], self._places[id(tensor)]
        value = known.of(real[known.number])
        return value.clone() if known.view is not None and place == CPU else value.to(place)

    @property
    def params(self) -> tuple[torch.nn.Parameter, ...]:
        """The parameters that were not born at once."""
        return tuple(param for param in self._params if param.numel() > 1)

    @property
    def mark(self) -> str:
        """The digest that workers share if they would give the model the same values."""
        digest = hashlib.blake2b(digest_size=8)
        for line in self._lines:
            digest.update(repr((str(line.operation), line.made, line.used)).encode())
            for stream in line.streams:
                digest.update(stream[1].numpy().tobytes())
        return digest.hexdigest()

    def bear(self, params: Collection[torch.nn.Parameter]) -> None:
        """Give these parameters their values, if they have none. Random streams stay unchanged."""
        lacking = [param for param in params if is_away(param) and id(param) in self._known]
        wanted = {self._known[id(param)].number for param in lacking}
        with _kept(self._lines, self._threads):
            real = _played(_leading(self._lines, self._roots, wanted), wanted, _draw_again)
        for param in lacking:
            param.data = self._made(param, real)


def _built(factory: Callable[[], Model], tape: Tape) -> Model:
    try:
        with torch.device("meta"), Constants(), tape, inits_written(tape):
            return factory()
    except (RuntimeError, NotImplementedError) as error:
        if "meta" not in str(error).lower():
            raise
        raise CannotPlayBack(
            f"the model's constructor looks at values that it has just made ({error}), so it cannot be built in "
            f"parts: leave that to the first step, or {BUILT}"
        ) from error


@contextmanager
def _weights_listed_anew(model: torch.nn.Module) -> Iterator[None]:
    """Make recurrent modules list their weights again.

    They have weak references to these, which must not exist while weights are swapped.
    """
    recurrent = [module for module in model.modules() if isinstance(module, torch.nn.RNNBase)]
    for module in recurrent:
        module._flat_weight_refs = []
    yield
    for module in recurrent:
        module._init_flat_weights()


def _too_early() -> None:
    raise Misuse(
        "the model was handed over unbuilt and is used before Session(...) was made: its values come with the "
        "first step"
    )


def _beside(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Yield the tensors of a model that are not parameters, each once."""
    seen: set[int] = set()
    for module in model.modules():
        kept = [item for key, item in vars(module).items() if not key.startswith("_")]
        for tensor in (*module._buffers.values(), *_tensors_within(kept)):
            if tensor is None or isinstance(tensor, torch.nn.Parameter) or id(tensor) in seen:
                continue
            if tensor.is_meta:
                seen.add(id(tensor))
                yield tensor


def _tensors_within(kept: Any) -> Iterator[torch.Tensor]:
    for item in kept:
        if isinstance(item, torch.Tensor):
            yield item
        elif isinstance(item, list | tuple):
            yield from _tensors_within(item)
        elif isinstance(item, dict):
            yield from _tensors_within(item.values())


# --- playing ---------------------------------------------------------------------------------------

Player = Callable[[TapeLine, dict[int, torch.Tensor]], list[torch.Tensor]]


def _played(lines: Sequence[TapeLine], wanted: set[int], player: Player) -> dict[int, torch.Tensor]:
    """Do these operations, and return the wanted ones of their results."""
    last_use: dict[int, int] = {}
    for index, line in enumerate(lines):
        last_use.update(dict.fromkeys((*line.made, *line.used), index))
    ends: dict[int, list[int]] = {}
    for number, index in last_use.items():
        ends.setdefault(index, []).append(number)
    real: dict[int, torch.Tensor] = {}
    with torch.no_grad():
        for index, line in enumerate(lines):
            real.update(zip(line.made, player(line, real), strict=True))
            for number in (-1, *ends.get(index, ())):
                if number not in wanted:
                    real.pop(number, None)
    return real


def _note_draws(line: TapeLine, real: dict[int, torch.Tensor]) -> list[torch.Tensor]:
    streams = [(each, each.get_state()) for each in _generators(line)]
    out = line.play(real)
    line.streams = tuple(s for s in streams if not torch.equal(s[0].get_state(), s[1]))
    return out


def _draw_again(line: TapeLine, real: dict[int, torch.Tensor]) -> list[torch.Tensor]:
    for generator, state in line.streams:
        generator.set_state(state)
    return line.play(real)


def _generators(line: TapeLine) -> list[torch.Generator]:
    found = {id(torch.default_generator): torch.default_generator}
    tree_map_only(torch.Generator, lambda g: found.setdefault(id(g), g), (line.args, line.kwargs))
    return list(found.values())


@contextmanager
def _kept(lines: Iterable[TapeLine], threads: int) -> Iterator[None]:
    """Play with the first thread count, so values are drawn as at first; then put all back."""
    drawn = {id(g): g for line in lines for g, _ in line.streams}
    states = [(generator, generator.get_state()) for generator in drawn.values()]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
        for generator, state in states:
            generator.set_state(state)


def _leading(lines: Sequence[TapeLine], roots: Sequence[int], wanted: set[int]) -> list[TapeLine]:
    """Return the operations that the values of these depend on."""
    needed, found = {roots[number] for number in wanted}, list[TapeLine]()
    for line in reversed(lines):
        if line.wrote & needed:
            needed |= {roots[number] for number in line.used}
            found.append(line)
    return found[::-1]
