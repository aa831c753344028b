"""What the keeper tells the manager: in order, and no more of it than a person or a plan can use."""

import contextlib
import math
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from crews import RedisProcess, until

from agent.keeper import outbox as outbox_module
from agent.keeper.keeper import connect
from agent.keeper.outbox import Outbox
from agent.keys import INBOX, metrics_key
from agent.messages import AnyReport, BackupHeld, CheckpointFailed, Logged, Progress

pytestmark = pytest.mark.processes

STEPS = 100


@pytest.fixture
def outbox(redis_process: RedisProcess) -> Iterator[Outbox]:
    outbox = Outbox(connect(redis_process.url))
    yield outbox
    outbox.close()


def told(server: RedisProcess) -> list[AnyReport]:
    rows = connect(server.url).xrange(INBOX)
    return [msgspec.json.decode(fields[b"e"], type=AnyReport) for _, fields in rows]


def train(outbox: Outbox, steps: range) -> None:
    """A backup after every step."""
    for step in steps:
        outbox.report(
            Progress(
                at_s=0.0, job="a", generation=1, step=step, steps_total=9, loss=0.0, step_s=0.0
            )
        )
        outbox.report(BackupHeld(at_s=0.0, job="a", step=step, state_bytes=1))


def test_what_comes_with_every_step_is_told_once_in_a_while(
    outbox: Outbox, redis_process: RedisProcess
) -> None:
    """While Redis is away it does not pile up: the newest is told, and before what came after it."""
    redis_process.kill()
    train(outbox, range(STEPS))
    failed = CheckpointFailed(at_s=0.0, job="a", step=STEPS, error="the disk is full")
    outbox.report(failed)
    train(outbox, range(STEPS, 2 * STEPS))
    redis_process.start()
    assert outbox.flush(30.0)
    reports = told(redis_process)
    assert len(reports) < STEPS / 5
    at = reports.index(failed)
    for kind in (Progress, BackupHeld):
        before, after = (
            [one.step for one in some if isinstance(one, kind)]
            for some in (reports[:at], reports[at:])
        )
        assert before[-1] == STEPS - 1 and after[-1] == 2 * STEPS - 1
        assert before + after == sorted(before + after)


def test_the_newest_waits_for_a_manager_that_is_away(
    outbox: Outbox, redis_process: RedisProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full inbox would have no room for what a person asks for."""
    monkeypatch.setattr(outbox_module, "UNREAD_MAX", 5)
    client, looks = connect(redis_process.url), list[None]()
    xlen = outbox._client.xlen
    monkeypatch.setattr(outbox._client, "xlen", lambda key: (looks.append(None), xlen(key))[1])
    for step in range(5):
        outbox.report(CheckpointFailed(at_s=0.0, job="a", step=step, error="the disk is full"))
    until("what is told at once", lambda: client.xlen(INBOX) == 5 and looks)
    for step in range(3):
        before = len(looks)
        train(outbox, range(step, step + 1))
        until("a look or two", lambda before=before: len(looks) > before + 1)
    assert client.xlen(INBOX) == 5
    client.xtrim(INBOX, maxlen=0)
    until("the newest", lambda: len(told(redis_process)) == 2)
    assert {type(one): one.step for one in told(redis_process)} == {Progress: 2, BackupHeld: 2}


def test_reports_that_no_longer_fitted_are_not_waited_for(
    redis_process: RedisProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else no report of an agent would ever be confirmed again, and each would be sent for ever."""
    monkeypatch.setattr(outbox_module, "REPORTS_WAITING_MAX", 5)
    outbox = Outbox(connect(redis_process.url))
    try:
        redis_process.kill()
        for step in range(20):
            outbox.report(CheckpointFailed(at_s=0.0, job="a", step=step, error="the disk is full"))
        train(outbox, range(3))
        redis_process.start()
        assert outbox.flush(20.0)
        assert told(redis_process)[-1] == BackupHeld(at_s=0.0, job="a", step=2, state_bytes=1)
    finally:
        outbox.close()


def test_the_newest_is_told_although_nothing_comes_after_it(
    outbox: Outbox, redis_process: RedisProcess
) -> None:
    """Training may stand still behind it."""
    train(outbox, range(STEPS))

    def newest() -> bool:
        last = {type(report): report for report in told(redis_process)}
        return len(last) == 2 and all(report.step == STEPS - 1 for report in last.values())

    until("the newest of both", newest)


class LostAnswer:
    """A way to Redis, which is killed with one answer on it: the first to a request with these bytes in it."""

    def __init__(self, server: RedisProcess, folder: Path, asked: bytes) -> None:
        self._server, self._asked, self.lost = server, asked, 0
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(folder / "way.sock"))
        self._listener.listen()
        self.url = f"unix://{folder / 'way.sock'}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                caller, _ = self._listener.accept()
                threading.Thread(target=self._carry, args=(caller,), daemon=True).start()

    def _carry(self, caller: socket.socket) -> None:
        """One request at a time, and its answer."""
        with caller, socket.socket(socket.AF_UNIX) as redis:
            redis.connect(str(self._server.socket))
            while request := caller.recv(1 << 20):
                redis.sendall(request)
                answer = redis.recv(1 << 20)
                if self._asked in request and not self.lost and not answer.startswith(b"-"):
                    self.lost += 1
                    self._server.kill()
                    self._server.start()
                    return
                caller.sendall(answer)

    def close(self) -> None:
        self._listener.close()


