"""What an application is: data in ranges of items, tables, and a function of a range.

The same file runs in one process (`run_alone`) and on any number of machines.
"""

import contextlib
import math
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple, SupportsFloat

import numpy as np

from agent.paramserver.tables import (
    SUM,
    ApplicationError,
    Array,
    Changes,
    Rows,
    Table,
    blamed,
    keys_of,
    verify,
)
from cloud.clock import CLOCK, Clock

ROUNDS = 1e-3  # what a library may add up in another order, as a share
MEASURE_MAX = 1e290  # so that the sum of a clock is finite, however many there are
FOREIGN = (
    "params are used by another thread or after their call of process_range; let that call itself "
    "read before its threads begin, and update after they have ended"
)
NOT_RUN = (
    "{}.{} has a yield or an await, so a call of it does nothing; it is to be a plain function that "
    "has done its work when it returns"
)
UNLIKE = (
    "{}.process_range({}, {}) was computed twice from the same rows, and the second time {}: it keeps "
    "something between calls (what lasts belongs into a table), or draws numbers of its own (draw "
    "them from params.random)"
)
GRAINS = 80  # of a worker's share of a clock: pieces of 2.5 % and 5 % are 2 and 4 of them


class Stop(NamedTuple):
    """When a job ends: whichever comes first. `change` is of the measure over `over` clocks."""

    clocks: int = 0
    seconds: float = 0.0
    change: float = 0.0
    over: int = 10

    def reached(self, measures: list[float], elapsed_s: float) -> str:
        """Return why the job ends after these clocks; empty if it goes on."""
        if self.clocks and len(measures) >= self.clocks:
            return f"{self.clocks} clocks are done"
        if self.seconds and elapsed_s >= self.seconds:
            return f"{self.seconds:g} s have passed"
        if self.change and len(measures) > self.over:
            before, now = measures[-1 - self.over], measures[-1]
            if now == before or abs(now - before) < self.change * abs(before):
                return f"the measure changed by less than {self.change:.1%} in {self.over} clocks"
        return ""


class Work(NamedTuple):
    """How the items are cut. A clock is one batch of every block, in grains.

    A grain is the smallest piece that is computed, given away, or lost.
    """

    bounds: tuple[int, ...]  # block b holds items bounds[b] up to bounds[b + 1]
    grains: int = GRAINS
    batches: int = 1  # so many clocks are one pass over the data

    @property
    def blocks(self) -> int:
        return len(self.bounds) - 1

    def items(self, block: int, clock: int, first: int, last: int) -> tuple[int, int]:
        """Return the items of grains `first` up to `last` of a block in a clock."""
        lo, hi = self.bounds[block], self.bounds[block + 1]
        cuts, batch = self.batches * self.grains, clock % self.batches * self.grains
        size = hi - lo
        return lo + size * (batch + first) // cuts, lo + size * (batch + last) // cuts


