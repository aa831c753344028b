"""Tables of vectors under whole-number keys: their declaration, and the rows that a process holds.

A row is the value and, if the table has a rule, the rule's arrays beside it (momentum, sums of
squares). So whatever copies, pushes or rolls back rows carries the optimizer's state with them.
"""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial, reduce
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from agent.errors import AgentError
from agent.store.memory import machine_bytes

Array = NDArray[Any]
FIXED_BITS = 32  # of an exact table: sums are whole multiples of 2^-32
FIXED_MAX = 2.0**30
# The numbers that a table may have, which are those that a checkpoint can have.
NUMBERS = (
    "float64",
    "float32",
    "float16",
    "int64",
    "int32",
    "int16",
    "int8",
    "uint8",
    "bool",
)
SAMPLES = 4096  # numbers that a table's aggregate is tried on, at least
LOOSE_ROWS = 4096  # changes are coalesced when there are more of them


class ApplicationError(AgentError):
    """An application did something that has no meaning; the message names it."""


@contextlib.contextmanager
def blamed(what: str) -> Iterator[None]:
    """Name what of a person's own raised an error, which would end one machine after another."""
    try:
        yield
    except ApplicationError:
        raise
    except (Exception, SystemExit) as error:
        raise ApplicationError(f"{what} raised {type(error).__name__}: {error}") from error


class Aggregate(NamedTuple):
    """How two changes become one, and what is promised of it."""

    name: str
    combine: Callable[[Array, Array], Array]
    neutral: float
    commutative: bool = True
    associative: bool = True


SUM = Aggregate("sum", np.add, 0)
PRODUCT = Aggregate("product", np.multiply, 1)
LARGEST = Aggregate("largest", np.maximum, -np.inf)
UNION = Aggregate("union", np.bitwise_or, 0)  # of sets as bits of whole numbers


class Rule(NamedTuple):
    """What a server does with the summed gradient of a closed clock; `arrays` lie in the row."""

    name: str
    arrays: int
    apply: Callable[[Array, Array, list[Array]], None]  # value, gradient, arrays: changed in place


def momentum(rate: float, keep: float = 0.9) -> Rule:
    def apply(value: Array, gradient: Array, arrays: list[Array]) -> None:
        arrays[0][:] = keep * arrays[0] + gradient
        value -= rate * arrays[0]

    return Rule("momentum", 1, apply)


def adagrad(rate: float, least: float = 1e-8) -> Rule:
    def apply(value: Array, gradient: Array, arrays: list[Array]) -> None:
        arrays[0] += gradient * gradient
        value -= rate * gradient / (np.sqrt(arrays[0]) + least)

    return Rule("adagrad", 1, apply)


def adam(rate: float, first: float = 0.9, second: float = 0.999, least: float = 1e-8) -> Rule:
    def apply(value: Array, gradient: Array, arrays: list[Array]) -> None:
        mean, square, count = arrays
        count += 1
        mean[:] = first * mean + (1 - first) * gradient
        square[:] = second * square + (1 - second) * gradient * gradient
        upper = mean / (1 - first**count)
        value -= rate * upper / (np.sqrt(square / (1 - second**count)) + least)

    return Rule("adam", 3, apply)


