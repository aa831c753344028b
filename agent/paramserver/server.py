"""Servers: partitions that are served, and replicas that are only kept.

A partition changes once for each clock, when the controller says which batches the clock consists
of, or when a server that has every partition knows what it will say. Before that its rows are kept
as they were, for every clock that reliable machines do not have yet. So going back is exact, for
every aggregate and rule.
"""

from functools import partial
from typing import Protocol

import numpy as np

from agent.paramserver.messages import (
    CONTROLLER,
    Close,
    Committed,
    Contents,
    Copy,
    Done,
    Finished,
    Forwarded,
    Fresh,
    Gone,
    Installed,
    Message,
    Move,
    Out,
    Passed,
    Push,
    PushUp,
    Received,
    Report,
    Roll,
    Route,
    Save,
    Saved,
    Section,
    Stage,
    Staged,
    Subscribe,
    listed,
)
from agent.paramserver.tables import Array, Changes, Rows, Table

Keys = dict[str, Array]
AHEAD = 64  # clocks that a server closes itself beyond the committed one, at most,
KEPT_BYTES = 1 << 24  # while it keeps less than that for going back: with more, caches are cold
NO_BLOCK = -1


class Partition:
    """One partition, served here."""

    def __init__(self, number: int, tables: dict[str, Table], partitions: int) -> None:
        self.number, self._tables = number, tables
        self.rows = {name: Rows(table, number, partitions) for name, table in tables.items()}
        self.closed = self.committed = -1
        self.before: list[tuple[int, list[Section]]] = []
        self.staged: dict[str, Stage] = {}
        self.readers: dict[str, Keys] = {}
        self.serials: dict[str, int] = {}
        self.later: list[Close | PushUp] = []  # orders that came before those they rest on
        self.pushed = -1
        self._clock_bytes = 0  # rows as they were before the newest clock

    def order(self, message: Close | PushUp) -> Out:
        """Take an order of the controller's. While a partition moves, orders come on two ways."""
        self.later.append(message)
        out: Out = []
        while (due := next((one for one in self.later if self._is_due(one)), None)) is not None:
            self.later.remove(due)
            out += self._close(due) if isinstance(due, Close) else self._push(due)
        self.later = [one for one in self.later if self._is_open(one)]
        return out

    def _is_due(self, message: Close | PushUp) -> bool:
        if isinstance(message, Close):
            return message.clock == self.closed + 1
        # A push may be ordered again, because a replica or its answer was lost.
        return max(self.pushed, self.committed + 1) <= message.clock <= self.closed

    def _is_open(self, message: Close | PushUp) -> bool:
        return message.clock > self.closed

    def _close(self, message: Close) -> Out:
        return self.refresh(self.close(message))

    def _push(self, message: PushUp) -> Out:
        self.pushed = message.clock
        sections = self.since(self.committed, message.clock)
        push = Push(partition=self.number, clock=message.clock, sections=sections)
        return [(message.replicas[self.number], push)]

    def close(self, message: Close) -> Keys:
        """Apply the batches of a clock, in their order, and return the keys that changed."""
        sums = {name: Changes(table) for name, table in self._tables.items()}
        for batch in message.batches:
            stage = self.staged.get(batch)
            for section in stage.sections if stage else []:
                sums[section.table].add(section.keys, section.values)
        before, after, changed = list[Section](), list[Section](), Keys()
        for name, changes in sums.items():
            keys, change = changes.all()
            if len(keys):
                keys = self.rows[name].known(keys)
                rows = self.rows[name].view(keys)
                before.append(Section(name, keys, rows))
                after.append(Section(name, keys, self._tables[name].changed(keys, rows, change)))
                changed[name] = keys
        put(self.rows, after)  # all or none, because a sum may be beyond its numbers
        self.before.append((message.clock, before))
        self._clock_bytes = sum(section.values.nbytes for section in before)
        self.closed = message.clock
        self.staged = {
            name: stage for name, stage in self.staged.items() if stage.clock > self.closed
        }
        return changed

    def fresh(self, reader: str, keys: Keys, asked: bool = False) -> tuple[str, Message]:
        sections = [
            Section(name, those, self.rows[name].view(those)[:, : self._tables[name].width])
            for name, those in keys.items()
            if len(those)
        ]
        message = Fresh(partition=self.number, age=self.closed, sections=sections, asked=asked)
        return reader, message

    def subscribe(self, reader: str, message: Subscribe) -> Out:
        keys, newest = message.keys, self.serials.get(reader, -1)
        self.serials[reader] = max(newest, message.serial)
        if message.stop:
            if message.serial >= newest:
                self.readers.pop(reader, None)
            return []
        held = self.readers.setdefault(reader, {})
        for name, new in keys.items():
            union = np.union1d(held[name], new) if name in held else np.unique(new)
            held[name] = self.rows[name].known(union)
        return [self.fresh(reader, keys, asked=True)]

    def refresh(self, changed: Keys) -> Out:
        """Send every reader what changed of its rows; the next clock begins with the next one."""
        names = sorted(self.readers)
        turn = self.closed % len(names) if names else 0
        out: Out = []
        for reader in names[turn:] + names[:turn]:
            mine = self.readers[reader]
            both = set(mine) & set(changed)
            keys = {name: _common(mine[name], changed[name]) for name in sorted(both)}
            out.append(self.fresh(reader, keys))
        return out

    def forget(self, gone: set[str]) -> None:
        for reader in gone & set(self.readers):
            del self.readers[reader]

    def since(self, first: int, last: int) -> list[Section]:
        """Return the rows that changed after clock `first` up to `last`, as they were at `last`."""
        keys: dict[str, list[Array]] = {}
        for at, sections in self.before:
            for section in sections if first < at <= last else []:
                keys.setdefault(section.table, []).append(section.keys)
        found = {name: _union(those) for name, those in keys.items()}
        return [
            Section(name, those, self.as_at(name, those, last)) for name, those in found.items()
        ]

    def as_at(self, table: str, keys: Array, clock: int) -> Array:
        """Return these sorted rows as they were at the end of a clock that is not committed yet."""
        later = [
            section
            for at, sections in reversed(self.before)
            for section in (sections if at > clock else [])
            if section.table == table
        ]
        if later and _are_same(later[-1].keys, keys):
            return later[-1].values
        rows = self.rows[table].get(keys) if later else self.rows[table].view(keys)
        for section in later:
            _overlay(keys, rows, section)
        return rows

    @property
    def kept_bytes(self) -> int:
        """How much is kept for going back when one more clock is closed, if clocks are alike."""
        return (len(self.before) + 1) * self._clock_bytes

    def commit(self, clock: int) -> None:
        if clock > self.committed:
            self.committed = clock
            self.before = [one for one in self.before if one[0] > clock]

    def roll_back(self, clock: int) -> None:
        """Be exactly as at the end of a clock."""
        assert clock >= self.committed, (clock, self.committed)
        while self.before and self.before[-1][0] > clock:
            for section in self.before.pop()[1]:
                self.rows[section.table].put(section.keys, section.values)
        self.closed = self.pushed = clock
        self.staged, self.readers, self.later, self.serials = {}, {}, [], {}

    def at_commit(self) -> list[Section]:
        """Return all rows as they were at the committed clock."""
        keys = {name: held.keys() for name, held in self.rows.items()}
        at = self.committed
        return [Section(name, those, self.as_at(name, those, at)) for name, those in keys.items()]

    def contents(self, whole: bool) -> Contents:
        """Return all of this partition; without `whole`, what its replica's node lacks of it."""
        changed = self.since(self.committed, self.closed)
        return Contents(
            closed=self.closed,
            committed=self.committed,
            sections=every_row(self.rows) if whole else changed,
            whole=whole,
            before=self.before,
            staged=list(self.staged.values()),
            readers=self.readers,
            pushed=self.pushed,
            later=self.later,
            serials=self.serials,
        )


