"""What a keeper leaves in memory: found by the next one, as it was, or not at all."""

import errno
import fcntl
import mmap
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import msgspec
import players
import pytest
import redis
from backups import disk, same, saved
from crews import Crew, KeeperProcess, Nursery, RedisProcess, ends_alike, played_alone, until
from players import House

from agent.keeper.storage import memory_log
from agent.keeper.storage.backup import Backup, LoggedSum, Saved
from agent.keeper.storage.memory_log import (
    AREA,
    STATE,
    Form,
    MemoryLog,
    kept,
    move_in,
    root_of,
    sweep,
)
from agent.keeper.storage.vault import Place, Vault
from agent.keeper.storage.versions import save
from agent.keys import OPEN_JOBS
from agent.messages import JobOrder, Recalled, RecallFailed, Rewound
from agent.store.encoding.format import lay_out
from agent.store.errors import Unavailable, Unknown
from agent.store.memory import RETURNING_BYTES_MIN, address_of

TOY = (
    Path(__file__)
    .parents[1]
    .joinpath("deep_toy.py")
    .read_text()
    .replace("width: int = 16", "width: int = 96")
)
STEPS = 24
OF_ANOTHER_VERSION = "is of another version of the software"
SIZES = (
    100,
    RETURNING_BYTES_MIN,
    3 * RETURNING_BYTES_MIN + 8,
)  # one that is written down whole, and two areas


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder in memory."""
    with tempfile.TemporaryDirectory(prefix="memory-log-", dir=memory_log.SHARED) as folder:
        yield Path(folder)


def filled(memory: MemoryLog, size: int, number: int) -> memoryview:
    body = memory.take(size)
    body[:] = bytes([number]) * size
    return body


def state(memory: MemoryLog, version: int) -> Backup:
    bodies = {f"l{size}": filled(memory, size, version) for size in SIZES}
    layers = tuple(lay_out(f"l{size}", [("x", "U8", (size,))]) for size in SIZES)
    return Backup(generation=1, version=version, layers=layers, bodies=bodies)


def logged(memory: MemoryLog, step: int, size: int = SIZES[1]) -> LoggedSum:
    return LoggedSum(step, b"\1\0", filled(memory, size, 100 + step))


def lived(folder: Path, version: int, sums: int) -> tuple[MemoryLog, Saved]:
    """One that has written down a state, and the sums that lead on from it."""
    memory = MemoryLog(folder)
    held = Saved(state(memory, version), ())
    assert memory.note_state(held)
    for step in range(version, version + sums):
        held = Saved(held.backup, (*held.redo, logged(memory, step)))
        memory.note_sum(held.redo[-1])
    return memory, held


def found(folder: Path, committed: int) -> Saved | None:
    """What the next keeper finds."""
    memory = MemoryLog(folder)
    held = memory.find(committed)
    memory.leave()
    return held


def until_version(held: Saved, version: int) -> Saved:
    return Saved(held.backup, tuple(one for one in held.redo if one.step < version))


def test_the_next_one_finds_what_was_committed(shared: Path) -> None:
    """Not the sum that was written down, and whose commit was not."""
    memory, held = lived(shared, 3, 4)
    memory.leave()
    for committed in (7, 6, 3):
        assert same(found(shared, committed), until_version(held, committed))
    assert same(found(shared, 2), until_version(held, 3))  # Redis is an older copy
    assert found(shared / "other", 7) is None


def test_it_is_there_when_the_memory_is_not_held_on_to_any_more(shared: Path) -> None:
    memory, held = lived(shared, 3, 2)
    expected = [bytes(one.body) for one in held.redo]
    memory.leave()
    del memory, held
    assert [bytes(one.body) for one in found(shared, 5).redo] == expected


def test_what_the_disk_has_beyond_what_an_older_copy_of_redis_knows_is_gone_on_from(
    shared: Path,
) -> None:
    """Going on from what the memory has up to there would make the newer version void, without a word."""
    memory, held = lived(shared / "memory" / "job", 3, 4)
    memory.leave()
    order = JobOrder(job="job", script="train.py", script_sha="")
    place = Place(checkpoints=shared / "disk", memory=shared / "memory")
    save(disk(shared / "disk" / "job"), 1, saved(9))
    vault = Vault(order, place, lambda _: None)
    found = vault.recall(5, patient=True)
    vault.leave()
    assert same(found.saved, saved(9))
    assert "Redis knows only the first 5 commits, so it is an older copy" in found.because
    vault = Vault(order, place, lambda _: None)
    for archive in (shared / "disk" / "job").glob("manifests/*"):
        archive.unlink()
    assert same(vault.recall(5, patient=True).saved, until_version(held, 5))
    vault.leave()


def test_a_new_state_takes_the_place_of_what_led_to_it(shared: Path) -> None:
    """Also of a sum that was written down, and not committed yet, when all of the state had come."""
    memory, held = lived(shared, 3, 4)
    newer = Saved(state(memory, 6), held.redo[3:])
    memory.note_sum(late := logged(memory, 7))
    assert memory.note_state(newer)
    memory.leave()
    assert same(found(shared, 8), Saved(newer.backup, (*newer.redo, late)))


def test_the_sum_of_another_try_is_not_that_of_a_step_whose_sum_stayed_away(shared: Path) -> None:
    """It was written down in a layout that was lost; the step was committed in the next one, without a sum."""
    memory, held = lived(shared, 3, 2)
    memory.note_gap(9)  # of which nothing was written down
    memory.note_sum(logged(memory, 5))
    memory.note_gap(5)
    memory.note_sum(logged(memory, 6))
    memory.leave()
    assert same(found(shared, 7), held)
    memory = MemoryLog(shared)
    newer = Saved(state(memory, 6), ())
    assert memory.note_state(newer)
    memory.note_sum(late := logged(memory, 6))
    memory.leave()
    assert same(found(shared, 7), Saved(newer.backup, (late,)))


def test_nor_is_that_of_a_step_from_before_the_job_went_back(shared: Path) -> None:
    """Sums came behind a gap, and lead on from what was done again once the gap is closed. Their memory may have come to
    something else."""
    memory, held = lived(shared, 3, 2)
    for step in (6, 7, 8):
        memory.note_sum(logged(memory, step))
    again = logged(memory, 5), logged(memory, 6)
    for one in again:
        memory.note_sum(one)
    memory.note_gap(7)
    memory.leave()
    assert same(found(shared, 8), Saved(held.backup, (*held.redo, *again)))


def test_what_is_not_needed_any_more_is_used_again(shared: Path) -> None:
    """A new file for each step would cost more than what comes into it."""
    memory, held = lived(shared, 0, 0)
    seen = []
    for step in range(9):
        memory.note_sum(one := logged(memory, step, 2 * SIZES[1]))
        newer = state(memory, step + 1)
        memory.rest()
        assert memory.note_state(Saved(newer, ()))
        held, one = newer, None
        seen.append({path.stat().st_ino for path in shared.glob(f"{AREA}*")})
    assert seen[3] == seen[-1], (held, one)


@pytest.mark.parametrize("number", range(len(SIZES)))
def test_memory_that_is_used_again_is_not_what_it_was(shared: Path, number: int) -> None:
    """What the log says of it is of the past. What is in the log itself is what it was."""
    memory, held = lived(shared, 3, 2)
    size = SIZES[number]
    _kept = [body for name, body in held.backup.bodies.items() if name != f"l{size}"]
    _sums = held.redo
    del held
    filled(memory, size, 77)
    memory.leave()
    left = found(shared, 5)
    assert (left is None) == (number > 0)
    assert left is None or {bytes(b)[0] for b in left.backup.bodies.values()} == {3}


def test_from_who_lives_nothing_is_taken(shared: Path) -> None:
    """It may be ending, and what it holds may be the only copy: who asks has to ask again."""
    memory, held = lived(shared, 3, 2)
    with pytest.raises(Unavailable, match="an earlier keeper still holds"):
        found(shared, 5)
    memory.leave()
    assert same(found(shared, 5), held)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENOMEM, errno.EIO])
@pytest.mark.parametrize("after", [0, 3])
def test_what_cannot_be_read_now_is_not_taken_for_gone(
    shared: Path, monkeypatch: pytest.MonkeyPatch, number: int, after: int
) -> None:
    """Too many files are open, or there is no room to map them: it may be the only copy."""
    memory, held = lived(shared, 3, 2)
    memory.leave()
    refusing(monkeypatch, number, after)
    memory = MemoryLog(shared)
    with pytest.raises(Unavailable, match=os.strerror(number)):
        memory.find(5)
    assert not memory._areas, "what was mapped already is let go of"
    monkeypatch.undo()
    assert same(memory.find(5), held)


def refusing(monkeypatch: pytest.MonkeyPatch, number: int, after: int = 0) -> None:
    """Let no more than so many files be mapped."""
    mapped, mapping = count(), mmap.mmap

    def refuse(handle: int, length: int) -> mmap.mmap:
        if next(mapped) < after:
            return mapping(handle, length)
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(mmap, "mmap", refuse)


def test_a_job_whose_memory_cannot_be_read_now_is_closed_later(
    large: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    large.job.forsake()
    large.open()
    large.job.close()
    with monkeypatch.context() as patch, pytest.raises(Unavailable):
        refusing(patch, errno.EMFILE)
        large.job.put_away()
    assert large.job.put_away()
    large.open()
    goes_on(large, "b")
    assert not [one for one in large.said.reports if isinstance(one, Rewound)]


@pytest.mark.parametrize("meanwhile", [True, False])
def test_a_job_that_is_opened_again_when_it_is_put_away_is_in_memory(
    large: House, monkeypatch: pytest.MonkeyPatch, meanwhile: bool
) -> None:
    """While the disk takes it or right behind: keeper and worker are killed before there is a new state, and no step is lost."""
    write = large.job.vault.write

    def is_slow(*args: object, **options: object) -> bool:
        written = write(*args, **options)  # type: ignore[arg-type]
        if meanwhile:
            large.job.reopen()
        return written

    monkeypatch.setattr(large.job.vault, "write", is_slow)
    large.job.close()
    assert large.job.put_away()
    large.job.reopen()
    goes_on(large, "b")
    large.commits(2)
    large.dies("b")
    large.job.forsake()
    large.open()
    goes_on(large, "c")
    assert large.players["c"].version == 7
    assert not [one for one in large.said.reports if isinstance(one, Rewound)]


@pytest.fixture
def large(shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> House:
    """A job with five commits, of which only memory has the last ones; its worker is gone."""
    size = 2 * RETURNING_BYTES_MIN
    monkeypatch.setattr(players, "SIZE", size)
    monkeypatch.setattr(players, "FORM", lay_out("l", [("model/l", "I64", (size // 8,))]))
    house = House(tmp_path)
    house.memory = shared
    house.open()
    goes_on(house, "a")
    house.commits(5)
    house.dies("a")
    return house


def goes_on(house: House, name: str) -> None:
    house.joins(name)
    house.until("it to be ready", lambda: name in house.ready)
    house.begins(name)
    house.until("it to go on", lambda: house.players[name].holds)


def test_a_record_that_was_being_written_does_not_count(shared: Path) -> None:
    """Killed before it was renamed into its place: what was written before is whole."""
    memory, held = lived(shared, 3, 2)
    memory.leave()
    (shared / memory_log.DRAFT).write_bytes(b"half")
    assert same(found(shared, 6), held)


@pytest.mark.parametrize("harm", [b"", b"\xc1"])
@pytest.mark.parametrize("area", [False, True])
def test_a_sum_that_is_not_whole_ends_what_is_found(
    shared: Path, harm: bytes, *, area: bool
) -> None:
    """Not the state before it, nor the sums that lead there."""
    memory, held = lived(shared, 3, 4)
    record = shared / f"{memory_log.SUM}5"
    memory.leave()
    spoilt = shared / memory._areas[address_of(held.redo[2].body)] if area else record
    spoilt.write_bytes(harm)
    assert same(found(shared, 7), until_version(held, 5))


def test_what_another_version_of_the_software_has_left_is_neither_taken_nor_let_go_of(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its sums may lie otherwise: applied unchanged, they would be other numbers."""
    memory, held = lived(shared, 3, 2)
    memory.leave()
    monkeypatch.setattr(memory_log, "FORMAT", 99)
    other = MemoryLog(shared)
    with pytest.raises(Unknown, match="another version of the software"):
        other.find(5)
    other.leave()
    monkeypatch.undo()
    assert same(found(shared, 5), held)


