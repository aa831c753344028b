"""The keeper's memory in files that outlive its process: where the next keeper finds it, if all workers died as well.
No torch here.

State and sums lie in areas: files in memory (tmpfs), mapped. A log beside them says what is in which: a sum before its
commit is written. An area is used again, and gets another stamp each time: what the log says of an area with another
stamp is of the past. Each keeper of a job has a folder of its own, and whoever has a state of its own there removes
those before it. Where there is no room, memory is the process's own, and the disk is the next rung.
"""

import contextlib
import fcntl
import hashlib
import logging
import mmap
import os
import shutil
import struct
import threading
import time
import weakref
from collections.abc import Collection, Iterable, Iterator, Sequence
from io import FileIO
from itertools import count as numbers
from pathlib import Path

import msgspec

from agent.checksum import crc32c
from agent.reliable.backup import Backup, LoggedSum, Saved
from agent.store.errors import Unknown
from agent.store.format import FORMAT, Layer
from agent.store.memory import RETURNING_BYTES_MIN, Returning, address_of, fresh

log = logging.getLogger(__name__)

SHARED = Path("/dev/shm")  # noqa: S108 - where files are in memory
PREFIX = f"spot-keeper-{os.getuid()}-"
HOME, LOG = "home", "log"
HEAD_BYTES = mmap.PAGESIZE  # of an area, for its stamp
PARTS, PARTS_FREE = 4, 1  # of that file system: so many of so many are left to others
_FRAME, _STAMP = struct.Struct("<II"), struct.Struct("<Q")


class Ref(msgspec.Struct, frozen=True, array_like=True):
    """Bytes in an area, or, where they are few, here."""

    size: int
    area: str = ""
    stamp: int = 0
    data: bytes = b""


class Form(msgspec.Struct, frozen=True, tag=True):
    """How states and sums lie; who does not know this word finds nothing behind it."""

    format: int = 0


class State(msgspec.Struct, frozen=True, tag=True):
    generation: int
    version: int
    layers: tuple[Layer, ...]
    bodies: dict[str, Ref]


class Sum(msgspec.Struct, frozen=True, tag=True):
    step: int
    present: bytes
    body: Ref


class Gap(msgspec.Struct, frozen=True, tag=True):
    """This step was committed without its sum: what came of that in an earlier layout, or before the job went back, is of
    no step."""

    step: int


class Records(msgspec.Struct, frozen=True, tag=True):
    """What is known of the step behind the state: see `agent.reliable.proofs`."""

    data: bytes


Entry = Form | State | Sum | Gap | Records


class _Place:
    """Where an area is, without holding on to it."""

    def __init__(self, name: str, area: mmap.mmap, stamp: int = 0) -> None:
        self.name, self.stamp = name, stamp
        self._area = weakref.ref(area)

    def begin(self) -> None:
        """Something else comes into it."""
        self.stamp += 1
        area = self._area()
        assert area is not None
        _STAMP.pack_into(area, 0, self.stamp)


