"""Write plain values as bytes, exactly and quickly, and read them back.

Script-defined state is copied at the start of every step, and may hold a history of 100,000
numbers, so lists and rows of numbers are given to the encoder as a whole. The bytes are
MessagePack. A value that MessagePack does not know is a map with one key, which says what it is
(see `_WRITERS`).

Tensors and arrays are returned live beside the bytes, so that the caller decides when to copy them.
Nothing is pickled, because what is read may come from elsewhere.
"""

import base64
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from itertools import chain, zip_longest
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from agent.errors import StateError
from agent.store.encoding import streams
from agent.store.encoding.sharing import present
from agent.tensors.shards import DTYPES, in_a_row

VALUES, TENSORS = "~values", "~tensors"
# A list of this many elements is first checked as a whole.
LONG = 16
TEXT_BYTES_MAX = 1 << 14
DEPTH_MAX = 100
FLOAT_TAG, FLOAT_BYTES = 0xCB, 9
NATIVE = frozenset((type(None), bool, float, bytes))
SCALARS = frozenset((type(None), bool, int, float, str))
FACTORIES: dict[str, Any] = {
    each.__name__: each for each in (int, float, bool, str, list, dict, set, tuple, deque, Counter)
}
NUMPY_KINDS = {"b", "i", "u", "f"}
INSTEAD = "keep numbers, strings, None, tensors, and lists, tuples, dicts and sets of them"


