"""The process that forks workers: what they inherit, how their ends are heard, and that none stays."""

import os
import queue
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from crews import SECRET, Crew, until
from explain import lives

from agent.machine import environment
from agent.machine.bounded_file import BoundedFile
from agent.machine.crashes import DISK_VARIABLE, crash_of
from agent.machine.workers import Answer, Over, Started, Workers
from agent.messages import WorkerOrder
from agent.net.handshake import job_secret

pytestmark = pytest.mark.processes

FLOOD_BYTES = 20 << 20
SHOWS = """
import json, os, subprocess, sys, time
from multiprocessing.util import get_temp_dir
from pathlib import Path
mode, told = sys.argv[1], Path(sys.argv[2])
held = {}
for number in os.listdir("/proc/self/fd"):
    try:
        held[number] = os.readlink(f"/proc/self/fd/{number}")
    except OSError:
        pass
child = subprocess.Popen(["sleep", "600"])
# Nobody finds it when its parent has ended by itself.
away = subprocess.Popen(["sleep", "600"], start_new_session=True) if mode == "waits" else child
facts = {
    "environment": dict(os.environ), "held": held, "argv": sys.argv, "pid": os.getpid(),
    "folder": os.getcwd(), "sockets": get_temp_dir(), "children": [child.pid, away.pid], "oom": Path("/proc/self/oom_score_adj").read_text(),
    "modules": [name for name in ("ray", "redis") if name in sys.modules], "draw": __import__("numpy").random.random(),
}
(told.parent / "part").write_text(json.dumps(facts))
(told.parent / "part").rename(told)
if mode == "floods":
    for _ in range(BYTES >> 16):
        os.write(2, 65535 * b"x" + b"\\n")
    subprocess.run(["sh", "-c", "echo from a child"])
    os.write(1, b"written directly\\n")
    os._exit(0) if os.fork() == 0 else None
if mode == "aborts":
    os.abort()
while mode != "ends" and mode != "floods":
    time.sleep(0.01)
""".replace("BYTES", str(FLOOD_BYTES))


class Machine:
    """The workers of one machine, for a job whose keeper is the crew's."""

    def __init__(self, crew: Crew, folder: Path) -> None:
        self.crew, self.folder = crew, folder
        self.log = folder / "workers.log"
        self.heard: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        known = {**os.environ, DISK_VARIABLE: str(folder), "RAY_AUTH_TOKEN": "t", "HF_TOKEN": "h"}
        self.workers = Workers(self.log, environment.of_worker(known), self.heard.put)

    def start(self, worker: str) -> WorkerOrder:
        order = WorkerOrder(
            job=self.crew.job,
            worker=worker,
            machine_id="m1",
            slot=0,
            keeper_address=self.crew.keeper.address,
            secret=job_secret(SECRET, self.crew.job),
        )
        self.workers.start(order, "127.0.0.1")
        return order

    def next(self, kind: type) -> Answer:
        answer = self.heard.get(timeout=60.0)
        assert isinstance(answer, kind), answer
        return answer

    def facts(self, name: str) -> dict:
        path = self.folder / name
        until(f"{name} of the script", path.exists)
        found = msgspec.json.decode(path.read_bytes())
        path.unlink()
        return found

    @property
    def server(self) -> int:
        assert self.workers._server is not None
        return self.workers._server.pid


@pytest.fixture
def machine(
    crew: Crew, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Machine]:
    disk = tmp_path_factory.mktemp("m")  # a short name, as a machine's: sockets lie below it
    monkeypatch.setenv(DISK_VARIABLE, str(disk))
    machine = Machine(crew, disk)
    yield machine
    machine.workers.close()


def gone(pids: list[int]) -> Callable[[], bool]:
    def look() -> bool:
        return not any(map(lives, pids))

    return look


