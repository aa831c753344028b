"""The machine as a node of the manager's cluster: its environment, its start and its end."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from agent.boot.node import CLUSTER_VARIABLE, IDLE_CARDS_VARIABLE, Cluster, refusal
from agent.machine.join import cards
from agent.machine.join.identity import METADATA_URL
from agent.machine.parent_death import kill_family

TOKEN = "RAY_AUTH_TOKEN"  # noqa: S105 - the name of a variable


class Node:
    """The processes of the node; `folder` is private to this machine's user."""

    def __init__(self, environment: Mapping[str, str], machine_id: str, address: str) -> None:
        given = os.environ.get("SPOT_TEMP_DIR")
        self._folder = Path(given or tempfile.mkdtemp(prefix="spot-"))
        temp = Path(given or "/tmp/ray")  # noqa: S108 - Ray's own choice
        self.cluster = environment[CLUSTER_VARIABLE]
        self._up = Cluster.read(self.cluster).socket(temp)
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
            served = cards.served()
            found["SPOT_SLOTS"] = str(served or 1)
            if not served and (idle := cards.on_bus()):
                found[IDLE_CARDS_VARIABLE] = str(idle)
        self._environment = found
        self._process: subprocess.Popen[bytes] | None = None

    def refusal(self) -> str:
        """Return why this machine cannot be a node, as the process of the node found before it ended."""
        return refusal(self._environment)[1]

    def start(self) -> None:
        for left in (self._up, self.sign):
            left.unlink(missing_ok=True)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "agent.boot.node"],
            env=self._environment,
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # so that the orphans of a dead node are found, by its group
            preexec_fn=_unblock,  # noqa: PLW1509 - there is one thread
        )

    def is_up(self) -> bool:
        return self._up.exists()

    def status(self) -> int | None:
        """Return how the node has ended, or None while it runs.

        It is not reaped before `kill`, so that its number belongs to no other process.
        """
        if self._process is None:
            return None
        how = os.WEXITED | os.WNOHANG | os.WNOWAIT
        ended = os.waitid(os.P_PID, self._process.pid, how)
        if ended is None:
            return None
        return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status

    def ask_to_end(self) -> None:
        if self._process is not None:
            os.kill(self._process.pid, signal.SIGTERM)

    def kill(self) -> None:
        """Kill all that is left of it, also what hangs."""
        if self._process is not None:
            kill_family(self._process.pid)
            self._process.wait()
            self._process = None


def _unblock() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _written(path: Path, secret: str) -> Path:
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as sink:
        sink.write(secret)
    return path
