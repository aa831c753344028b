"""What a job has in safe hands: the backup in the keeper's memory, and its versions on the keeper's disk.

A version is the backup and the sums since, just as they lie in memory: writing one asks nothing of
the workers, stalls nobody, and has every committed step in it.
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
from agent.reliable import recovery, saving
from agent.reliable.backup import Backup, LoggedSum, Saved, StateAssembly
from agent.reliable.offsite import Offsite, Storage, earlier
from agent.reliable.recovery import Found, Kept, Shelf
from agent.reliable.remains import Remains
from agent.reliable.toll import Toll
from agent.store import weights
from agent.store.archive import Archive
from agent.store.format import Manifest
from agent.store.ladder import Rung
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


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where states are kept: a folder with a folder per job and, if there is one, a place elsewhere."""

    checkpoints: Path
    storage: Storage | None = None
    memory: Path | None = None  # where the keeper's memory outlives it


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
        self._remains = Remains(place.memory / order.job) if place.memory is not None else None
        self.memory = self._remains or Returning()  # for states and sums
        self._assembly: StateAssembly | None = None
        self._heard_s = 0.0  # when some of the assembly last came, or was asked for
        self._begun_s = 0.0  # when the first of it came
        self._rested_s = 0.0  # until then none is asked for, if there is room for sums
        self.backup: Backup | None = None
        self.redo: list[LoggedSum] = []  # from the backup on, without a gap
        self._ahead: list[LoggedSum] = []  # behind one, for the state that is asked for
        self._committed = 0
        self.toll = Toll(order.sums)

    # --- the backup ---------------------------------------------------------------------------------

    def promise(self, step: int, logged: LoggedSum | None) -> None:
        """This step is about to be committed, and this is its sum if it is here."""
        if self._remains is None:
            return
        if logged is not None:
            self._remains.note_sum(logged)
        else:
            self._remains.note_gap(step)

    def log(self, logged: LoggedSum) -> None:
        self._committed = logged.step + 1
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
            return False
        now_s = time.monotonic()
        if self._assembly is not None:
            return not self._assembly.final and now_s > self._heard_s + LOST_S
        short = self.backup is None or 2 * self._sums >= self._bound
        return short or now_s >= self._rested_s

    def lags(self, layout: Layout) -> bool:
        """Whether the backup is of another layout, in one where neighbours have copies of what came since their own
        began: with another state they have all of it."""
        other = self.backup is not None and self.backup.generation != layout.generation
        return layout.sole and other and self._assembly is None

    @property
    def adrift(self) -> bool:
        """Whether nothing leads to the sums that come to stay, and no state is on its way that would."""
        return self.behind > 0 and self._assembly is None and not self.toll.probing

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

    def stop_asking(self) -> None:
        """Another layout begins: what a state took in the one before says nothing of it."""
        self._assembly, self._rested_s = None, 0.0

    def _match(self, message: Snapshot, layout: Layout) -> StateAssembly | None:
        assembly = self._assembly
        if message.final and message.generation == layout.generation:
            if assembly is None or not assembly.final or assembly.generation != layout.generation:
                self.ask(layout, message.version, final=True)
            assembly = self._assembly
        if assembly is None or not assembly.of(
            message.generation, message.version, final=message.final
        ):
            return None
        self._heard_s = time.monotonic()
        self._begun_s = self._begun_s or self._heard_s
        return assembly

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
        redo, ahead = _leading(whole.version, (*self.redo, *self._ahead))
        if self._remains is not None:  # before what was written down until now is let go
            self._remains.note_state(Saved(whole, tuple(redo)))
            self._remains.remove_earlier()
        self.backup, self.redo, self._ahead = whole, redo, ahead
        held = BackupHeld(
            at_s=CLOCK.now_s(), job=self._job, step=whole.version, state_bytes=whole.state_bytes
        )
        self._report(held)
        passing("keeper: assembled")
        return whole

    # --- versions on the disk -----------------------------------------------------------------------

    @property
    def saved(self) -> Saved | None:
        return None if self.backup is None else Saved(self.backup, tuple(self.redo))

    @property
    def reached(self) -> int | None:
        """The version that what is in memory leads to."""
        return None if self.backup is None else self.backup.version + len(self.redo)

    def kept(self, committed: int, copied: Saved | None) -> Kept | None:
        """Beside the job: the best of what workers had in memory, and of what the keeper before us has left there."""
        if copied is not None and copied.reached >= committed:
            return Kept(copied, Rung.PEER, "workers")
        left = self.left(committed)
        if left is not None and (copied is None or left.reached > copied.reached):
            return Kept(left, Rung.BACKUP, "the keeper before this one")
        return None if copied is None else Kept(copied, Rung.PEER, "workers")

    def left(self, committed: int) -> Saved | None:
        """Beside the job: what the keeper before us has left in memory, which may be all that there is of it."""
        return None if self._remains is None else self._remains.find(committed)

    def recall(self, committed: int, *, patient: bool, kept: Kept | None = None) -> Found:
        """Beside the job: the best of what is in memory, of the versions on the disk and, if need be, elsewhere. Where there
        is a backup nothing that is stored reaches further: what cannot be read is no reason to wait then.

        Who is patient hears of what cannot be read, and asks again; else what can be read must do."""
        if self.backup is not None or (kept is not None and kept.saved.reached >= committed):
            return recovery.newest([], committed, kept)
        here, further = Shelf(Rung.DISK, self._archive), partial(self._elsewhere, committed)
        found = recovery.newest([here], committed, kept, patient=patient, further=further)
        if found.saved is None and not committed and self._order.from_url:
            raise CheckpointError(
                f"nothing sound is stored at {self._order.from_url} to go on from"
            )
        return found

    def _elsewhere(self, committed: int) -> list[Shelf]:
        """Where else something may lie. Of a job that has committed nothing we have stored nothing."""
        if committed and self._place.storage is not None:
            return [Shelf(Rung.OBJECT, self._place.storage.archive(self._job))]
        if self._order.from_url:
            return [Shelf(Rung.OBJECT, earlier(self._order.from_url))]
        return []

    def drop(self) -> None:
        """What is in memory leads nowhere any more."""
        self.backup, self.redo, self._ahead, self._assembly = None, [], [], None

    def begin_anew(self, version: int) -> None:
        """Whoever wrote meanwhile: from this version on it is us."""
        self.since, self._generation, self._assembly = version, None, None
        self._committed = version

    def go_back(self, version: int) -> None:
        """Nothing is there any more of what was newer."""
        self.since = self._committed = version
        self._ahead.clear()

    def adopt(self, saved: Saved) -> None:
        """Hold this from now on."""
        self.backup, self.redo, self._assembly = saved.backup, list(saved.redo), None
        self._ahead.clear()
        if self._remains is not None and self._remains.note_state(saved):
            self._remains.remove_earlier()

    def leave(self) -> None:
        """The keeper ends, and what is in memory is for the next one."""
        if self._remains is not None:
            self._remains.leave()

    def clear(self) -> None:
        """The job is over: whoever takes it up again finds it on the disk."""
        if self._remains is not None:
            self._remains.clear()

    def due(self) -> bool:
        return self.backup is not None and time.monotonic() >= self._checkpoint_due_s

    def write_beside(self) -> bool:
        """Write a checkpoint on a thread of its own, unless one is being written or there is nothing to write."""
        saved = self.saved
        self._checkpoint_due_s = time.monotonic() + self._order.checkpoint_every_s
        begins = saved is not None and not self._writing.locked()
        if begins:
            threading.Thread(
                target=self.write, args=(saved,), name="checkpoint", daemon=True
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
        self, saved: Saved, *, last: bool = False, ended: bool = False, copied_s: float = 0.0
    ) -> bool:
        """Beside the job. Full disks are reported, and do not stop training. For so long it is waited for the copy: behind
        the report whoever asked for it may end this machine."""
        with self._writing:
            try:
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
