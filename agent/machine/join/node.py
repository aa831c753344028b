"""The machine as a node of the manager's cluster: its environment, its start and its end."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import cloud
from agent.machine.join.identity import METADATA_URL
from agent.machine.parent_death import kill_family

TOKEN = "RAY_AUTH_TOKEN"  # noqa: S105 - the name of a variable
UP = "ray_current_cluster"  # Ray writes this file when its node is up


class Node:
    """The processes of the node; `folder` is private to this machine's user."""

    def __init__(self, environment: Mapping[str, str], machine_id: str, address: str) -> None:
        given = os.environ.get("SPOT_TEMP_DIR")
        self._folder = Path(given or tempfile.mkdtemp(prefix="spot-"))
        self._temp = Path(given or "/tmp/ray")  # noqa: S108 - Ray's own choice
        self.sign = self._folder / "ends"
        here = Path(sys.executable)
        path = dict.fromkeys([here.parent, here.resolve().parent])
        found = {**os.environ, **environment}
        found["PATH"] = os.pathsep.join([*map(str, path), os.environ.get("PATH", os.defpath)])
        # In a file, so that it is in the environment of no process of this machine.
        found["RAY_AUTH_TOKEN_PATH"] = str(_written(self._folder / "ray.token", found.pop(TOKEN)))
        found["SPOT_MACHINE_ID"], found["SPOT_END_SIGN"] = machine_id, str(self.sign)
        found.setdefault("SPOT_ADDRESS", address)
        found.setdefault("SPOT_METADATA_URL", METADATA_URL)
        if not found.get("SPOT_SLOTS"):
            found["SPOT_SLOTS"] = str(_accelerators() or 1)
        self._environment = found
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        for left in (self._temp / UP, self.sign):
            left.unlink(missing_ok=True)
        self._process = subprocess.Popen(
            ["/bin/sh", str(Path(cloud.__path__[0]) / "boot.sh")],
            env=self._environment,
            stdin=subprocess.DEVNULL,
            start_new_session=False,
            preexec_fn=_unblock,  # noqa: PLW1509 - there is one thread
        )

    def is_up(self) -> bool:
        return (self._temp / UP).exists()

    def status(self) -> int | None:
        """Return how the node has ended, or None while it runs."""
        return None if self._process is None else self._process.poll()

    def ask_to_end(self) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.terminate()

    def kill(self) -> None:
        """Kill all that is left of it, also what hangs."""
        if self._process is not None:
            kill_family(self._process.pid)


def _unblock() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _written(path: Path, secret: str) -> Path:
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as sink:
        sink.write(secret)
    return path


def _accelerators() -> int:
    """Return how many the driver lists; there may be no driver."""
    try:
        listed = subprocess.run(
            ["nvidia-smi", "--list-gpus"], capture_output=True, text=True, check=True, timeout=60
        )
    except (OSError, subprocess.SubprocessError):
        return 0
    return sum(line.startswith("GPU") for line in listed.stdout.splitlines())
