"""A real local cloud, a process of its own, in a folder of its own."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import msgspec
from waiting import until

from cloud.local import processes
from cloud.local.provider import LocalProvider
from cloud.model import DEPLOYMENT_TAG, LaunchRequest, Machine, Pool

READY_S_MAX = 30.0
QUIET = ("--tempo", "0", "--startup-s", "0.02", "--refused-share", "0")
SLEEPING = "#!/bin/sh\nexec sleep 600\n"
POOLS = {
    "ec2": Pool(cloud="local", region="local-east", zone="local-east-a", type="local.small"),
    "azure": Pool(cloud="local", region="local-west", zone="local-west-1", type="local.small"),
}


def request(token: str, pool: Pool = POOLS["ec2"], deployment: str = "ours") -> LaunchRequest:
    tags = {DEPLOYMENT_TAG: deployment, "orchestrator-generation": "3"}
    return LaunchRequest(token=token, pool=pool, market="spot", bid_usd_per_h=None, tags=tags)


class RunningCloud:
    """`python -m cloud.local` on a directory, with a market that stands still."""

    def __init__(self, directory: Path, boot: str = SLEEPING) -> None:
        self.directory = directory
        self.console = directory.parent / f"{directory.name}.log"
        self.boot_script = directory.parent / f"{directory.name}-boot.sh"
        self.boot_script.write_text(boot)
        self.boot_script.chmod(0o700)
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *words: str) -> "RunningCloud":
        self.begin(*words)
        until("the local cloud to listen", self._ready, READY_S_MAX)
        return self

    def begin(self, *words: str) -> "subprocess.Popen[bytes]":
        """Start it, and do not wait for it to listen."""
        options = ["--dir", str(self.directory), "--boot-script", str(self.boot_script)]
        with self.console.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "cloud.local", *options, *QUIET, *words],
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return self.process

    def _ready(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, self.console.read_text()
        return self._told().get("pid") == self.process.pid

    def _told(self) -> dict[str, object]:
        ready = self.directory / "cloud.json"
        return msgspec.json.decode(ready.read_bytes()) if ready.exists() else {}

    def provider(self, deployment: str = "ours", timeout_s: float = 10.0) -> LocalProvider:
        token = (self.directory / "token").read_text().strip()
        return LocalProvider(str(self._told()["url"]), token, deployment, timeout_s)

    def metadata_url(self, machine: Machine) -> str:
        """Where this machine asks about itself, as its own environment says."""
        pid = until("the machine to boot", lambda: self.init_of(machine.id))
        environment = Path("/proc", str(pid), "environ").read_bytes().split(b"\0")
        named = dict(line.split(b"=", 1) for line in environment if b"=" in line)
        return named[b"SPOT_METADATA_URL"].decode()

    def init_of(self, machine_id: str) -> int | None:
        """The pid of the machine's init, once its first-boot script runs."""
        assert self.process is not None
        for child in _children(self.process.pid):
            with suppress(FileNotFoundError, ProcessLookupError):  # it ends while it is looked at
                if _machine_of(child) == machine_id and _children(child):
                    return child
        return None

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(number)
            self.process.wait(20)


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _machine_of(pid: int) -> str:
    """Return the machine that a process carries the mark of, or nothing."""
    start = f"{processes.MARKER}=".encode()
    try:
        marks = Path("/proc", str(pid), "environ").read_bytes().split(b"\0")
    except OSError:
        return ""
    found = [mark.removeprefix(start).decode() for mark in marks if mark.startswith(start)]
    return Path(found[0]).name if found else ""


def alive_on(machine_ids: set[str]) -> dict[str, set[int]]:
    """Every process that carries the mark of one of these machines, detached or not."""
    found: dict[str, set[int]] = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit() and (machine_id := _machine_of(int(entry.name))) in machine_ids:
            found.setdefault(machine_id, set()).add(int(entry.name))
    return found
