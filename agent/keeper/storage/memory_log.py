"""Keep what the keeper holds of a job in files in memory, where the next keeper finds it.

It finds them even if all workers died as well. No torch here.

State and sums arrive in areas: files in tmpfs that are mapped, so nothing is copied to keep it.
Small records name the areas: `state`, and one for the sum of each step, written before that step
is committed. A record is renamed into its place, so it is there whole or not at all. An area that
is used again gets a new name, so a record never names an area with other contents. If there is no
room, the process uses ordinary memory, and the disk is the next place to look.

The folder of a job is locked by the keeper that uses it, so nothing is taken from a live keeper.
"""

import contextlib
import fcntl
import hashlib
import logging
import mmap
import os
import shutil
import stat
import tempfile
import threading
import weakref
from collections.abc import Collection
from itertools import count as numbers
from pathlib import Path
from uuid import uuid4

import msgspec

from agent.keeper.storage.backup import Backup, LoggedSum, Saved
from agent.store.encoding.format import FORMAT, Layer
from agent.store.errors import Unavailable, Unknown
from agent.store.memory import RETURNING_BYTES_MIN, Returning, address_of, fresh
from cloud.plain_file import is_there

log = logging.getLogger(__name__)

SHARED = Path("/dev/shm")  # noqa: S108 - where files are in memory
PREFIX = f"spot-keeper-{os.getuid()}-"
# ValueError: an empty file cannot be mapped
UNSOUND = (FileNotFoundError, ValueError)
HOME, STATE, SUM, PROOF, AREA, DRAFT = "home", "state", "sum-", "proof-", "area-", "draft"
NAMES = 8  # tried for a house's folder
PARTS, PARTS_FREE = 4, 1  # of that file system: PARTS_FREE of PARTS are left to other programs


class Ref(msgspec.Struct, frozen=True):
    """Bytes in an area or, if they are few, in the reference."""

    size: int
    area: str = ""
    data: bytes = b""


class Form(msgspec.Struct, frozen=True):
    """The part of a state's record that every version of the software can read."""

    format: int = 0


class State(msgspec.Struct, frozen=True):
    generation: int
    version: int
    layers: tuple[Layer, ...]
    bodies: dict[str, Ref]
    format: int


class Sum(msgspec.Struct, frozen=True):
    present: bytes
    body: Ref


class Held(Unavailable):
    """The keeper before this one still lives, and holds the memory."""