def test_worker_inherits_nothing_and_takes_its_children_along(machine: Machine) -> None:
    """No descriptor, no key, no Ray; it is killed with its group and what has left that, or with the server."""
    machine.crew.open(SHOWS, "waits", str(machine.folder / "facts"))
    machine.start("w1")
    pid = machine.next(Started).pid
    facts = machine.facts("facts")
    assert facts["pid"] == pid
    assert len([*Path(f"/proc/{machine.server}/task").iterdir()]) == 1
    pipes = {link for number, link in facts["held"].items() if link.startswith("pipe:")}
    # They go with the killed worker, and a script that copies its folder copies none.
    assert Path(facts["sockets"]).is_relative_to(machine.folder)
    assert not Path(facts["sockets"]).is_relative_to(facts["folder"])
    assert facts["held"]["0"] == os.devnull
    assert facts["held"]["1"] == facts["held"]["2"]
    assert len(pipes) == 2, facts["held"]  # its output, and its last words
    assert not [link for link in facts["held"].values() if "pidfd" in link or "workers.log" in link]
    assert facts["modules"] == []
    assert "RAY_AUTH_TOKEN" not in facts["environment"]
    assert facts["environment"]["HF_TOKEN"] == "h"
    assert int(facts["oom"]) == 1000
    assert Path(f"/proc/{pid}/comm").read_text().strip() == "worker w1"
    machine.workers.stop("w1")
    over = machine.next(Over)
    assert (over.worker, over.finished, over.why) == (
        "w1",
        False,
        "its process was ended by SIGKILL",
    )
    until("its children to end", gone(facts["children"]))

    machine.start("w2")
    pid = machine.next(Started).pid
    second = machine.facts("facts")
    assert second["draw"] != facts["draw"]
    os.kill(machine.server, signal.SIGKILL)
    over = machine.next(Over)
    assert (over.worker, over.finished) == ("w2", False)
    until("its worker to end", gone([pid, *second["children"][:1]]))
    os.kill(second["children"][1], signal.SIGKILL)

    machine.start("w3")  # by the next server
    answer = machine.heard.get(timeout=60.0)
    if isinstance(answer, Over):  # the order came to the one that was killed
        machine.start("w4")
        answer = machine.heard.get(timeout=60.0)
    assert isinstance(answer, Started)
    third = machine.facts("facts")
    machine.workers.close()
    until("all to end", gone([answer.pid, *third["children"]]))


def test_ends_are_told_apart_and_words_are_bounded(machine: Machine) -> None:
    """A script that ends, one that crashes, with its record, and a worker that nobody waits for.

    Of what the script, its library or its children write to descriptors the newest is in a file, which is bounded.
    """
    machine.crew.open(SHOWS, "floods", str(machine.folder / "facts"))
    machine.start("w1")
    machine.next(Started)
    assert machine.next(Over).finished
    until("its output", lambda: b"written directly" in machine.log.read_bytes())
    assert b"from a child" in machine.log.read_bytes()
    both = [machine.log, machine.log.with_name("workers.log.1")]
    assert sum(path.stat().st_size for path in both) <= 16 << 20

    machine.crew.job = "aborts"
    machine.crew.open(SHOWS, "aborts", str(machine.folder / "facts"))
    order = machine.start("w2")
    machine.next(Started)
    assert machine.next(Over).why == "its process was ended by SIGABRT"
    crash = crash_of(order)
    assert crash is not None
    assert crash.signal == "SIGABRT"
    assert crash.where.startswith("train.py, line ")

    machine.crew.keeper.close_job("aborts")
    machine.start("w3")
    machine.next(Started)
    over = machine.next(Over)
    assert not over.finished
    assert over.why, "the keeper's own words"
    assert "status" not in over.why


def test_bounded_file_keeps_the_newest(tmp_path: Path) -> None:
    """Two halves, whatever is written at once; one that is there already is gone on with."""
    path, older = tmp_path / "log", tmp_path / "log.1"
    for number in range(10):
        file = BoundedFile(path, half_bytes=100)
        file.write(f"{number:030}".encode())
        file.close()
    assert path.stat().st_size <= 100
    assert path.read_bytes().endswith(b"9")
    assert older.stat().st_size <= 100
    file = BoundedFile(path, half_bytes=100)
    file.write(1000 * b"x" + b"end")
    file.close()
    assert path.stat().st_size == 100
    assert path.read_bytes().endswith(b"xend")
