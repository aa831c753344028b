"""What a job has in safe hands: the backup in the keeper's memory, and its versions on the keeper's disk.

A version is the backup and the sums since, just as they lie in memory: writing one asks nothing of
the workers, stalls nobody, and has every committed step in it.

A worker that joins proves itself by the step behind a backup: see `agent.reliable.proofs`. So the backup before the newest
stays until that step is known of the newest, in memory and on the disk: there is always one to prove, whoever is lost when.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Literal

import msgspec

from agent.errors import CheckpointError
from agent.faults import passing
from agent.layout import Layout
from agent.messages import BackupHeld, CheckpointFailed, CheckpointWritten, JobOrder, Report
from agent.protocol import Snapshot
from agent.reliable import proofs, recovery, saving
from agent.reliable.backup import Backup, LoggedSum, Saved, StateAssembly
from agent.reliable.memory_log import MemoryLog
from agent.reliable.offsite import Offsite, Storage, earlier
from agent.reliable.proofs import Proofs, Question
from agent.reliable.recovery import DISK, OBJECT, Found, Shelf
from agent.store import weights
from agent.store.archive import Archive
from agent.store.format import Manifest
from agent.store.memory import Returning
from agent.store.sinks import DiskSink
from cloud.clock import CLOCK

log = logging.getLogger(__name__)

REDO_MAX_FACTOR = 4
REDO_BYTES_FREE = 1 << 30  # of sums that are held whatever the state's size
REDO_STEPS = 1000  # each sum is a file of a version, and a message to whoever replays it
ROOM_FACTOR = 1.01  # a sum is padded, and may be a little larger than its part of the state
AGAIN_S = 60.0  # after a version that could not be written, however seldom there shall be one
LOST_S = 10.0  # without a byte of a state that was asked for
SMALL_SUM_BYTES = 1 << 24  # less is never dear
EARLY = 3  # steps, behind which the first state is asked for that a proof can begin with


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where states are kept: a folder with a folder per job and, if there is one, a place elsewhere."""

    checkpoints: Path
    storage: Storage | None = None
    memory: Path | None = None  # where the keeper's memory outlives it