def test_what_a_keeper_left_goes_when_the_next_one_has_a_state(shared: Path) -> None:
    job = shared / "job"
    first, older = lived(job, 3, 5)
    first.leave()
    second = MemoryLog(job)
    assert same(second.find(8), older)
    second.note_sum(logged(second, 8))
    newer = Saved(state(second, 9), ())
    assert second.note_state(newer)
    assert sum(path.name.startswith(AREA) for path in job.iterdir()) == 2
    second.leave()
    assert same(found(job, 9), newer)
    third = MemoryLog(job)
    assert third.find(9)
    third.clear()
    third.take(SIZES[1])  # by who still reads what is stored
    assert not job.exists()
    third.take_up()
    assert third.note_state(Saved(state(third, 9), ()))


def test_steps_that_were_missed_end_what_is_found(shared: Path) -> None:
    """Another keeper lived, so nothing was written down; what it had left does not lead to what came after."""
    first, _ = lived(shared, 3, 2)
    second = MemoryLog(shared)
    second.note_sum(logged(second, 5))
    first.leave()
    second.note_sum(logged(second, 6))
    assert second.find(7) is None
    second.rest()
    assert second.note_state(newer := Saved(state(second, 7), ()))
    second.leave()
    assert same(found(shared, 7), newer)


def test_what_is_found_is_written_down_as_it_is(shared: Path) -> None:
    """Killed again before there is another state: the third one finds the same, and what came since."""
    first, _ = lived(shared, 3, 2)
    first.leave()
    second = MemoryLog(shared)
    left = second.find(5)
    assert second.note_state(left)
    second.note_sum(more := logged(second, 5))
    second.leave()
    assert same(found(shared, 6), Saved(left.backup, (*left.redo, more)))


