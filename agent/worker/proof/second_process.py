"""A second process of this worker, to prove that all the script's state is registered.

See `agent.keeper.lone_proof`. The process runs the script from its first line, beside this worker and
on the same device. So it is started only if there is memory for it: on the machine twice what this
process takes, and on the device as much as this process has reserved there. It has a low priority
and ends with this process, and its output is dropped.
"""

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec
import torch

import agent
from agent.messages import WorkerOrder
from agent.protocol import Untried
from agent.store.memory import resident_bytes
from agent.tensors.device import CPU

HOST_FACTOR = 2
GB = 1e9
PROGRAM = Path(agent.__file__).parents[1]
MEMORY = Path("/proc/meminfo")
GROUPS, GROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
LACKING = "{} has {:.2f} GB free, and it would take {:.2f} GB"


class Second:
    """Starts the second process of this worker, and reports how it ended.

    `tell` sends to the keeper, and `device` is where the script trains. `start` may be called on
    any thread.
    """

    def __init__(
        self,
        order: WorkerOrder,
        host: str,
        tell: Callable[[Untried], None],
        device: Callable[[], torch.device],
    ) -> None:
        self._order = msgspec.structs.replace(order, worker=f"{order.worker}-proof", prover=True)
        self._host, self._tell, self._device = host, tell, device
        # The environment before the script has changed any of it.
        self._env = dict(os.environ)
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the process unless it runs, because a restarted keeper may ask again."""
        with self._lock:
            if self._thread is not None and self._thread.is_alive():
                return
            # The process ends with the thread that starts it, so a thread is kept for it.
            self._thread = threading.Thread(target=self._run, name="second", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        if why := lacking(self._device()):
            self._tell(Untried(why=why, final=True))
            return
        try:
            ended = self._play()
        except OSError as error:
            self._tell(Untried(why=f"it could not be started: {error.strerror or error}"))
            return
        # If the process has answered, the keeper ignores this.
        self._tell(Untried(why=f"it ended without an answer, with status {ended}"))

    def _play(self) -> int:
        process = subprocess.Popen(
            [sys.executable, "-m", "agent.machine.proof_process", str(os.getpid()), self._host],
            cwd=PROGRAM,
            env=self._env,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        with suppress(BrokenPipeError):
            process.communicate(msgspec.json.encode(self._order) + b"\n")
        return process.wait()


def lacking(device: torch.device) -> str:
    """Return why there is no room for a second process, in words; empty if there is room."""
    free, takes = _free_bytes(), HOST_FACTOR * resident_bytes()
    if free is not None and free < takes:
        return LACKING.format("this machine", free / GB, takes / GB)
    if device == CPU:
        return ""
    try:
        free, takes = (
            torch.accelerator.get_memory_info(device)[0],
            torch.accelerator.memory_reserved(device),
        )
    except (RuntimeError, AttributeError):
        return f"{device} does not say how much memory is free"
    return LACKING.format(device, free / GB, takes / GB) if free < takes else ""


def _free_bytes() -> int | None:
    """Return the free memory of the machine or this process's container; None if unknown."""
    found = [each for each in (_free_of_machine(), _free_of_group()) if each is not None]
    return min(found, default=None)


def _free_of_machine() -> int | None:
    try:
        lines = dict(line.split(":", 1) for line in MEMORY.read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) << 10
    except (OSError, KeyError, ValueError):
        return None


def _free_of_group() -> int | None:
    """Return the free memory of the container; cached files count, as they can be dropped."""
    try:
        own = next(
            line.split("::/", 1)[1] for line in GROUP.read_text().splitlines() if "::/" in line
        )
        place = GROUPS / own if (GROUPS / own / "memory.max").exists() else GROUPS
        most, used = ((place / name).read_text() for name in ("memory.max", "memory.current"))
        told = dict(line.split() for line in (place / "memory.stat").read_text().splitlines())
        return int(most) - int(used) + int(told["inactive_file"])
    except (OSError, KeyError, ValueError, StopIteration):
        return None