class Base:
    """A backup, the sums that lead on from it without a gap, and what is known of the step behind it."""

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
    """Not guarded by itself: the job that owns it holds its lock, but for what is said to be done beside it."""

    def __init__(self, order: JobOrder, place: Place, report: Callable[[Report], None]) -> None:
        self._order, self._report, self._place = order, report, place
        self._job, self._directory = order.job, place.checkpoints / order.job
        self._archive = Archive(DiskSink(self._directory), order.job)
        self.offsite = None if place.storage is None else self._open_offsite(place.storage)
        self._generation: int | None = None  # of our versions in the archive, once there are any
        self.since = 0  # the version that this job's keeper went on from
        self._checkpoint_due_s = time.monotonic() + order.checkpoint_every_s
        self._writing = threading.Lock()
        self._lasting = MemoryLog(place.memory / order.job) if place.memory is not None else None
        self.memory = self._lasting or Returning()  # for states and sums
        self._assembly: StateAssembly | None = None
        self._heard_s = 0.0  # when some of the assembly last came, or was asked for
        self._begun_s = 0.0  # when the first of it came
        self._rested_s = 0.0  # until then none is asked for, if there is room for sums
        self.backup: Backup | None = None
        self.redo: list[LoggedSum] = []  # from the backup on, without a gap
        self._ahead: list[LoggedSum] = []  # behind one, for the state that is asked for
        self._committed = 0
        self.proofs = Proofs()
        self.awaited = False  # somebody waits for a step to prove
        self._question: Question | None = None  # about the step behind the backup
        self._older: Base | None = None  # the one before, as long as that is not complete
        self._aside: Base | None = None  # recalled, only to be proven by
        self._noted: int | None = None  # the version of the backup that the next keeper would find
        self._noted_whole = False
        self.sum_bytes = 0  # of the newest sum that came
        self._whole_until_s = 0.0  # until then nothing may be lacking, whatever it costs

    # --- the backup ---------------------------------------------------------------------------------

    def promise(self, step: int, logged: LoggedSum | None, records: bytes = b"") -> None:
        """This step is about to be committed, and this is its sum if it is here. `records` are what `records_of` says."""
        if self._lasting is None:
            return
        if records and self._noted is not None:
            self._lasting.note_proof(self._noted, records)
        if logged is not None:
            self._lasting.note_sum(logged)
        else:
            self._lasting.note_gap(step)

    def records_of(self, step: int, logged: LoggedSum | None) -> bytes:
        """What is known of the step behind what the next keeper would find, with this sum, which is not committed yet: it
        may be all that there will ever be."""
        base = self._kept_base
        if base is None or base.provable or base.backup.version != self._noted:
            return b""
        if self._lasting is None or step > base.backup.version + self.proofs.phases:
            return b""
        asked = self.proofs.question(base.backup.version, step + (logged is not None))
        return proofs.encode(asked, self._order)

    def log(self, logged: LoggedSum) -> None:
        self._committed, self.sum_bytes = logged.step + 1, logged.body.nbytes
        older = self._older
        if older is not None and logged.step == older.reached and len(older.redo) < self._bound:
            older.redo.append(logged)
        if logged.step == self.reached:
            self.redo.append(logged)
            return
        if self._ahead and self._ahead[-1].step != logged.step - 1:
            self._ahead.clear()
        self._ahead.append(logged)

    def skip(self, step: int) -> None:
        """It is committed, and its sum is not here."""
        self._committed = step + 1

    @property
    def behind(self) -> int:
        """How many steps are committed that nothing here leads to."""
        reached = self.reached
        return 0 if reached is None else max(0, self._committed - reached)

    def logged(self, step: int) -> LoggedSum | None:
        """They lie without a gap."""
        at = step - self.redo[0].step if self.redo else -1
        return self.redo[at] if 0 <= at < len(self.redo) else None

    @property
    def open(self) -> bool:
        """Whether one more commit may be logged; without a backup or with too many sums, not yet."""
        return self.backup is not None and self._sums < self._bound

    @property
    def _sums(self) -> int:
        return len(self.redo) + len(self._ahead)

    @property
    def _room(self) -> int:
        """How many sums are held without haste: about as many bytes as the state has, and so few that whoever takes the
        job up again can be sent them all."""
        newest = next((led[-1] for led in (self._ahead, self.redo) if led), None)
        if self.backup is None or newest is None:
            return REDO_STEPS
        room = ROOM_FACTOR * max(REDO_BYTES_FREE, self.backup.state_bytes)
        return max(1, min(REDO_STEPS, int(room / max(1, newest.body.nbytes))))

    @property
    def _every(self) -> int:
        """After how many steps a new state is asked for."""
        return min(self._order.backup_every_steps, self._room)

    @property
    def _bound(self) -> int:
        """A state that takes longer than the steps between two is no reason to wait as long as there is room."""
        return max(REDO_MAX_FACTOR * self._every, self._room)

    @property
    def wants(self) -> bool:
        """Whether a new state should be asked for now. One of which nothing comes any more is asked for again.

        Who sends a state computes more slowly meanwhile: for as long as the last one took there is none.
        """
        if self.backup is not None and len(self.redo) + self.behind < self._every:
            return self._lacks_proof and self._assembly is None
        now_s = time.monotonic()
        if self._assembly is not None:
            return not self._assembly.final and now_s > self._heard_s + LOST_S
        short = self.backup is None or 2 * self._sums >= self._bound
        return short or now_s >= self._rested_s

    @property
    def _lacks_proof(self) -> bool:
        """Whether there is no backup by which workers can prove themselves, and another would be one. What a script begins
        with is none while there is a choice: what it counts by itself is right there."""
        if self.backup is None:
            return False
        if self.backup.version == 0:
            return self._committed >= (1 if self.awaited else EARLY)
        over = self._committed > self.backup.version + self.proofs.phases
        return self.awaited and over and self.asked(partly=False) is None

    def owes(self, version: int) -> bool:
        """Whether the sum of this step is wanted whatever it costs, because workers prove themselves by it."""
        begun = [self._assembly.version] if self._assembly is not None else []
        newest = self._newest
        if newest is not None and not newest.provable and newest.reached >= version:
            begun.append(newest.backup.version)
        return any(first <= version < first + self.proofs.phases for first in begun)

    @property
    def adrift(self) -> bool:
        """Whether nothing leads to the sums that come to stay, and no state is on its way that would."""
        return self.behind > 0 and self._assembly is None

    def takes_sums(self, copies: int) -> bool:
        """Return whether every step waits for its sum to come here, where so many machines could go on alone.

        With it no loss of workers costs a step. Two machines seldom go at once, so a large sum may stay with them: then the
        steps since the newest state are computed again.
        """
        policy = self._order.sums
        small = policy == "auto" and self.sum_bytes < SMALL_SUM_BYTES
        return policy == "always" or copies < 2 or small

    def wants_sum(self, copies: int) -> bool:
        return self.takes_sums(copies) or time.monotonic() < self._whole_until_s

    def insist(self, seconds: float) -> None:
        """Take every sum for so long: a checkpoint that was asked for has all steps in it."""
        self._whole_until_s = time.monotonic() + seconds

    def ask(self, layout: Layout, version: int, *, final: bool = False) -> None:
        """From now on shares of this state are welcome, and no others. What has come of it already stays, and who has sent
        its share as that of the last state does not send it once more."""
        self._heard_s = time.monotonic()
        coming = self._assembly
        if coming is not None and coming.of(
            layout.generation, version, final=final or coming.final
        ):
            return
        self._begun_s = 0.0
        self._assembly = StateAssembly(
            layout.generation, version, layout.workers, self.memory.take, final=final
        )

    def stop_asking_for(self, version: int) -> None:
        """No state of this version will come."""
        assembly = self._assembly
        if assembly is not None and not assembly.final and assembly.version == version:
            self._assembly = None

    def stop_asking(self) -> None:
        """Another layout begins: what a state took in the one before says nothing of it."""
        self._assembly, self._rested_s = None, 0.0

    def _match(self, message: Snapshot, layout: Layout) -> StateAssembly | None:
        assembly = self._assembly
        if message.final and message.generation == layout.generation:
            if assembly is None or not assembly.final or assembly.generation != layout.generation:
                self.ask(layout, message.version, final=True)
            assembly = self._assembly
        if assembly is not None and self._is_boundary_of(assembly, message):
            self.ask(layout, message.version)
            assembly = self._assembly
        if assembly is None or not assembly.of(
            message.generation, message.version, final=message.final
        ):
            return None
        self._heard_s = time.monotonic()
        self._begun_s = self._begun_s or self._heard_s
        return assembly

    def _is_boundary_of(self, assembly: StateAssembly, message: Snapshot) -> bool:
        """Whether what was asked for fell between two commits of a step, and this is the state at the end of that step."""
        follows = assembly.generation == message.generation and assembly.version < message.version
        return follows and not (self._begun_s or assembly.final or message.final)

    def place(self, message: Snapshot, layout: Layout) -> memoryview | None:
        assembly = self._match(message, layout)
        return None if assembly is None else assembly.place(message.extents)

    def take(
        self, message: Snapshot, payload: memoryview, worker: str, layout: Layout
    ) -> Backup | None:
        """Some of a share has come; the backup, if nothing is lacking now."""
        assembly = self._match(message, layout)
        if assembly is None:
            return None
        assembly.take(message.forms, message.extents, payload)
        if message.last:
            assembly.end(worker)
        whole = assembly.whole()
        if whole is None:
            return None
        self._assembly = None
        self._rested_s = self._heard_s + (self._heard_s - self._begun_s)
        self.memory.rest()
        self._succeed(whole)
        held = BackupHeld(
            at_s=CLOCK.now_s(), job=self._job, step=whole.version, state_bytes=whole.state_bytes
        )
        self._report(held)
        passing("keeper: assembled")
        return whole

    def _succeed(self, whole: Backup) -> None:
        """It is the newest; what was there before stays, if it is that by which workers can prove themselves."""
        before, older = self._newest, self._older
        if older is None or not older.provable:
            older = before if before is not None and before.question is not None else older
        redo, ahead = _leading(whole.version, (*self.redo, *self._ahead))
        self.backup, self.redo, self._ahead = whole, redo, ahead
        self._question, self._older = None, older
        self.look()

    # --- proofs -------------------------------------------------------------------------------------

    @property
    def _newest(self) -> Base | None:
        return None if self.backup is None else Base(self.backup, self.redo, self._question)

    @property
    def _kept_base(self) -> Base | None:
        """What the next keeper is to find: the newest, as soon as workers can prove themselves by it."""
        newest = self._newest
        return self._older if newest is not None and self._older is not None else newest

    def look(self) -> None:
        """Something has become known of the newest steps."""
        newest = self._newest
        if self._older is not None:
            self._older.look(self.proofs)
        if newest is not None and not newest.provable:
            newest.look(self.proofs)
            self._question = newest.question
        if newest is not None and newest.provable:
            self._older = self._aside = None
        self._note()

    def _note(self) -> None:
        """Before what was written down until now is let go."""
        base = self._kept_base
        if self._lasting is None or base is None:
            return
        noted = base.backup.version == self._noted
        if not noted or (base.provable and not self._noted_whole):
            self._noted, self._noted_whole = base.backup.version, base.provable
            self._lasting.note_state(base.saved(self._order))

    def step_back(self) -> None:
        """Go on from the state before the backup, where no step is committed behind that which could be proven."""
        older = self._older
        if older is not None and not self.redo and older.redo and older.reached == self.reached:
            self.backup, self.redo, self._question = older.backup, older.redo, older.question
            self._older = None

    @property
    def asks_first(self) -> int | None:
        """Name a microbatch of the first step behind the backup of which something is known."""
        question = None
        if self.backup is not None:
            question = self.proofs.question(self.backup.version, self.reached or 0)
        return None if question is None else question.microbatches[0]

    def asked(self, *, partly: bool) -> Base | None:
        """The base from which a worker is to prove itself: where some steps have gone before, if there is one. `partly`
        is for when nobody is there who could bring the job further: then it is whatever is known."""
        held = (self._newest, self._older, self._aside)
        bases = [base for base in held if base is not None]
        whole = [base for base in bases if base.provable]
        if (found := next((base for base in whole if base.backup.version), None)) or not partly:
            return found
        return next(iter([*whole, *(base for base in bases if base.question is not None)]), None)

    def keep(self, saved: Saved) -> None:
        """Hold this, to be proven by, beside what is gone on from. It was recalled for that."""
        question = proofs.read(saved, self._order)
        if question is not None:
            self._aside = Base(saved.backup, list(saved.redo), question)

    # --- versions on the disk -----------------------------------------------------------------------

    @property
    def saved(self) -> Saved | None:
        """What goes to the disk: something that workers can prove themselves by, if it lies no further back."""
        newest, older = self._newest, self._older
        if newest is None:
            return None
        if older is not None and older.provable and older.reached == newest.reached:
            return older.saved(self._order)
        return newest.saved(self._order)

    @property
    def beside(self) -> Saved | None:
        """What goes to the disk before that, because else nobody could prove itself by what lies there."""
        newest, older = self._newest, self._older
        if newest is None or newest.provable or older is None or not older.provable:
            return None
        return None if older.reached == newest.reached else older.saved(self._order)

    @property
    def reached(self) -> int | None:
        """The version that what is in memory leads to."""
        return None if self.backup is None else self.backup.version + len(self.redo)

    def left(self, committed: int) -> Saved | None:
        """Beside the job: what the keeper before us has left in memory, which may be all that there is of it."""
        return None if self._lasting is None else self._lasting.find(committed)

    def recall(self, committed: int, *, patient: bool) -> Found:
        """Beside the job: return the best of what an earlier keeper left in memory, of the disk and, if need be, of what lies
        elsewhere. Nothing stored reaches further than a backup that is here.

        A patient caller hears of what cannot be read, and asks again; else what can be read must do.
        """
        if self.backup is not None:
            return Found(None, "nothing that is stored reaches further")
        left = self.left(committed)
        if left is not None and left.reached >= committed:
            return recovery.newest([], committed, left)
        here, further = Shelf(DISK, self._archive), partial(self._elsewhere, committed)
        found = recovery.newest([here], committed, left, patient=patient, further=further)
        if found.saved is None and not committed and self._order.from_url:
            raise CheckpointError(
                f"nothing sound is stored at {self._order.from_url} to go on from"
            )
        return found

    def recall_proof(self, saved: Saved) -> Saved | None:
        """Beside the job: of a version that nobody can prove itself by, another on the disk by which one can."""
        if proofs.read(saved, self._order) is not None:
            return None
        try:
            for manifest in self._archive.sound(None, []):
                if proofs.decode(manifest.records, self._order) is not None:
                    return saving.load(self._archive, manifest)
        except (CheckpointError, OSError, MemoryError) as error:
            log.warning("%s: no step to prove can be read: %s", self._job, error)
        return None

    def _elsewhere(self, committed: int) -> list[Shelf]:
        """Where else something may lie. Of a job that has committed nothing we have stored nothing."""
        if committed and self._place.storage is not None:
            return [Shelf(OBJECT, self._place.storage.archive(self._job))]
        if self._order.from_url:
            return [Shelf(OBJECT, earlier(self._order.from_url))]
        return []

    def drop(self) -> None:
        """What is in memory leads nowhere any more."""
        self.backup, self.redo, self._ahead, self._assembly = None, [], [], None
        self._question, self._older, self._aside = None, None, None
        self.proofs.clear()
        self._noted = None

    def begin_anew(self, version: int) -> None:
        """Whoever wrote meanwhile: from this version on it is us."""
        self.since, self._generation, self._assembly = version, None, None
        self._committed = version

    def go_back(self, version: int) -> None:
        """Nothing is there any more of what was newer."""
        self.since = self._committed = version
        self._ahead.clear()
        self.proofs.forget(version)

    def adopt(self, saved: Saved) -> None:
        """Hold this from now on."""
        self.backup, self.redo, self._assembly = saved.backup, list(saved.redo), None
        self._ahead.clear()
        self._older, self._question = None, proofs.read(saved, self._order)
        if self._question is not None:
            self.proofs.learn(self._question)
        self._noted, self._noted_whole = saved.backup.version, bool(saved.records)
        if self._lasting is not None:
            self._lasting.note_state(saved)

    def leave(self) -> None:
        """The keeper ends, and what is in memory is for the next one."""
        if self._lasting is not None:
            self._lasting.leave()

    def clear(self) -> None:
        """The job is over: whoever takes it up again finds it on the disk."""
        if self._lasting is not None:
            self._lasting.clear()

    def due(self) -> bool:
        return self.backup is not None and time.monotonic() >= self._checkpoint_due_s

    def write_beside(self) -> bool:
        """Write a checkpoint on a thread of its own, unless one is being written or there is nothing to write."""
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

    def _open_offsite(self, storage: Storage) -> Offsite:
        return Offsite(
            self._job,
            self._archive,
            partial(
                storage.archive, self._job
            ),  # without us: it may outlive us, and the state that we hold
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
        """Beside the job. Full disks are reported, and do not stop training. For so long it is waited for the copy: behind
        the report whoever asked for it may end this machine."""
        with self._writing:
            try:
                if beside is not None:
                    saving.save(self._archive, self._taken_over(), beside)
                manifest = saving.save(self._archive, self._taken_over(), saved)
                if ended and manifest.redo:
                    manifest = self._written_whole(saved)
            except (CheckpointError, OSError, MemoryError) as error:
                again_s = time.monotonic() + AGAIN_S
                self._checkpoint_due_s = min(self._checkpoint_due_s, again_s)
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
        """This version lies there as an earlier state and the sums that lead to it. Copies and exports are of states: of
        a job that has ended, which nobody goes on with, the state is written once more, as one more generation."""
        self._generation = self._archive.take_over(saved.reached)
        return saving.save(self._archive, self._generation, saved)

    def _taken_over(self) -> int:
        """Our generation in the archive."""
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
        """Beside the job: the last version, and the trained model on its own.

        The model's digest and where it is; None if the disk did not take it.
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
    """Those that lead on from this version, and those behind the first gap."""
    redo, ahead = list[LoggedSum](), list[LoggedSum]()
    for logged in sums:
        if logged.step == version + len(redo):
            redo.append(logged)
        elif logged.step > version:
            ahead.append(logged)
    return redo, ahead
