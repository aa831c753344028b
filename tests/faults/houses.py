"""Real houses: Redis, Ray head, local cloud, keeper and manager, each in a folder of its own."""

import asyncio
import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import redis
from waiting import until

from agent.keeper.storage.memory_log import root_of
from orchestrator.client import Client, NotRunning, local_cloud
from orchestrator.events import JobSpec, JobSubmitted, ShutdownAsked
from orchestrator.paths import Places
from orchestrator.redis_client import connect
from orchestrator.supervisor import processes
from orchestrator.view import JobView

UP_S_MAX = 180.0


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""  # it has just ended


def is_worker(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().startswith("worker ")
    return False  # it has just ended


def orchestrator(*words: str) -> "subprocess.CompletedProcess[str]":
    """The command as a person types it."""
    program = Path(sys.executable).with_name("orchestrator")
    return subprocess.run([str(program), *words], capture_output=True, text=True, timeout=180)


def drill(house: "RunningHouse", warning_s: float, nodes: object) -> list[str]:
    async def go() -> list[str]:
        async with local_cloud(house.client().house()) as cloud:
            return await cloud.drill(warning_s=warning_s, nodes=nodes)

    return asyncio.run(go())


class RunningHouse:
    """A house as `orchestrator up` starts one."""

    def __init__(self, folder: Path, settings: str = "") -> None:
        self.folder = folder
        self.config = folder / "orchestrator.toml"
        self.config.write_text('[manager]\nstate_dir = "state"\n' + settings)
        self.places = Places(folder / "state")
        self.log = folder / "house.log"
        self.process: subprocess.Popen[bytes] | None = None
        self._newest = ""

    def start(self) -> Client:
        self.begin()
        self.wait_until_up()
        return self.client()

    def wait_until_up(self) -> None:
        until("the house to answer", self._ready, UP_S_MAX)

    def begin(self, *, mark: bool = True) -> None:
        """Start it, and do not wait until it is ready; with our mark, which `up` does not give it."""
        environment = {**os.environ, **({processes.MARK: self.places.identity} if mark else {})}
        self.process = processes.start(self._command(), env=environment, log=self.log)

    def refused(self) -> str:
        """What one more house on these settings says when it ends by itself: one line, and code 1."""
        ran = subprocess.run(self._command(), capture_output=True, text=True, timeout=UP_S_MAX)
        assert ran.returncode == 1, ran.stderr
        (line,) = ran.stderr.splitlines()
        return line

    def _command(self) -> list[str]:
        return [sys.executable, "-m", "orchestrator.supervisor", "--config", str(self.config)]

    def _ready(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, self.log.read_text()
        with contextlib.suppress(NotRunning):
            return self.client().view() is not None
        return False

    def client(self) -> Client:
        return Client.connect(self.places.state_dir)

    def store(self) -> "redis.Redis":
        return connect(self.client().house().redis_url)

    def submit(self, script: str, job: str = "job", **spec: object) -> str:
        client = self.client()
        sha = client.put_script(script.encode())
        asked = JobSpec(job=job, script="train.py", script_sha=sha, **spec)
        client.post(JobSubmitted(at_s=time.time(), spec=asked))
        self._newest = job
        return job

    def follow(self, job: str) -> None:
        """Look at this job from now on."""
        self._newest = job

    def job(self) -> JobView | None:
        """The job that was submitted last, or is followed."""
        view = self.client().view()
        return next((job for job in view.jobs if job.id == self._newest), None) if view else None

    def reached(self, step: int, patience_s: float = 90.0) -> JobView:
        """The job as soon as so many steps are committed."""

        def look() -> JobView | None:
            job = self.job()
            assert job is None or job.status not in {"FAILED", "CANCELLED"}, job.because
            return job if job is not None and job.step >= step else None

        return self._telling(until, f"step {step}", look, patience_s)

    def ended(self, patience_s: float = 120.0) -> JobView:
        def look() -> JobView | None:
            job = self.job()
            return job if job is not None and job.ended_at_s is not None else None

        return self._telling(until, "the job to end", look, patience_s)

    def _telling(self, wait: Callable[..., object], *words: object) -> object:
        """A wait whose failure shows what the manager has said."""
        try:
            return wait(*words)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.told()}") from None

    def told(self) -> str:
        """What the manager has said, for a test that fails."""
        return "\n".join(
            f"{line.at_s:.2f} {line.who} {line.what}: {line.because}"
            for _, line in self.client().sentences("0")
        )

    def down(self) -> int:
        """As `orchestrator down`: everything is given back, then the house ends."""
        assert self.process is not None
        self.client().post(ShutdownAsked(at_s=time.time(), by="a test"))
        return self.process.wait(60)

    def close(self) -> None:
        if self.process is not None:
            processes.end(self.process, 30)
        processes.sweep(self.places.identity)
        self.places.remove_links()
        shutil.rmtree(root_of(self.places.checkpoints), ignore_errors=True)
