"""Orders that the keeper gets while something else goes wrong."""

import resource
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
import pytest
import redis
from backups import disk, saved
from crews import SECRET, Crew, Nursery, RedisProcess, played_alone, until
from explain import lives
from injection import Fault, Plan
from redis.backoff import NoBackoff
from redis.retry import Retry

from agent.keeper import keeper as keeper_module
from agent.keeper.commits import Commit, RedisCommitLog
from agent.keeper.job import KeptJob
from agent.keeper.keeper import KEPT_MAX, Keeper, OpenJob, connect
from agent.keeper.storage import vault
from agent.keeper.storage.memory_log import kept, root_of
from agent.keeper.storage.vault import Place, Vault
from agent.keys import (
    INBOX,
    KEPT_JOBS,
    OPEN_JOBS,
    PORTS,
    PULSE,
    commit_key,
    script_key,
    submitted_key,
)
from agent.layout import data_parallel
from agent.messages import AnyReport, JobOrder, RecordsDamaged, Rewound, WorkerLost
from agent.protocol import Snapshot

pytestmark = pytest.mark.processes

TOY = Path(__file__).parents[1].joinpath("toy.py")
SCRIPT = b"lr = 1e-2"
SCRIPT_SHA = sha256(SCRIPT).hexdigest()


class Refusing:
    """A client of the real Redis, some of whose calls get no answer."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self.refused: dict[str, int] = {}  # by the name of the call: how many more

    def __getattr__(self, name: str) -> Any:
        if self.refused.get(name):
            self.refused[name] -= 1
            raise redis.ConnectionError(f"{name} got no answer")
        return getattr(self._client, name)


@pytest.fixture
def refusing(redis_process: RedisProcess) -> Refusing:
    return Refusing(connect(redis_process.url))


@pytest.fixture
def keeper(refusing: Refusing, tmp_path: Path) -> Iterator[Keeper]:
    keeper = Keeper(refusing, Place(checkpoints=tmp_path), "127.0.0.1", SECRET)
    yield keeper
    keeper.close()


def order(job: str = "job") -> JobOrder:
    return JobOrder(job=job, script="train.py", script_sha="")


def test_a_keeper_that_ends_in_the_middle_of_a_close_leaves_it_to_the_next(mortal: Crew) -> None:
    """Killed while a closed job's state is written: the next keeper does not take the job for a running one,
    and what was on the disk before is gone on from when it is opened again."""
    arguments = ("100000", "0.005", str(mortal.folder / "out.pt"))
    plan = Plan(
        who="keeper",
        ledger=str(mortal.folder / "ledger"),
        faults=(Fault(point="keeper: part drafted", passing=1, kind="kill"),),
    )
    mortal.keeper.kill()
    mortal.keeper.faults = msgspec.json.encode(plan).decode()
    mortal.keeper.start()
    # The close writes the first part, however slowly the steps come.
    workers = mortal.begin(1, TOY.read_text(), *arguments, checkpoint_every_s=3600.0)
    mortal.reach(3)
    mortal.keeper.close_job("job")
    assert mortal.keeper.process.ended(30.0)
    mortal.kill(*workers)  # one that comes back to the job opened again has what the disk lacks
    assert mortal.client.hkeys(OPEN_JOBS) == [b"job"]
    mortal.keeper.kill()
    mortal.keeper.faults = ""
    mortal.keeper.start()
    until("its end", lambda: not mortal.client.exists(OPEN_JOBS))
    mortal.begin(1, TOY.read_text(), *arguments)
    (rewound,) = until("a new beginning", lambda: mortal.of(Rewound))
    assert rewound.to_step == 0


def is_open(refusing: Refusing, job: str = "job") -> bool:
    return bool(refusing.hexists(OPEN_JOBS, job))


def test_the_step_that_a_branch_begins_from_is_kept_until_the_branch_is_closed(
    refusing: Refusing, tmp_path: Path
) -> None:
    """Also if the keeper restarts, and although the job goes on and prunes what is old."""
    place = Place(checkpoints=tmp_path)
    keeper = Keeper(refusing, place, "127.0.0.1", SECRET)
    try:
        keeper.open_job(order(), b"")
        assert keeper._jobs["job"].vault.write(saved(1))
        url = f"{(tmp_path / 'job').as_uri()}#1"
        keeper.open_job(msgspec.structs.replace(order("branch"), from_url=url), b"")
    finally:
        keeper.close()
    keeper = Keeper(refusing, place, "127.0.0.1", SECRET)
    try:
        trained = keeper._jobs["job"].vault
        trained.since = 1  # as the commits of a job that trained would say
        for version in range(2, 2 + order().checkpoints_kept):
            assert trained.write(saved(version))
        assert disk(tmp_path / "job").newest(1) is not None
        keeper.close_job("branch")
        until("the close", lambda: not trained._archive.branched)
        assert trained.write(saved(20))
        assert disk(tmp_path / "job").newest(1) is None
    finally:
        keeper.close()


def test_a_close_that_is_taken_up_again_knows_what_branches_begin_from(
    refusing: Refusing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next keeper has read of the branch, too, before it writes and prunes in the closing job's folder."""
    place = Place(checkpoints=tmp_path)
    keeper = Keeper(refusing, place, "127.0.0.1", SECRET)
    try:
        keeper.open_job(order(), b"")
        url = f"{(tmp_path / 'job').as_uri()}#1"
        keeper.open_job(msgspec.structs.replace(order("branch"), from_url=url), b"")
        keeper._keep(OpenJob(order=order(), closing=True))  # which is read first
    finally:
        keeper.close()
    make, written = Keeper._make, threading.Event()
    spared: list[set[int]] = []

    def slow(keeper: Keeper, record: OpenJob, script: bytes) -> KeptJob:
        if record.order.job == "branch":
            written.wait(0.5)
        return make(keeper, record, script)

    def write(job: KeptJob) -> bool:
        spared.append(set(job.vault._archive.branched))
        written.set()
        return True

    monkeypatch.setattr(Keeper, "_make", slow)
    monkeypatch.setattr(KeptJob, "put_away", write)
    keeper = Keeper(refusing, place, "127.0.0.1", SECRET)
    try:
        until("the close", lambda: not refusing.hexists(KEPT_JOBS, "job"))
        assert spared == [{1}]
    finally:
        keeper.close()