class MemoryLog:
    """Memory for the states and sums of one job, and the records of what is in it."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._path = folder, str(folder)
        self._returning = Returning(self._make)
        self._areas: dict[int, str] = {}  # their names, by address
        self._names, self._numbers = f"{AREA}{uuid4().hex}", numbers()
        self._sums = set[int]()  # the steps whose records are ours
        self._lock = threading.RLock()
        self._held: int | None = None  # the folder, open and locked
        self._missed = False  # a step was committed that the records do not have
        self._left = False

    # --- memory -----------------------------------------------------------------------------------

    def take(self, count: int) -> memoryview:
        view = self._returning.take(count)
        if count >= RETURNING_BYTES_MIN:
            self._rename(address_of(view))
        return view

    def rest(self) -> None:
        self._returning.rest()

    def _rename(self, address: int) -> None:
        """Rename an area that is used again, so that no record names its new contents."""
        with self._lock, contextlib.suppress(OSError):
            if (name := self._areas.pop(address, None)) is not None:
                new = self._new_name()
                os.rename(f"{self._path}/{name}", f"{self._path}/{new}")  # noqa: PTH104
                self._areas[address] = new

    def _new_name(self) -> str:
        return f"{self._names}-{next(self._numbers)}"

    def _make(self, count: int) -> memoryview:
        try:
            with self._lock:
                return self._made(count)
        except OSError as error:
            log.warning("%s: this memory ends with its process: %s", self._folder.name, error)
            return fresh(count)

    def _made(self, count: int) -> memoryview:
        if not self._holds():
            return fresh(count)
        there = os.statvfs(self._folder)
        if PARTS * (there.f_bavail - count // there.f_frsize) < PARTS_FREE * there.f_blocks:
            return fresh(count)
        path = self._folder / self._new_name()
        with path.open("xb+", buffering=0) as file:
            # Allocate all of it now: a process that writes to memory that is not there is killed.
            try:
                os.posix_fallocate(file.fileno(), 0, count)
                return self._map(path.name, file.fileno(), ours=True)
            except OSError:
                path.unlink()
                raise

    def _map(self, name: str, handle: int, *, ours: bool) -> memoryview:
        mapped = mmap.mmap(handle, 0)
        view = memoryview(mapped)
        self._areas[address_of(view)] = name
        weakref.finalize(mapped, self._unmapped, address_of(view), ours=ours).atexit = False
        return view

    def _unmapped(self, address: int, *, ours: bool) -> None:
        """Delete an unused area of ours. One that an earlier keeper left stays until a sweep."""
        name = self._areas.pop(address, None)
        if ours and name is not None and not self._left:
            (self._folder / name).unlink(missing_ok=True)

    def _holds(self) -> bool:
        """Return whether we hold the folder's lock; take it unless an earlier keeper lives."""
        with self._lock:
            if self._held is None and not self._left:
                self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                held = os.open(self._folder, os.O_RDONLY)
                try:
                    fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    os.close(held)
                    return False
                self._held = held
                if self._missed:
                    self._sweep(())
            return self._held is not None

    # --- what is written down ---------------------------------------------------------------------

    def note_sum(self, logged: LoggedSum) -> None:
        """Write a sum down before its step is committed."""
        with self._lock:
            if not self._write_sum(logged):
                self.note_gap(logged.step)

    def note_gap(self, step: int) -> None:
        """Forget this step's sum from an earlier layout, before it is committed without its sum."""
        with self._lock:
            self._sums.discard(step)
            self._remove(_sum_of(step))

    def note_proof(self, version: int, records: bytes) -> None:
        """Write down the records of the step after this version; see `agent.keeper.proofs`."""
        with self._lock:
            self._write(f"{PROOF}{version}", records)

    def note_state(self, saved: Saved, *, recalled: bool = False) -> bool:
        """Make this state and what follows it what the next keeper finds. Return whether it can."""
        with self._lock:
            backup = saved.backup
            if recalled:
                self._sums.clear()  # the records of these steps may name other memory
            if backup.stored is not None:  # the next keeper finds it in the store
                self._sums.clear()
                self._remove(STATE)
                if self._holds():
                    self._sweep(())
                return False
            refs = {
                name: ref
                for name, body in backup.bodies.items()
                if (ref := self._ref(body)) is not None
            }
            whole = len(refs) == len(backup.bodies) and all(
                logged.step in self._sums or self._write_sum(logged) for logged in saved.redo
            )
            state = State(backup.generation, backup.version, backup.layers, refs, FORMAT)
            self.note_proof(backup.version, saved.records)
            if not (whole and self._write(STATE, state)):
                self._remove(STATE)
                return False
            self._sums = {step for step in self._sums if step >= backup.version}
            self._sweep({STATE, f"{PROOF}{backup.version}", *map(_sum_of, self._sums)})
            return True

    def _write_sum(self, logged: LoggedSum) -> bool:
        body = self._ref(logged.body)
        if body is None or not self._write(_sum_of(logged.step), Sum(bytes(logged.present), body)):
            return False
        self._sums.add(logged.step)
        return True

    def _ref(self, body: memoryview) -> Ref | None:
        if body.nbytes < RETURNING_BYTES_MIN:
            return Ref(body.nbytes, data=bytes(body))
        name = self._areas.get(address_of(body))
        return None if name is None else Ref(body.nbytes, name)

    def _write(self, name: str, entry: State | Sum | bytes) -> bool:
        """Put a record in its place, whole, if there is room."""
        try:
            if not self._holds():
                self._missed = True
                return False
            # Every commit waits for this, and `Path` takes longer for it than the system.
            draft = f"{self._path}/{DRAFT}"
            _put(draft, msgspec.msgpack.encode(entry))
            os.rename(draft, f"{self._path}/{name}")  # noqa: PTH104
        except OSError as error:
            log.warning("what the keeper holds is not written down: %s", error)
            return False
        return True

    def _remove(self, name: str) -> None:
        with contextlib.suppress(OSError):
            if self._holds():
                (self._folder / name).unlink(missing_ok=True)
        self._missed |= self._held is None

    def _sweep(self, records: Collection[str]) -> None:
        """Remove all records but these, and the areas that are not in use."""
        kept = {*records, *self._areas.values()}
        for path in self._folder.iterdir():
            if path.name not in kept:
                path.unlink(missing_ok=True)

    # --- what is found ----------------------------------------------------------------------------

    def find(self, committed: int) -> Saved | None:
        """Return what the previous keeper left, without sums that were not committed; take it over.

        Its state was committed, whatever Redis knows. Raise `Held` while that keeper still ends, as
        what it holds may be the only copy, and `Unavailable` for an error that may pass.
        """
        with self._lock:
            try:
                return self._find(committed)
            except UNSOUND as error:
                log.warning("%s cannot be gone on from: %s", self._folder, error)
                return None
            except OSError as error:
                why = str(error)
        # Not from within, because the error would keep what is mapped already.
        raise Unavailable(f"{self._folder} cannot be read now ({why}); it is tried again")

    def _find(self, committed: int) -> Saved | None:
        if self._left or not (self._folder / STATE).exists():
            return None
        if not self._holds():
            raise Held(f"an earlier keeper still holds {self._folder}; it is tried again")
        data = (self._folder / STATE).read_bytes()
        if msgspec.msgpack.decode(data, type=Form).format != FORMAT:
            raise Unknown(
                f"{self._folder} is of another version of the software: start that one, and then: orchestrator down"
            )
        state = msgspec.msgpack.decode(data, type=State)
        backup = Backup(
            generation=state.generation,
            version=state.version,
            layers=state.layers,
            bodies={name: self._body(ref) for name, ref in state.bodies.items()},
        )
        redo, records = list[LoggedSum](), b""
        with contextlib.suppress(*UNSOUND):
            data = (self._folder / f"{PROOF}{state.version}").read_bytes()
            records = msgspec.msgpack.decode(data, type=bytes)
        with contextlib.suppress(*UNSOUND):  # what leads up to one that is not whole still counts
            for step in range(state.version, committed):
                found = msgspec.msgpack.decode(
                    (self._folder / _sum_of(step)).read_bytes(), type=Sum
                )
                redo.append(LoggedSum(step, found.present, self._body(found.body)))
        return Saved(backup, tuple(redo), records)

    def _body(self, ref: Ref) -> memoryview:
        """Map the area that a record names."""
        if not ref.area:
            return memoryview(bytearray(ref.data))
        with (self._folder / ref.area).open("rb+", buffering=0) as file:
            body = self._map(ref.area, file.fileno(), ours=False)
        if body.nbytes != ref.size:
            raise ValueError(f"{ref.area} has {body.nbytes} bytes, not {ref.size}")
        return body

    # --- the end ----------------------------------------------------------------------------------

    def leave(self) -> None:
        """Unlock the folder and leave all files, as if this process ended here."""
        self._left = True
        with self._lock:
            if self._held is not None:
                os.close(self._held)
                self._held = None

    def clear(self) -> None:
        """Remove the folder, because all of it is on the disk; no keeper will find it again."""
        with self._lock, contextlib.suppress(OSError):
            if self._holds():
                self._returning = Returning(self._make)  # the areas that come back have no files
                self._areas.clear()
                self._sums.clear()
                shutil.rmtree(self._folder, ignore_errors=True)
                assert self._held is not None
                os.close(self._held)
                self._held = None
            self._left = True

    def take_up(self) -> None:
        """Use the folder again if it was cleared."""
        if self._left:
            self._left, self._returning = False, Returning(self._make)


