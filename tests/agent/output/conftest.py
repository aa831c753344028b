"""Workers' folders and the storage of their job, connected by queues instead of a network."""

import queue
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agent.keeper.output_files import Outputs
from agent.messages import JobOrder, Report
from agent.output.catalog import listed
from agent.output.files import Bounds
from agent.output.folder import Output
from agent.output.strays import Strays
from agent.protocol import Message, Numbers, ScriptValues, Strayed
from cloud.ranges import flaw_in


class Told:
    """What the manager and the log hear."""

    def __init__(self) -> None:
        self.reports: list[Report] = []
        self.said: list[str] = []
        self.logged: list[tuple[int, dict[str, float]]] = []

    def report(self, report: Report) -> None:
        self.reports.append(report)

    def lines(self, job: str, worker: str, lines: tuple[str, ...]) -> None:
        self.said += lines

    def numbers(self, job: str, step: int, numbers: dict[str, float]) -> None:
        self.logged.append((step, numbers))

    def newest(self, kind: type) -> Any:
        return [report for report in self.reports if isinstance(report, kind)][-1]


class Worker:
    """One worker's folder, as its world calls it."""

    def __init__(self, name: str, home: Path, job: "Job") -> None:
        self.worker, self._job, self.home = name, job, home
        self.generation = 0
        self.cut = False  # nothing comes through any more
        self.sent: list[Message] = []
        self._answers: queue.Queue[tuple[Any, bytes] | None] = queue.Queue()
        self.said: list[str] = []
        home.mkdir(parents=True)
        self.output = Output(
            home / "output",
            self._send,
            lambda: self.generation,
            bounds=job.bounds,
            strays=Strays(home, home / "output"),
            say=self.said.append,
        )
        self._thread = threading.Thread(target=self._hear, daemon=True)
        self._thread.start()

    @property
    def folder(self) -> Path:
        return self.output.folder

    def _send(self, message: Any, *payload: bytes) -> None:
        assert not flaw_in(message, type(message)), "no connection would take it"
        self.sent.append(message)
        if not self.cut:
            self._job.take(self, message, b"".join(payload))

    def post(self, message: Any, *payload: bytes) -> None:
        if not self.cut:
            self._answers.put((message, b"".join(payload)))

    def _hear(self) -> None:
        while (answer := self._answers.get()) is not None:
            self.output.hear(answer[0], memoryview(answer[1]))

    def step(
        self,
        step: int,
        does: Callable[["Worker"], None],
        *,
        leads: bool = True,
        saved: bool = False,
    ) -> None:
        """A step of the script with nothing to wait for in it."""
        self.output.enter(step, leads=leads, fresh=False)
        does(self)
        self.output.scan(step, leads=leads, saved=saved)

    def begin(self, step: int, *, leads: bool = True, beside: bool = False) -> None:
        self.output.enter(step, leads=leads, fresh=True, beside=beside)

    def save(self, step: int) -> None:
        """Send the state that step `step` begins with; what it holds is stored before."""
        self.output.precede(step - 1, leads=True)

    def leave(self, step: int, *, leads: bool) -> None:
        """The end of the loop; it is over for all once the last to lead has handed in."""
        self.output.leave(step)
        if leads:
            self.output.hand_in()

    def end(self, step: int) -> None:
        assert self.output.finish(step, leads=True, patience_s=30.0)

    def flush(self) -> None:
        assert self.output._sending is not None
        assert self.output._sending.flush(30.0)

    def close(self) -> None:
        self.output.close()
        self._answers.put(None)
        self._thread.join(10)


class Job:
    """A job's storage, and who takes part."""

    def __init__(self, home: Path, **bounds: int) -> None:
        self.home, self.told = home / "storage", Told()
        self._order = JobOrder(job="job", script="train.py", script_sha="", **bounds)
        self.bounds = Bounds(files=self._order.output_files, total_bytes=self._order.output_bytes)
        self._workers: list[Worker] = []
        self._folder = home
        self.open()

    def open(self) -> None:
        self.outputs = Outputs(self._order, self.home, self.told)  # type: ignore[arg-type]

    def take(self, worker: Worker, message: Any, payload: bytes) -> None:
        match message:
            case Numbers():
                self.outputs.log(message)
            case ScriptValues():
                self.outputs.hold(message)
            case Strayed():
                self.outputs.strayed(message)
            case _:
                self.outputs.hear(worker, message, memoryview(payload))

    def worker(self, name: str) -> Worker:
        worker = Worker(name, self._folder / name, self)
        self._workers.append(worker)
        return worker

    def text(self, path: str) -> str:
        return (self.home / "output" / path).read_text()

    def names(self) -> dict[str, int]:
        """What is stored, and behind which step it was so."""
        return {file.path: file.step for file in listed(self.home)}

    def close(self) -> None:
        for worker in self._workers:
            worker.close()
        self.outputs.close(10.0)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    job = Job(tmp_path)
    yield job
    job.close()


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Job]:
    """A job that keeps three files and a thousand bytes."""
    job = Job(tmp_path, output_files=3, output_bytes=1000)
    yield job
    job.close()
