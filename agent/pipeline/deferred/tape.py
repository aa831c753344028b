"""A tape of a constructor that runs on the meta device, operation by operation."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import torch
from torch.nn import init
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from agent.errors import Misuse
from agent.tensors.device import CPU
from agent.tensors.unchanged import memory_of

LOOKING_INITS = ("_no_grad_trunc_normal_", "orthogonal_", "sparse_", "dirac_")
META, TOLD = torch.device("meta"), torch.device("cpu", 0)  # no other code numbers the CPU
TO_COPY = torch.ops.aten._to_copy.default
IS_META = torch.Tensor.is_meta.__get__  # type: ignore[attr-defined]
DEVICE = torch.Tensor.device.__get__

Stream = tuple[torch.Generator, torch.Tensor]


class CannotPlayBack(Misuse):
    """The constructor looked at values of the model that it was building."""


class View(msgspec.Struct, frozen=True):
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class Known(msgspec.Struct, frozen=True):
    """A tensor that has a number, or a view of the memory of one that has."""

    number: int
    view: View | None = None

    def of(self, real: torch.Tensor) -> torch.Tensor:
        if self.view is None:
            return real
        return real.as_strided(self.view.shape, self.view.stride, self.view.offset)


class TapeLine:
    """One operation that was not done.

    `made` has the numbers of its results, or -1 for a result that is no new tensor. `wrote` has the
    memories that it changes, each by its first number. `streams` are the random streams that it
    draws from, with their states.
    """

    def __init__(self, operation: Any, args: Any, kwargs: dict[str, Any], made: list[int]) -> None:
        self.operation, self.args, self.kwargs, self.made = operation, args, kwargs, made
        self.used = [known.number for known in known_in((args, kwargs))]
        self.wrote: set[int] = set()
        self.streams: tuple[Stream, ...] = ()

    def play(self, real: dict[int, torch.Tensor]) -> list[torch.Tensor]:
        args, kwargs = tree_map_only(
            Known, lambda known: known.of(real[known.number]), (self.args, self.kwargs)
        )
        return tensors(self.operation(*args, **kwargs))


class Constants(TorchFunctionMode):
    """Keeps what `torch.tensor(...)` makes, because it has values; they are copied in turn.

    Code that asks whether a tensor has no values would leave it so, silently; that is refused. Code
    that asks for a tensor's device gets the answer of a single device, because a library that finds
    itself on the meta device initialises nothing.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(
            torch.device, lambda each: META if each == TOLD else each, (args, kwargs or {})
        )
        if func == DEVICE:
            device = func(*args)
            return TOLD if device == META else device
        if func == IS_META:  # a new wrapper every time, so not the same object
            raise CannotPlayBack(
                "the model's constructor asks whether its tensors have values: if that is an initialiser of "
                "torch.nn.init, call it by that name, so that it can be written down"
            )
        if func is not torch.tensor:
            return func(*args, **kwargs)
        return func(*args, **{**kwargs, "device": "cpu"}).to("meta")


