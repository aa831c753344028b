"""Initial values, made only where they are owned.

A model that is too large for one process is built on the meta device: its constructor runs, and what it would
have computed is written down instead. Playing that back draws the same random numbers in the same
order as the script on a single device, and so gives the same initial values; but each tensor is
dropped as soon as nothing behind it needs it, unless it is one of ours.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import init
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from agent.errors import Misuse

LOOKING_INITS = ("_no_grad_trunc_normal_", "orthogonal_", "sparse_", "dirac_")
IS_META = torch.Tensor.is_meta.__get__  # type: ignore[attr-defined]


class CannotPlayBack(Misuse):
    """The constructor looked at values of the model that it was building."""


class _Line:
    """One operation that was not done. `made` numbers what came of it; -1 is nothing new."""

    def __init__(self, operation: Any, args: Any, kwargs: dict[str, Any], made: list[int]) -> None:
        self.operation, self.args, self.kwargs, self.made = operation, args, kwargs, made


class _Known:
    """A tensor that has a number, or a view of the memory of one that has."""

    def __init__(self, number: int, view: torch.Tensor | None = None) -> None:
        self.number, self._view = number, view

    def of(self, real: torch.Tensor) -> torch.Tensor:
        if self._view is None:
            return real
        return real.as_strided(self._view.shape, self._view.stride(), self._view.storage_offset())


class _Constants(TorchFunctionMode):
    """`torch.tensor(...)` has values from the start: they are kept, and copied when it is its turn.

    Code that asks whether a tensor is without values would leave it so, and nobody would notice.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == IS_META:  # a new wrapper every time, so not the same object
            raise CannotPlayBack(
                "the model's constructor asks whether its tensors have values: if that is an initialiser of "
                "torch.nn.init, call it by that name, so that it can be written down"
            )
        if func is not torch.tensor:
            return func(*args, **(kwargs or {}))
        return func(*args, **{**(kwargs or {}), "device": "cpu"}).to("meta")


class _Tape(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes down every operation that touches the meta device."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.lines: list[_Line] = []
        self._alive: list[torch.Tensor] = []  # so that no identity is taken for another
        self._numbers: dict[int, int] = {}
        self._first: dict[int, int] = {}  # on each storage

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        args, named = tree_map_only(torch.Tensor, self.known, (args, dict(kwargs or {})))
        made = [self._made(tensor) for tensor in _tensors(out)]
        if any(each >= 0 for each in made) or _known_in((args, named)):
            if "device" in named:
                named["device"] = torch.device("cpu")
            self.lines.append(_Line(func, args, named, made))
        return out

    def known(self, tensor: torch.Tensor) -> Any:
        """`nn.Parameter(tensor)` is another tensor on the same memory, made behind our back."""
        if tensor.device.type != "meta":
            return tensor
        if id(tensor) in self._numbers:
            return _Known(self._numbers[id(tensor)])
        number = self._first[tensor.untyped_storage()._cdata]
        first = self._alive[number]
        same = (first.shape, first.stride(), first.storage_offset()) == (
            tensor.shape,
            tensor.stride(),
            tensor.storage_offset(),
        )
        return _Known(number, None if same else tensor)

    def _made(self, tensor: torch.Tensor) -> int:
        if tensor.device.type != "meta" or id(tensor) in self._numbers:
            return -1
        self._numbers[id(tensor)] = number = len(self._alive)
        self._alive.append(tensor)
        self._first.setdefault(tensor.untyped_storage()._cdata, number)
        return number


@contextmanager
def _inits_written(tape: _Tape) -> Iterator[None]:
    """Initialisers that look at values are written down whole."""

    def written(original: Any) -> Any:
        def write(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            if tensor.device.type != "meta":
                return original(tensor, *args, **kwargs)  # type: ignore[no-any-return]
            tape.lines.append(_Line(original, (tape.known(tensor), *args), kwargs, [-1]))
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


class Unborn:
    """A model without values, and how to make them."""

    def __init__(self, factory: Callable[[], torch.nn.Module]) -> None:
        """`factory` builds the model; what it draws is drawn in `bear`."""
        self._tape = _Tape()
        try:
            with torch.device("meta"), _Constants(), self._tape, _inits_written(self._tape):
                self.model = factory()
        except (RuntimeError, NotImplementedError) as error:
            if "meta" not in str(error).lower():
                raise
            raise CannotPlayBack(
                f"the model's constructor looks at values that it has just made ({error}), so it cannot be "
                "built in parts: leave that to the first step, or train with depth 1"
            ) from error

    def bear(self, owned: Collection[str]) -> None:
        """Give these parameters and buffers their values; the random stream moves on as if all had them."""
        tensors = {
            **dict(self.model.named_parameters(remove_duplicate=False)),
            **dict(self.model.named_buffers(remove_duplicate=False)),
        }
        wanted = {self._tape.known(tensors[n]).number for n in owned if tensors[n].is_meta}
        real = self._play(wanted)
        born: dict[int, torch.Tensor] = {}
        for module in self.model.modules():
            for kind in (module._parameters, module._buffers):
                places: dict[str, Any] = dict(kind)
                for key, tensor in places.items():
                    if tensor is None or not tensor.is_meta:
                        continue
                    known = self._tape.known(tensor)
                    if known.number in wanted:
                        value = _alike(known.of(real[known.number]), tensor)
                        places[key] = born.setdefault(id(tensor), value)
                kind.update(places)

    def _play(self, wanted: set[int]) -> dict[int, torch.Tensor]:
        last_use: dict[int, int] = {}
        for index, line in enumerate(self._tape.lines):
            used = [known.number for known in _known_in((line.args, line.kwargs))]
            last_use.update(dict.fromkeys((*line.made, *used), index))
        ends: dict[int, list[int]] = {}
        for number, index in last_use.items():
            ends.setdefault(index, []).append(number)
        real: dict[int, torch.Tensor] = {}
        with torch.no_grad():
            for index, line in enumerate(self._tape.lines):
                args, kwargs = tree_map_only(
                    _Known, lambda known: known.of(real[known.number]), (line.args, line.kwargs)
                )
                out = _tensors(line.operation(*args, **kwargs))
                real.update(zip(line.made, out, strict=True))
                for number in (-1, *ends.get(index, ())):
                    if number not in wanted:
                        real.pop(number, None)
        return real


def _tensors(out: Any) -> list[torch.Tensor]:
    several = out if isinstance(out, tuple | list) else (out,)
    return [each for each in several if isinstance(each, torch.Tensor)]


def _known_in(tree: Any) -> list[_Known]:
    found: list[_Known] = []
    tree_map_only(_Known, found.append, tree)
    return found


def _alike(value: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(value, tensor.requires_grad)
    return value
