"""Initial values, made only where they are owned.

A model that is too large for one process is built on the meta device: its constructor runs, and what it would
have computed is written down instead. That is played back once, each tensor dropped as soon as nothing behind it
needs it: so the random stream ends where it does on a single device, and where it stood before every draw is
known. From there any part of the model can be born later, in any order: what leads to it is done again, and
draws what it would have drawn.

Until then a parameter is away: see `agent.away`. It is the same object before and after, so that an optimizer may
have it already.
"""

import ctypes
import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import msgspec
import torch
from torch.nn import init
from torch.overrides import TorchFunctionMode
from torch.utils import swap_tensors
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from agent.away import is_away, nothing
from agent.errors import Misuse

LOOKING_INITS = ("_no_grad_trunc_normal_", "orthogonal_", "sparse_", "dirac_")
IS_META = torch.Tensor.is_meta.__get__  # type: ignore[attr-defined]
MALLOC = {-1: 1 << 24, -2: 1 << 17, -3: 1 << 22}  # M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD
BUILT = "build it as usual instead of handing it over unbuilt"

Model = TypeVar("Model", bound=torch.nn.Module)
Stream = tuple[torch.Generator, torch.Tensor]


class CannotPlayBack(Misuse):
    """The constructor looked at values of the model that it was building."""


class _View(msgspec.Struct, frozen=True):
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class _Known(msgspec.Struct, frozen=True):
    """A tensor that has a number, or a view of the memory of one that has."""

    number: int
    view: _View | None = None

    def of(self, real: torch.Tensor) -> torch.Tensor:
        if self.view is None:
            return real
        return real.as_strided(self.view.shape, self.view.stride, self.view.offset)


class _Line:
    """One operation that was not done. `made` numbers what came of it, -1 being nothing new; `wrote` are the
    memories that are other ones behind it, each by its first number. `streams` are where it drew from."""

    def __init__(self, operation: Any, args: Any, kwargs: dict[str, Any], made: list[int]) -> None:
        self.operation, self.args, self.kwargs, self.made = operation, args, kwargs, made
        self.used = [known.number for known in _known_in((args, kwargs))]
        self.wrote: set[int] = set()
        self.streams: tuple[Stream, ...] = ()

    def play(self, real: dict[int, torch.Tensor]) -> list[torch.Tensor]:
        args, kwargs = tree_map_only(
            _Known, lambda known: known.of(real[known.number]), (self.args, self.kwargs)
        )
        return _tensors(self.operation(*args, **kwargs))


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
        self.roots: list[int] = []  # the first number on the memory of each
        # Held on to, so that no identity is taken for another: tensors may be given other memory.
        self._alive: list[tuple[torch.Tensor, torch.UntypedStorage]] = []
        self._numbers: dict[int, int] = {}
        self._first: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = dict(kwargs or {})
        before = tree_map_only(torch.Tensor, self.known, (args, named))
        out = func(*args, **named)
        made = [self._made(tensor) for tensor in _tensors(out)]
        if any(each >= 0 for each in made) or _known_in(before):
            taken, named = before
            if "device" in named:
                named["device"] = torch.device("cpu")
            line = _Line(func, taken, named, made)
            line.wrote = {self.roots[number] for number in (*made, *_written(func, before))}
            self.lines.append(line)
        return out

    def write_down(self, operation: Any, tensor: torch.Tensor, args: Any, kwargs: Any) -> None:
        """An operation that fills a tensor and makes no new one."""
        known = self.known(tensor)
        line = _Line(operation, (known, *args), kwargs, [-1])
        line.wrote = {self.roots[known.number]}
        self.lines.append(line)

    def known(self, tensor: torch.Tensor) -> Any:
        """`nn.Parameter(tensor)` is another tensor on the same memory, made behind our back."""
        if tensor.device.type != "meta":
            return tensor
        number = self._numbers.get(id(tensor))
        memory = tensor.untyped_storage()._cdata
        if number is not None and self._alive[number][1]._cdata == memory:
            return _Known(number)
        number = self._first[memory]
        first = self._alive[number][0]
        place = _View(tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))
        same = (first.shape, first.stride(), first.storage_offset()) == (
            tensor.shape,
            tensor.stride(),
            tensor.storage_offset(),
        )
        still = first.untyped_storage()._cdata == memory
        return _Known(number, None if same and still else place)

    def _made(self, tensor: torch.Tensor) -> int:
        if tensor.device.type != "meta":
            return -1
        number, storage = self._numbers.get(id(tensor)), tensor.untyped_storage()
        if number is not None and self._alive[number][1]._cdata == storage._cdata:
            return -1
        self._numbers[id(tensor)] = number = len(self._alive)
        self._alive.append((tensor, storage))
        self.roots.append(self._first.setdefault(storage._cdata, number))
        return number

    def forget(self) -> None:
        """Nothing more is written down, and nothing more is asked."""
        self._alive, self._numbers, self._first = [], {}, {}