class Table(NamedTuple):
    """A table: `keys` rows of `width` numbers, or any whole numbers as keys if `keys` is 0."""

    name: str
    keys: int
    width: int
    dtype: str = "float64"
    initial: float | Callable[[Array], Array] = 0  # of the rows of these keys
    aggregate: Aggregate = SUM
    rule: Rule | None = None
    exact: bool = False  # sums are the same bits in every order
    own_writes: bool = True  # a worker sees what it wrote, before others do
    item_state: bool = False  # rows belong to items, and are read as the clock before left them

    @property
    def reads_own(self) -> bool:
        """Whether a worker adds its own changes to what it reads; a rule needs whole clocks."""
        return self.own_writes and self.rule is None

    @property
    def columns(self) -> int:
        return self.width * (1 + (self.rule.arrays if self.rule else 0))

    @property
    def row_bytes(self) -> int:
        """Return what a row takes in memory, with its key."""
        return self.columns * np.dtype(self.dtype).itemsize + np.dtype(np.int64).itemsize

    @property
    def change_dtype(self) -> str:
        return "int64" if self.exact else self.dtype

    def rows_at_first(self, keys: Array) -> Array:
        found = np.zeros((len(keys), self.columns), self.dtype)
        with blamed(f"making the first rows of table {self.name!r}"):
            value = self.initial(keys) if callable(self.initial) else self.initial
            found[:, : self.width] = value
        if found.dtype.kind == "f" and (odd := np.isnan(found).any(axis=1)).any():
            raise ApplicationError(
                f"the first row of table {self.name!r}, key {int(keys[odd][0])}, is not a number"
            )
        return found

    def wanted(self, keys: Any) -> Array:
        """Return a copy of these keys, or name one that the table does not have."""
        given = np.asarray(keys)
        if given.ndim != 1 or (given.size and given.dtype.kind not in "iuf"):
            raise ApplicationError(
                f"keys of table {self.name!r} are one row of whole numbers; these have shape "
                f"{given.shape} and are {given.dtype}"
            )
        with np.errstate(invalid="ignore"):
            found = given.astype(np.int64)
        if given.dtype.kind != "i" and (odd := given[found != given]).size:
            is_whole = odd[0] == np.floor(odd[0])
            wrong = "keys are less than 2^63" if is_whole else "it is no whole number"
            raise ApplicationError(f"table {self.name!r} has no key {odd[0]}: {wrong}")
        strange = found[(found < 0) | (found >= self.keys)] if self.keys else found[:0]
        if strange.size:
            raise ApplicationError(
                f"table {self.name!r} has no key {int(strange[0])}; "
                f"its keys are 0 to {self.keys - 1}"
            )
        return found

    def change(self, keys: Array, values: Any) -> Array:
        """Return a change as it is kept and sent, or name what is wrong with it.

        It is a copy, because it is summed and sent after the application has its array back.
        """
        given = np.asarray(values)
        if given.dtype.kind not in "biuf":
            raise ApplicationError(
                f"a change of table {self.name!r} is of {given.dtype}, no numbers"
            )
        if given.shape != (len(keys), self.width):
            raise ApplicationError(
                f"a change of table {self.name!r} has shape {given.shape}; "
                f"{len(keys)} keys of width {self.width} need {(len(keys), self.width)}"
            )
        with np.errstate(over="ignore", invalid="ignore"):
            found: Array = given.astype("float64" if self.exact else self.dtype)
            # A sum that is finite needs no look at each number.
            is_sound = found.dtype.kind != "f" or np.isfinite(found.sum())
        if not (is_sound or np.isfinite(found).all()):
            row, column = np.argwhere(~np.isfinite(found))[0]
            raise ApplicationError(
                f"a change of table {self.name!r}, key {int(keys[row])}, is not finite: "
                f"{found[row, column]}"
            )
        if found.dtype.kind != "f" and not np.array_equal(found, given):
            row, column = np.argwhere(found != given)[0]
            raise ApplicationError(
                f"a change of table {self.name!r}, key {int(keys[row])}, is "
                f"{given[row, column]}, which {self.dtype} cannot hold"
            )
        if not self.exact:
            return found
        if (large := np.abs(found) > FIXED_MAX).any():
            row, column = np.argwhere(large)[0]
            raise ApplicationError(
                f"a change of exact table {self.name!r}, key {int(keys[row])}, is beyond "
                f"{FIXED_MAX:g}: {found[row, column]}"
            )
        fixed: Array = np.rint(found * 2.0**FIXED_BITS).astype(np.int64)
        return fixed

    def changed(self, keys: Array, rows: Array, change: Array) -> Array:
        """Return what these rows are after the summed change of a clock, as new memory."""
        with blamed(f"changing table {self.name!r}"):
            found, is_noticed = _watched(lambda: self._changed(rows, change))
        self._demand_shape(found, rows.shape)
        if found.dtype.kind == "f":
            if is_noticed or self._is_odd(found):
                self._demand(keys, found, np.isfinite(rows) & ~np.isfinite(found))
        elif (
            self.rule is None
            and (combine := self._wraps(found, [(rows, 1), (change, 1)])) is not None
        ):
            with np.errstate(over="ignore"):
                about = combine(rows.astype(float), change.astype(float))
            self._demand(keys, found, _wrapped(found, about))
        return found

    def combined(self, keys: Array, changes: Array, starts: Array) -> Array:
        """Return the changes of these keys, of which each has those from its start on."""
        with blamed(f"summing changes of table {self.name!r}"):
            found, is_noticed = _watched(lambda: self._combined(changes, starts))
        self._demand_shape(found, (len(starts), *changes.shape[1:]))
        most = int(np.diff(starts, append=len(changes)).max())
        if found.dtype.kind == "f":
            if is_noticed or self._is_odd(found):
                self._demand(keys, found, ~np.isfinite(found))
        elif (combine := self._wraps(found, [(changes, most)])) is not None:
            with np.errstate(over="ignore"):
                about = combine.reduceat(changes.astype(float), starts, axis=0)
            self._demand(keys, found, _wrapped(found, about))
        return found

    def _demand_shape(self, found: Array, shape: tuple[int, ...]) -> None:
        if found.shape != shape:
            raise ApplicationError(
                f"the aggregate {self.aggregate.name!r} of table {self.name!r} makes rows of shape "
                f"{found.shape} where {shape} are needed; rows have to keep theirs"
            )

    def _wraps(self, found: Array, parts: list[tuple[Array, int]]) -> np.ufunc | None:
        """Return the aggregate if whole numbers may have wrapped around when these were summed."""
        combine = self.aggregate.combine
        can = combine in (np.add, np.multiply) and found.dtype.kind != "b" and found.size
        if not (can and isinstance(combine, np.ufunc)):
            return None
        return None if combine is np.add and _holds(found.dtype, parts) else combine

    def _is_odd(self, found: Array) -> bool:
        """Whether numbers that NumPy has not watched being made need a look at each."""
        is_watched = self.rule is None and isinstance(self.aggregate.combine, np.ufunc)
        with np.errstate(all="ignore"):
            return not (is_watched or np.isfinite(found.sum()))

    def _demand(self, keys: Array, found: Array, is_wrong: Array) -> None:
        """Raise if a number is wrong: nothing comes back from infinity, or from another number."""
        if not is_wrong.any():
            return
        key = int(keys[np.argwhere(is_wrong)[0, 0]])
        fixed = self.exact and found.dtype.kind != "f"
        after = "" if self.rule is None else f" after {self.rule.name!r}"
        raise ApplicationError(
            f"the {self.aggregate.name} of changes of table {self.name!r}, key {key}, is beyond "
            f"what {'fixed point' if fixed else self.dtype} can hold{after}; scale the changes down"
        )

    def _changed(self, rows: Array, change: Array) -> Array:
        if self.exact:
            change = (change * 2.0**-FIXED_BITS).astype(self.dtype)
        if self.rule is None and rows.shape == change.shape:
            combine = self.aggregate.combine
            kept = rows if isinstance(combine, np.ufunc) else rows.copy()
            new: Array = combine(kept, change)
            return new.astype(rows.dtype, copy=False)
        after = rows.copy()
        value = after[:, : self.width]
        if self.rule is None:
            value[:] = self.aggregate.combine(value, change)
        else:
            parts = [
                after[:, at : at + self.width] for at in range(self.width, self.columns, self.width)
            ]
            gradient = change.view()
            gradient.flags.writeable = False  # it may be what is read again
            self.rule.apply(value, gradient, parts)
        return after

    def _combined(self, changes: Array, starts: Array) -> Array:
        combine = np.add if self.exact else self.aggregate.combine
        if isinstance(combine, np.ufunc):
            # Of itself NumPy sums narrow whole numbers as wide ones, which are cut off unseen later.
            found: Array = combine.reduceat(changes, starts, axis=0, dtype=changes.dtype)
            return found
        groups = np.split(changes[:, None], starts[1:])
        return np.concatenate([reduce(combine, group) for group in groups])