class Tape(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records every operation that touches the meta device."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.lines: list[TapeLine] = []
        self.roots: list[int] = []  # for each tensor, the first number on its memory
        # The devices that memories were brought to, by the first number of each memory.
        self.places: dict[int, torch.device] = {}
        # Held, so that no id is used again; with the storage, as a tensor may be given other
        # memory.
        self._alive: list[tuple[torch.Tensor, torch.UntypedStorage]] = []
        self._numbers: dict[int, int] = {}
        self._first: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():
            return self._written_down(func, args, dict(kwargs or {}))

    def _written_down(self, func: Any, args: Any, named: dict[str, Any]) -> Any:
        before = tree_map_only(torch.Tensor, self.known, (args, named))
        place = self._place(func, before)
        if func is TO_COPY and known_in(before):
            named["device"] = META
        out = func(*args, **named)
        made = [self._made(tensor) for tensor in tensors(out)]
        if place != CPU:
            self.places.update((self.roots[number], place) for number in made)
        if any(each >= 0 for each in made) or known_in(before):
            taken, named = before
            if "device" in named:
                named["device"] = torch.device("cpu")
            line = TapeLine(func, taken, named, made)
            line.wrote = {self.roots[number] for number in (*made, *_written(func, before))}
            self.lines.append(line)
        return out

    def _place(self, func: Any, taken: tuple[Any, dict[str, Any]]) -> torch.device:
        """Return the final device of a result; it is made on the CPU and moved when complete."""
        known = known_in(taken)
        if func is TO_COPY and known:
            asked = taken[1].get("device")
            return self.place_of(known[0]) if asked is None or asked == META else asked
        if not func.is_view:
            self._refuse_placed(known)
        return CPU

    def _refuse_placed(self, known: list[Known]) -> None:
        for place in filter(lambda place: place != CPU, map(self.place_of, known)):
            raise CannotPlayBack(
                f"the model's constructor computes with what it has brought to {place}: values are made on the CPU. "
                "Bring the model there last, as in unbuilt(lambda: Model(...).to(device))"
            )

    def place_of(self, known: Known) -> torch.device:
        return self.places.get(self.roots[known.number], CPU)

    def write_down(self, operation: Any, tensor: torch.Tensor, args: Any, kwargs: Any) -> None:
        """Record an operation that fills a tensor and makes no new one."""
        known = self.known(tensor)
        self._refuse_placed([known])
        line = TapeLine(operation, (known, *args), kwargs, [-1])
        line.wrote = {self.roots[known.number]}
        self.lines.append(line)

    def known(self, tensor: torch.Tensor) -> Any:
        """Return the number of a meta tensor, or its view of the memory of one with a number.

        `nn.Parameter(tensor)` makes a different tensor on the same memory, without a recorded
        operation.
        """
        if not _unmade(tensor):
            return tensor
        number = self._numbers.get(id(tensor))
        memory = memory_of(tensor)
        if number is not None and self._alive[number][1]._cdata == memory:
            return Known(number)
        number = self._first[memory]
        first = self._alive[number][0]
        place = View(tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))
        same = (first.shape, first.stride(), first.storage_offset()) == (
            tensor.shape,
            tensor.stride(),
            tensor.storage_offset(),
        )
        still = memory_of(first) == memory
        return Known(number, None if same and still else place)

    def _made(self, tensor: torch.Tensor) -> int:
        if not _unmade(tensor):
            return -1
        number, storage = self._numbers.get(id(tensor)), tensor.untyped_storage()
        if number is not None and self._alive[number][1]._cdata == storage._cdata:
            return -1
        self._numbers[id(tensor)] = number = len(self._alive)
        self._alive.append((tensor, storage))
        self.roots.append(self._first.setdefault(storage._cdata, number))
        return number

    def forget(self) -> None:
        """Release the tensors; nothing is recorded or asked after this."""
        self._alive, self._numbers, self._first = [], {}, {}


@contextmanager
def inits_written(tape: Tape) -> Iterator[None]:
    """Record initialisers that look at values as one operation each."""

    def written(original: Any) -> Any:
        def write(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            if not _unmade(tensor):
                return original(tensor, *args, **kwargs)  # type: ignore[no-any-return]
            tape.write_down(original, tensor, args, kwargs)
            return tensor

        return write

    originals = {name: getattr(init, name) for name in LOOKING_INITS}
    for name, original in originals.items():
        setattr(init, name, written(original))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(init, name, original)


def _written(func: Any, taken: tuple[Any, dict[str, Any]]) -> list[int]:
    """Return the numbers of the tensors that an operation writes to."""
    args, named = taken
    given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | named
    into = [
        given.get(argument.name)
        for argument in func._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return [known.number for known in known_in(into)]


def _unmade(tensor: torch.Tensor) -> bool:
    with torch._C.DisableTorchFunction():
        return tensor.device == META


def tensors(out: Any) -> list[torch.Tensor]:
    several = out if isinstance(out, tuple | list) else (out,)
    return [each for each in several if isinstance(each, torch.Tensor)]


def known_in(tree: Any) -> list[Known]:
    found: list[Known] = []
    tree_map_only(Known, found.append, tree)
    return found