class Replica:
    """One partition as it was at the committed clock, and what has come for a later one."""

    def __init__(self, number: int, tables: dict[str, Table], partitions: int) -> None:
        self.rows = {name: Rows(table, number, partitions) for name, table in tables.items()}
        self.committed = self.version = -1
        self.coming: list[tuple[int, list[Section]]] = []

    def commit(self, clock: int) -> None:
        """Go on to a clock that has come; a replica that lacks it stays where it is."""
        while self.coming and self.coming[0][0] <= clock:
            self.committed, sections = self.coming.pop(0)
            put(self.rows, sections)


class Store(Protocol):
    """Where committed clocks are written, and read after the loss of a reliable machine."""

    def write(self, partition: int, clock: int, sections: list[Section]) -> None: ...

    def read(self, partition: int, clock: int) -> list[Section]: ...

    def drop(self, partition: int, before: int) -> None:
        """Delete what is older than a clock."""


class Server:
    """All partitions and replicas of one node."""

    def __init__(
        self, name: str, tables: dict[str, Table], partitions: int, store: Store, blocks: int = 0
    ) -> None:
        """With the number of `blocks` it closes clocks itself while it has every partition."""
        self.name, self.tables, self._count, self._store = name, tables, partitions, store
        self._blocks = set(range(blocks))
        self._finished: dict[int, dict[int, list[Done]]] = {}  # by clock and block
        self.parts: dict[int, Partition] = {}
        self.replicas: dict[int, Replica] = {}
        self.forward: dict[int, str] = {}
        self._unknown: set[int] = set()  # that left, which the controller may not know yet
        self._early: dict[int, list[tuple[str, Message]]] = {}
        self._version = -1
        self._passed = -1  # the newest clock of which something was passed on from here
        self._gone: set[str] = set()  # nodes that read no more; names are not used twice

    def handle(self, sender: str, message: Message) -> Out:  # noqa: PLR0911, PLR0912 - one case each
        match message:
            case Stage() | Subscribe():
                return self._at_partition(sender, message)
            case Forwarded():
                return self._forwarded(message)
            case Close() | PushUp():
                return self._order(message)
            case Push():
                return self._pushed(message)
            case Committed():
                for part in self.parts.values():
                    part.commit(message.clock)
                for replica in self.replicas.values():
                    replica.commit(message.clock)
            case Gone():
                self._gone.update(message.nodes)
                self._finished = {}  # what is lost counts if the controller says so
                for part in self.parts.values():
                    part.forget(self._gone)
            case Move():
                return self._move(message)
            case Copy():
                return self._install(message)
            case Route() if message.version > self._version:
                self._version = message.version
                self._drop_replicas(message)
                # From here on the controller's orders reach these partitions where they are.
                self._unknown = {one for one in self._unknown if message.owners[one] == self.name}
            case Roll():
                return self._roll(message)
            case Save():
                return self._save(message)
            case Report():
                return self._report()
        return []

    def _at_partition(self, sender: str, message: Stage | Subscribe) -> Out:
        number = message.partition
        part = self.parts.get(number)
        if part is None:
            if number in self.forward:
                forwarded = Forwarded(message=message, partition=number, sender=sender)
                return [(self.forward[number], forwarded)]
            self._early.setdefault(number, []).append((sender, message))
            return []
        if isinstance(message, Subscribe):
            return part.subscribe(sender, message)
        if message.clock > part.closed:
            part.staged[message.batch] = message
        return self._receipt(sender, message)

    def _receipt(self, sender: str, stage: Stage) -> Out:
        """Tell the worker that its stage is here, and the controller if it was the last one."""
        passed = stage.finished is not None and all(map(partial(self._has, stage), stage.together))
        waits = passed or (bool(stage.together) and stage.finished is None)
        staged = Staged(partition=stage.partition, batch=stage.batch, passed=passed, waits=waits)
        if stage.finished is None or not passed:
            return [(sender, staged)]
        self._passed = max(self._passed, stage.clock)
        return [(sender, staged), *self._pass_on(sender, stage.finished)]

    def _pass_on(self, worker: str, finished: Finished) -> Out:
        """Tell the controller what is finished; with every partition here, close what is whole.

        All that the controller hears of a clock is heard here before, so it closes the same. What
        it would not count is left to it, and so are clocks while it commits none.
        """
        parts = list(self.parts.values())
        if len(parts) < self._count or not self._blocks:
            self._finished = {}
            return [(CONTROLLER, Passed(worker=worker, finished=finished))]
        if worker not in self._gone:
            self._enter(finished)
        closed, out = min(part.closed for part in parts), Out()
        is_near = sum(part.kept_bytes for part in parts) < KEPT_BYTES
        while self._finished.get(closed + 1, {}).keys() == self._blocks and all(
            is_near and part.closed == closed < part.committed + AHEAD for part in parts
        ):
            closed += 1
            close = Close(clock=closed, batches=listed(self._finished.pop(closed)))
            for part in parts:
                out += part.order(close)
        self._finished = {at: one for at, one in self._finished.items() if at > closed}
        return [(CONTROLLER, Passed(worker=worker, finished=finished, closed=closed)), *out]

    def _enter(self, finished: Finished) -> None:
        """Note what is finished of a clock. A clock with a block that comes twice is never whole."""
        heard, said = self._finished.setdefault(finished.clock, {}), dict[int, list[Done]]()
        for done in finished.done:
            said.setdefault(done.span.block, []).append(done)
        heard.update(said if heard.keys().isdisjoint(said) else {NO_BLOCK: []})

    def _has(self, stage: Stage, partition: int) -> bool:
        part = self.parts.get(partition)
        return part is not None and (stage.batch in part.staged or stage.clock <= part.closed)

    def _order(self, message: Close | PushUp) -> Out:
        out: Out = []
        for part in self.parts.values():
            out += part.order(message)
        for number in sorted(self._unknown):
            out.append((self.forward[number], Forwarded(message=message, partition=number)))
        return out

    def _forwarded(self, forwarded: Forwarded) -> Out:
        message, part = forwarded.message, self.parts.get(forwarded.partition)
        if isinstance(message, Stage | Subscribe):
            return self._at_partition(forwarded.sender, message)
        if part is not None:
            return part.order(message)
        if forwarded.partition in self.forward:
            return [(self.forward[forwarded.partition], forwarded)]
        return []

    def _pushed(self, message: Push) -> Out:
        replica = self.replicas.get(message.partition)
        if replica is None:
            return []
        newest = replica.coming[-1][0] if replica.coming else replica.committed
        if message.clock > newest:  # else it is said again, perhaps late and by a former owner
            replica.coming.append((message.clock, message.sections))
        # Whoever passed this clock on says the same of the next one soon.
        waits = message.partition in self.parts and message.clock <= self._passed
        received = Received(partition=message.partition, clock=message.clock, waits=waits)
        return [(CONTROLLER, received)]

    def _move(self, message: Move) -> Out:
        number = message.partition
        part = self.parts.get(number)
        if part is None:
            return []
        part.commit(message.committed)
        if message.mirror:
            sections, at = part.at_commit(), part.committed
            part.pushed = at  # the new replica has nothing of later clocks
            contents = Contents(at, at, sections, True, [], [], {}, at, [])
            version = message.version
            copy = Copy(partition=number, contents=contents, mirror=True, version=version)
            return [(message.to, copy)]
        del self.parts[number]
        self.forward[number] = message.to
        self._unknown.add(number)
        contents = part.contents(whole=message.whole)
        return [(message.to, Copy(partition=number, contents=contents))]

    def _install(self, message: Copy) -> Out:
        number, contents = message.partition, message.contents
        if message.mirror:
            replica = self.replicas[number] = Replica(number, self.tables, self._count)
            put(replica.rows, contents.sections)
            replica.committed, replica.version = contents.committed, message.version
            return [(CONTROLLER, Installed(partition=number, mirror=True))]
        if number in self.parts:
            return []  # it came twice, and has gone on since
        part = self.parts[number] = Partition(number, self.tables, self._count)
        if not contents.whole:
            self.replicas[number].commit(contents.committed)
            put(part.rows, every_row(self.replicas[number].rows))
        put(part.rows, contents.sections)
        part.closed, part.committed = contents.closed, contents.committed
        part.before, part.readers = list(contents.before), dict(contents.readers)
        part.serials = dict(contents.serials)
        part.forget(self._gone)
        part.pushed, part.later = contents.pushed, list(contents.later)
        part.staged = {stage.batch: stage for stage in contents.staged}
        self.forward.pop(number, None)
        out: Out = [(CONTROLLER, Installed(partition=number))]
        for sender, early in self._early.pop(number, []):
            out += self.handle(sender, early)
        return out

    def _drop_replicas(self, route: Route) -> None:
        """Drop what a newer route than the one it was made for gives to somebody else."""
        for number, replica in list(self.replicas.items()):
            if route.replicas[number] != self.name and route.version > replica.version:
                del self.replicas[number]

    def _roll(self, message: Roll) -> Out:
        """Go back; what is lost elsewhere is sent from here if its replica is here."""
        self.forward, self._early, self._unknown, self._passed = {}, {}, set(), -1
        self._finished = {}
        self._version = message.version
        out: Out = []
        for number in range(self._count):
            replica = self.replicas.get(number)
            if message.replicas[number] == self.name:
                here = replica is not None and replica.committed == message.clock >= 0
                if not here and (message.restore or (replica is None and message.clock < 0)):
                    replica = self.replicas[number] = self._restored(number, message.clock)
                if replica is not None:
                    replica.commit(message.clock)
                    replica.coming = []
                    assert replica.committed == message.clock or number not in message.lost
            else:
                self.replicas.pop(number, None)
            if message.owners[number] != self.name or number in message.lost:
                self.parts.pop(number, None)
            else:
                self._keep(number, message.clock)
            if number in message.lost and replica is not None:
                at = message.clock
                contents = Contents(at, at, every_row(replica.rows), True, [], [], {}, at, [])
                copy = Copy(partition=number, contents=contents)
                out.append((message.owners[number], copy))
        return out

    def _keep(self, number: int, clock: int) -> None:
        if clock < 0:  # at the very beginning; what an earlier controller committed may be nowhere
            self.parts[number] = Partition(number, self.tables, self._count)
        self.parts[number].roll_back(clock)

    def _save(self, message: Save) -> Out:
        out: Out = []
        for number, replica in self.replicas.items():
            replica.commit(message.clock)
            if replica.committed == message.clock:
                self._store.write(number, message.clock, every_row(replica.rows))
                self._store.drop(number, before=message.saved)
                out.append((CONTROLLER, Saved(partition=number, clock=message.clock)))
        return out

    def _restored(self, number: int, clock: int) -> Replica:
        replica = Replica(number, self.tables, self._count)
        if clock >= 0:
            put(replica.rows, self._store.read(number, clock))
            replica.committed = clock
        return replica

    def _report(self) -> Out:
        """Say again what a controller may not have heard that was away."""
        out: Out = [(CONTROLLER, Installed(partition=number)) for number in self.parts]
        for number, replica in self.replicas.items():
            out.append((CONTROLLER, Installed(partition=number, mirror=True)))
            for clock, _ in replica.coming:
                out.append((CONTROLLER, Received(partition=number, clock=clock)))
        return out


def put(rows: dict[str, Rows], sections: list[Section]) -> None:
    for section in sections:
        rows[section.table].put(section.keys, section.values)


def every_row(rows: dict[str, Rows]) -> list[Section]:
    keys = {name: held.keys() for name, held in rows.items()}
    return [Section(name, those, rows[name].view(those)) for name, those in keys.items()]


def _overlay(keys: Array, rows: Array, section: Section) -> None:
    """Replace those of `rows` that are in the section; both sets of keys are sorted."""
    at = np.minimum(np.searchsorted(section.keys, keys), len(section.keys) - 1)
    hit = section.keys[at] == keys
    rows[hit] = section.values[at[hit]]


def _union(keys: list[Array]) -> Array:
    """Return the keys in these arrays, each of which is sorted."""
    first = keys[0]
    if all(_are_same(each, first) for each in keys[1:]):
        return first
    return np.unique(np.concatenate(keys))


def _common(first: Array, second: Array) -> Array:
    if _are_same(first, second):
        return first
    return np.intersect1d(first, second, assume_unique=True)


def _are_same(first: Array, second: Array) -> bool:
    return first is second or (len(first) == len(second) and np.array_equal(first, second))
