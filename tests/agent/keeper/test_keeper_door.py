"""A value out of its range ends at the keeper: its sender's job suffers, and the manager hears of it once."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from crews import SECRET, RedisProcess, until

from agent.errors import WireError
from agent.keeper import keeper as keepers
from agent.keeper.keeper import Keeper, connect
from agent.keeper.storage.vault import Place
from agent.keys import INBOX
from agent.messages import (
    AgentJoined,
    AgentLost,
    AnyReport,
    JobOrder,
    WorkerFailed,
    WorkerLost,
    WorkerReady,
)
from agent.net.handshake import job_secret
from agent.net.wire import dial
from agent.protocol import AgentHello, Dismissal, Hello, Message, Ready, Told, Welcome

pytestmark = pytest.mark.processes

SOUND = Ready(microbatches=2, steps_total=5, state_bytes=1)


@pytest.fixture
def keeper(redis_process: RedisProcess, tmp_path: Path) -> Iterator[Keeper]:
    keeper = Keeper(connect(redis_process.url), Place(checkpoints=tmp_path), "127.0.0.1", SECRET)
    keeper.open_job(JobOrder(job="job", script="train.py", script_sha=""), b"")
    yield keeper
    keeper.close()


def reports(redis_process: RedisProcess, kind: type[Any]) -> list[Any]:
    rows: Any = connect(redis_process.url).xrange(INBOX)
    said = [msgspec.json.decode(fields[b"e"], type=AnyReport) for _, fields in rows]
    return [report for report in said if isinstance(report, kind)]


def says(keeper: Keeper, worker: str, message: Message) -> str:
    """What the keeper says to a worker after this message, if it dismisses it."""
    hello = Hello(job="job", worker=worker, machine_id="m", mesh_address="127.0.0.1:1")
    connection = dial(keeper.address, job_secret(SECRET, "job"), hello)
    try:
        assert isinstance(connection.receive()[0], Welcome)
        connection.send(message)
        while not isinstance(answer := connection.receive()[0], Dismissal):
            pass
        return answer.why
    finally:
        connection.close()


def test_value_out_of_range_fails_its_sender_and_goes_no_further(
    keeper: Keeper, redis_process: RedisProcess
) -> None:
    """The sentence names field, value and range; the keeper listens to the next worker and to agents."""
    wrong = msgspec.structs.replace(SOUND, microbatches=0)
    assert says(keeper, "w1", wrong) == "the script failed"
    (failed,) = until("the failure", lambda: reports(redis_process, WorkerFailed))
    assert (failed.worker, failed.kind) == ("w1", "setup")
    said = "w1: 'Ready' was refused: microbatches is 0: expected `int` >= 1"
    assert failed.detail == said
    assert not reports(redis_process, WorkerReady)

    agent = dial(keeper.address, SECRET, AgentHello(machine_id="m"))
    agent.send(Told(serial=1, report=AgentJoined(at_s=1.0, machine_id="m", address="a", slots=0)))
    (lost,) = until("the loss", lambda: reports(redis_process, AgentLost))
    assert lost.machine_id == "m"
    assert "report.slots is 0" in lost.why
    agent.close()

    hello = Hello(job="job", worker="w2", machine_id="m", mesh_address="127.0.0.1:1")
    connection = dial(keeper.address, job_secret(SECRET, "job"), hello)
    connection.send(SOUND)
    until("a sound worker", lambda: reports(redis_process, WorkerReady))
    connection.close()


def test_message_that_the_keeper_cannot_take_in_costs_its_worker(
    keeper: Keeper, redis_process: RedisProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that listens to it does not end alone, which would leave a member that nobody hears."""
    job = keeper._jobs["job"]
    monkeypatch.setattr(job, "receive", lambda *_: {}["no such key"])
    hello = Hello(job="job", worker="w1", machine_id="m", mesh_address="127.0.0.1:1")
    connection = dial(keeper.address, job_secret(SECRET, "job"), hello)
    connection.send(SOUND)
    (lost,) = until("the loss", lambda: reports(redis_process, WorkerLost))
    assert (lost.worker, lost.cause) == ("w1", "connection")
    assert "the keeper could not take its message" in lost.detail
    assert "w1" not in job.roster.members
    connection.close()


def test_agent_from_which_nothing_comes_is_let_go(
    keeper: Keeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its machine was switched off, and hung up on nobody: it keeps no thread and no file of the keeper's."""
    monkeypatch.setattr(keepers, "AGENT_SILENT_S", 0.05)
    agent = dial(keeper.address, SECRET, AgentHello(machine_id="m"))
    agent.patience(20.0)
    with pytest.raises(WireError, match="closed"):
        agent.receive()
    agent.close()
    until("its connection to be forgotten", lambda: not keeper._connections)
