"""A job's recoverable state: the backup in the keeper's memory, and versions on its disk.

A version is the backup and the sums since, as they lie in memory. Writing one therefore needs
nothing from the workers and stalls none of them, and it has every committed step in it.

A joining worker proves itself by the step after a backup: see `agent.keeper.proofs`. So the
backup before the newest is kept, in memory and on the disk, until the records of the step after the
newest are complete: then there is always a step to prove, whichever workers are lost and when.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Literal

import msgspec

from agent.errors import CheckpointError
from agent.faults import passing
from agent.keeper import proofs
from agent.keeper.proofs import Proofs, Question
from agent.keeper.storage import recovery, versions
from agent.keeper.storage.backup import Backup, LoggedSum, Saved, StateAssembly
from agent.keeper.storage.memory_log import Held, MemoryLog
from agent.keeper.storage.offsite import Begun, Offsite, Storage, branched_from, earlier, step_in
from agent.keeper.storage.recovery import DISK, OBJECT, Found, Shelf
from agent.keeper.storage.sharding import Passing, Sharding, room_for_sums, sums_pass
from agent.layout import Layout
from agent.messages import BackupHeld, CheckpointFailed, CheckpointWritten, JobOrder, Report
from agent.protocol import Shards, Snapshot
from agent.store.archive import Archive, Mark, marks_in
from agent.store.encoding import weights
from agent.store.encoding.format import MANIFESTS, Manifest, folder_of
from agent.store.memory import Returning, machine_bytes
from agent.store.places.sinks import DiskSink
from cloud.clock import CLOCK

log = logging.getLogger(__name__)

REDO_MAX_FACTOR = 4
REDO_BYTES_FREE = 1 << 30  # of sums that are held whatever the state's size
REDO_STEPS = 1000  # each sum is a file of a version, and a message to each worker that replays it
ROOM_FACTOR = 1.01  # a sum is padded, and may be a little larger than its part of the state
HELD_S = 3.0  # for an earlier keeper, which usually ends in a moment, before that is reported
LOOK_S = 0.05
AGAIN_S = 60.0  # the longest wait after a version that could not be written
LOST_S = 10.0  # without a byte of a state that was asked for
SHARD_LOST_S = 90.0  # a store may be tried for a minute
PROOF_S = 10.0  # beside three steps: for the records of the step after a snapshot
EARLY = 3  # steps until the first state that a proof can begin with is asked for


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where states are kept: a folder with a folder per job and, optionally, object storage."""

    checkpoints: Path
    storage: Storage | None = None
    memory: Path | None = None  # a folder in which the keeper's memory outlives the keeper
    memory_bytes: int = msgspec.field(default_factory=machine_bytes)


class Landed(msgspec.Struct, frozen=True):
    """What became of a snapshot that all workers have written."""

    whole: StateAssembly
    backup: Backup | None
    error: str = ""


class Base:
    """A backup, the sums that follow it without a gap, and the records of the step after it."""

    def __init__(
        self, backup: Backup, redo: list[LoggedSum], question: Question | None = None
    ) -> None:
        self.backup, self.redo, self.question = backup, redo, question

    @property
    def reached(self) -> int:
        return self.backup.version + len(self.redo)

    @property
    def provable(self) -> bool:
        return self.question is not None and self.question.complete

    def look(self, known: Proofs) -> None:
        if not self.provable:
            self.question = known.question(self.backup.version, self.reached) or self.question

    def saved(self, order: JobOrder) -> Saved:
        return Saved(self.backup, tuple(self.redo), proofs.encode(self.question, order))


