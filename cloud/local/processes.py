"""Finding and ending all processes of a machine of the local cloud, detached or not.

A machine is its init process and all descendants of it. Init is a subreaper, so a process that
detaches is still its descendant. If init is already gone, an environment marker that every process
of the machine carries shows where it belongs. This needs /proc, which only Linux has; cloud VMs run
Linux.
"""

import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path

MARKER = "SPOT_BELONGS_TO"
"""Names what a process belongs to, unlike anything else on this computer: a machine by its disk.

The id of a machine does not do. Two accounts may sell machines of one name, as two tests do.
"""
PASS_S = 0.002
PATIENCE_S = 10.0


def living(inits: Mapping[str, int]) -> set[int]:
    """Return the pids of all processes of these machines, init included.

    `inits` maps the mark of each machine to the pid of its init.
    """
    parents, zombies = _process_table()
    machines = {f"{MARKER}={mark}".encode() for mark in inits}
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
    """Send SIGKILL to every process of these machines until none is left.

    The inits are killed last, because while they live, they inherit the orphans of dying children.
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
    """Return the parent of every process, and the processes that only wait to be reaped."""
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