@pytest.mark.parametrize(("left", "branched"), [(0, False), (1, False), (3, False), (0, True)])
@pytest.mark.parametrize("size", SIZES)
def test_what_was_read_is_there_for_the_next_keeper_as_well(
    shared: Path, tmp_path: Path, size: int, left: int, branched: bool
) -> None:
    """A job goes on from the disk, or from an earlier job's versions: its steps are in memory from the first one on. Of an
    earlier keeper there may be something left in memory that does not reach as far."""
    disk, place = MemoryLog(shared / "disk"), Place(checkpoints=tmp_path, memory=shared)
    sums = tuple(logged(disk, step, size) for step in (4, 5, 6))
    order = JobOrder(job="earlier" if branched else "job", script="train.py", script_sha="")
    writer = Vault(order, Place(checkpoints=tmp_path), lambda report: None)
    assert writer.write(Saved(state(disk, 4), sums))
    if left:
        lived(shared / "job", 3, left)[0].leave()
    url = (tmp_path / "earlier").as_uri() if branched else ""
    order = JobOrder(job="job", script="train.py", script_sha="", from_url=url)
    keeper = Vault(order, place, lambda report: None)
    begun = keeper.recall(0 if branched else 7, patient=True)
    recalled = begun.saved
    assert f"from {url or 'local disk'}" in begun.because
    assert same(recalled, Saved(state(disk, 4), sums))
    keeper.adopt(recalled)
    for step in (7, 8, 9):
        keeper.promise(step, one := logged(keeper.memory, step, size))
        keeper.log(one)
    expected = Saved(state(disk, 4), tuple(logged(disk, step, size) for step in range(4, 10)))
    keeper.leave()
    del keeper, recalled, begun, one
    found = Vault(order, place, lambda report: None).recall(10, patient=True)
    assert same(found.saved, expected), found.because


