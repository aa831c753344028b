"""Processes that end with the one that started them, their names and descendants. No torch."""

import ctypes
import os
import signal
from contextlib import suppress
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_NAME = 1, 15


def tie(parent: int) -> None:
    """Have this process killed when the thread that started it ends.

    It ends at once if `parent` is gone already.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def name(comm: str) -> None:
    """Name this process for `ps` and `top`, which show fifteen bytes."""
    ctypes.CDLL(None).prctl(PR_SET_NAME, comm.encode())


def kill_family(leader: int) -> None:
    """Kill a process, the group that it leads, and all its descendants outside of that group.

    A descendant whose parent has ended before is found only if it is still in the group.
    """
    away = descendants(leader)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)
    for pid in (leader, *away):
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def descendants(ancestor: int) -> set[int]:
    children: dict[int, list[int]] = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with suppress(OSError, ValueError, IndexError):
                stat = Path(entry.path, "stat").read_bytes()
                parent = int(stat.rpartition(b")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    found: set[int] = set()
    young = [ancestor]
    while young:
        young = [child for pid in young for child in children.get(pid, ()) if child not in found]
        found.update(young)
    return found
