"""The commit log: one step after the other, by one writer, and never from an older generation."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import redis
from commit_logs import MemoryCommitLog
from crews import RedisProcess

from agent.errors import Fenced
from agent.keeper.commits import Commit, CommitLog, History, RedisCommitLog
from agent.keeper.reports import Reports
from agent.keys import INBOX, commit_key
from agent.messages import AnyReport, Progress, Report, Rewound

pytestmark = pytest.mark.processes

JOB = "job"


@pytest.fixture(params=["memory", "redis"])
def log(request: pytest.FixtureRequest) -> Any:
    if request.param == "memory":
        yield MemoryCommitLog()
        return
    server: RedisProcess = request.getfixturevalue("redis_process")
    client = redis.Redis.from_url(server.url)
    yield RedisCommitLog(client)
    client.close()


def commit(version: int, generation: int = 1) -> Commit:
    return Commit(generation=generation, version=version, loss=0.1 + 0.2)


def test_what_was_written_is_what_the_next_keeper_reads(log: CommitLog) -> None:
    """To the last bit of the loss."""
    term, newest = log.take(JOB)
    assert newest == Commit()
    log.write(JOB, term, commit(1))
    log.write(JOB, term, commit(2, generation=4))
    assert log.take(JOB)[1] == commit(2, generation=4)


def test_where_in_the_script_a_commit_is_outlives_the_keeper(log: CommitLog) -> None:
    """Also that a step has several commits, when the job goes back."""
    term, _ = log.take(JOB)
    written = Commit(generation=1, version=1, loss=0.5, script_step=0, phase=1, phases=3)
    log.write(JOB, term, written)
    history = History(log, JOB)
    assert history.newest == written
    history.rewind(0)
    assert History(log, JOB).newest == Commit(generation=1, version=0, phases=3)


def test_a_place_of_another_commit_is_not_believed(redis_process: RedisProcess) -> None:
    """Earlier software writes commits without one."""
    with redis.Redis.from_url(redis_process.url) as client:
        log = RedisCommitLog(client)
        term, _ = log.take(JOB)
        log.write(JOB, term, commit(1))
        for place in ("0 5 1 2", "x", ""):
            client.hset(commit_key(JOB), "place", place)
            assert log.take(JOB)[1].script_step == -1


def test_a_loss_that_nobody_knows_is_none(log: CommitLog) -> None:
    """A keeper that comes after a step that was skipped has no loss to show, and does not show 0."""
    term, _ = log.take(JOB)
    log.write(JOB, term, Commit(generation=1, version=1, loss=None))
    told: list[Report] = []
    Reports(JOB, told.append, History(log, JOB).loss).progress(generation=1, step=1, steps_total=9)
    (sent,) = told
    read = msgspec.json.decode(msgspec.json.encode(sent), type=AnyReport)
    assert isinstance(read, Progress)
    assert read.loss is None


def test_the_same_commit_twice_is_one(log: CommitLog) -> None:
    """An answer that got lost does no harm."""
    term, _ = log.take(JOB)
    log.write(JOB, term, commit(1))
    log.write(JOB, term, commit(1))
    assert log.take(JOB)[1].version == 1


def back(before: int, after: int) -> Rewound:
    return Rewound(at_s=0.0, job=JOB, from_step=before, to_step=after)


REFUSED: dict[str, Callable[[CommitLog, int], None]] = {
    "an older generation": lambda log, term: log.write(JOB, term, commit(3, generation=1)),
    "a step too far": lambda log, term: log.write(JOB, term, commit(4, generation=2)),
    "a step back": lambda log, term: log.write(JOB, term, commit(1, generation=2)),
    "an earlier keeper": lambda log, term: log.write(JOB, term - 1, commit(3, generation=2)),
    "an earlier keeper that rewinds": lambda log, term: log.rewind(
        JOB, term - 1, commit(0, generation=2), back(2, 0)
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_must_not_be_written_is_refused(log: CommitLog, case: str) -> None:
    """Generations and terms fence; steps come one by one."""
    log.take(JOB)
    term, _ = log.take(JOB)
    log.write(JOB, term, commit(1, generation=2))
    log.write(JOB, term, commit(2, generation=2))
    with pytest.raises(Fenced):
        REFUSED[case](log, term)
    assert log.take(JOB)[1] == commit(2, generation=2)


def test_a_rewind_goes_back(log: CommitLog) -> None:
    """The one way to an earlier step; commits go on from there."""
    term, _ = log.take(JOB)
    for version in range(1, 6):
        log.write(JOB, term, commit(version))
    log.rewind(JOB, term, Commit(generation=1, version=2), back(5, 2))
    log.write(JOB, term, commit(3))
    assert log.take(JOB)[1].version == 3


def test_who_goes_back_has_told_the_manager(redis_process: RedisProcess) -> None:
    """With the very write: a keeper that is killed behind it, with its outbox, leaves no step uncounted."""
    with redis.Redis.from_url(redis_process.url) as client:
        history = History(RedisCommitLog(client), JOB)
        for version in range(1, 6):
            history.write(commit(version))
            history.note(commit(version))
        history.rewind(2)
        ((_, entry),) = client.xrange(INBOX)
    told = msgspec.json.decode(entry[b"e"], type=AnyReport)
    assert isinstance(told, Rewound)
    assert (told.job, told.from_step, told.to_step) == (JOB, 5, 2)