@contextmanager
def _inits_written(tape: _Tape) -> Iterator[None]:
    """Initialisers that look at values are written down whole."""

    def written(original: Any) -> Any:
        def write(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            if tensor.device.type != "meta":
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


class Unborn(Generic[Model]):
    """A model whose parameters have no values yet, and how to make them.

    What has few numbers (buffers, tensors that a module keeps for itself) is born at once. `used` is called
    when the model is about to be run or saved.
    """

    def __init__(self, factory: Callable[[], Model]) -> None:
        _give_back_at_once()
        stream, tape = torch.get_rng_state(), _Tape()
        self.model = _built(factory, tape)
        if not torch.equal(torch.get_rng_state(), stream):
            raise CannotPlayBack(
                "the model's constructor draws random numbers on a device that it names itself, out of "
                f"turn with the others: leave the device out, or {BUILT}"
            )
        self.used: Callable[[], None] = _too_early
        self._lines, self._roots = tape.lines, tape.roots
        self._threads = (
            torch.get_num_threads()
        )  # where they share an operation, they share its rounding
        self._params = [param for param in self.model.parameters() if param.is_meta]
        beside = list(_beside(self.model))
        self._known: dict[int, _Known] = {id(t): tape.known(t) for t in (*self._params, *beside)}
        self._refuse_views(beside)
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

    def _begin(self, beside: Sequence[torch.Tensor]) -> None:
        """All of it once, and what is small stays."""
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
            value = known.of(real[known.number]) if known.number in wanted else nothing(tensor)
            if known.number in wanted and known.view is not None:
                value = value.clone()
            if isinstance(tensor, torch.nn.Parameter):
                value = torch.nn.Parameter(value, tensor.requires_grad)
            try:
                swap_tensors(tensor, value)  # type: ignore[no-untyped-call]
            except RuntimeError as error:
                raise CannotPlayBack(
                    f"something besides the model holds on to one of its tensors ({error}): {BUILT}"
                ) from error

    @property
    def params(self) -> tuple[torch.nn.Parameter, ...]:
        """Those that are not born from the start."""
        return tuple(param for param in self._params if param.numel() > 1)

    @property
    def mark(self) -> str:
        """The same on whoever would give it the same values."""
        digest = hashlib.blake2b(digest_size=8)
        for line in self._lines:
            digest.update(repr((str(line.operation), line.made, line.used)).encode())
            for stream in line.streams:
                digest.update(stream[1].numpy().tobytes())
        return digest.hexdigest()

    def bear(self, params: Collection[torch.nn.Parameter]) -> None:
        """Give these parameters their values, if they have none. Random streams stay where they are."""
        lacking = [param for param in params if is_away(param) and id(param) in self._known]
        wanted = {self._known[id(param)].number for param in lacking}
        with _kept(self._lines, self._threads):
            real = _played(_leading(self._lines, self._roots, wanted), wanted, _draw_again)
        for param in lacking:
            known = self._known[id(param)]
            value = known.of(real[known.number])
            param.data = value if known.view is None else value.clone()


def _built(factory: Callable[[], Model], tape: _Tape) -> Model:
    try:
        with torch.device("meta"), _Constants(), tape, _inits_written(tape):
            return factory()
    except (RuntimeError, NotImplementedError) as error:
        if "meta" not in str(error).lower():
            raise
        raise CannotPlayBack(
            f"the model's constructor looks at values that it has just made ({error}), so it cannot be "
            f"built in parts: leave that to the first step, or {BUILT}"
        ) from error


@contextmanager
def _weights_listed_anew(model: torch.nn.Module) -> Iterator[None]:
    """A recurrent module has weak references to its weights, which cannot be swapped under them."""
    recurrent = [module for module in model.modules() if isinstance(module, torch.nn.RNNBase)]
    for module in recurrent:
        module._flat_weight_refs = []
    yield
    for module in recurrent:
        module._init_flat_weights()


def _give_back_at_once() -> None:
    """Have the C library give large blocks back to the system when they are freed.

    Kept in the heap, they are of no use as soon as a little lies between them: a process that makes one tensor after
    the other would have grown to the size of the model. Memory comes before time where a model is this large.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for setting, nbytes in MALLOC.items():
            mallopt(setting, nbytes)


def _too_early() -> None:
    raise Misuse(
        "the model was handed over unbuilt and is used before Session(...) was made: its values come with the "
        "first step"
    )


def _beside(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """The tensors of a model that are no parameters, each once."""
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

Player = Callable[[_Line, dict[int, torch.Tensor]], list[torch.Tensor]]


def _played(lines: Sequence[_Line], wanted: set[int], player: Player) -> dict[int, torch.Tensor]:
    """Do these operations; of what they make the wanted is left."""
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


def _note_draws(line: _Line, real: dict[int, torch.Tensor]) -> list[torch.Tensor]:
    streams = [(each, each.get_state()) for each in _generators(line)]
    out = line.play(real)
    line.streams = tuple(s for s in streams if not torch.equal(s[0].get_state(), s[1]))
    return out


def _draw_again(line: _Line, real: dict[int, torch.Tensor]) -> list[torch.Tensor]:
    for generator, state in line.streams:
        generator.set_state(state)
    return line.play(real)


def _generators(line: _Line) -> list[torch.Generator]:
    found = {id(torch.default_generator): torch.default_generator}
    tree_map_only(torch.Generator, lambda g: found.setdefault(id(g), g), (line.args, line.kwargs))
    return list(found.values())


@contextmanager
def _kept(lines: Iterable[_Line], threads: int) -> Iterator[None]:
    """What is born late is drawn as at first, and whoever draws next does not notice."""
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


def _leading(lines: Sequence[_Line], roots: Sequence[int], wanted: set[int]) -> list[_Line]:
    """The operations without which these would not be what they are."""
    needed, found = {roots[number] for number in wanted}, list[_Line]()
    for line in reversed(lines):
        if line.wrote & needed:
            needed |= {roots[number] for number in line.used}
            found.append(line)
    return found[::-1]


def _written(func: Any, taken: tuple[Any, dict[str, Any]]) -> list[int]:
    """The numbers of the tensors that an operation writes to."""
    args, named = taken
    given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | named
    into = [
        given.get(argument.name)
        for argument in func._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return [known.number for known in _known_in(into)]


def _tensors(out: Any) -> list[torch.Tensor]:
    several = out if isinstance(out, tuple | list) else (out,)
    return [each for each in several if isinstance(each, torch.Tensor)]


def _known_in(tree: Any) -> list[_Known]:
    found: list[_Known] = []
    tree_map_only(_Known, found.append, tree)
    return found