def test_what_did_not_fit_when_a_job_was_closed_is_written_when_there_is_room(
    refusing: Refusing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The keeper's memory ends with it; so nobody has to open the job again for that."""
    monkeypatch.setattr(keeper_module, "KEPT_S", 0.05)
    keeper = Keeper(refusing, Place(checkpoints=tmp_path), "127.0.0.1", SECRET)
    try:
        keeper.open_job(order(), b"")
        keeper._jobs["job"].vault.adopt(saved(3))
        (tmp_path / "job").write_bytes(b"")  # where its folder would be
        keeper.close_job("job")
        until("the close", lambda: not is_open(refusing) and "job" in keeper._kept)
        (tmp_path / "job").unlink()
        until("room to be found", lambda: not keeper._kept)
        assert [mark.version for mark in disk(tmp_path / "job").marks()] == [3]
    finally:
        keeper.close()


def test_of_many_jobs_that_the_disk_refused_the_next_keeper_has_all(
    refusing: Refusing, tmp_path: Path
) -> None:
    """One keeper holds on to a few of them only; what it has noted down of the others stays where it is."""
    jobs = [f"job{number}" for number in range(KEPT_MAX + 2)]
    checkpoints = tmp_path / "checkpoints"
    place = Place(checkpoints=checkpoints, memory=root_of(checkpoints))
    checkpoints.mkdir()
    keeper = Keeper(refusing, place, "127.0.0.1", SECRET)
    try:
        for job in jobs:
            refusing.hset(commit_key(job), mapping={"term": 1, "generation": 0, "step": 3})
            keeper.open_job(order(job), b"")
            keeper._jobs[job].vault.adopt(saved(3))
            (checkpoints / job).write_bytes(b"")  # where its folder would be
            keeper.close_job(job)
            until("the close", lambda job=job: job not in keeper._jobs)
        keeper.close()
        for job in jobs:
            (checkpoints / job).unlink()
        keeper = Keeper(refusing, place, "127.0.0.1", SECRET)
        until("all to be on the disk", lambda: not (keeper._jobs or kept(place.memory)))
        for job in jobs:
            assert [mark.version for mark in disk(checkpoints / job).marks()] == [3]
        assert not refusing.exists(KEPT_JOBS)
    finally:
        keeper.close()
        shutil.rmtree(place.memory)


def cut_off(client: Any) -> None:
    client.hset(OPEN_JOBS, "job", client.hget(OPEN_JOBS, "job")[:-9])


def more_steps(client: Any) -> None:
    client.hset(OPEN_JOBS, "job", client.hget(OPEN_JOBS, "job").replace(b'"24"', b'"26"'))


def other_scripts(client: Any) -> None:
    for key in (script_key("job"), submitted_key(SCRIPT_SHA)):
        client.set(key, SCRIPT.replace(b"1e-2", b"1e-3"))


COMMITS = "orch:commit:job"
DAMAGE: list[tuple[str, Callable[[Any], object]]] = [
    (f"{OPEN_JOBS} job in Redis is damaged", cut_off),
    (f"{OPEN_JOBS} job in Redis is damaged", more_steps),
    (f"the step in {COMMITS} in Redis is damaged", lambda it: it.hset(COMMITS, "step", "5")),
    (f"the term in {COMMITS} in Redis is damaged", lambda it: it.hset(COMMITS, "term", "1x")),
    (f"{COMMITS} in Redis is gone", lambda it: it.delete(COMMITS)),
    (f"{script_key('job')} and {submitted_key(SCRIPT_SHA)} in Redis are damaged", other_scripts),
]


def left(refusing: Refusing, folder: Path) -> None:
    """What a keeper leaves that ends behind the third step of a job, beside another one."""
    keeper = Keeper(refusing, Place(checkpoints=folder), "127.0.0.1", SECRET)
    keeper.open_job(order("other"), b"")
    refusing.set(submitted_key(SCRIPT_SHA), SCRIPT)
    keeper.open_job(msgspec.structs.replace(order(), script_sha=SCRIPT_SHA, argv=("24",)))
    keeper.regroup("job", data_parallel(1, 2, ("w",)), "now")
    for version in (1, 2, 3):
        keeper._jobs["job"].history.write(Commit(generation=1, version=version, loss=0.5))
    keeper.close()


@pytest.mark.parametrize(("said", "damage"), DAMAGE)
def test_what_redis_has_of_a_job_is_damaged(
    refusing: Refusing, tmp_path: Path, said: str, damage: Callable[[Any], object]
) -> None:
    """The next keeper says which key it is, and neither goes on from it nor ends: other jobs are none the worse. The job
    is opened again by who resumes it, and goes on from what is on the disk."""
    left(refusing, tmp_path)
    damage(refusing)
    keeper = Keeper(refusing, Place(checkpoints=tmp_path), "127.0.0.1", SECRET)
    try:
        assert set(keeper._jobs) == {"other"}
        rows = [msgspec.json.decode(row[b"e"], type=AnyReport) for _, row in refusing.xrange(INBOX)]
        (told,) = [report for report in rows if isinstance(report, RecordsDamaged)]
        assert told.error.startswith(said)
        assert not is_open(refusing)
        keeper.open_job(order(), b"")
        assert keeper._jobs["job"].history.version == 0
    finally:
        keeper.close()


@pytest.mark.parametrize("left", [b"4071x", b"", b"-1", b"99999", b"\xff\x00"])
def test_a_port_that_is_none_keeps_nobody_down(
    refusing: Refusing, tmp_path: Path, left: bytes
) -> None:
    place = Place(checkpoints=tmp_path / "checkpoints")
    Keeper(refusing, place, "127.0.0.1", SECRET).close()
    (house,) = refusing.hgetall(PORTS)
    refusing.hset(PORTS, house, left)
    keeper = Keeper(refusing, place, "127.0.0.1", SECRET)
    keeper.close()
    assert keeper.address.endswith(f":{refusing.hget(PORTS, house).decode()}")


def test_a_script_is_in_redis_twice(refusing: Refusing, tmp_path: Path) -> None:
    """One of them is damaged: newcomers get the other."""
    left(refusing, tmp_path)
    refusing.delete(script_key("job"))
    keeper = Keeper(refusing, Place(checkpoints=tmp_path), "127.0.0.1", SECRET)
    assert keeper._jobs["job"]._script == SCRIPT
    assert keeper._jobs["job"].history.version == 3
    keeper.close()


@pytest.mark.parametrize("damage", [other_scripts, lambda it: it.delete(submitted_key(SCRIPT_SHA))])
def test_a_job_whose_script_is_gone_or_another_is_not_opened(
    keeper: Keeper, refusing: Refusing, damage: Callable[[Any], object]
) -> None:
    """The manager hears it at once: its machines would start a script that is none, and be paid for."""
    refusing.set(submitted_key(SCRIPT_SHA), SCRIPT)
    damage(refusing)
    keeper.open_job(msgspec.structs.replace(order(), script_sha=SCRIPT_SHA))
    (row,) = until("a report", lambda: refusing.xrange(INBOX))
    told = msgspec.json.decode(row[1][b"e"], type=AnyReport)
    assert isinstance(told, RecordsDamaged)
    assert submitted_key(SCRIPT_SHA) in told.error
    assert not is_open(refusing)


@pytest.mark.parametrize("call", ["zrem", "set", "hset"])
def test_an_order_that_failed_may_come_again(keeper: Keeper, refusing: Refusing, call: str) -> None:
    """Redis gave no answer while a job was opened: asked again, the job is opened, and can be closed."""
    refusing.refused[call] = 1
    with pytest.raises(redis.ConnectionError):
        keeper.open_job(order(), b"")
    keeper.open_job(order(), b"")
    assert "job" in keeper._jobs
    assert is_open(refusing)


@pytest.mark.parametrize("call", ["hset", "hdel", "delete", "zadd"])
def test_a_job_is_closed_although_redis_gives_no_answer(
    keeper: Keeper, refusing: Refusing, call: str
) -> None:
    """It is asked again until it does: a job that was closed does not come back with the next keeper."""
    keeper.open_job(order(), b"")
    refusing.refused[call] = 2
    keeper.close_job("job")
    until("the end", lambda: not keeper._closing and refusing.zrange("orch:jobs:closed", 0, -1))
    assert not is_open(refusing)
    keeper.open_job(order(), b"")
    assert is_open(refusing)


def test_nobody_waits_for_a_job_that_is_being_closed(
    keeper: Keeper, refusing: Refusing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its state is on its way to a slow disk: others are opened meanwhile, and itself again afterwards."""
    slow = threading.Event()
    monkeypatch.setattr(Vault, "saved", property(lambda _: slow.wait(60) and None))
    keeper.open_job(order(), b"")
    keeper.close_job("job")
    keeper.close_job("job")
    keeper.open_job(order("other"), b"")
    assert "job" in keeper._closing
    assert is_open(refusing), "whoever ends the keeper can see that it is at work"
    threading.Timer(0.1, slow.set).start()
    keeper.open_job(order(), b"")
    assert is_open(refusing)
    assert not keeper._jobs["job"].closed


def test_a_keeper_that_is_closed_leaves_no_thread_behind(
    redis_process: RedisProcess,
    nursery: Nursery,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """While a commit waits for a Redis that does not come back, and workers are connected."""
    before = set(threading.enumerate())
    at_once = Retry(NoBackoff(), 0)  # it says that nobody is there
    client = redis.Redis.from_url(redis_process.url, retry=at_once)
    keeper = Keeper(client, Place(checkpoints=tmp_path / "checkpoints"), "127.0.0.1", SECRET)
    crew = Crew(redis_process, nursery, tmp_path, keeper)
    crew.client = client
    try:
        crew.begin(2, TOY.read_text(), "100000", "0.005", str(tmp_path / "out.pt"))
        crew.reach(3)
        redis_process.kill()
        until("a commit that waits", lambda: "Redis does not take commits" in caplog.text)
    finally:
        crew.close()
    until("all threads to end", lambda: set(threading.enumerate()) <= before, 20.0)


def test_who_was_fenced_goes_on_when_it_is_asked_again(
    redis_process: RedisProcess, nursery: Nursery, tmp_path: Path
) -> None:
    """Somebody else took the job over and is gone: this keeper says so, lets its workers go, and for new
    ones takes it over again with all that it has in memory."""
    lines, weights = played_alone(TOY, tmp_path / "alone" / "out.pt", "30", "0.005")
    crew = Crew(redis_process, nursery, tmp_path)
    try:
        crew.begin(2, TOY.read_text(), "30", "0.005", str(tmp_path / "out.pt"))
        crew.reach(9)
        RedisCommitLog(crew.client).take("job")
        until("the losses", lambda: {"w1", "w2"} <= {lost.worker for lost in crew.of(WorkerLost)})
        rows = crew.client.xrange("orch:log:job")
        assert any(b"this keeper commits no more" in fields[b"line"] for _, fields in rows)
        crew.start(2)
        crew.completed()
        assert set(crew.printed()) & set(lines)
        assert (tmp_path / "out.pt").read_bytes() == weights
        assert crew.of(Rewound) == []
    finally:
        crew.close()


def test_a_first_backup_that_got_lost_is_asked_for_again(
    crew: Crew, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it nothing is committed, so that no commit is a moment to ask: it is asked for all the same."""
    lost: list[Snapshot] = []
    take = Vault.take

    def forgetful(held: Vault, message: Snapshot, *more: Any) -> Any:
        if not (lost and lost[-1].last):
            lost.append(message)
            return None
        return take(held, message, *more)

    monkeypatch.setattr(Vault, "take", forgetful)
    monkeypatch.setattr(vault, "LOST_S", 0.5)
    crew.begin(1, TOY.read_text(), "5", "0", str(crew.folder / "out.pt"))
    assert crew.completed().step == 5
    assert lost


def test_who_was_fenced_leaves_the_job_to_the_newer_keeper(
    redis_process: RedisProcess, nursery: Nursery, tmp_path: Path
) -> None:
    """Another house takes a job over. The workers that the first keeper lets go dial it again, and it does
    not take the job back for their sake: the newer one trains on, with workers of its own."""
    crew = Crew(redis_process, nursery, tmp_path)
    first = crew.keeper
    try:
        workers = crew.begin(2, TOY.read_text(), "100000", "0.005", str(tmp_path / "out.pt"))
        crew.reach(5)
        with crew.on_hold():
            place = Place(checkpoints=tmp_path / "other")
            crew.keeper = Keeper(connect(redis_process.url), place, "127.0.0.1", SECRET)
            for worker in workers:
                until("its end", lambda pid=crew.pids[worker]: not lives(pid))
            crew.ready = []
            (newcomer,) = crew.start(1)
            until("the newcomer", lambda: crew.ready == [newcomer])
        until("a step of its own", lambda: crew.of(Rewound) and crew.step > 0)
        assert first._jobs["job"].fenced
        assert not crew.keeper._jobs["job"].fenced
    finally:
        first.close()
        crew.close()


def test_who_is_fenced_while_it_goes_back_gives_up(crew: Crew) -> None:
    """Nothing is stored of what was committed, and somebody else writes the commits meanwhile: the job
    is as it was, and goes back once it is asked for here again."""
    log = RedisCommitLog(crew.client)
    term, _ = log.take("job")
    log.write("job", term, Commit(generation=0, version=1))
    crew.open(TOY.read_text(), "5", "0", str(crew.folder / "out.pt"))
    log.take("job")
    (first,) = crew.start(1)
    until("the loss", lambda: first in {lost.worker for lost in crew.of(WorkerLost)})
    assert crew.keeper._jobs["job"].history.version == 1
    assert crew.of(Rewound) == []
    crew.start(1)
    assert crew.completed().step == 5
    (rewound,) = crew.of(Rewound)
    assert (rewound.from_step, rewound.to_step) == (1, 0)


def test_a_keeper_leaves_signs_of_life(
    keeper: Keeper, redis_process: RedisProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Again and again another one, from the thread that watches over all jobs."""
    monkeypatch.setattr(keeper_module, "PULSE_S", 0.1)
    client = connect(redis_process.url)
    first = until("a sign", lambda: client.get(PULSE))
    assert until("another", lambda: client.get(PULSE) != first)


def test_a_keeper_that_can_let_nobody_in_leaves_no_sign_of_life(mortal: Crew) -> None:
    """Its clock ticks on, and whoever is there is heard; but there is no memory for one thread more."""
    mortal.begin(1, TOY.read_text(), "100000", "0.02", str(mortal.folder / "out.pt"))
    mortal.reach(3)
    pid = mortal.keeper.process.pid
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
    most = pages * resource.getpagesize()
    resource.prlimit(pid, resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))
    mortal.start(1)
    seen: dict[Any, float] = {}

    def silent() -> bool:
        sign, now_s = mortal.client.get(PULSE), time.monotonic()
        return now_s > seen.setdefault(sign, now_s) + 2.5 * keeper_module.PULSE_S

    until("silence", silent)
    assert not mortal.keeper.process.ended()
