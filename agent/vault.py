"""What a job has in safe hands: the backup in the keeper's memory, and checkpoints on its disk.

A checkpoint is the backup and the sums since, just as they lie in memory: writing one asks nothing of
the workers, stalls nobody, and has every committed step in it.
"""

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

from agent import checkpoint
from agent.backup import Backup, LoggedSum, StateAssembly
from agent.errors import CheckpointError
from agent.messages import BackupHeld, CheckpointFailed, CheckpointWritten, Report
from agent.protocol import Snapshot

log = logging.getLogger(__name__)

REDO_MAX_FACTOR = 4


class Vault:
    """Not guarded by itself: the job that owns it holds its lock, but for what is said to be done beside it."""

    def __init__(
        self,
        job: str,
        directory: Path,
        report: Callable[[Report], None],
        backup_every_steps: int,
        checkpoint_every_s: float,
    ) -> None:
        self._job, self._directory, self._report = job, directory, report
        self._backup_every_steps = backup_every_steps
        self._checkpoint_every_s = checkpoint_every_s
        self._checkpoint_due_s = time.monotonic() + checkpoint_every_s
        self._writing = threading.Lock()
        self._assembly: StateAssembly | None = None
        self.backup: Backup | None = None
        self.redo: list[LoggedSum] = []

    # --- the backup ---------------------------------------------------------------------------------

    def log(self, logged: LoggedSum) -> None:
        self.redo.append(logged)

    @property
    def open(self) -> bool:
        """Whether one more commit may be logged; without a backup or with too many sums, not yet."""
        return self.backup is not None and len(self.redo) < self._bound

    @property
    def _bound(self) -> int:
        return REDO_MAX_FACTOR * self._backup_every_steps

    @property
    def wants(self) -> bool:
        """Whether a new state should be asked for now. One that got lost on its way is asked for again."""
        late = self.backup is None or len(self.redo) >= self._backup_every_steps
        lost = len(self.redo) in (self._bound // 2, self._bound)
        return late and (self._assembly is None or lost)

    def ask(self, generation: int, version: int, *, final: bool = False) -> None:
        """From now on slices of this state are welcome, and no others."""
        self._assembly = StateAssembly(generation, version, final=final)

    def stop_asking(self) -> None:
        self._assembly = None

    def _match(self, message: Snapshot, generation: int) -> StateAssembly | None:
        assembly = self._assembly
        if message.final and message.generation == generation:
            if assembly is None or not assembly.final or assembly.generation != generation:
                self.ask(generation, message.version, final=True)
            assembly = self._assembly
        if assembly is None or (assembly.generation, assembly.version, assembly.final) != (
            message.generation,
            message.version,
            message.final,
        ):
            return None
        return assembly

    def place(self, message: Snapshot, size: int, generation: int) -> memoryview | None:
        assembly = self._match(message, generation)
        if assembly is None:
            return None
        return assembly.place(message.offset, size, message.total, message.header)

    def take(self, message: Snapshot, payload: memoryview, generation: int) -> Backup | None:
        """A slice has come; the backup, if it was the last one."""
        assembly = self._match(message, generation)
        if assembly is None:
            return None
        assembly.take(message.offset, payload, message.total, message.header)
        whole = assembly.whole()
        if whole is None:
            return None
        self._assembly = None
        self.backup = whole
        self.redo = [logged for logged in self.redo if logged.step >= whole.version]
        held = BackupHeld(
            at_s=time.time(), job=self._job, step=whole.version, state_bytes=whole.state_bytes
        )
        self._report(held)
        return whole

    def forget(self) -> None:
        """What is held belongs to a past that the job does not go on from."""
        self.backup, self.redo, self._assembly = None, [], None

    # --- checkpoints --------------------------------------------------------------------------------

    @property
    def saved(self) -> checkpoint.Saved | None:
        return None if self.backup is None else checkpoint.Saved(self.backup, tuple(self.redo))

    def load(self) -> int | None:
        """Take the newest whole checkpoint into memory; the version that it leads to."""
        found = checkpoint.newest(self._directory)
        if found is None:
            return None
        self.backup, self.redo, self._assembly = found.backup, list(found.redo), None
        return found.reached

    def due(self) -> bool:
        return self.backup is not None and time.monotonic() >= self._checkpoint_due_s

    def write_beside(self) -> None:
        """Write a checkpoint on a thread of its own, unless one is being written."""
        saved = self.saved
        self._checkpoint_due_s = time.monotonic() + self._checkpoint_every_s
        if saved is not None:
            threading.Thread(
                target=self.write, args=(saved,), name="checkpoint", daemon=True
            ).start()

    def write(self, saved: checkpoint.Saved) -> bool:
        """Beside the job. Full disks are reported, and do not stop training."""
        with self._writing:
            try:
                path, manifest = checkpoint.write(self._directory, self._job, saved)
            except (CheckpointError, OSError) as error:
                failed = CheckpointFailed(
                    at_s=time.time(), job=self._job, step=saved.reached, error=str(error)
                )
                self._report(failed)
                return False
        written = CheckpointWritten(
            at_s=time.time(),
            job=self._job,
            step=manifest.reached,
            state_bytes=manifest.total_bytes,
            uri=path.resolve().as_uri(),
        )
        self._report(written)
        return True

    def store(self, final: Backup) -> tuple[str, str] | None:
        """Beside the job: the last checkpoint, and the trained model on its own.

        The model's digest and where it is; None if the disk did not take it.
        """
        if not self.write(checkpoint.Saved(final, ())):
            return None
        weights = checkpoint.weights_of(final.header, final.body)
        path = self._directory / "model.safetensors"
        try:
            checkpoint.export(path, weights)
        except CheckpointError as error:
            self._report(
                CheckpointFailed(
                    at_s=time.time(), job=self._job, step=final.version, error=str(error)
                )
            )
            return None
        return checkpoint.digest(weights), path.resolve().as_uri()