class Remains:
    """Memory for the states and the sums of one job, and what is written down of it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._life = folder / f"{time.time_ns():020d}-{os.getpid()}"
        self._returning = Returning(self._make)
        self._places: dict[int, _Place] = {}  # by address
        self._number = numbers()
        self._lock = threading.Lock()  # of the log
        self._log: int | None = None
        self._last: LoggedSum | None = None  # it may not be committed yet
        self._moving = threading.Lock()
        self._lived: int | None = None  # held open, and locked
        self._left = False

    # --- memory -------------------------------------------------------------------------------------

    def take(self, count: int) -> memoryview:
        view = self._returning.take(count)
        place = self._places.get(address_of(view)) if count >= RETURNING_BYTES_MIN else None
        if place is not None:
            place.begin()
        return view

    def rest(self) -> None:
        self._returning.rest()

    def _make(self, count: int) -> memoryview:
        try:
            self._move_in()
            there = os.statvfs(self._life)
            if PARTS * (there.f_bavail - count // there.f_frsize) < PARTS_FREE * there.f_blocks:
                return fresh(count)
            path = self._next_path()
            with path.open("xb+", buffering=0) as file:
                # All of it now, or an error now: who writes to what is not there is killed.
                try:
                    os.posix_fallocate(file.fileno(), 0, HEAD_BYTES + count)
                    return self._map(path, file, 0)
                except OSError:
                    path.unlink()
                    raise
        except OSError as error:
            log.warning("%s: this memory ends with its process: %s", self._folder.name, error)
            return fresh(count)

    def _move_in(self) -> None:
        """What is locked is of somebody who lives."""
        with self._moving:
            if self._lived is None:
                self._life.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._lived = os.open(self._life, os.O_RDONLY)
                fcntl.flock(self._lived, fcntl.LOCK_EX)

    def _next_path(self) -> Path:
        return self._life / f"{next(self._number)}"

    def _map(self, path: Path, file: FileIO, stamp: int) -> memoryview:
        area = mmap.mmap(file.fileno(), 0)
        view = memoryview(area)[HEAD_BYTES:]
        address = address_of(view)
        self._places[address] = _Place(path.name, area, stamp)
        weakref.finalize(area, self._unmapped, address, path).atexit = False
        return view

    def _unmapped(self, address: int, path: Path) -> None:
        self._places.pop(address, None)
        if not self._left:
            path.unlink(missing_ok=True)

    # --- what is written down -------------------------------------------------------------------------

    def note_sum(self, logged: LoggedSum) -> None:
        """Before it is committed."""
        with self._lock:
            self._last = logged
            entry = self._sum(logged)
            if self._log is not None and entry is not None and not _wrote(self._log, [entry]):
                self._drop_log()

    def note_gap(self, step: int) -> None:
        """Before it is committed."""
        with self._lock:
            if self._last is not None and self._last.step == step:
                self._last = None
            if self._log is not None and not _wrote(self._log, [Gap(step)]):
                self._drop_log()

    def note_records(self, records: bytes) -> None:
        """Before the step is committed that they are of."""
        with self._lock:
            if self._log is not None and records and not _wrote(self._log, [Records(records)]):
                self._drop_log()

    def note_state(self, saved: Saved) -> bool:
        """From now on this, and what follows it, is what is found. Whether all of it is where it can be found."""
        with self._lock:
            redo, last = {logged.step: logged for logged in saved.redo}, self._last
            if last is not None and last.step >= saved.backup.version and last.step not in redo:
                redo[last.step] = last
            else:
                self._last = None  # its memory is wanted
            entries = [self._state(saved.backup), *map(self._sum, redo.values())]
            noted = [entry for entry in entries if entry is not None]
            told = [Records(saved.records)] if saved.records else []
            if len(noted) == len(entries) and self._begin_log([*told, *noted]):
                return True
            self._drop_log()
            return False

    def _begin_log(self, entries: Sequence[State | Sum | Records]) -> bool:
        draft = self._life / f"{LOG}.draft"
        try:
            self._move_in()
            begun = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        except OSError as error:
            log.warning("%s: %s", self._folder.name, error)
            return False
        if not _wrote(begun, [Form(FORMAT), *entries]):
            os.close(begun)
            return False
        draft.rename(self._life / LOG)
        self._close_log()
        self._log = begun
        return True

    def _drop_log(self) -> None:
        """Nothing is found until there is another."""
        self._close_log()
        (self._life / LOG).unlink(missing_ok=True)

    def _state(self, backup: Backup) -> State | None:
        bodies = {name: self._ref(body) for name, body in backup.bodies.items()}
        found = {name: ref for name, ref in bodies.items() if ref is not None}
        if len(found) < len(bodies):
            return None
        return State(backup.generation, backup.version, backup.layers, found)

    def _sum(self, logged: LoggedSum) -> Sum | None:
        body = self._ref(logged.body)
        return None if body is None else Sum(logged.step, bytes(logged.present), body)

    def _ref(self, body: memoryview) -> Ref | None:
        if body.nbytes < RETURNING_BYTES_MIN:
            return Ref(body.nbytes, data=bytes(body))
        place = self._places.get(address_of(body))
        return None if place is None else Ref(body.nbytes, place.name, place.stamp)

    def _close_log(self) -> None:
        if self._log is not None:
            os.close(self._log)
            self._log = None

    # --- what others have left ------------------------------------------------------------------------

    def find(self, committed: int) -> Saved | None:
        """What reaches furthest of what keepers before us have left; nothing newer than was committed. It is ours as well
        then."""
        found: list[tuple[int, Path, State, list[Sum], bytes]] = []
        for life in self._others():
            form, state, sums, records = _read(life / LOG)
            if state is None or state.version > committed or not _is_over(life):
                continue
            if form.format != FORMAT and (form.format or sums):
                raise Unknown(
                    f"{life} is of another version of the software: start that one, and then: orchestrator down"
                )
            end = state.version
            while end < committed and end in sums:
                end += 1
            redo = [sums[step] for step in range(state.version, end)]
            found.append((end, life, state, redo, records))
        for _, life, state, redo, records in sorted(found, key=lambda one: one[0], reverse=True):
            try:
                self._move_in()
                saved = self._taken_over(life, state, redo)
                return Saved(saved.backup, saved.redo, records)
            except (_Gone, OSError, ValueError) as error:  # the latter of a file that is empty
                log.warning("%s cannot be gone on from: %s", life, error)
        return None

    def _taken_over(self, life: Path, state: State, sums: Iterable[Sum]) -> Saved:
        backup = Backup(
            generation=state.generation,
            version=state.version,
            layers=state.layers,
            bodies={name: self._body(life, ref) for name, ref in state.bodies.items()},
        )
        redo = (LoggedSum(one.step, one.present, self._body(life, one.body)) for one in sums)
        return Saved(backup, tuple(redo))

    def _body(self, life: Path, ref: Ref) -> memoryview:
        """The very area: it has a name in both folders until the other one is removed."""
        if not ref.area:
            return memoryview(bytearray(ref.data))
        path = self._next_path()
        os.link(life / ref.area, path)
        with path.open("rb+", buffering=0) as file:
            if os.pread(file.fileno(), _STAMP.size, 0) != _STAMP.pack(ref.stamp):
                raise _Gone(f"{ref.area} has come to something else")
            body = self._map(path, file, ref.stamp)
        if body.nbytes != ref.size:
            raise _Gone(f"{ref.area} has {body.nbytes} bytes, not {ref.size}")
        return body

    def _others(self) -> list[Path]:
        with contextlib.suppress(OSError):
            return [life for life in self._folder.iterdir() if life != self._life]
        return []

    def remove_earlier(self) -> None:
        for life in self._others():
            if life < self._life:
                shutil.rmtree(life, ignore_errors=True)

    # --- the end --------------------------------------------------------------------------------------

    def leave(self) -> None:
        """As if our process ended here."""
        self._left = True
        self._move_out()

    def _move_out(self) -> None:
        with self._moving:
            if self._lived is not None:
                os.close(self._lived)
                self._lived = None

    def clear(self) -> None:
        """All of it is on the disk, or nobody's. What is held on to is found by nobody any more."""
        with self._lock:
            self._close_log()
            self._places.clear()
            self._returning.rest()
            self._move_out()
            self.remove_earlier()
            shutil.rmtree(self._life, ignore_errors=True)
        with contextlib.suppress(OSError):  # somebody else's are there as well
            self._folder.rmdir()