class Unsavable(StateError):  # noqa: N818 - it names what happened
    """Raised for a value that cannot be written; `path` is its place: `["net"]["x"][3]`."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what, self.path = what, ""


class Object(NamedTuple):
    """An object of a Python class taken apart: the name of its class, and its attributes."""

    kind: str
    attributes: Mapping[str, Any]


class Reference(NamedTuple):
    """An object registered under this name, not part of the state; without a name, unchanged."""

    name: str


Open = Callable[[Any], Object | Reference | None]


def _closed(_: Any) -> None:
    """Take no object apart."""


def packed(value: Any, opened: Open = _closed) -> dict[str, Any]:
    """Return `value` as a state: its bytes, and the live tensors that are in it.

    For an object that is not plain, `opened` returns its parts, a reference to it, or None. Raises
    `Unsavable`.
    """
    try:
        packing = _Packing(opened)
        data = msgspec.msgpack.encode(packing.form(value))
    except (OverflowError, UnicodeEncodeError):
        # A very long number, or a broken string: then each element is looked at alone.
        packing = _Packing(opened, careful=True)
        data = msgspec.msgpack.encode(packing.form(value))
    if packing.sharing is not None:
        packing.sharing.written(packing)
    return {VALUES: _as_value(data), TENSORS: packing.tensors}


def _as_value(data: bytes) -> str | torch.Tensor:
    """Return short bytes as text, which one worker writes; long ones as a tensor, for several."""
    if len(data) <= TEXT_BYTES_MAX:
        return base64.b64encode(data).decode()
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def is_packed(state: Any) -> bool:
    return isinstance(state, Mapping) and state.keys() == {VALUES, TENSORS}


def unpacked(
    state: Mapping[str, Any],
    here: Any = None,
    opened: Open = _closed,
    registered: Mapping[str, Any] = MappingProxyType({}),
) -> Any:
    """Return the value of a state. What is `here` in the same place is filled, not replaced.

    `opened` is as in `packed`, and `registered` has the objects that the state refers to.
    """
    unpacking = _Unpacking(state[TENSORS], opened, registered)
    found = unpacking.value(_form_of(state), here)
    unpacking.part()
    return found


def described(state: Mapping[str, Any]) -> Any:
    """Return the value of a state for other tools.

    An object becomes its attributes, and a registered one its name.
    """
    return _Describing(state[TENSORS], _closed, {}).value(_form_of(state))


def _form_of(state: Mapping[str, Any]) -> Any:
    data = state[VALUES]
    return msgspec.msgpack.decode(
        base64.b64decode(data) if isinstance(data, str) else data.numpy().tobytes()
    )


class _Packing:
    """One pass over a value. If `careful`, every element of a list is looked at."""

    def __init__(self, opened: Open, *, careful: bool = False) -> None:
        self.tensors: list[torch.Tensor] = []
        self.sharing = present()
        self._opened, self._careful = opened, careful
        # By identity. The objects are held, so that no identity is used again meanwhile.
        self.containers: dict[int, int] = {}
        self.places: dict[int, int] = {}
        self._held: list[Any] = []
        self._depth = 0

    def form(self, value: Any) -> Any:
        if type(value) in NATIVE:
            return value
        writer = _WRITERS.get(type(value))
        form = self._other(value) if writer is None else writer(self, value)
        if self.sharing is None or (found := self.sharing.find(value)) is None:
            return form
        return form if type(form) is dict and form.keys() & {"=", "@"} else {"~": [*found, form]}

    def items(self, values: list[Any], place: Callable[[int], str]) -> list[Any]:
        """Return the forms of these; `place` says where one is, if it cannot be written."""
        if not self._careful and (plain := _plain(values)) is not None:
            return plain
        self._depth += 1
        if self._depth > DEPTH_MAX:
            raise Unsavable(f"is nested more than {DEPTH_MAX} deep: {INSTEAD}")
        found = list[Any]()
        try:
            for value in values:
                found.append(self.form(value))
        except Unsavable as error:
            error.path = place(len(found)) + error.path
            raise
        self._depth -= 1
        return found

    def seen(self, value: Any) -> dict[str, int] | None:
        """Return a reference if this container was seen before, so that one list stays one."""
        known = self.containers.get(id(value))
        if known is not None:
            return {"=": known}
        self.containers[id(value)] = len(self.containers)
        self._held.append(value)
        return None

    def rows(self, values: list[Any]) -> str:
        """Return the tag of these rows, or an empty string if they are not rows."""
        kind = type(values[0])
        if kind not in ROWS or self._careful or len({*map(type, values)}) > 1:
            return ""
        parts: Iterable[Any] = chain.from_iterable(values)
        if kind is dict:
            if not {str}.issuperset(map(type, parts)):
                return ""
            parts = chain.from_iterable(map(dict.values, values))
        if not SCALARS.issuperset(map(type, parts)):
            return ""
        if kind is not tuple:
            first, ids = len(self.containers), [*map(id, values)]
            if len({*ids}) < len(ids) or not self.containers.keys().isdisjoint(ids):
                return ""
            if self.sharing is not None and any(map(self.sharing.find, values)):
                return ""
            self.containers.update(zip(ids, range(first, first + len(ids)), strict=True))
            self._held.extend(values)
        return ROWS[kind]

    def pairs(self, value: Mapping[Any, Any]) -> list[list[Any]]:
        keys = [*value]
        try:
            written = self.items(keys, lambda at: f"'s key {keys[at]!r}")
        except Unsavable as error:
            if any(isinstance(key, torch.nn.Module | torch.Tensor) for key in keys):
                error.what = "cannot be saved as a key: take its name, as named_modules() and named_parameters() give it"
            raise
        return [written, self.items([*value.values()], lambda at: f"[{_shown(keys[at])}]")]

    def place(self, value: Any, tensor: torch.Tensor) -> int:
        """Return the number of a tensor beside the bytes."""
        if id(value) not in self.places:
            self.places[id(value)] = len(self.tensors)
            self._held.append(value)
            self.tensors.append(tensor)
        return self.places[id(value)]

    def _other(self, value: Any) -> Any:
        if isinstance(value, float):  # numpy's, or a result
            return float(value)
        if isinstance(value, np.generic) and _is_known(value.dtype):
            return {"n": [value.dtype.name, value.item()]}
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            kind = type(value)
            return {"N": [kind.__module__, kind.__qualname__, _tuple(self, value)["()"]]}
        if type(value) is np.ndarray and _is_known(value.dtype):
            return {"A": self.place(value, _tensor_of(value))}
        if type(value) is torch.Tensor:
            if why := _why_not(value):
                raise Unsavable(why)
            wants = [value.device.type, value.requires_grad]
            return {"T": [self.place(value, value.detach()), *wants]}
        return self._object(value, self._opened(value))

    def _object(self, value: Any, found: Object | Reference | None) -> Any:
        if found is None:
            raise Unsavable(_what(value))
        if isinstance(found, Reference):
            return {"@": found.name}
        if (known := self.seen(value)) is not None:
            return known
        # In an order that does not depend on which attribute was set first.
        names = sorted(found.attributes)
        inside = [found.attributes[name] for name in names]
        return {"o": [found.kind, names, self.items(inside, lambda at: f".{names[at]}")]}


def _shown(key: Any) -> str:
    return f'"{key}"' if isinstance(key, str) else repr(key)


def _plain(values: list[Any]) -> list[Any] | None:
    """Return what the encoder can write at once, if all are numbers, strings or None."""
    if _all_floats(values):
        return values
    kinds = {*map(type, values)}
    if kinds <= SCALARS:
        return values
    return [*map(float, values)] if kinds <= {float, np.float64} else None


def _all_floats(values: list[Any]) -> bool:
    """Whether all are floats, by the tags of their encoding, in a tenth of the time of a loop.

    Each element begins where the one before it ends, so if all tags in the row are those of
    floats, all elements are.
    """
    count = len(values)
    if count < LONG or not isinstance(values[0], float) or not isinstance(values[-1], float):
        return False
    try:
        data = msgspec.msgpack.encode(values)
    except (TypeError, OverflowError, UnicodeEncodeError, RecursionError):
        return False
    head = 3 if count < 1 << 16 else 5
    if len(data) != head + FLOAT_BYTES * count:
        return False
    return bool((np.frombuffer(data, np.uint8)[head::FLOAT_BYTES] == FLOAT_TAG).all())


def _int(_: _Packing, value: int) -> Any:
    return value if -(1 << 63) <= value < 1 << 63 else {"i": hex(value)}


def _str(_: _Packing, value: str) -> Any:
    if value.isascii():
        return value
    try:
        value.encode()
    except UnicodeEncodeError:
        return {"s": value.encode("utf-8", "surrogatepass")}
    return value


def _complex(_: _Packing, value: complex) -> Any:
    return {"complex": [value.real, value.imag]}


def _bytearray(packing: _Packing, value: bytearray) -> Any:
    return packing.seen(value) or {"bytearray": bytes(value)}


def _list(packing: _Packing, value: list[Any]) -> Any:
    if (known := packing.seen(value)) is not None:
        return known
    if len(value) >= LONG and (tag := packing.rows(value)):
        return {"[]": [tag, value]}
    return packing.items(value, lambda at: f"[{at}]")


def _tuple(packing: _Packing, value: tuple[Any, ...]) -> Any:
    return {"()": packing.items([*value], lambda at: f"[{at}]")}


def _set(packing: _Packing, value: set[Any] | frozenset[Any]) -> Any:
    """Write a set in an order that is the same in every process, as that of strings is not."""
    tag = "set" if type(value) is set else "frozenset"
    if type(value) is set and (known := packing.seen(value)) is not None:
        return known
    ordered = sorted(value, key=lambda each: (type(each).__name__, repr(each)))
    return {tag: packing.items(ordered, lambda _: "")}


def _deque(packing: _Packing, value: deque[Any]) -> Any:
    if (known := packing.seen(value)) is not None:
        return known
    return {"deque": [value.maxlen, packing.items([*value], lambda at: f"[{at}]")]}


def _dict(packing: _Packing, value: dict[Any, Any]) -> Any:
    if (known := packing.seen(value)) is not None:
        return known
    return {DICTS[type(value)]: packing.pairs(value)}


def _defaultdict(packing: _Packing, value: defaultdict[Any, Any]) -> Any:
    factory = value.default_factory
    if factory is not None and FACTORIES.get(getattr(factory, "__name__", "")) is not factory:
        raise Unsavable(
            f"is a defaultdict of {factory!r}, which cannot be saved: {', '.join(FACTORIES)} can be its default"
        )
    if (known := packing.seen(value)) is not None:
        return known
    name = None if factory is None else factory.__name__
    return {"defaultdict": [name, packing.pairs(value)]}


def _stream(packing: _Packing, value: Any) -> Any:
    if streams.of_process(value):
        return {"@": ""}
    if (known := packing.seen(value)) is not None:
        return known
    kind = streams.kind_of(value)
    if not streams.is_known(kind):
        raise Unsavable(f"is a stream of random numbers of {kind}, which nothing here can make")
    return {"stream": [kind, packing.form(streams.place_of(value))]}


ROWS: dict[type, str] = {tuple: "()", list: "[]", dict: "{}"}
DICTS: dict[type, str] = {dict: "{}", OrderedDict: "OrderedDict", Counter: "Counter"}
MADE: dict[str, Callable[[], Any]] = {tag: kind for kind, tag in DICTS.items()}
_WRITERS: dict[type, Callable[[_Packing, Any], Any]] = {
    int: _int,
    str: _str,
    complex: _complex,
    bytearray: _bytearray,
    list: _list,
    tuple: _tuple,
    torch.Size: _tuple,
    set: _set,
    frozenset: _set,
    deque: _deque,
    defaultdict: _defaultdict,
    **dict.fromkeys(DICTS, _dict),
    **dict.fromkeys(streams.KINDS, _stream),
}


class _Unpacking:
    def __init__(
        self, tensors: list[torch.Tensor], opened: Open, registered: Mapping[str, Any]
    ) -> None:
        self._tensors, self._opened, self._registered = tensors, opened, registered
        self.made: dict[int, Any] = {}
        self.containers: list[Any] = []
        self._sharing = present()
        if self._sharing is not None:
            self._sharing.read(self)
        # Objects here that have been filled, and their memories; one is not filled for two places.
        self._used: set[int] = set()
        # Tensors here in a memory that others may read, with what they are to be.
        self._within: list[tuple[torch.Tensor, torch.Tensor]] = []

    def value(self, form: Any, here: Any = None) -> Any:
        if type(form) is list:
            return self._list(form, here)
        if type(form) is not dict:
            return form
        ((tag, content),) = form.items()
        if tag in MADE:
            return self._dict(content, self._mine(here, MADE[tag]), here)
        return getattr(self, _READERS[tag])(content, here)

    def _known(self, thing: Any) -> Any:
        self.containers.append(thing)
        return thing

    def _mine(self, here: Any, kind: Any, *given: Any) -> Any:
        """Return `here` if it is of this kind and not filled yet, else a new one. Note it."""
        if type(here) is not kind or id(here) in self._used:
            here = kind(*given)
        self._used.add(id(here))
        return self._known(here)

    def _items(self, forms: list[Any], here: Any) -> list[Any]:
        before = here if isinstance(here, list | tuple) else ()
        return [self.value(form, old) for form, old in zip_longest(forms, before[: len(forms)])]

    def _list(self, forms: list[Any], here: Any) -> list[Any]:
        before = [*here] if type(here) is list else []
        found: list[Any] = self._mine(here, list)
        found[:] = self._items(forms, before)
        return found

    def _dict(self, pairs: list[list[Any]], found: Any, here: Any) -> Any:
        before = {**here} if isinstance(here, Mapping) else {}
        keys = [self.value(key) for key in pairs[0]]
        values = [self.value(v, before.get(k)) for k, v in zip(keys, pairs[1], strict=True)]
        found.clear()
        found.update(dict(zip(keys, values, strict=True)))
        return found

    def _rows(self, content: list[Any], here: Any) -> list[Any]:
        tag, rows = content
        found: list[Any] = self._mine(here, list)
        found[:] = [*map(tuple, rows)] if tag == ROWS[tuple] else rows
        if tag != ROWS[tuple]:
            self.containers.extend(rows)
        return found

    def _tuple(self, forms: list[Any], here: Any) -> tuple[Any, ...]:
        return tuple(self._items(forms, here))

    def _set(self, forms: list[Any], here: Any) -> set[Any]:
        found: set[Any] = self._mine(here, set)
        found.clear()
        found.update(self._items(forms, None))
        return found

    def _frozenset(self, forms: list[Any], _: Any) -> frozenset[Any]:
        return frozenset(self._items(forms, None))

    def _deque(self, content: list[Any], here: Any) -> deque[Any]:
        longest, forms = content
        before = [*here] if type(here) is deque else []
        same = type(here) is deque and here.maxlen == longest
        found: deque[Any] = self._mine(here if same else None, deque, (), longest)
        items = self._items(forms, before)
        found.clear()
        found.extend(items)
        return found

    def _defaultdict(self, content: list[Any], here: Any) -> Any:
        name, pairs = content
        found = self._mine(here, defaultdict)
        found.default_factory = None if name is None else FACTORIES[name]
        return self._dict(pairs, found, here)

    def _stream(self, content: list[Any], here: Any) -> Any:
        kind, place = content
        if not streams.is_known(kind):
            raise StateError(f"{kind!r} is no stream of random numbers that can be made here")
        mine = type(here) in streams.KINDS and streams.kind_of(here) == kind
        if not mine or id(here) in self._used:
            here = streams.made(kind)
        self._used.add(id(self._known(here)))
        streams.move(here, self.value(place))
        return here

    def _tensor(self, content: list[Any], here: Any) -> torch.Tensor:
        place, device, wants_grad = content
        if place not in self.made:
            found = self._tensors[place]
            if _takes(here, found, device) and id(here) not in self._used:
                found = self._filled(here, found)
            elif device != found.device.type:
                found = found.to(device)
            self._used.add(id(found))
            self.made[place] = found.requires_grad_(wants_grad)
        made: torch.Tensor = self.made[place]
        return made

    def _filled(self, here: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
        """Fill a tensor with a memory of its own; one within another's waits for what that gets."""
        memory = here.untyped_storage()
        if here.nbytes < memory.nbytes() or memory._cdata in self._used:
            self._within.append((here, found.to(here.device)))
            return here
        self._used.add(memory._cdata)
        with torch.no_grad():
            return here.copy_(found)

    def part(self) -> None:
        """Give tensors their own memory that are not what the memory around them has made them.

        Such a tensor is a row of the script's data, or of a table where another row was kept.
        Writing to it would change that.
        """
        for here, found in self._within:
            if not torch.equal(in_a_row(here), in_a_row(found)):
                here.data = found

    def _array(self, place: int, _: Any) -> Any:
        if place not in self.made:
            self.made[place] = self._tensors[place].numpy()
        return self.made[place]

    def _object(self, content: list[Any], here: Any) -> Any:
        kind, names, forms = content
        if type(here).__qualname__ != kind or id(here) in self._used:
            raise StateError(
                f"the saved state has a {kind} where this worker has a {type(here).__name__}: make it before Session(...)"
            )
        self._used.add(id(self._known(here)))
        known = self._opened(here)
        for name in {*known.attributes} - {*names} if isinstance(known, Object) else ():
            delattr(here, name)
        for name, form in zip(names, forms, strict=True):
            set_attribute(here, name, self.value(form, getattr(here, name, None)))
        return here

    def _named(self, content: list[Any], here: Any) -> Any:
        module, name, forms = content
        kind: Any = sys.modules.get(module)
        for part in name.split("."):
            kind = getattr(kind, part, None)
        values = self._items(forms, here)
        if not (isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields")):
            raise StateError(
                f"the saved state has a {name} of {module}, which is no named tuple here"
            )
        return kind(*values)

    def _shared(self, content: list[Any], here: Any) -> Any:
        """Return what was read of an object before this one, in the place of what is equal."""
        key, kind, number, form = content
        at = len(self.containers)
        found = self.value(form, here)
        if self._sharing is None:
            return found
        thing = self._sharing.thing(key, kind, number)
        if kind == "container":
            self.containers[at] = thing
        else:
            ((_, place),) = form.items()
            self.made[place[0] if isinstance(place, list) else place] = thing
        return thing

    def _reference(self, name: str, here: Any) -> Any:
        return self._registered[name] if name else here

    def _seen(self, number: int, _: Any) -> Any:
        return self.containers[number]

    def _int(self, text: str, _: Any) -> int:
        return int(text, 16)

    def _str(self, data: bytes, _: Any) -> str:
        return data.decode("utf-8", "surrogatepass")

    def _complex(self, parts: list[float], _: Any) -> complex:
        return complex(*parts)

    def _bytearray(self, data: bytes, _: Any) -> bytearray:
        found: bytearray = self._known(bytearray(data))
        return found

    def _numpy(self, content: list[Any], _: Any) -> Any:
        return np.dtype(content[0]).type(content[1])


class _Describing(_Unpacking):
    def _object(self, content: list[Any], _: Any) -> Any:
        _, names, forms = content
        found = self._known({})
        found.update(zip(names, self._items(forms, None), strict=True))
        return found

    def _reference(self, name: str, _: Any) -> Any:
        return name or None

    def _named(self, content: list[Any], _: Any) -> Any:
        return tuple(self._items(content[2], None))

    def _stream(self, content: list[Any], _: Any) -> Any:
        self._known(None)
        return self.value(content[1])


_READERS = {
    "()": "_tuple",
    "[]": "_rows",
    "=": "_seen",
    "@": "_reference",
    "~": "_shared",
    "N": "_named",
    "set": "_set",
    "frozenset": "_frozenset",
    "deque": "_deque",
    "stream": "_stream",
    "defaultdict": "_defaultdict",
    "T": "_tensor",
    "A": "_array",
    "n": "_numpy",
    "i": "_int",
    "s": "_str",
    "o": "_object",
    "complex": "_complex",
    "bytearray": "_bytearray",
}


def set_attribute(thing: Any, name: str, value: Any) -> None:
    """Set an attribute without asking the class, which may be frozen or have a property."""
    if hasattr(thing, "__dict__"):
        thing.__dict__[name] = value
    else:
        object.__setattr__(thing, name, value)


def _takes(here: Any, found: torch.Tensor, device: str) -> bool:
    """Whether the tensor that is here can be filled in place."""
    return (
        type(here) is torch.Tensor
        and (here.dtype, here.shape, here.device.type) == (found.dtype, found.shape, device)
        and here.layout is torch.strided
        and not here.is_inference()
        and here.grad_fn is None
        and not torch._debug_has_internal_overlap(here)
    )


def _is_known(dtype: np.dtype[Any]) -> bool:
    if dtype.kind not in NUMPY_KINDS or not dtype.isnative:
        return False
    try:
        return torch.from_numpy(np.empty(0, dtype)).dtype in DTYPES
    except TypeError:
        return False


def _tensor_of(array: np.ndarray[Any, Any]) -> torch.Tensor:
    plain = array.flags.writeable and all(stride >= 0 for stride in array.strides)
    return torch.from_numpy(array if plain else array.copy())


def _why_not(tensor: torch.Tensor) -> str:
    """Return what is wrong with a tensor; empty if it can be saved."""
    if tensor.grad_fn is not None:
        return "is a tensor that still has its graph: keep value.item(), or value.detach() of a larger one"
    if tensor.layout is not torch.strided:
        return "is a sparse tensor: keep it dense"
    if tensor.is_complex():
        return "is a complex tensor: keep torch.view_as_real(...) of it"
    if tensor.is_meta or tensor.dtype not in DTYPES:
        return f"is a tensor of {tensor.dtype} on {tensor.device}, which cannot be saved: keep it as float32 on a device"
    return ""


def _what(value: Any) -> str:
    """Return what cannot be saved, and what to do."""
    kind = type(value).__name__
    if isinstance(value, torch.nn.Parameter):
        return "is a Parameter: put it into a module and give that to Session(...), or keep value.detach().clone()"
    if isinstance(value, torch.Tensor):
        return f"is a tensor of a special kind ({kind}): keep it as a plain tensor"
    if hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
        return f"is a {kind}: give it to Session(...) by itself, in place of what holds it"
    if isinstance(value, np.ndarray | np.generic):
        return f"is a {kind} of {value.dtype}, which cannot be saved: keep it as float, int or bool of up to 64 bits"
    # An object of a person's class, such as a dataclass.
    if hasattr(value, "__dict__") and not callable(value):
        return f"is a {kind}: {INSTEAD}; or give it to Session(...) by itself, which saves its attributes"
    return f"is a {kind}: {INSTEAD}"