def _put(path: str, data: bytes) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        while data:
            data = data[os.write(handle, data) :]
    finally:
        os.close(handle)


def _sum_of(step: int) -> str:
    return f"{SUM}{step}"


def root_of(checkpoints: Path) -> Path:
    """Return the folder in memory that has a folder for each of a house's jobs.

    Everybody may make folders there, so a different user may have taken its name: then the next
    name is tried. A folder that we have already comes first, since it has the steps of our jobs.
    """
    name = str(checkpoints.resolve())
    names = [name, *(f"{name}\n{number}" for number in range(1, NAMES))]
    roots = [SHARED / f"{PREFIX}{hashlib.sha256(each.encode()).hexdigest()[:16]}" for each in names]
    ours = (root for root in roots if _is_ours(root))
    free = (root for root in roots if not os.path.lexists(root))
    return next(ours, None) or next(free, roots[0])


def _is_ours(root: Path) -> bool:
    with contextlib.suppress(OSError):
        found = root.lstat()
        return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
    return False


def obstacle(checkpoints: Path) -> str:
    """Return why what a keeper holds would end with its process, as a sentence; "" if it would not.

    To be asked before a keeper starts, while nothing depends on it.
    """
    root = root_of(checkpoints)
    if os.path.lexists(root) and not _is_ours(root):
        return _unsafe(f"other users have taken every name for it in {SHARED}", "remove them")
    try:
        with tempfile.TemporaryFile(dir=SHARED) as probe:
            os.posix_fallocate(probe.fileno(), 0, RETURNING_BYTES_MIN)
        there = os.statvfs(SHARED)
    except OSError as error:
        return _unsafe(f"{SHARED} takes no files ({error.strerror})", "make it writable")
    if PARTS * there.f_bavail < PARTS_FREE * there.f_blocks:
        return _unsafe(f"{SHARED} is nearly full", "remove what is not needed there, or enlarge it")
    return ""


def _unsafe(because: str, remedy: str) -> str:
    return (
        f"{because}, so the newest steps are in the memory of one process: if it ends together with all workers, "
        f"the steps since the last checkpoint are lost; {remedy}, then: orchestrator down, and up"
    )


def move_in(root: Path, checkpoints: Path) -> bool:
    """Make the folder ours, if it can be, and remove those of houses whose folder is gone."""
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not _is_ours(root):
            raise PermissionError(f"{root} is another user's")
        root.chmod(0o700)
        (root / HOME).write_text(str(checkpoints.resolve().parent))
    except OSError as error:
        log.warning("what the keeper holds ends with its process: %s", error)
        return False
    for other in root.parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            if _is_ours(other) and not is_there(Path((other / HOME).read_text())):
                shutil.rmtree(other, ignore_errors=True)
    return True


def kept(root: Path) -> list[Path]:
    """Return the folders of jobs that can be found here, and are not wholly on the disk."""
    return sorted(state.parent for state in root.glob(f"*/{STATE}"))


def sweep(root: Path, jobs: Collection[str]) -> None:
    """Remove the folders of all jobs but these."""
    with contextlib.suppress(OSError):
        for folder in root.iterdir():
            if folder.is_dir() and folder.name not in jobs:
                shutil.rmtree(folder, ignore_errors=True)