class Vault:
    """Not locked itself: the job that owns it holds its lock, except for what runs beside it."""

    def __init__(self, order: JobOrder, place: Place, report: Callable[[Report], None]) -> None:
        self._order, self._report, self._place = order, report, place
        self._job, self._directory = order.job, place.checkpoints / order.job
        kept = order.checkpoints_kept
        self._archive = Archive(DiskSink(self._directory), order.job, kept)
        self.offsite = None if place.storage is None else self._open_offsite(place.storage)
        self._generation: int | None = None  # of our versions in the archive, once there are any
        self.since = 0  # the version that this job's keeper went on from
        self._checkpoint_due_s = time.monotonic() + order.checkpoint_every_s
        self._writing = threading.Lock()
        self._lasting = MemoryLog(place.memory / order.job) if place.memory is not None else None
        self.memory = self._lasting or Returning()  # for states and sums
        self._assembly: StateAssembly | None = None
        self._heard_s = 0.0  # when a part of the assembly last arrived, or was asked for
        self._begun_s = 0.0  # when the first part of it arrived
        self._rested_s = 0.0  # no state is asked for before this time if there is room for sums
        self.backup: Backup | None = None
        self.redo: list[LoggedSum] = []  # from the backup on, without a gap
        self._ahead: list[LoggedSum] = []  # after a gap, for the state that is asked for
        self._committed = 0
        self.proofs = Proofs()
        self.awaited = False  # a worker waits for a step to prove
        self._question: Question | None = None  # about the step after the backup
        self._older: Base | None = None  # the one before, until the newest is provable
        self._aside: Base | None = None  # recalled, and used for proofs only
        self._noted: int | None = None  # the version of the backup that the next keeper would find
        self._noted_whole = False
        self.sum_bytes = 0  # of the newest sum that arrived
        self._earlier_place = ""  # where the job lies that this one goes on from
        self._unread = dict[tuple[str, Mark], str]()  # what workers could not read, by its place
        self.sharding = Sharding(order, has_store=self.offsite is not None)
        self._landed: queue.SimpleQueue[Landed] = queue.SimpleQueue()
        self._lands = False  # on a separate thread
        self._step_s, self._begun_bytes = 0.0, 0
        self._whole_until_s = 0.0  # until then every sum is taken, whatever it costs

    # --- the backup -------------------------------------------------------------------------------

    def promise(self, step: int, logged: LoggedSum | None, records: bytes = b"") -> None:
        """Note in lasting memory a step that is about to be committed, with its sum if here.

        `records` are what `records_of` returns.
        """
        if self._lasting is None:
            return
        if records and self._noted is not None:
            self._lasting.note_proof(self._noted, records)
        if logged is not None:
            self._lasting.note_sum(logged)
        else:
            self._lasting.note_gap(step)

    def records_of(self, step: int, logged: LoggedSum | None) -> bytes:
        """Return the records of the step after the backup that the next keeper would find.

        They include this sum, which is not committed yet, because no further sum may ever come.
        """
        base = self._kept_base
        if base is None or base.provable or base.backup.version != self._noted:
            return b""
        if self._lasting is None or step > base.backup.version + self.proofs.phases:
            return b""
        asked = self.proofs.question(base.backup.version, step + (logged is not None))
        return proofs.encode(asked, self._order)

    def log(self, logged: LoggedSum) -> None:
        self._committed, self.sum_bytes = logged.step + 1, logged.body.nbytes
        older, sharded = self._older, self.sharding.on
        most = self.proofs.phases if sharded else self._bound
        if older is not None and logged.step == older.reached and len(older.redo) < most:
            older.redo.append(logged)
        if logged.step == self.reached and (len(self.redo) < most or not sharded):
            self.redo.append(logged)
            return
        if self._ahead and self._ahead[-1].step != logged.step - 1:
            self._ahead.clear()
        self._ahead.append(logged)
        if sharded:  # commits do not wait for a state, so sums without one would have no bound
            self._ahead = [one for one in self._ahead if self._proves(one.step, self._coming)]

    def _proves(self, step: int, versions: Iterable[int]) -> bool:
        """Whether this sum is a part of the proof of one of these states."""
        return any(first <= step < first + self.proofs.phases for first in versions)

    @property
    def _coming(self) -> list[int]:
        """The versions of the states that are on their way, here or to the store."""
        coming = (self._assembly, self.sharding.whole)
        return [assembly.version for assembly in coming if assembly is not None]

    def skip(self, step: int) -> None:
        """Count a committed step whose sum is not here."""
        self._committed = step + 1

    @property
    def behind(self) -> int:
        """How many committed steps cannot be reached from what is in memory."""
        reached = self.reached
        return 0 if reached is None else max(0, self._committed - reached)

    def logged(self, step: int) -> LoggedSum | None:
        """Return the sum of a step; an index suffices because the sums have no gap."""
        at = step - self.redo[0].step if self.redo else -1
        return self.redo[at] if 0 <= at < len(self.redo) else None

    @property
    def open(self) -> bool:
        """Whether one more commit may be logged: there is a backup, and not too many sums."""
        return self.sharding.on or (self.backup is not None and self._sums < self._bound)

    @property
    def _sums(self) -> int:
        return len(self.redo) + len(self._ahead)

    @property
    def _room(self) -> int:
        """How many sums are held without haste.

        They have about as many bytes as the state, and are few enough to be sent to every worker
        that takes the job up again.
        """
        return min(REDO_STEPS, self._fits, self._sums_in(max(REDO_BYTES_FREE, self._state_bytes)))

    @property
    def _fits(self) -> int:
        """How many sums the keeper's machine has memory for, beside the states."""
        return self._sums_in(room_for_sums(self._state_bytes, self._place.memory_bytes))

    def _sums_in(self, room_bytes: int) -> int:
        newest = next((led[-1] for led in (self._ahead, self.redo) if led), None)
        if self.backup is None or newest is None:
            return REDO_STEPS
        return max(1, int(ROOM_FACTOR * room_bytes / max(1, newest.body.nbytes)))

    @property
    def _every(self) -> int:
        """After how many steps a new state is asked for."""
        return min(self._order.backup_every_steps, self._room, max(1, self._fits // 2))

    @property
    def _bound(self) -> int:
        """The most sums that are held.

        As long as there is room for sums, commits go on even if a state takes longer to arrive than
        the steps between two states.
        """
        return min(self._fits, max(REDO_MAX_FACTOR * self._every, self._room))

    @property
    def wants(self) -> bool:
        """Whether a new state should be asked for now, or again if no more of it arrives.

        A worker that sends a state computes more slowly. So after each state none is asked for
        during as long a time as that state took.
        """
        now_s = time.monotonic()
        if self.sharding.on:
            return self._wants_shards(now_s)
        if self.backup is not None and len(self.redo) + self.behind < self._every:
            return self._lacks_proof and self._assembly is None
        if self._assembly is not None:
            return not self._assembly.final and now_s > self._heard_s + LOST_S
        short = self.backup is None or 2 * self._sums >= self._bound
        return short or now_s >= self._rested_s

    def _wants_shards(self, now_s: float) -> bool:
        if self._assembly is not None:
            return not self._assembly.final and now_s > self._heard_s + SHARD_LOST_S
        lacks = self.backup is None or self._lacks_proof
        return self.sharding.due(now_s) or (lacks and self.sharding.free(now_s))

    @property
    def _lacks_proof(self) -> bool:
        """Whether workers cannot prove themselves by any backup here, but could by a newer one.

        The initial state does not count while there is a choice, because what a script counts
        outside of the session is correct there.
        """
        if self.backup is None:
            return False
        if self.backup.version == 0:
            return self._committed >= (1 if self.awaited else EARLY)
        over = self._committed > self.backup.version + self.proofs.phases
        return self.awaited and over and self.asked(partly=False) is None

    def owes(self, version: int) -> bool:
        """Whether this sum is wanted whatever it costs, because workers prove themselves by it."""
        if self._sparing:
            return False
        begun, newest = self._coming, self._newest
        if newest is not None and not newest.provable and newest.reached >= version:
            begun.append(newest.backup.version)
        return self._proves(version, begun)

    @property
    def adrift(self) -> bool:
        """Whether sums are logged after a gap, and no state is on its way that would close it."""
        return self.behind > 0 and self._assembly is None

    def takes_sums(self, copies: int, *, parted: bool = False) -> bool:
        """Return whether every step waits for its sum to arrive here; see `sums_pass`."""
        delays = self.sharding.sums_delay
        return not self.sharding.on and sums_pass(
            self._order.sums, self.sum_bytes, copies, delays=delays, parted=parted
        )

    def wants_sum(self, copies: int, *, parted: bool = False) -> bool:
        kept = self.takes_sums(copies, parted=parted)
        return kept or time.monotonic() < self._whole_until_s

    def insist(self, seconds: float) -> None:
        """Take every sum for `seconds`, so that a requested checkpoint has all steps in it."""
        self._whole_until_s = time.monotonic() + seconds

    def ask(self, layout: Layout, version: int, *, final: bool = False) -> None:
        """Accept shares of this state from now on, and no others.

        What has arrived of it stays, and a worker that has sent its share of it as that of the last
        state does not send it again.
        """
        self._heard_s = time.monotonic()
        coming = self._assembly
        if coming is not None and coming.of(
            layout.generation, version, final=final or coming.final
        ):
            return
        self._begun_s, ahead = 0.0, None
        if self.sharding.on and not final:
            self.sharding.begin(self._heard_s)
            ahead = 0 if self._sparing else self.proofs.phases
        self._assembly = StateAssembly(
            layout.generation, version, layout.workers, self.memory.take, final=final, ahead=ahead
        )

    def stop_asking_for(self, version: int) -> None:
        """Give up a state that will not come."""
        assembly = self._assembly
        if assembly is not None and not assembly.final and assembly.version == version:
            self._assembly = None
            self.sharding.again()

    def stop_asking(self) -> None:
        """Give up the state asked for, because another layout begins.

        How long a state took in the previous layout says nothing about the next one.
        """
        if self._assembly is not None:
            self.sharding.again()
        self._assembly, self._rested_s = None, 0.0

    def _match(self, message: Snapshot, layout: Layout) -> StateAssembly | None:
        assembly = self._assembly
        if message.final and message.generation == layout.generation:
            if assembly is None or not assembly.final or assembly.generation != layout.generation:
                self.ask(layout, message.version, final=True)
            assembly = self._assembly
        if assembly is not None and self._is_boundary_of(assembly, message):
            ahead = assembly.ahead
            self.ask(layout, message.version)
            assembly = self._assembly
            assert assembly is not None
            assembly.ahead = ahead
        if assembly is None or not assembly.of(
            message.generation, message.version, final=message.final
        ):
            return None
        if assembly.stored != message.stored:
            return None  # asked for before the job went the other way
        self._heard_s = time.monotonic()
        self._begun_s = self._begun_s or self._heard_s
        return assembly

    def _is_boundary_of(self, assembly: StateAssembly, message: Snapshot) -> bool:
        """Whether this is the end of a step in the middle of which the state was asked for."""
        follows = assembly.generation == message.generation and assembly.version < message.version
        return follows and not (self._begun_s or assembly.final or message.final)

    def place(self, message: Snapshot, layout: Layout) -> memoryview | None:
        assembly = self._match(message, layout)
        return None if assembly is None else assembly.place(message.extents)

    def take(
        self, message: Snapshot, payload: memoryview, worker: str, layout: Layout
    ) -> Backup | None:
        """Take a part of a share. Return the backup if it is complete with this part."""
        assembly = self._match(message, layout)
        if assembly is None:
            return None
        if message.stored:
            self._take_shards(assembly, message, worker)
            return None
        assembly.take(message.forms, message.extents, payload)
        if message.last:
            assembly.end(worker)
        whole = assembly.whole()
        if whole is None:
            return None
        self._assembly = None
        self.sharding.passed(whole.state_bytes, self._heard_s - self._begun_s)
        self._rested_s = self._heard_s + self.sharding.rest_s(self._heard_s - self._begun_s)
        self.memory.rest()
        self._succeed(whole)
        held = BackupHeld(
            at_s=CLOCK.now_s(), job=self._job, step=whole.version, state_bytes=whole.state_bytes
        )
        self._report(held)
        passing("keeper: assembled")
        return whole

    # --- states that go straight to the store -----------------------------------------------------

    def choose(self, step_s: float, begun_bytes: int = 0) -> None:
        """Decide which way states go; `begun_bytes` have workers that hold no state yet."""
        self._step_s, self._begun_bytes = step_s, begun_bytes or self._begun_bytes
        self.sharding.choose(
            Passing(
                state_bytes=self._state_bytes,
                sum_bytes=self.sum_bytes,
                every=self._every,
                step_s=step_s,
                bytes_s=self.sharding.keeper_bytes_s,
                memory_bytes=self._place.memory_bytes,
            )
        )

    @property
    def _state_bytes(self) -> int:
        return self._begun_bytes if self.backup is None else self.backup.state_bytes

    @property
    def _sparing(self) -> bool:
        """Whether not even the sum after each snapshot is sent."""
        return self.sharding.on and self.sharding.spares(self.sum_bytes or self._state_bytes)

    def shards(self, crowd: int) -> Shards | None:
        """Return where workers write the state that is asked for; None if it comes here.

        `crowd` of them may share one machine's network.
        """
        assembly = self._assembly
        if assembly is None or assembly.ahead is None or self._place.storage is None:
            return None
        place = self._place.storage.place(self._job)
        return Shards(place=place, bytes_s=self.sharding.bytes_s(crowd), ahead=assembly.ahead)

    def _take_shards(self, assembly: StateAssembly, message: Snapshot, worker: str) -> None:
        if message.why:
            self._assembly = None
            self._give_up(assembly.version, message.why)
            return
        assembly.add(message.forms, message.parts)
        if message.last:
            assembly.end(worker)
        if assembly.ended:
            self._assembly, self.sharding.whole = None, assembly

    def _give_up(self, version: int, why: str) -> None:
        self.sharding.fail(time.monotonic())
        self._report(CheckpointFailed(at_s=CLOCK.now_s(), job=self._job, step=version, error=why))

    @property
    def landing(self) -> bool:
        """Whether a snapshot that all workers have written is about to become a version."""
        return self.sharding.whole is not None

    def advance(self, *, patient: bool) -> bool:
        """Make such a snapshot a version beside the job; return whether one has become the backup.

        A patient caller lets the records of the step after it come first.
        """
        try:
            landed = self._landed.get_nowait()
        except queue.Empty:
            self._land(patient=patient)
            return False
        self._lands = False
        if landed.whole is not self.sharding.whole:
            return False  # the job has gone on from elsewhere meanwhile
        if landed.backup is None:
            self._give_up(landed.whole.version, landed.error)
            return True
        self.sharding.whole = None
        self.sharding.succeed(time.monotonic())
        self._succeed(landed.backup)
        self._report_stored(landed.backup)
        return True

    def _report_stored(self, backup: Backup) -> None:
        assert backup.stored is not None
        at_s, job, step = CLOCK.now_s(), self._job, backup.version
        size, uri = backup.state_bytes, f"{backup.stored.place}/{backup.stored.manifest}"
        self._report(BackupHeld(at_s=at_s, job=job, step=step, state_bytes=size))
        self._report(CheckpointWritten(at_s=at_s, job=job, step=step, state_bytes=size, uri=uri))

    def _land(self, *, patient: bool) -> None:
        whole = self.sharding.whole
        if whole is None or self._lands:
            return
        redo, _ = _leading(whole.version, (*self.redo, *self._ahead))
        most = redo[: whole.ahead]
        question = self.proofs.question(whole.version, whole.version + len(most))
        lacks = question is None or not (question.complete or self._sparing)
        if patient and lacks and time.monotonic() < self._heard_s + PROOF_S + 3 * self._step_s:
            return
        count = 0 if question is None else question.commits
        records = proofs.encode(question, self._order)
        saved = Saved(whole.described(), tuple(most[:count]), records)
        self._lands = True
        threading.Thread(
            target=self._land_beside,
            args=(whole, saved, self._kept_folders()),
            name="manifest",
            daemon=True,
        ).start()

    def _kept_folders(self) -> frozenset[int]:
        """Return the versions in whose folders lie parts of what is used here."""
        bases = (self._newest, self._older, self._aside)
        stored = (base.backup.stored for base in bases if base is not None)
        return frozenset(folder_of(part) for each in stored if each for part in each.parts)

    def _land_beside(self, whole: StateAssembly, saved: Saved, kept: frozenset[int]) -> None:
        offsite, backup, error = self.offsite, None, ""
        assert offsite is not None
        try:
            with self._writing:
                begun = Begun(self._taken_over(), self.since)
            backup = offsite.commit(begun, saved, whole.parts)
        except Exception as problem:  # a store's library has errors of many kinds
            log.warning("%s: version %d: %r", self._job, whole.version, problem)
            error = str(problem) or type(problem).__name__
        self._landed.put(Landed(whole, backup, error))
        offsite.prune(kept)  # beside the job too, as it may take long

    def unread(self, manifest: str, why: str) -> None:
        """Set aside what workers could not read; called beside the job, without its lock."""
        stored = None if self.backup is None else self.backup.stored
        if stored is not None:
            marks = marks_in(MANIFESTS, [manifest])
            self._unread |= {(stored.place, mark): why for mark in marks}
        if (stored is None or stored.place != self._earlier_place) and self.offsite is not None:
            self.offsite.set_aside(manifest, why)

    def forget(self, manifest: str) -> bool:
        """Have nobody prove itself by an older state; return whether the backup is of this one."""
        self._older = self._aside = None  # else each worker would be lost that reads it
        stored = None if self.backup is None else self.backup.stored
        return stored is not None and stored.manifest == manifest

    # --- the newest backup ------------------------------------------------------------------------

    def _succeed(self, whole: Backup) -> None:
        """Make `whole` the newest backup; keep the previous one while only that is provable.

        The initial state makes room for one that will be: where each step ends with a new state,
        there is always a newest one of which nothing is known so far.
        """
        before, older = self._newest, self._older
        if older is None or not older.provable or not older.backup.version:
            older = before if before is not None and before.question is not None else older
        redo, ahead = _leading(whole.version, (*self.redo, *self._ahead))
        self.backup, self.redo, self._ahead = whole, redo, ahead
        self._question, self._older = None, older
        self.look()

    # --- proofs -----------------------------------------------------------------------------------

    @property
    def _newest(self) -> Base | None:
        return None if self.backup is None else Base(self.backup, self.redo, self._question)

    @property
    def _kept_base(self) -> Base | None:
        """The base that the next keeper finds: the older one until the newest is provable.

        But a committed step is worth more than a step to prove.
        """
        newest, older = self._newest, self._older
        reaches = newest is not None and older is not None and older.reached == newest.reached
        return older if reaches else newest

    def look(self) -> None:
        """Update the questions after new records of the newest steps have arrived."""
        newest = self._newest
        if self._older is not None:
            self._older.look(self.proofs)
        if newest is not None and not newest.provable:
            newest.look(self.proofs)
            self._question = newest.question
        if newest is not None and self._serves(newest):
            self._older = self._aside = None
        self._note()

    def _serves(self, base: Base) -> bool:
        """Whether a base has all the records that it will ever have.

        Where no sum is sent after a snapshot, no base becomes provable: a provable one from before
        would be held for ever, a whole state in memory or pinned in the store.
        """
        return base.provable or (self._sparing and base.question is not None)

    def _note(self) -> None:
        """Note the kept base in lasting memory, before the one noted until now is dropped."""
        base = self._kept_base
        if self._lasting is None or base is None:
            return
        noted = base.backup.version == self._noted
        if not noted or (base.provable and not self._noted_whole):
            self._noted, self._noted_whole = base.backup.version, base.provable
            self._lasting.note_state(base.saved(self._order))

    def step_back(self) -> None:
        """Go on from the state before the backup if no step is committed after the backup.

        Then the step after that older state is replayed, and can be proven.
        """
        older = self._older
        if older is not None and not self.redo and older.redo and older.reached == self.reached:
            self.backup, self.redo, self._question = older.backup, older.redo, older.question
            self._older = None

    @property
    def asks_first(self) -> int | None:
        """A recorded microbatch of the first step after the backup; None if none is recorded."""
        question = None
        if self.backup is not None:
            question = self.proofs.question(self.backup.version, self.reached or 0)
        return None if question is None else question.microbatches[0]

    def asked(self, *, partly: bool) -> Base | None:
        """Return the base for a worker to prove itself by, not the initial state if possible.

        With `partly`, a base with incomplete records will do. That is for a job in which no worker
        commits, so that the records cannot become complete.
        """
        held = (self._newest, self._older, self._aside)
        bases = [base for base in held if base is not None]
        whole = [base for base in bases if base.provable]
        partly |= self._sparing
        if (found := next((base for base in whole if base.backup.version), None)) or not partly:
            return found
        return next(iter([*whole, *(base for base in bases if base.question is not None)]), None)

    def keep(self, saved: Saved) -> None:
        """Hold a recalled version for proofs only, beside the one that the job goes on from."""
        question = proofs.read(saved, self._order)
        if question is not None:
            self._aside = Base(saved.backup, list(saved.redo), question)

    # --- versions on the disk ---------------------------------------------------------------------

    @property
    def saved(self) -> Saved | None:
        """The version to write: a provable one, if it reaches as far as the newest."""
        newest, older = self._newest, self._older
        if newest is None:
            return None
        if older is not None and older.provable and older.reached == newest.reached:
            return older.saved(self._order)
        return newest.saved(self._order)

    @property
    def beside(self) -> Saved | None:
        """A provable version to write before `saved`, if `saved` itself is not provable."""
        newest, older = self._newest, self._older
        if newest is None or newest.provable or older is None or not older.provable:
            return None
        return None if older.reached == newest.reached else older.saved(self._order)

    @property
    def reached(self) -> int | None:
        """The version that the backup and its sums lead to."""
        return None if self.backup is None else self.backup.version + len(self.redo)

    def left(self, committed: int) -> Saved | None:
        """Return what the previous keeper left in memory, which may be the only copy.

        Called beside the job, without its lock.
        """
        if self._lasting is None:
            return None
        until_s = time.monotonic() + HELD_S
        while True:
            try:
                return self._lasting.find(committed)
            except Held:
                if time.monotonic() > until_s:
                    raise
            time.sleep(LOOK_S)

    def recall(self, committed: int, *, patient: bool) -> Found:
        """Return the best of an earlier keeper's memory, the disk and, if needed, remote storage.

        Called beside the job, without its lock. If there is a backup here, nothing stored reaches
        further. A patient caller gets an error for what cannot be read, and asks again; otherwise
        what cannot be read is left out.
        """
        if self.backup is not None:
            return Found(None, "nothing that is stored reaches further")
        left = self.left(committed)
        patient &= left is None or left.reached < committed  # else nothing has to be read
        here, more = Shelf(DISK, self._archive), partial(self._elsewhere, committed)
        room = self.memory.take  # so that the next keeper finds it, too
        found = recovery.newest([here], committed, left, patient=patient, further=more, room=room)
        if found.saved is not None or not (url := self._order.from_url):
            return found
        begun = recovery.newest([self._origin(url)], committed, patient=patient, room=room)
        if begun.saved is None:
            raise CheckpointError(f"nothing sound is stored at {url} to go on from")
        return begun

    def recall_proof(self, saved: Saved) -> Saved | None:
        """Return a provable version from the disk if `saved` is not provable.

        Called beside the job, without its lock.
        """
        if proofs.read(saved, self._order) is not None:
            return None
        try:
            for manifest in self._archive.sound(None, []):
                if proofs.decode(manifest.records, self._order) is not None:
                    return versions.load(self._archive, manifest)
        except (CheckpointError, OSError, MemoryError) as error:
            log.warning("%s: no step to prove can be read: %s", self._job, error)
        return None

    def _elsewhere(self, committed: int) -> list[Shelf]:
        """Where else a version may lie. Of a job without commits we have stored nothing."""
        if not committed or self._place.storage is None:
            return []
        return [Shelf(OBJECT, self._without_unread(self._place.storage.archive(self._job)))]

    def _origin(self, url: str) -> Shelf:
        """Where the job began, which is searched if nothing of its own is left."""
        source = self._without_unread(earlier(url))
        self._earlier_place = source.sink.name
        return Shelf(url, source, step_in(url))

    def _without_unread(self, archive: Archive) -> Archive:
        for (place, mark), why in dict(self._unread).items():
            if place == archive.sink.name:
                archive.set_aside(mark, why)
        return archive

    def drop(self) -> None:
        """Forget all that is in memory, because the job's history no longer contains it."""
        self.backup, self.redo, self._ahead, self._assembly = None, [], [], None
        self.sharding.whole = None
        self._question, self._older, self._aside = None, None, None
        self.proofs.clear()
        self._noted = None

    def begin_anew(self, version: int) -> None:
        """Go on from this version as the only writer, whichever keeper wrote meanwhile."""
        self.since, self._generation, self._assembly = version, None, None
        self.sharding.whole = None
        self._committed = version
        if self._lasting is not None:
            self._lasting.take_up()

    def go_back(self, version: int) -> None:
        """Go back to a version, because everything newer is lost."""
        self.since = self._committed = version
        self._ahead.clear()
        self.proofs.forget(version)

    def adopt(self, saved: Saved) -> None:
        """Go on from a recalled version, and hold it from now on."""
        self.backup, self.redo, self._assembly = saved.backup, list(saved.redo), None
        self._ahead.clear()
        self._older, self._question = None, proofs.read(saved, self._order)
        if self._question is not None:
            self.proofs.learn(self._question)
        self._noted, self._noted_whole = saved.backup.version, bool(saved.records)
        if self._lasting is not None:
            self._lasting.note_state(saved, recalled=True)

    def leave(self) -> None:
        """Leave what is in memory to the next keeper, because this one ends."""
        if self._lasting is not None:
            self._lasting.leave()

    def clear(self) -> None:
        """Clear the memory of a finished job; if it is taken up again, it is read from the disk."""
        if self._lasting is not None:
            self._lasting.clear()

    def due(self) -> bool:
        here = self.backup is not None and self.backup.stored is None
        return here and time.monotonic() >= self._checkpoint_due_s

    def write_beside(self) -> bool:
        """Write a checkpoint on a separate thread.

        Return False if one is being written already, or there is nothing to write.
        """
        saved, beside = self.saved, self.beside
        self._checkpoint_due_s = time.monotonic() + self._order.checkpoint_every_s
        begins = saved is not None and not self._writing.locked()
        if begins:
            threading.Thread(
                target=self.write,
                args=(saved,),
                kwargs={"beside": beside},
                name="checkpoint",
                daemon=True,
            ).start()
        return begins

    def spare(self, urls: Iterable[str]) -> None:
        """Keep on the disk the versions that jobs with these URLs begin from, and no others.

        Else a version could be pruned between the wish for a branch and its first worker.
        """
        self._archive.branched = branched_from(self._directory.resolve().as_uri(), urls)

    def _open_offsite(self, storage: Storage) -> Offsite:
        return Offsite(
            self._job,
            self._archive,
            partial(
                storage.archive, self._job
            ),  # without a reference to us: it may outlive us and the state that we hold
            storage.every_s,
            self._report,
        )

    def write(
        self,
        saved: Saved,
        *,
        beside: Saved | None = None,
        last: bool = False,
        ended: bool = False,
        copied_s: float = 0.0,
    ) -> bool:
        """Write a version to the disk. Return whether it was written.

        Called beside the job, without its lock. A full disk is reported and does not stop training.
        The report waits up to `copied_s` for the copy in remote storage, because once a requester
        has the report, it may end this machine.
        """
        if saved.backup.stored is not None:
            self._report_stored(saved.backup)
            if last and self.offsite is not None:
                self.offsite.sweep()
            return True
        if beside is not None and beside.backup.stored is not None:
            beside = None
        with self._writing:
            try:
                if beside is not None:
                    with suppress(CheckpointError):  # the newest counts, whatever became of it
                        versions.save(self._archive, self._taken_over(), beside)
                manifest = versions.save(self._archive, self._taken_over(), saved)
                if ended and manifest.redo:
                    manifest = self._written_whole(saved)
            except (CheckpointError, OSError, MemoryError) as error:
                again_s = time.monotonic() + AGAIN_S
                self._checkpoint_due_s = min(self._checkpoint_due_s, again_s)
                if self.offsite is not None:
                    self.offsite.offer(saved, self.since, last=last)
                    self.offsite.wait(copied_s)
                return self._failed(saved.reached, error)
        written = CheckpointWritten(
            at_s=CLOCK.now_s(),
            job=self._job,
            step=manifest.version,
            state_bytes=manifest.state_bytes,
            uri=(self._directory / manifest.key).resolve().as_uri(),
        )
        if self.offsite is not None:
            self.offsite.offer(manifest, self.since, last=last)
            self.offsite.wait(copied_s)
        self._report(written)
        return True

    def _written_whole(self, saved: Saved) -> Manifest:
        """Write this version again as a whole state, in one more generation.

        It lies there as an earlier state and the sums that lead to it, but copies and exports are
        of states. That is for a job that has ended, because no worker goes on with it.
        """
        self._generation = self._archive.take_over(saved.reached)
        return versions.save(self._archive, self._generation, saved)

    def _taken_over(self) -> int:
        """Return our generation in the archive."""
        generation = self._generation
        if generation is None:
            generation = self._generation = self._archive.take_over(self.since)
        return generation

    def _failed(self, step: int, error: Exception) -> Literal[False]:
        why = str(error) or type(error).__name__
        failed = CheckpointFailed(at_s=CLOCK.now_s(), job=self._job, step=step, error=why)
        self._report(failed)
        return False

    def store(self, final: Backup) -> tuple[str, str] | None:
        """Store the last version, and the trained model separately. Called beside the job.

        Return the model's digest and its location; None if the disk did not take it.
        """
        if not self.write(Saved(final, ()), last=True, ended=True):
            return None
        model = weights.weights_of(final.layers, final.bodies)
        path = self._directory / "model.safetensors"
        try:
            weights.write(path, model)
        except (CheckpointError, MemoryError) as error:
            self._failed(final.version, error)
            return None
        return weights.digest(model), path.resolve().as_uri()


def _leading(version: int, sums: Iterable[LoggedSum]) -> tuple[list[LoggedSum], list[LoggedSum]]:
    """Split sums into those that follow this version without a gap, and those after it."""
    redo, ahead = list[LoggedSum](), list[LoggedSum]()
    for logged in sums:
        if logged.step == version + len(redo):
            redo.append(logged)
        elif logged.step > version:
            ahead.append(logged)
    return redo, ahead
