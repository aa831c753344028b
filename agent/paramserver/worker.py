"""The worker: computes its blocks clock by clock, within the bound on staleness.

What a clock changed is staged at the servers, one batch for each partition, and when all of them
have it the controller is notified. Only batches that the controller then lists count, so a worker
may die at any point of this and leaves nothing torn.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from agent.paramserver.api import (
    Application,
    Missing,
    Params,
    Work,
    is_tried,
    process,
    touched,
    try_again,
)
from agent.paramserver.help import Helpee, Helper, Order, Piece, Settings, Tail
from agent.paramserver.messages import (
    CONTROLLER,
    Begun,
    Cancel,
    CancelAck,
    Committed,
    Completed,
    Done,
    DoThis,
    Failed,
    Finished,
    Fresh,
    Gone,
    Grant,
    Group,
    Load,
    Loaded,
    Message,
    Out,
    Progress,
    Release,
    Released,
    Report,
    Roll,
    Route,
    Section,
    Span,
    Stage,
    Staged,
    Subscribe,
)
from agent.paramserver.tables import ApplicationError, Array, Changes, Table, blamed
from agent.source.tracebacks import traceback_of

FAR = 1 << 40
AHEAD_BYTES = 1 << 30  # of own changes that are in no clock yet, which servers hold as well
NOTHING = -2  # the age of a partition of which nothing has come


class Bound(NamedTuple):
    """How far a worker may be ahead: 0 is BSP, `slack` is SSP, and None is ASP."""

    slack: int | None = 0
    clocks: int = 0  # of the job, if it has a last one

    def verified(self) -> "Bound":
        if self.slack is not None and self.slack < 0:
            raise ApplicationError(
                f"slack is {self.slack}; it must be 0 (BSP) or more, or none (ASP)"
            )
        return self

    def newest(self, age: int) -> int:
        """Return the newest clock for which rows of this age are fresh enough."""
        newest = FAR if self.slack is None else age + 1 + self.slack
        return min(newest, self.clocks - 1) if self.clocks else newest


class Cache:
    """Rows that servers sent, and the ages of the partitions they came from."""

    def __init__(self, tables: dict[str, Table], partitions: int) -> None:
        self._tables = tables
        self.ages = [NOTHING] * partitions
        self._rows: dict[str, dict[int, Array]] = {name: {} for name in tables}
        self._dense: dict[str, Array] = {}
        self._known: dict[str, Array] = {}
        self._shared: set[str] = set()  # tables whose array somebody else has as well
        self.asked: list[dict[str, set[int]]] = [{} for _ in range(partitions)]
        self.tried: set[int] = set()  # blocks of which a dry run has shown what they read

    def get(self, table: Table, keys: Array) -> Array:
        """Return these rows, which nobody changes, or raise `Missing` with those not here."""
        if not len(keys):
            return np.zeros((0, table.width), table.dtype)
        if table.keys:
            known = self._known.get(table.name)
            if known is None or not known[keys].all():
                raise Missing(table, keys if known is None else keys[~known[keys]])
            dense = self._dense[table.name]
            whole = len(self.ages) == 1 and len(keys) == len(dense)
            if whole and np.array_equal(keys, np.arange(len(dense))):
                self._shared.add(table.name)
                return dense
            found: Array = dense[keys]
            return found
        rows = self._rows[table.name]
        if lacking := [key for key in keys.tolist() if key not in rows]:
            raise Missing(table, np.array(lacking))
        return np.stack([rows[key] for key in keys.tolist()])

    def put(self, section: Section) -> None:
        table = self._tables[section.table]
        if not table.keys:
            rows = self._rows[table.name]
            # Each row is a copy, because a view keeps the whole message alive.
            copies = [row.copy() for row in section.values]
            rows.update(zip(section.keys.tolist(), copies, strict=True))
            return
        if table.name not in self._dense:
            self._dense[table.name] = np.zeros((table.keys, table.width), table.dtype)
            self._known[table.name] = np.zeros(table.keys, bool)
        first = int(section.keys[0]) if len(section.keys) else 0
        # Servers send each key once and in order, so there are as many only if these are all.
        whole = len(section.keys) == len(range(first, table.keys, len(self.ages)))
        at: Array | slice = slice(first, None, len(self.ages)) if whole else section.keys
        self._known[table.name][at] = True
        if whole and len(section.keys) == table.keys:
            self._dense[table.name] = section.values  # nobody changes it
            self._shared.add(table.name)
            return
        if table.name in self._shared:
            self._dense[table.name] = self._dense[table.name].copy()
            self._shared.discard(table.name)
        self._dense[table.name][at] = section.values

    def wanted(self) -> dict[str, Array]:
        """Return all that was asked for."""
        found: dict[str, list[Array]] = {}
        for asked in self.asked:
            for name, keys in asked.items():
                found.setdefault(name, []).append(np.array(sorted(keys)))
        return {name: np.concatenate(keys) for name, keys in found.items()}

    def forget(self, partition: int) -> None:
        """Have none of its rows, because not all of them are of one clock."""
        for known in self._known.values():
            known[partition :: len(self.ages)] = False
        for rows in self._rows.values():
            for key in [key for key in rows if key % len(self.ages) == partition]:
                del rows[key]

    def lacks(self, partition: int) -> dict[str, Array]:
        """Return what was asked of a partition and has not come."""
        found = {}
        for name, keys in self.asked[partition].items():
            known, rows = self._known.get(name), self._rows[name]
            lacking = [
                key for key in keys if not (known[key] if known is not None else key in rows)
            ]
            if lacking:
                found[name] = np.array(sorted(lacking))
        return found


class Batch:
    """Changes on their way: nothing is said of them before every partition has its part."""

    def __init__(self, name: str, clock: int, changes: dict[str, Changes]) -> None:
        self.name, self.clock, self.changes = name, clock, changes
        self.waiting: set[int] = set()
        self.passed = False  # a server has said to the controller what is finished
        self.repeats = False  # it is to be said again
        self.then: list[tuple[str, Message]] = []
        self.release: set[int] = set()


class Turn:
    """One clock of some blocks."""

    def __init__(self, clock: int, blocks: list[int], grains: int) -> None:
        self.clock, self.blocks = clock, blocks
        self.tail = Tail(clock, [Span(block, 0, grains) for block in blocks])
        self.changes: dict[str, Changes] = {}
        self.done: list[Span] = []
        self.measured = 0.0
        self.grains, self.own_s = 0, 0.0  # computed here, and how long that took


class Extra:
    """A piece in progress apart from the own work: somebody else's, or one taken back."""

    def __init__(self, source: Order | Piece, clock: int, spans: list[Span]) -> None:
        self.source, self.tail = source, Tail(clock, list(spans))
        self.changes: dict[str, Changes] = {}
        self.done: list[Span] = []
        self.measured = 0.0