def test_what_redis_took_without_an_answer_is_there_once(
    redis_process: RedisProcess, tmp_path: Path
) -> None:
    """Sent again, to the server that comes back, it is known by its number."""
    way = LostAnswer(redis_process, tmp_path, b"the last line")
    outbox = Outbox(connect(way.url))
    failed = CheckpointFailed(at_s=0.0, job="a", step=1, error="the disk is full")
    outbox.report(failed)
    outbox.lines("a", "w1", ("a line", "the last line"))
    assert outbox.flush(30.0)
    outbox.lines("a", "w1", ("the last line",))
    assert outbox.flush(30.0)
    outbox.close()
    way.close()
    assert way.lost == 1
    rows = connect(redis_process.url).xrange("orch:log:a")
    assert [fields[b"line"] for _, fields in rows] == [b"a line", *[b"the last line"] * 2]
    assert told(redis_process) == [failed]


def test_numbers_are_there_by_step_and_told_once_in_a_while(
    outbox: Outbox, redis_process: RedisProcess
) -> None:
    """All of them for whoever draws a curve, the newest for the manager."""
    redis_process.kill()
    for step in range(STEPS):
        outbox.numbers("a", step, {"loss": float(step), "best": math.inf})
        outbox.report(Logged(at_s=0.0, job="a", step=step, numbers={"loss": float(step)}))
    redis_process.start()
    assert outbox.flush(30.0)
    rows = connect(redis_process.url).xrange("orch:metrics:a")
    assert [int(row[b"step"]) for _, row in rows] == list(range(STEPS))
    last = msgspec.msgpack.decode(rows[-1][1][b"numbers"])
    assert last == {"loss": STEPS - 1.0, "best": math.inf}
    logged = [report for report in told(redis_process) if isinstance(report, Logged)]
    assert logged[-1].step == STEPS - 1
    assert len(logged) < STEPS / 5


def test_numbers_of_quick_steps_go_to_redis_together(
    outbox: Outbox, redis_process: RedisProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each batch is written to the disk, and a commit waits for the disk behind it."""
    monkeypatch.setattr(outbox_module, "NEWEST_S", 3600.0)
    client = connect(redis_process.url)
    outbox.numbers("a", 0, {"loss": 0.0})
    until("the first", lambda: client.xlen(metrics_key("a")) == 1)
    for step in range(1, STEPS):
        outbox.numbers("a", step, {"loss": float(step)})
        assert client.xlen(metrics_key("a")) == 1
    assert outbox.flush(30.0)
    assert client.xlen(metrics_key("a")) == STEPS