def test_without_room_memory_is_the_process_own(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A state of which some is nowhere to be found is not written down, nor is the one before it left to be found."""
    memory, held = lived(shared, 3, 2)
    monkeypatch.setattr(memory_log, "PARTS_FREE", memory_log.PARTS + 1)
    assert not memory.note_state(Saved(state(memory, 5), ()))
    memory.note_sum(logged(memory, 5))
    memory.leave()
    assert found(shared, 6) is None
    assert held.reached == 5


def test_nothing_is_left_of_jobs_and_houses_that_are_no_more(shared: Path) -> None:
    house, gone = shared / "house", shared / "gone"
    root, other = (shared / f"{memory_log.PREFIX}{name}" for name in "ab")
    for place, home in ((other, gone), (root, house)):
        home.mkdir()
        assert move_in(place, home / "checkpoints")
        for job in ("one", "two"):
            lived(place / job, 3, 1)[0].leave()
    sweep(root, {"two"})
    assert sorted(path.name for path in root.iterdir()) == [memory_log.HOME, "two"]
    gone.rmdir()
    move_in(root, house / "checkpoints")
    assert not other.exists()
    assert root.exists()


def test_a_name_that_another_user_took_is_not_the_only_one(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then the next one is ours, and stays so when the first is free again. When all are taken, that is said before a
    keeper starts."""
    monkeypatch.setattr(memory_log, "SHARED", shared)
    checkpoints = shared / "house" / "checkpoints"
    checkpoints.mkdir(parents=True)
    first = root_of(checkpoints)
    assert memory_log.obstacle(checkpoints) == ""
    first.symlink_to(shared)  # as little ours as the folder of another user
    second = root_of(checkpoints)
    assert second != first
    assert move_in(second, checkpoints)
    first.unlink()
    assert root_of(checkpoints) == second
    shutil.rmtree(second)
    for _ in range(memory_log.NAMES):
        root_of(checkpoints).symlink_to(shared)
    assert not move_in(root_of(checkpoints), checkpoints)
    assert "other users have taken every name" in memory_log.obstacle(checkpoints)


def test_memory_that_takes_nothing_is_said(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A place that is not there, and one that is nearly full."""
    monkeypatch.setattr(memory_log, "SHARED", shared / "none")
    assert "takes no files (No such file or directory)" in memory_log.obstacle(shared)
    monkeypatch.setattr(memory_log, "SHARED", shared)
    monkeypatch.setattr(memory_log, "PARTS_FREE", memory_log.PARTS + 1)
    assert "is nearly full" in memory_log.obstacle(shared)


def test_memory_with_later_times_of_a_clock_set_back_is_replaced(shared: Path) -> None:
    """What the earlier keeper left carries a later time, because the clock was set back: it goes all the same."""
    job = shared / "job"
    first, older = lived(job, 3, 5)
    first.leave()
    later_s = time.time() + 90_000
    old = {path for path in job.iterdir() if path.name != STATE}
    for path in job.iterdir():
        os.utime(path, (later_s, later_s))
    second = MemoryLog(job)
    assert same(second.find(8), older)
    assert second.note_state(newer := Saved(state(second, 9), ()))
    assert old and not old & {*job.iterdir()}
    second.leave()
    assert same(found(job, 9), newer)
    third = MemoryLog(job)
    assert third.find(9)
    third.clear()
    assert kept(shared) == []


# --- with real processes ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], bytes]:
    folder = tmp_path_factory.mktemp("alone")
    (folder / "train.py").write_text(TOY)
    return played_alone(folder / "train.py", folder / "out" / "out.pt", str(STEPS))


@pytest.fixture
def lasting(redis_process: RedisProcess, nursery: Nursery, tmp_path: Path) -> Iterator[Crew]:
    """A crew whose keeper's memory outlives it."""
    keeper = KeeperProcess(redis_process, tmp_path, lasting=True)
    crew = Crew(redis_process, nursery, tmp_path, keeper)
    yield crew
    crew.close()
    shutil.rmtree(root_of(tmp_path / "checkpoints"))


def all_are_killed(lasting: Crew) -> None:
    """Train until there are steps that only memory has; then kill the keeper and all workers."""
    out = lasting.folder / "out.pt"
    lasting.begin(2, TOY, str(STEPS), str(out), backup_every_steps=5, checkpoint_every_s=3600.0)
    lasting.reach(8)
    lasting.keeper.kill()
    lasting.kill(*lasting.pids)


def cannot_go_on(lasting: Crew) -> RecallFailed:
    """Start a keeper and workers, and return what the job says that it waits for."""
    lasting.keeper.start()
    lasting.pids.clear()
    lasting.start(2)
    (said, *_) = until("the job to say so", lambda: lasting.of(RecallFailed))
    return said


def commits(redis_process: RedisProcess) -> list[int]:
    client = redis.Redis.from_url(redis_process.url)
    return [int(client.hget("orch:commit:job", "step"))]


@pytest.mark.processes
def test_the_keeper_and_all_workers_are_killed_and_no_step_is_lost(
    lasting: Crew, alone: tuple[list[str], bytes]
) -> None:
    """Twice, and nothing is on the disk: the next keeper has what the one before had in memory. Each keeps its own
    layers. When the job is done nothing of it is left in memory."""
    lasting.depth, lasting.owned = 2, True
    out = lasting.folder / "out.pt"
    lasting.begin(2, TOY, str(STEPS), str(out), backup_every_steps=5, checkpoint_every_s=3600.0)
    for step in (8, 15):
        lasting.reach(step)
        lasting.keeper.kill()
        lasting.kill(*lasting.pids)
        lasting.keeper.start()
        lasting.pids.clear()
        lasting.start(2)
    lasting.completed()
    assert lasting.of(Rewound) == []
    ends_alike(lasting, alone, STEPS)
    found = lasting.of(Recalled)
    assert len(found) == 2
    assert all("the keeper before" in one.because or "backup tier" in one.because for one in found)
    lasting.keeper.close_job("job")
    root = root_of(lasting.folder / "checkpoints")
    until("all to be let go", lambda: [path.name for path in root.iterdir()] == [memory_log.HOME])


@pytest.mark.processes
def test_memory_that_cannot_be_taken_now_is_left_as_it_is_and_waited_for(
    lasting: Crew, alone: tuple[list[str], bytes]
) -> None:
    """All were killed, and what is started then is newer; and a keeper that was killed may end later than the next one
    starts. The job waits with words for either, goes on with what was left, and loses no step."""
    all_are_killed(lasting)
    record = root_of(lasting.folder / "checkpoints") / "job" / STATE
    held = os.open(record.parent, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    said = cannot_go_on(lasting)
    assert "an earlier keeper still holds" in said.error
    written = record.read_bytes()
    record.write_bytes(msgspec.msgpack.encode(Form(format=1)))
    os.close(held)
    until("the words", lambda: OF_ANOTHER_VERSION in lasting.of(RecallFailed)[-1].error)
    assert lasting.of(Recalled) == []
    record.write_bytes(written)
    lasting.completed()
    assert lasting.of(Rewound) == []
    ends_alike(lasting, alone, STEPS)


@pytest.mark.processes
def test_a_job_that_is_closed_before_it_goes_on_loses_no_step(
    lasting: Crew, alone: tuple[list[str], bytes], redis_process: RedisProcess
) -> None:
    """All were killed, and the next keeper closes the job before any worker has come: nobody has asked for the state
    yet, and what was left of it in memory goes to the disk."""
    all_are_killed(lasting)
    committed = commits(redis_process)
    lasting.keeper.start()
    lasting.keeper.close_job("job")
    store = redis.Redis.from_url(redis_process.url)
    until("it to be closed", lambda: not store.hlen(OPEN_JOBS))
    assert list(memory_log.SHARED.glob(f"{root_of(lasting.folder / 'checkpoints').name}/job")) == []
    out = lasting.folder / "out.pt"
    lasting.open(TOY, str(STEPS), str(out), backup_every_steps=5, checkpoint_every_s=3600.0)
    lasting.pids.clear()
    lasting.start(2)
    lasting.completed()
    assert lasting.of(Rewound) == []
    assert lasting.of(Recalled)[0].step == committed[0]
    ends_alike(lasting, alone, STEPS)


@pytest.mark.processes
@pytest.mark.parametrize("room", [True, False])
def test_what_the_disk_refuses_when_a_job_is_closed_outlives_the_keeper(
    lasting: Crew, alone: tuple[list[str], bytes], redis_process: RedisProcess, room: bool
) -> None:
    """The next keepers leave it where it is for as long as the disk refuses it, and put it there by themselves once
    there is room. Opened again before that, the job goes on from what is in memory."""
    out, folder = lasting.folder / "out.pt", lasting.folder / "checkpoints" / "job"
    options = {"backup_every_steps": 5, "checkpoint_every_s": 3600.0}
    lasting.begin(2, TOY, str(STEPS), str(out), **options)
    lasting.reach(8)
    folder.parent.mkdir(exist_ok=True)
    folder.write_bytes(b"")  # where its folder would be
    store = redis.Redis.from_url(redis_process.url)
    lasting.keeper.close_job("job")
    for _ in range(2):
        until("it to be closed", lambda: not store.hlen(OPEN_JOBS))
        lasting.keeper.kill()
        lasting.keeper.start()
    committed = commits(redis_process)
    root = root_of(lasting.folder / "checkpoints")
    until("it to be closed", lambda: not store.hlen(OPEN_JOBS))
    assert kept(root) == [root / "job"]
    if room:
        folder.unlink()
        lasting.keeper.kill()
        lasting.keeper.start()
        until("it to be on the disk", lambda: not store.hlen(OPEN_JOBS) and not kept(root))
    lasting.ready.clear()
    lasting.open(TOY, str(STEPS), str(out), **options)
    lasting.pids.clear()
    lasting.start(2)
    recalled = until("it to go on", lambda: lasting.of(Recalled))
    if not room:
        folder.unlink()
    lasting.completed()
    assert lasting.of(Rewound) == []
    assert [one.step for one in recalled] == committed
    ends_alike(lasting, alone, STEPS)
    lasting.keeper.close_job("job")
    until("all to be let go", lambda: [path.name for path in root.iterdir()] == [memory_log.HOME])