def _watched(make: Callable[[], Array]) -> tuple[Array, bool]:
    """Return what is made, and whether NumPy noticed a number go beyond what it can hold."""
    noticed: list[str] = []
    with np.errstate(all="call", under="ignore", call=lambda kind, _: noticed.append(kind)):
        return make(), bool(noticed)


def _holds(kind: np.dtype[Any], parts: list[tuple[Array, int]]) -> bool:
    """Return whether sums of so many numbers of each part are sure to fit."""
    info = np.iinfo(kind)
    most = sum(times * max(0, int(part.max())) for part, times in parts)
    least = sum(times * min(0, int(part.min())) for part, times in parts)
    return bool(info.min <= least and most <= info.max)


def _wrapped(found: Array, about: Array) -> Array:
    """Return which whole numbers are others than floats make of the same: by 2 ^ bits at least."""
    wrong: Array = np.abs(found - about) > 2.0 ** (8 * found.dtype.itemsize - 2)
    return wrong


def keys_of(table: str) -> str:
    """Return the name under which the result of a job has the keys of a table."""
    return f"{table} keys"


def verify(table: Table) -> None:
    """Raise unless the aggregate is, on samples, what it declares, because sums need it."""
    if not (isinstance(table.name, str) and table.name and table.name.isprintable()):
        raise ApplicationError(
            f"a table has the name {table.name!r}; a name is text of printable characters, because "
            "files and messages carry it"
        )
    if not _is_known(table.dtype):
        raise ApplicationError(
            f"table {table.name!r} has numbers of {table.dtype!r}, which no checkpoint can have; "
            f"there are: {', '.join(NUMBERS)}"
        )
    sizes = (table.keys, table.width)
    is_sized = all(isinstance(size, int | np.integer) for size in sizes)
    if not is_sized or table.keys < 0 or table.width < 1:
        raise ApplicationError(
            f"table {table.name!r} has {table.keys} keys of width {table.width}; keys are 0 (any "
            "whole number) or more, and the width is 1 or more"
        )
    if not isinstance(table.aggregate, Aggregate):
        raise ApplicationError(
            f"table {table.name!r} has the aggregate {table.aggregate!r}; Aggregate(...), SUM, "
            "PRODUCT, LARGEST and UNION are some"
        )
    if not isinstance(table.rule, Rule | None):
        raise ApplicationError(
            f"table {table.name!r} has the rule {table.rule!r}; adam(0.1), adagrad(0.1), "
            "momentum(0.1) and Rule(...) are some, and None is without one"
        )
    draw, kind = np.random.default_rng(7), np.dtype(table.dtype).kind
    shape = (3, 4 + SAMPLES // table.width, table.width)
    drawn, signs = draw.integers(1, 64, shape, "int8"), draw.integers(0, 2, shape, "int8") * 2 - 1
    samples: Array = (drawn if kind in "bu" else drawn * signs).astype(table.dtype)
    _look_at_rows(table, np.abs(samples[0, : table.keys or 4]))
    _look_at_aggregate(table, samples / np.float16(8) if kind == "f" else samples)


def _look_at_aggregate(table: Table, samples: Array) -> None:
    name = f"{table.aggregate.name!r} of table {table.name!r}"
    if not (table.aggregate.commutative and table.aggregate.associative):
        raise ApplicationError(
            f"the aggregate {name} does not declare that it is commutative and associative; "
            "workers finish in any order, so it must be both"
        )

    def both(left: Array, right: Array) -> Array:
        with np.errstate(all="ignore"):
            found = table.aggregate.combine(left.copy(), right)
        return _demand_alike(name, found, left)

    alike = partial(_are_alike, table)
    first, second, third = samples
    if not alike(both(first, second), both(second, first)):
        raise ApplicationError(f"the aggregate {name} is not commutative, though it declares it")
    if not alike(both(both(first, second), third), both(first, both(second, third))):
        raise ApplicationError(f"the aggregate {name} is not associative, though it declares it")
    neutral, plain = np.full_like(first, neutral_of(table)), np.abs(first)
    if not alike(np.nan_to_num(both(neutral, plain)), plain):
        raise ApplicationError(f"{table.aggregate.neutral} is not neutral for the aggregate {name}")


def _are_alike(table: Table, left: Array, right: Array) -> bool:
    near = 1e-5 if _is_whole(table) else max(1e-5, 8 * float(np.finfo(table.dtype).eps))
    known = ~(np.isnan(left) | np.isnan(right))  # it may not be made for every sign
    return np.allclose(left[known], right[known], near, near)


def _demand_alike(name: str, found: Any, given: Array) -> Array:
    """Raise if an aggregate makes what a row of the table cannot be."""
    made = type(found).__name__
    if isinstance(found, np.ndarray):
        made = f"{found.dtype} of shape {found.shape}"
        if found.shape == given.shape and np.can_cast(found.dtype, given.dtype, "same_kind"):
            return found
    raise ApplicationError(
        f"the aggregate {name} makes {made} out of {given.dtype} of shape {given.shape}; "
        "rows have to keep both"
    )


def _look_at_rows(table: Table, change: Array) -> None:
    """Raise unless a table's first rows are what it declares, and its rule can change them."""
    keys = np.arange(len(change))
    rows = _samples_of_rows(table, keys)
    if table.rule is None:
        return
    name = f"the rule {table.rule.name!r} of table {table.name!r}"
    change = change.astype(table.change_dtype)
    with blamed(name):
        whole = table.changed(keys, rows, change)
        parts = [table.changed(keys[at], rows[at], change[at]) for at in (slice(1), slice(1, None))]
        idle = np.array_equal(whole, rows) and not _moves_others(table, keys, rows, change)
    if idle:
        raise ApplicationError(
            f"{name} changes neither a value nor an array by samples of gradients; "
            "it is to change them in place, because what it returns is not looked at"
        )
    if not _are_alike(table, whole, np.concatenate(parts)):
        raise ApplicationError(
            f"{name} makes of a row what depends on other rows or on calls before, so on where "
            "partitions lie; have it keep what it remembers in its arrays"
        )


def _moves_others(table: Table, keys: Array, rows: Array, change: Array) -> bool:
    """Return whether a rule that leaves first rows as they are changes others, or by larger gradients.

    A step in proportion to a row's norm does nothing to zeros, and a threshold takes small ones.
    """
    others = rows + rows.dtype.type(1)
    sizes = () if _is_whole(table) else (1.0, 1e3, 1e6)
    tried = (table.changed(keys, others, change * change.dtype.type(size)) for size in sizes)
    return not all(np.array_equal(found, others) for found in tried)


def _samples_of_rows(table: Table, keys: Array) -> Array:
    try:
        value = table.initial(keys) if callable(table.initial) else table.initial
    except LookupError:
        if table.keys:
            raise
        # Of any keys it may have those that are read, and nobody knows here which these are.
        return np.zeros((len(keys), table.columns), table.dtype)
    rows, turned = table.rows_at_first(keys), table.rows_at_first(keys[::-1])[::-1]
    found = rows[:, : table.width]
    if _is_whole(table) and not (found == value).all():
        raise ApplicationError(
            f"the first rows of table {table.name!r} are numbers that {table.dtype} cannot hold"
        )
    if not np.allclose(rows, turned, rtol=1e-3, atol=0):
        raise ApplicationError(
            f"the first rows of table {table.name!r} depend on more than their keys, so machines "
            "would begin with different ones; draw each row by its key"
        )
    return rows


def neutral_of(table: Table) -> Any:
    if np.isfinite(table.aggregate.neutral) or not _is_whole(table):
        return table.aggregate.neutral
    kind = np.dtype(table.dtype)
    is_least = table.aggregate.neutral < 0
    if kind.kind == "b":
        return not is_least
    return np.iinfo(kind).min if is_least else np.iinfo(kind).max


def _is_known(dtype: str) -> bool:
    try:
        kind = np.dtype(dtype)
    except TypeError:
        return False
    return kind.name in NUMBERS and kind.isnative


def _is_whole(table: Table) -> bool:
    return np.dtype(table.dtype).kind != "f"


class Rows:
    """The rows of one table that a process holds: of keys `first`, `first + stride`, ...

    An array of all rows is given and taken without a copy, and then it never changes: the first
    change of a part of the rows makes a copy.
    """

    def __init__(self, table: Table, first: int = 0, stride: int = 1) -> None:
        self.table, self._first, self._stride = table, first, stride
        nbytes = len(range(first, table.keys, stride)) * table.row_bytes
        if nbytes > machine_bytes():
            raise ApplicationError(
                f"table {table.name!r} has {table.keys} keys, whose rows take {nbytes / 2**30:,.0f} GiB: more than the "
                "memory of this machine. With keys=0 a table holds only the rows that are changed"
            )
        self._all = np.arange(first, table.keys, stride)
        self._dense = table.rows_at_first(self._all) if table.keys else None
        self._shared = False  # whether somebody else has the array of all rows
        self._sparse: dict[int, Array] = {}

    def get(self, keys: Array) -> Array:
        """Return copies of these rows; those that a sparse table lacks are as they are at first.

        Reading makes none, so that a table has the same rows wherever it was read.
        """
        if self._dense is not None:
            found: Array = self._dense[keys // self._stride]
            return found
        held = [self._sparse.get(key) for key in keys.tolist()]
        new = np.array([row is None for row in held], bool)
        if new.all():
            return self.table.rows_at_first(keys)
        rows = np.empty((len(keys), self.table.columns), self.table.dtype)
        rows[~new] = [row for row in held if row is not None]
        if new.any():
            rows[new] = self.table.rows_at_first(keys[new])
        return rows

    def view(self, keys: Array) -> Array:
        """Return these rows, which the caller does not change."""
        if self._dense is None or not self._is_all(keys):
            return self.get(keys)
        self._shared = True
        return self._dense

    def known(self, keys: Array) -> Array:
        """Return these keys, as our own array if they are all of them: that is known at a glance."""
        return self._all if self._is_all(keys) else keys

    def put(self, keys: Array, rows: Array) -> None:
        """Take these rows over, which nobody changes from now on."""
        if self._dense is None:
            # Each row is a copy, because a view keeps the whole batch alive.
            self._sparse.update(zip(keys.tolist(), [row.copy() for row in rows], strict=True))
        elif rows.dtype == self._dense.dtype and self._is_all(keys):
            self._dense, self._shared = rows, True
        else:
            if self._shared:
                self._dense, self._shared = self._dense.copy(), False
            self._dense[keys // self._stride] = rows

    def keys(self) -> Array:
        if self._dense is not None:
            return self._all
        return np.array(sorted(self._sparse), np.int64)

    def _is_all(self, keys: Array) -> bool:
        return keys is self._all or (
            len(keys) == len(self._all) and np.array_equal(keys, self._all)
        )


class Changes:
    """Changes of one table, coalesced: one row for each key, however often it was changed."""

    def __init__(self, table: Table) -> None:
        self._table = table
        self._chunks: list[tuple[Array, Array]] = []  # the first holds each key once, in order
        self._loose = 0  # rows that are not in the first

    def add(self, keys: Array, change: Array) -> None:
        if len(keys):
            self._chunks.append((keys, change))
            self._loose += len(keys)
            if self._loose > LOOSE_ROWS + 4 * len(self._chunks[0][0]):
                self.all()

    def merge(self, other: "Changes") -> None:
        self.add(*other.all())

    def all(self) -> tuple[Array, Array]:
        """Return the keys, in order, and their changes."""
        if not self._loose:
            return self._chunks[0] if self._chunks else self._none()
        first = self._chunks[0][0]
        if len(self._chunks) == 1 and (first[1:] > first[:-1]).all():
            self._loose = 0
            return self._chunks[0]
        keys = np.concatenate([keys for keys, _ in self._chunks])
        rows = np.concatenate([rows for _, rows in self._chunks])
        if not (keys[1:] >= keys[:-1]).all():
            order = np.argsort(keys, kind="stable")
            keys, rows = keys[order], rows[order]
        starts = np.flatnonzero(np.append(True, keys[1:] != keys[:-1]))
        if len(starts) < len(keys):
            keys, rows = self._summed(keys, rows, starts)
        self._chunks, self._loose = [(keys, rows)], 0
        return self._chunks[0]

    def _summed(self, keys: Array, rows: Array, starts: Array) -> tuple[Array, Array]:
        """Return each key once. Only rows of keys that come again are summed: a copy is quicker."""
        counts = np.diff(starts, append=len(keys))
        found, again = rows[starts], counts > 1
        firsts = np.cumsum(counts[again]) - counts[again]
        mine = np.repeat(again, counts)
        found[again] = self._table.combined(keys[starts[again]], rows[mine], firsts)
        return keys[starts], found

    def _none(self) -> tuple[Array, Array]:
        keys = np.zeros(0, np.int64)
        return keys, np.zeros((0, self._table.width), self._table.change_dtype)

    def over(self, keys: Array, rows: Array) -> Array:
        """Return these rows as they are with the changes, for a worker that reads its writes."""
        mine, change = self.all()
        if not len(mine):
            return rows
        at = np.searchsorted(mine, keys)
        hit = (at < len(mine)) & (mine[np.minimum(at, len(mine) - 1)] == keys)
        if hit.any():
            rows = rows.copy()
            rows[hit] = self._table.changed(keys[hit], rows[hit], change[at[hit]])
        return rows
