"""Finding and ending everything that runs on a machine of the local cloud, detached or not.

A machine is its init process and all that descends from it. Init is a subreaper, so a process that
detaches is still its descendant; should init be gone already, the environment marker that every
process of the machine carries tells whose it is. Only Linux has /proc; so has every cloud VM.
"""

import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path

MARKER = "SPOT_MACHINE_ID"
PASS_S = 0.002
PATIENCE_S = 10.0


def living(inits: Mapping[str, int]) -> set[int]:
    """The pids of all that runs on these machines (machine id to pid of its init), init included."""
    parents, zombies = _process_table()
    machines = {f"{MARKER}={machine_id}".encode() for machine_id in inits}
    found = {pid for pid in inits.values() if pid in parents}
    undecided = set(parents) - found
    grown = True
    while grown:
        children = {pid for pid in undecided if parents[pid] in found}
        undecided -= children
        found |= children
        grown = bool(children)
    found |= {pid for pid in undecided if machines & _environment(pid)}
    return found - zombies - {os.getpid()}


def kill(inits: Mapping[str, int], patience_s: float | None = None) -> None:
    """SIGKILL everything on these machines, again and again until a look finds nothing left.

    The inits go last: as long as they live, what their dying children leave behind stays theirs.
    """
    patience_s = PATIENCE_S if patience_s is None else patience_s
    deadline_s = time.monotonic() + patience_s
    while time.monotonic() < deadline_s:
        found = living(inits)
        if not found:
            return
        for pid in (found - set(inits.values())) or found:
            _send(pid, signal.SIGKILL)
        time.sleep(PASS_S)
    raise TimeoutError(f"processes {sorted(living(inits))} outlived SIGKILL for {patience_s} s")


def _send(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def _process_table() -> tuple[dict[int, int], set[int]]:
    """The parent of every process, and which of them only wait to be reaped."""
    parents: dict[int, int] = {}
    zombies: set[int] = set()
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        try:
            stat = Path(entry.path, "stat").read_bytes()
        except OSError:
            continue
        state, parent = stat.rpartition(b")")[2].split()[:2]
        parents[int(entry.name)] = int(parent)
        if state in (b"Z", b"X"):
            zombies.add(int(entry.name))
    return parents, zombies


def _environment(pid: int) -> set[bytes]:
    try:
        return set(Path("/proc", str(pid), "environ").read_bytes().split(b"\0"))
    except OSError:
        return set()