class _Gone(Exception):  # noqa: N818 - it names what is the case
    """Some of what was written down is not there any more."""


def root_of(checkpoints: Path) -> Path:
    """Where the remains of a house's jobs are."""
    name = str(checkpoints.resolve()).encode()
    return SHARED / f"{PREFIX}{hashlib.sha256(name).hexdigest()[:16]}"


def move_in(root: Path, checkpoints: Path) -> bool:
    """Ours from now on, if it can be. The remains of houses whose folder is gone are removed."""
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        if root.lstat().st_uid != os.getuid():
            raise PermissionError(f"{root} is somebody else's")
        (root / HOME).write_text(str(checkpoints.resolve().parent))
    except OSError as error:
        log.warning("what the keeper holds ends with its process: %s", error)
        return False
    for other in root.parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            if not Path((other / HOME).read_text()).exists():
                shutil.rmtree(other, ignore_errors=True)
    return True


def kept(root: Path) -> list[Path]:
    """The jobs of which something is there that can be found: not all of their steps are on the disk."""
    return sorted({log.parent.parent for log in root.glob(f"*/*/{LOG}")})


def sweep(root: Path, jobs: Collection[str]) -> None:
    """Remove what is of none of these jobs."""
    with contextlib.suppress(OSError):
        for folder in root.iterdir():
            if folder.is_dir() and folder.name not in jobs:
                shutil.rmtree(folder, ignore_errors=True)


def _wrote(handle: int, entries: Iterable[Entry]) -> bool:
    """Whether all of them found room."""
    frames = bytearray()
    for entry in entries:
        data = msgspec.msgpack.encode(entry)
        frames += _FRAME.pack(len(data), crc32c(0, data)) + data
    try:
        return os.write(handle, frames) == len(frames)
    except OSError as error:
        log.warning("what the keeper holds is not written down: %s", error)
        return False


def _is_over(life: Path) -> bool:
    """Whether its process has ended. Of one that lives nothing is taken: it may write."""
    with contextlib.suppress(OSError):
        handle = os.open(life, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        finally:
            os.close(handle)
        return True
    return False


def _read(path: Path) -> tuple[Form, State | None, dict[int, Sum], bytes]:
    """As far as it makes sense."""
    form, state, sums, records = Form(), None, dict[int, Sum](), b""
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        for entry in _entries(path.read_bytes()):
            match entry:
                case Form():
                    form = entry
                case State():
                    state = entry
                case Sum():
                    sums[entry.step] = entry
                case Gap():
                    sums.pop(entry.step, None)
                case Records():
                    records = entry.data
    return form, state, sums, records


def _entries(data: bytes) -> Iterator[Entry]:
    at = 0
    while at + _FRAME.size <= len(data):
        size, crc = _FRAME.unpack_from(data, at)
        body = data[at + _FRAME.size : at + _FRAME.size + size]
        if len(body) < size or crc32c(0, body) != crc:
            return
        yield msgspec.msgpack.decode(body, type=Entry)
        at += _FRAME.size + size