class Run(NamedTuple):
    """What is to be computed now, until something else is heard."""

    span: Span
    clock: int
    part: Turn | Extra


class Worker:
    def __init__(
        self,
        name: str,
        application: Application,
        work: Work,
        bound: Bound,
        help_settings: Settings,
        partitions: int,
    ) -> None:
        self.name, self.application, self.work = name, application, work
        self.bound, self._settings, self._partitions = bound.verified(), help_settings, partitions
        self.tables = {table.name: table for table in application.tables}
        self.held: set[int] = set()
        self._serial = 0
        self.computed = 0  # grains, with those that did not count
        self._reset()

    def _reset(self) -> None:
        self._failed: Failed | None = None
        self._tried = -1  # the newest clock of which items were computed twice
        self.helpee, self.helper = Helpee(self._settings), Helper(self._settings)
        self.cache = Cache(self.tables, self._partitions)
        self.own: dict[int, int] = {}
        self.turn: Turn | None = None
        self.extra: Extra | None = None
        self._redone: dict[int, Extra] = {}
        self._leaving: set[int] = set()
        self._alone_since: dict[int, int] = {}  # from which clock on nobody else did a block
        self._let_go: dict[int, int] = {}  # released blocks: from which clock on
        self._batches: dict[str, Batch] = {}
        self.grain_s = 0.0  # of what was computed here in the newest clock
        self._said: list[Finished] = []  # that may not have been heard
        self._unseen: list[tuple[int, dict[str, Changes]]] = []  # own changes newer than the cache
        self._unseen_bytes = 0  # which have to be held until others are as far
        self._blocked: list[Turn | Extra] = []  # until rows come
        self.route: list[str] = []
        self._version = -1

    # What is heard.

    def handle(  # noqa: PLR0911 - one case for each kind of message
        self, sender: str, message: Message, now_s: float
    ) -> Out:
        match message:
            case Fresh():
                return self._fresh(message)
            case Staged():
                return self._staged(message)
            case Progress():
                turn = self.turn
                first_s = (
                    turn.own_s * turn.tail.total / turn.grains if turn and turn.grains else 0.0
                )
                tail = turn.tail if turn else None
                return self.helpee.heard(sender, message, tail, now_s, first_s)
            case DoThis():
                self.helper.asked(sender, message, self.clock, self.held)
            case Begun():
                tail = self.turn.tail if self.turn and not self._settling else None
                return self.helpee.begun(message, tail, now_s) + self._advance()
            case CancelAck():
                self.helpee.acknowledged(message)
                return self._advance()
            case Completed():
                self.helpee.completed(message)
                return self._advance()
            case Cancel():
                return [(sender, answer) for answer in self.helper.cancelled(sender, message)]
            case _:
                return self._ordered(message)
        return []

    def _ordered(self, message: Message) -> Out:  # noqa: PLR0911 - one case each
        """Do what the controller says."""
        match message:
            case Roll():
                return self._roll(message)
            case Route() if message.version > self._version:
                return self._follow(message)
            case Grant():
                return self._grant(message)
            case Release():
                return self._release(message)
            case Load():
                return self._load(message.blocks)
            case Group():
                self.helpee.helpers, self.helper.helpees = message.helpers, message.helpees
            case Gone():
                for node in message.nodes:
                    self.helpee.forget(node)
                    self.helper.forget(node)
                return self._say_again() + self._advance()  # one of them may have passed it on
            case Committed():
                self._said = [said for said in self._said if said.clock > message.clock]
            case Report():
                again: Out = [(CONTROLLER, Loaded(blocks=sorted(self.held))), *self._say_again()]
                return [*again, (CONTROLLER, self._failed)] if self._failed else again
        return []

    def _say_again(self) -> Out:
        """Say what is finished, and what will be, because what was passed on may not be heard."""
        for batch in self._batches.values():
            batch.repeats = True
        return [(CONTROLLER, said) for said in self._said]

    def _follow(self, message: Route) -> Out:
        """Say again to new owners what the former ones may not have passed on."""
        moved = {at for at, owner in enumerate(message.owners) if owner != self.route[at]}
        self.route, self._version = message.owners, message.version
        out: Out = []
        for batch in self._batches.values():
            stages = self._stages(batch)
            out += [(self.route[at], stages[at]) for at in sorted(moved & batch.waiting)]
        for at in sorted(moved):  # at least for the clock: the newest rows may be lost on their way
            again = Subscribe(partition=at, keys=self.cache.lacks(at), serial=self._serial)
            out.append((self.route[at], again))
        return out

    def _load(self, blocks: list[int]) -> Out:
        for block in blocks:
            if block not in self.held:
                lo, hi = self.work.bounds[block : block + 2]
                with blamed(f"{type(self.application).__name__}.load({lo}, {hi})"):
                    self.application.load(lo, hi)
                self.held.add(block)
        return [(CONTROLLER, Loaded(blocks=blocks))]

    def _roll(self, message: Roll) -> Out:
        usual_s, groups = self.helpee.usual_s, (self.helpee.helpers, self.helper.helpees)
        before = self.cache
        self._reset()
        self.helpee.usual_s = usual_s
        self.helpee.helpers, self.helper.helpees = groups
        self.route, self._version = message.owners, message.version
        self.own = dict.fromkeys(message.blocks, message.clock + 1)
        self._alone_since = dict(self.own)
        if not self.own:
            return self._subscribe({})
        self.cache.tried = before.tried
        return self._subscribe(self.own, before.wanted())

    def _grant(self, message: Grant) -> Out:
        new = {
            block: clock
            for block, clock in message.clocks.items()
            if block not in self.own and clock >= self._let_go.get(block, clock)
        }
        for block in new:
            self._let_go.pop(block, None)
        self._alone_since.update(new)
        self.own.update(new)
        # An older clock goes first, because the present one may not end before it is closed.
        is_older = self.turn is not None and min(new.values(), default=FAR) < self.turn.clock
        out = self._drop_turn() if is_older else []
        if free := self._free():  # of what the clock that was given up had
            out += self._say_released(free)
        return out + self._subscribe(new)

    def _subscribe(self, clocks: dict[int, int], before: dict[str, Array] | None = None) -> Out:
        """Ask every partition for what blocks read in these clocks, and what was read `before`.

        All are asked, for their clock at least. A block is tried once: later clocks that read
        other rows ask for them.
        """
        keys = {name: [found] for name, found in (before or {}).items()}
        for block, clock in clocks.items():
            if block not in self.cache.tried:
                self.cache.tried.add(block)
                for name, found in touched(self.application, self.work, block, clock).items():
                    keys.setdefault(name, []).append(found)
        return self._ask({name: np.unique(np.concatenate(found)) for name, found in keys.items()})

    def _ask(self, keys: dict[str, Array], only_new: bool = False) -> Out:
        out: Out = []
        self._serial += 1
        for partition, owner in enumerate(self.route):
            asked, mine = self.cache.asked[partition], {}
            for name, all_keys in keys.items():
                part = all_keys[all_keys % self._partitions == partition]
                new = [key for key in part.tolist() if key not in asked.get(name, ())]
                if new:
                    mine[name] = np.array(new)
                    asked.setdefault(name, set()).update(new)
            if mine or not only_new:
                order = Subscribe(partition=partition, keys=mine, serial=self._serial)
                out.append((owner, order))
        return out

    def _fresh(self, message: Fresh) -> Out:
        """Take rows in. After a move those of a clock before may be on a slower way, or lost."""
        ages, at = self.cache.ages, message.partition
        is_late = message.age < ages[at]
        # Of its own accord a server sends each clock; an answer has only what was asked.
        is_gap = NOTHING < ages[at] < message.age - (not message.asked)
        if is_gap:
            self.cache.forget(at)
        if not is_late:
            ages[at] = message.age
            for section in message.sections:
                self.cache.put(section)
            seen = min(ages)
            self._unseen_bytes -= sum(_size(changes) for at, changes in self._unseen if at <= seen)
            self._unseen = [one for one in self._unseen if one[0] > seen]
            self.helper.drop_old(seen)
            self._blocked = []
        lacking = self.cache.lacks(at) if is_gap or (is_late and message.asked) else {}
        again = Subscribe(partition=at, keys=lacking, serial=self._serial)
        return [(self.route[at], again)] if lacking else []

    def _release(self, message: Release) -> Out:
        blocks = [block for block in message.blocks if block in self.own]
        turn = self.turn
        out: Out = []
        if message.now and turn is not None and set(blocks) & set(turn.blocks):
            out = self._drop_turn()
        self._leaving |= set(blocks)
        again = {block: self._let_go[block] for block in message.blocks if block in self._let_go}
        if free := self._free() | again:  # also of orders before, which the turn has held up
            out += self._say_released(free)
        return out + self._read_no_more()

    def _free(self) -> dict[int, int]:
        """Let go of the blocks that leave and have no work under way; return their next clocks."""
        busy = set(self.turn.blocks) if self.turn is not None else set()
        busy |= {block for batch in self._batches.values() for block in batch.release}
        free = {block: self.own.pop(block) for block in sorted(self._leaving - busy)}
        self._leaving -= set(free)
        self._let_go.update(free)
        return free

    def _drop_turn(self) -> Out:
        """Give the present clock up: its blocks are done anew, here or by others."""
        out = self.helpee.cancel()
        self.turn, self.extra, self._redone = None, self._foreign(), {}
        self.helpee.pieces.clear()
        return out

    def _say_released(self, clocks: dict[int, int]) -> Out:
        """Say what is finished before what is released: what was passed on may come later."""
        said: Out = [(CONTROLLER, finished) for finished in self._said]
        return [*said, (CONTROLLER, Released(clocks=clocks))]

    def _read_no_more(self) -> Out:
        """Have no rows sent any more if there is nothing to do here."""
        if self.own or self.turn is not None or self._batches:
            return []
        self.cache = Cache(self.tables, self._partitions)
        self._serial += 1
        return [
            (owner, Subscribe(partition=at, keys={}, stop=True, serial=self._serial))
            for at, owner in enumerate(self.route)
        ]

    def _foreign(self) -> Extra | None:
        foreign = self.extra is not None and isinstance(self.extra.source, Order)
        return self.extra if foreign else None

    # What is computed.

    @property
    def clock(self) -> int:
        """The clock of the own work, present or next."""
        if self.turn is not None:
            return self.turn.clock
        return min(self.own.values(), default=FAR)

    @property
    def _newest(self) -> int:
        age = min(self.cache.ages)
        if age == NOTHING:
            return -1
        newest = self.bound.newest(age)
        return newest if self._unseen_bytes < AHEAD_BYTES else min(newest, age + 1)

    @property
    def _settling(self) -> bool:
        return self.turn is not None and not self.turn.tail.spans

    def next_run(self, now_s: float) -> tuple[Run | None, Out]:
        """Return what to compute now, and what is to be said before."""
        out: Out = []
        if self._failed:
            return None, out
        if self.turn is None:
            self._begin()
        if self.extra is None:
            out = self._next_extra()
        if self.extra is not None and self.extra not in self._blocked:
            return Run(self.extra.tail.spans[0], self.extra.tail.clock, self.extra), out
        if self.turn is None or not self.turn.tail.spans or self.turn in self._blocked:
            return None, out
        out += self.helper.report(self.turn.tail, now_s)
        span, due = self.turn.tail.spans[0], self.helper.until_report(self.turn.tail)
        span = Span(span.block, span.first, min(span.last, span.first + due))
        return Run(span, self.turn.clock, self.turn), out

    def _begin(self) -> None:
        """Begin the next clock, without blocks that leave: they are somebody else's from then on."""
        own = {block: clock for block, clock in self.own.items() if block not in self._leaving}
        clock = min(own.values(), default=FAR)
        if clock == FAR or clock > self._newest:
            return
        blocks = sorted(block for block, next_ in own.items() if next_ == clock)
        self.turn = Turn(clock, blocks, self.work.grains)
        self.helper.new_clock()

    def _next_extra(self) -> Out:
        """Take up a piece: of an older clock at once, else after the own work is done."""
        own_done = self.turn is None or self._settling
        if own_done and (redo := self._to_redo()) is not None:
            self.extra = redo
            return []
        order = self.helper.next(self.clock, own_done, self._newest)
        if order is None:
            return []
        self.extra = Extra(order, order.clock, order.spans)
        return [(order.helpee, Begun(piece=order.piece))]

    def _to_redo(self) -> Extra | None:
        for piece in self.helpee.to_redo():
            if piece.number not in self._redone and self.turn is not None:
                extra = self._redone[piece.number] = Extra(piece, self.turn.clock, piece.spans)
                return extra
        return None

    def finish(self, run: Run, grains: int, took_s: Callable[[], float], now_s: float) -> Out:
        """Compute the first grains of a run. If rows are missing they are asked for instead.

        When they are computed, `took_s` says how long that took.
        """
        part = run.part
        if part is not self.turn and part is not self.extra:
            return []  # it was taken away meanwhile
        step = 1 if self.application.grainwise else grains
        for _ in range(0, grains, step):
            span = part.tail.spans[0]
            params = Params(self.tables, self._reader(part), part.tail.clock)
            lo, hi = self.work.items(span.block, part.tail.clock, span.first, span.first + step)
            try:
                process(self.application, lo, hi, params)
                if hi > lo and isinstance(part, Turn) and is_tried(part.clock, self._tried):
                    self._tried = part.clock
                    again = Params(self.tables, self._reader(part), part.clock)
                    try_again(self.application, lo, hi, params, again)
                self._take(part, params, step)
            except Missing as missing:
                self._blocked.append(part)
                return self._ask({missing.table.name: np.unique(missing.keys)}, only_new=True)
            except ApplicationError as error:
                return self.fail(f"clock {part.tail.clock}, items {lo} to {hi}", error)
        if isinstance(part, Turn):
            part.grains, part.own_s = part.grains + grains, part.own_s + took_s()
        try:
            return self._after(part, now_s)
        except ApplicationError as error:
            return self.fail(f"clock {part.tail.clock}", error)

    def fail(self, where: str, error: ApplicationError) -> Out:
        """Compute no more before a roll-back, and have the controller end the job with this."""
        why = f"worker {self.name}, {where}: {error}"
        traceback = traceback_of(error.__cause__ or error)
        lines = '  File "' in traceback  # else none of it is the person's
        self._failed = Failed(why=why, traceback=traceback if lines else "")
        return [(CONTROLLER, self._failed)]

    def _take(self, part: Turn | Extra, params: Params, grains: int) -> None:
        """Keep what grains changed: they are computed as a whole or not at all."""
        span = part.tail.spans[0]
        part.tail.advance(grains)
        part.measured += params.measured
        self.computed += grains
        for name, changes in params.changes.items():
            part.changes.setdefault(name, Changes(self.tables[name])).merge(changes)
        last = part.done[-1] if part.done else None
        if last is not None and last.block == span.block and last.last == span.first:
            part.done[-1] = Span(last.block, last.first, span.first + grains)
        else:
            part.done.append(Span(span.block, span.first, span.first + grains))

    def _after(self, part: Turn | Extra, now_s: float) -> Out:
        out: Out = []
        if isinstance(part, Turn):
            out += self.helper.report(part.tail, now_s)
        elif not part.tail.spans:
            self.extra = None
            if isinstance(part.source, Order):
                out += self._flush_help(part.source, part)
        return out + self._advance()

    def _reader(self, part: Turn | Extra) -> Callable[[Table, Array], Array]:
        def read(table: Table, keys: Array) -> Array:
            if table.item_state:
                self._demand_exact(part, table, keys)
            rows = self.cache.get(table, keys)
            if not table.reads_own:
                return rows
            for clock, changes in self._unseen:
                if table.name in changes:
                    rows = self._over(clock, changes[table.name], keys, rows)
            return part.changes[table.name].over(keys, rows) if table.name in part.changes else rows

        return read

    def _demand_exact(self, part: Turn | Extra, table: Table, keys: Array) -> None:
        """Raise `Missing` until rows have what others did to these items in earlier clocks."""
        clock = part.tail.clock
        foreign = isinstance(part, Extra) and isinstance(part.source, Order)
        alone = clock if foreign else self._alone_since.get(part.tail.spans[0].block, clock)
        if (np.array(self.cache.ages)[keys % self._partitions] < alone - 1).any():
            raise Missing(table, keys[:0])

    def _over(self, clock: int, changes: Changes, keys: Array, rows: Array) -> Array:
        """Add own changes of a clock to rows of partitions whose servers have not closed it."""
        ages = np.array(self.cache.ages)
        newer = ages[keys % self._partitions] < clock
        if newer.any():
            rows = rows.copy()
            rows[newer] = changes.over(keys[newer], rows[newer])
        return rows

    # What is sent.

    def _advance(self) -> Out:
        """Settle a clock whose own work is done: wait for the pieces, then flush."""
        turn = self.turn
        if turn is None or turn.tail.spans:
            return []
        out = self.helpee.cancel()
        source = self.extra.source if self.extra else None
        if isinstance(source, Piece) and source.begun:
            del self._redone[source.number]
            self.extra = None  # the helper was faster than the cancel
        if all(self._settled(piece) for piece in self.helpee.pieces.values()):
            out += self._flush(turn)
        return out

    def _settled(self, piece: Piece) -> bool:
        if piece.done is not None:
            return True
        redone = self._redone.get(piece.number)
        return piece.refused and redone is not None and not redone.tail.spans

    def _flush(self, turn: Turn) -> Out:
        done: list[Done] = []
        for piece in self.helpee.pieces.values():
            if piece.done is not None:
                done += piece.done
                turn.measured += piece.measured
                helped = {one.span.block for one in piece.done}
                self._alone_since.update(dict.fromkeys(helped, turn.clock + 1))
                continue
            redone = self._redone[piece.number]
            turn.measured += redone.measured
            turn.done += redone.done
            for name, changes in redone.changes.items():
                turn.changes.setdefault(name, Changes(self.tables[name])).merge(changes)
        if turn.grains:
            self.grain_s = turn.own_s / turn.grains
            self.helpee.learn(self.grain_s * turn.tail.total)
        self.helpee.pieces, self._redone, self.turn = {}, {}, None
        batch = self._batch(turn.clock, turn.changes)
        done += [Done(span, batch.name) for span in turn.done]
        said = Finished(clock=turn.clock, done=done, measured=turn.measured)
        batch.then = [(CONTROLLER, said)]
        batch.release = set(turn.blocks)
        for block in turn.blocks:
            self.own[block] = turn.clock + 1
        self._unseen_bytes += _size(turn.changes)
        self._unseen.append((turn.clock, turn.changes))
        return self._send(batch)

    def _flush_help(self, order: Order, extra: Extra) -> Out:
        batch = self._batch(order.clock, extra.changes)
        done = [Done(span, batch.name) for span in extra.done]
        said = Completed(piece=order.piece, done=done, measured=extra.measured)
        batch.then = [(order.helpee, said)]
        return self._send(batch)

    def _batch(self, clock: int, changes: dict[str, Changes]) -> Batch:
        self._serial += 1
        batch = Batch(f"{self.name}/{self._serial}", clock, changes)
        self._batches[batch.name] = batch
        return batch

    def _stages(self, batch: Batch) -> dict[int, Stage]:
        """Return what a batch has for each partition that it touches."""
        sections: dict[int, list[Section]] = {}
        for name, changes in sorted(batch.changes.items()):
            keys, values = changes.all()
            homes = keys % self._partitions
            there = np.flatnonzero(np.bincount(homes, minlength=self._partitions)).tolist()
            for partition in there:
                here = slice(None) if len(there) == 1 else homes == partition
                sections.setdefault(partition, []).append(Section(name, keys[here], values[here]))
        return {
            at: Stage(partition=at, batch=batch.name, clock=batch.clock, sections=those)
            for at, those in sections.items()
        }

    def _send(self, batch: Batch) -> Out:
        stages = self._stages(batch)
        batch.waiting = set(stages)
        said = batch.then[-1][1]
        if isinstance(said, Finished) and len({self.route[at] for at in stages}) == 1:
            together, last = list(stages), max(stages)
            for at, stage in stages.items():
                finished = said if at == last else None
                stages[at] = replace(stage, together=together, finished=finished)
        out: Out = [(self.route[at], stages[at]) for at in sorted(stages)]
        return out if out else self._landed(batch)

    def _staged(self, message: Staged) -> Out:
        batch = self._batches.get(message.batch)
        if batch is None:
            return []
        batch.waiting.discard(message.partition)
        batch.passed |= message.passed
        return [] if batch.waiting else self._landed(batch)

    def _landed(self, batch: Batch) -> Out:
        del self._batches[batch.name]
        self._said += [said for _, said in batch.then if isinstance(said, Finished)]
        out: Out = [] if batch.passed and not batch.repeats else batch.then
        if free := self._free():
            out += self._say_released(free) + self._read_no_more()
        return out


def _size(changes: dict[str, Changes]) -> int:
    return sum(each.all()[1].nbytes for each in changes.values())