def even(items: int, blocks: int, grains: int = GRAINS, batches: int = 1) -> Work:
    """Cut the items into blocks of equal size, within one."""
    return Work(tuple(items * block // blocks for block in range(blocks + 1)), grains, batches)


SEEN: "ContextVar[Params | None]" = ContextVar("params", default=None)


class Params:
    """What one call of `process_range` sees. Its changes count only if the call returns.

    It is of that call and its thread: changes of threads side by side would be lost.
    """

    def __init__(
        self, tables: dict[str, Table], read: Callable[[Table, Array], Array], clock: int
    ) -> None:
        self._tables, self._read, self.clock = tables, read, clock
        self.changes: dict[str, Changes] = {}
        self.measured = 0.0
        self.wrong: Exception | None = None  # which counts even if the application catches it
        self._called, self._first = False, 0
        self._random: np.random.Generator | None = None

    @contextlib.contextmanager
    def called(self, first: int) -> Iterator[None]:
        """Have this be the one that a call from this item on sees; another thread sees none."""
        self._called, self._first, token = True, first, SEEN.set(self)
        try:
            yield
        finally:
            SEEN.reset(token)

    @property
    def random(self) -> np.random.Generator:
        """Return a stream of random numbers that depends on the clock and the items alone."""
        self._demand_own()
        if self._random is None:
            self._random = np.random.default_rng((self.clock, self._first))
        return self._random

    def read(self, table: str, keys: Any) -> Array:
        """Return the values of these keys, one row each, to be read only."""
        declared = self._table(table)
        wanted = declared.wanted(keys)
        try:
            rows = self._read(declared, wanted)
        except Missing as missing:
            self.wrong = missing
            raise
        if declared.reads_own and table in self.changes:
            rows = self.changes[table].over(wanted, rows)
        found = rows[:, : declared.width]
        found.flags.writeable = False  # it may be what is sent to others
        return found

    def update(self, table: str, keys: Any, change: Any) -> None:
        """Add changes; a table with a rule takes gradients."""
        declared = self._table(table)
        wanted = declared.wanted(keys)
        held = self.changes.setdefault(table, Changes(declared))
        held.add(wanted, declared.change(wanted, change))

    def measure(self, value: SupportsFloat) -> None:
        """Add to the objective of this clock, which is summed over all items."""
        self._demand_own()
        number = float(value.item() if hasattr(value, "item") else value)
        if not abs(number) <= MEASURE_MAX:
            wrong = "too large to be summed" if math.isfinite(number) else "not finite"
            raise ApplicationError(f"the measure is {wrong}: {number}")
        self.measured += number

    def unlike(self, other: "Params") -> str:
        """Return what the call that saw `other` did otherwise, but for rounding; empty if nothing."""
        for name, table in self._tables.items():
            (keys, change), (others, again) = [
                one.changes.get(name, Changes(table)).all() for one in (self, other)
            ]
            if not np.array_equal(keys, others):
                return f"it changed other rows of table {name!r}"
            share = ROUNDS if np.dtype(table.dtype).kind == "f" else 0.0
            odd = ~np.isclose(change, again, share, share * np.abs(change).max(initial=0.0))
            if odd.any():
                return f"it changed key {keys[odd.any(axis=1)][0]} of table {name!r} otherwise"
        alike = math.isclose(self.measured, other.measured, rel_tol=ROUNDS, abs_tol=ROUNDS)
        return "" if alike else f"it measured {other.measured:g}, not {self.measured:g}"

    def _table(self, name: str) -> Table:
        self._demand_own()
        try:
            return self._tables[name]
        except KeyError:
            known = ", ".join(self._tables)
            raise ApplicationError(f"there is no table {name!r}; there are: {known}") from None

    def _demand_own(self) -> None:
        if self._called and SEEN.get() is not self:
            foreign = ApplicationError(FOREIGN)
            self.wrong = self.wrong or foreign
            raise foreign


class Application:
    """The base of applications. `process_range` or `process_item` is to be overridden."""

    tables: tuple[Table, ...] = ()
    stop = Stop(clocks=10)
    items = 0
    grainwise = True  # a call for each grain; else for as many as lie together

    def load(self, lo: int, hi: int) -> None:
        """Load these items from storage, because they may be processed here from now on."""

    def process_range(self, lo: int, hi: int, params: Params) -> None:
        for item in range(lo, hi):
            _demand_done("process_item", self, self.process_item(item, params))  # type: ignore[func-returns-value]

    def process_item(self, item: int, params: Params) -> None:  # noqa: ARG002 - to be overridden
        raise ApplicationError(f"{type(self).__name__} has neither process_range nor process_item")


def checked(application: Application) -> dict[str, Table]:
    """Return the tables by name, after whatever can be found wrong before a start is looked for."""
    given = application.tables
    is_row = isinstance(given, tuple | list) and not isinstance(given, Table)
    if not is_row or not all(isinstance(table, Table) for table in given):
        raise ApplicationError("the application's tables are not a tuple of Table(...)")
    if type(application.stop) is not Stop:  # the keeper would not hear of a criterion of one's own
        raise ApplicationError(f"the application's stop is {application.stop!r}, not a Stop(...)")
    for table in application.tables:
        with blamed(f"looking at samples of table {table.name!r}"):
            verify(table)
        if table.exact and (table.aggregate is not SUM or np.dtype(table.dtype).kind != "f"):
            raise ApplicationError(f"table {table.name!r} is exact, which needs float sums")
    tables = {table.name: table for table in application.tables}
    if len(tables) != len(application.tables) or not tables:
        raise ApplicationError("tables need names that differ, and there must be at least one")
    for name in tables:
        if keys_of(name) in tables:
            raise ApplicationError(
                f"table {keys_of(name)!r} has the name under which the keys of table {name!r} are saved"
            )
    items = application.items
    if not isinstance(items, int | float | np.number) or items < 1:
        raise ApplicationError(f"the application's items are {items!r}; their number is 1 or more")
    return tables


def process(application: Application, lo: int, hi: int, params: Params) -> None:
    """Process a range, if it has items; an error names the range and the kind of error."""
    if hi <= lo:
        return
    error: BaseException | None = None
    try:
        with params.called(lo):
            _demand_done("process_range", application, application.process_range(lo, hi, params))  # type: ignore[func-returns-value]
    except (Exception, SystemExit) as raised:  # an exit would end machine after machine
        error = raised
    error = params.wrong or error
    if isinstance(error, Missing | ApplicationError):
        raise error
    if error is not None:
        what = f"{type(application).__name__}.process_range({lo}, {hi}) raised"
        raise ApplicationError(f"{what} {type(error).__name__}: {error}") from error


def is_tried(clock: int, before: int) -> bool:
    """Whether items of this clock are to be computed twice, after one `before`, or none (-1).

    It is done in a worker's first clock, and then ever more seldom.
    """
    return before < 0 or (before < clock and clock & (clock - 1) == 0)


def try_again(application: Application, lo: int, hi: int, first: Params, again: Params) -> None:
    """Compute a range once more, from the same rows; raise if it comes out otherwise.

    A range may be computed anywhere, and again where a row had not come, so it is to be a function
    of its rows.
    """
    process(application, lo, hi, again)
    if how := first.unlike(again):
        raise ApplicationError(UNLIKE.format(type(application).__name__, lo, hi, how))


def _demand_done(call: str, application: Application, returned: object) -> None:
    if isinstance(returned, Generator | Coroutine | AsyncGenerator):
        if not isinstance(returned, AsyncGenerator):
            returned.close()  # else it complains later that nobody waited for it
        raise ApplicationError(NOT_RUN.format(type(application).__name__, call))


class Missing(Exception):  # noqa: N818 - it says what is so
    """A row that was read is not here yet: the range is processed again when it is."""

    def __init__(self, table: Table, keys: Array) -> None:
        super().__init__(table.name)
        self.table, self.keys = table, keys


class Alone(NamedTuple):
    """What a run in one process ends with."""

    rows: dict[str, Rows]
    measures: list[float]
    why: str

    def value(self, table: str) -> Array:
        held = self.rows[table]
        return held.get(held.keys())[:, : held.table.width]


def run_alone(application: Application, work: Work | None = None, time: Clock = CLOCK) -> Alone:
    """Run an application in this process: one worker that waits for nobody."""
    tables = checked(application)
    work = work or even(application.items, 1)
    application.load(0, application.items)
    rows = {name: Rows(table) for name, table in tables.items()}
    measures: list[float] = []
    begun_s, tried = time.now_s(), -1
    while not (why := application.stop.reached(measures, time.now_s() - begun_s)):
        clock = len(measures)
        sums = {name: Changes(table) for name, table in tables.items()}

        def read(table: Table, keys: Array, sums: dict[str, Changes] = sums) -> Array:
            found = rows[table.name].get(keys)
            return sums[table.name].over(keys, found) if table.reads_own else found

        measures.append(0.0)
        for block in range(work.blocks):
            step = 1 if application.grainwise else work.grains
            for grain in range(0, work.grains, step):
                params = Params(tables, read, clock)
                lo, hi = work.items(block, clock, grain, grain + step)
                process(application, lo, hi, params)
                if hi > lo and is_tried(clock, tried):
                    tried = clock
                    try_again(application, lo, hi, params, Params(tables, read, clock))
                measures[-1] += params.measured
                for name, changes in params.changes.items():
                    sums[name].merge(changes)
        for name, changes in sums.items():
            keys, change = changes.all()
            rows[name].put(keys, tables[name].changed(keys, rows[name].get(keys), change))
    return Alone(rows, measures, why)


def touched(application: Application, work: Work, block: int, clock: int) -> dict[str, Array]:
    """Return the keys that one clock of a block reads, from a dry run over first rows.

    It only saves asking later, so what goes wrong in it is left to be named by the real run.
    """
    tables = {table.name: table for table in application.tables}
    found = dict[str, list[Array]]()

    def read(table: Table, keys: Array) -> Array:
        found.setdefault(table.name, []).append(np.unique(keys))
        return table.rows_at_first(keys)

    lo, hi = work.items(block, clock, 0, work.grains)
    with contextlib.suppress(ApplicationError):
        process(application, lo, hi, Params(tables, read, clock))
    return {name: np.unique(np.concatenate(keys)) for name, keys in found.items()}
