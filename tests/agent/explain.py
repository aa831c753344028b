"""What every process of a crew was about, when somebody waited for something in vain.

Whoever calls `listen` writes down, when it is asked by SIGUSR1, what its threads are at, and what its worker or its
keeper knows.
"""

import atexit
import contextlib
import faulthandler
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType

FOLDER = Path(tempfile.gettempdir()) / f"stacks-{os.getuid()}"
END = "--- that is all\n"
PATIENCE_S = 5.0
PARTS_SHOWN = 20


def listen() -> None:
    FOLDER.mkdir(exist_ok=True)
    place = FOLDER / str(os.getpid())
    file = place.open("w")
    atexit.register(place.unlink, missing_ok=True)

    def tell(_: int, frame: FrameType | None) -> None:
        file.write("\n".join([*_known(frame), END]))
        file.flush()

    signal.signal(signal.SIGUSR1, tell)
    # Stacks are written even if the main thread comes back from nowhere; what is known is not.
    faulthandler.register(signal.SIGUSR1, file=file, all_threads=True, chain=True)


def _known(frame: FrameType | None) -> Iterator[str]:
    while frame is not None:
        for value in frame.f_locals.values():
            match type(value).__name__:  # nothing is imported here: the keeper knows no torch
                case "Group":
                    return (yield from _of_worker(value))
                case "KeeperActor":
                    return (yield from of_keeper(value._keeper))
        frame = frame.f_back


def _of_worker(group) -> Iterator[str]:
    for name in ("order", "entered"):
        enter = getattr(group, name)
        yield f"{name}: {str(enter)[:1000]}"
    it = group._replica
    known = None if it is None else (it.version, it.step, it.phase, it.stage, it.given, it.newborn)
    yield f"replica's version, step, phase, stage, given, newborn: {known}"
    state = {k: getattr(group, k) for k in ("_holds", "_needs_state", "_committed", "astray")}
    yield f"{state}; asked for a state at {group._snapshots.asked_at}"
    yield f"having: {group._handover.having}"
    yield f"peers: {sorted(group._mesh._connections)}, mailbox: {sorted(group._mesh.mailbox)[:PARTS_SHOWN]}"


def of_keeper(keeper) -> Iterator[str]:
    for name, job in list(keeper._jobs.items()):
        roster, vault = job.roster, job.vault
        yield f"{name}: layout {roster.layout}, next {roster.pending}, started {roster.started}"
        yield f"version {job.history.version}, committing {job._committing}, closed {job.closed}"
        backup = vault.backup and vault.backup.version
        yield f"backup {backup}, sums {len(vault.redo)}, asking {vault._assembly is not None}"
        waits, regrouping = job._regrouping.waits, job._regrouping
        yield f"waits {waits}, recalling {regrouping._recalling}, recalled {regrouping._recalled}"
        yield f"prepared {sorted(job._round._prepared)}, left {roster.left}, finishing {roster.finishing}"
        for member in list(roster.members.values()):
            told = (member.generation, member.version, member.held, member.step)
            yield f"  {member.worker}: generation, version, held, step: {told}"


def ask(pids: Iterable[tuple[str, int]]) -> str:
    """What these processes say, each with its state as the system has it."""
    return "\n".join(f"=== {name} ({pid}, {state_of(pid)})\n{_ask(pid)}" for name, pid in pids)


def state_of(pid: int) -> str:
    """R, S, T and so on; Z for who is dead and not buried, and - for who is not there."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
    except (FileNotFoundError, ProcessLookupError):
        return "-"


def lives(pid: int) -> bool:
    return state_of(pid) not in "Z-"


def _ask(pid: int) -> str:
    place, deadline_s = FOLDER / str(pid), time.monotonic() + PATIENCE_S
    if state_of(pid) in "TZ-" or not place.exists():
        return ""
    before = place.stat().st_size
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGUSR1)
    while time.monotonic() < deadline_s and not place.read_text()[before:].endswith(END):
        time.sleep(0.05)
    return place.read_text()[before:]


def own_threads() -> str:
    """Of the process that asks: what all threads but this one are at."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    lines = []
    for ident, frame in sys._current_frames().items():
        if ident != threading.get_ident():
            at: FrameType | None = frame
            places = []
            while at is not None and len(places) < PARTS_SHOWN:
                places.append(f"{Path(at.f_code.co_filename).name}:{at.f_lineno}")
                at = at.f_back
            lines.append(f"{names.get(ident)}: {' < '.join(places)}")
    return "\n".join(lines)
