"""A clock of served tables is a version like any other: it is found again, or named if it does not fit."""

import errno
import threading
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from commit_logs import MemoryCommitLog
from crews import until
from players import House, Line

from agent.keeper import clocks
from agent.keeper import tables as tables_module
from agent.keeper.clocks import Clock, Copying, clock_of, saved_of, write_result
from agent.keeper.commits import Commit, History
from agent.keeper.member import Member
from agent.keeper.storage.offsite import Storage
from agent.keeper.storage.vault import Place, Vault
from agent.keeper.tables import Reached, Tables
from agent.layout import Layout, Replica
from agent.messages import CheckpointCopied, JobOrder, Report
from agent.paramserver.controller import Part
from agent.paramserver.live.plan import KEPT
from agent.paramserver.live.store import Folder
from agent.paramserver.messages import CONTROLLER, Join, Loaded, Push, Roll, Save, Section
from agent.protocol import Hello, Ready, Serving, Shape
from agent.store.errors import Unknown

PATIENCE_S = 20.0
WORKERS = ("one", "two")
SERVING = Serving(
    items=10,
    blocks=2,
    grains=1,
    batches=1,
    partitions=2,
    tables=(Shape("rows", 5, 2, 4, "float32"), Shape("any/keys", 0, 1, 1, "int64")),
)

ROLL = Roll(epoch=1, clock=4, owners=["w"], replicas=[KEPT], version=1, lost=[], restore=True)


def clock(number: int) -> Clock:
    """The second partition has none of the rows with any key."""
    rows = np.arange(20, dtype=np.float32).reshape(5, 4) + number
    return Clock(
        tuple(float(at) for at in range(number + 1)),
        [
            [
                Section("rows", np.arange(0, 5, 2), rows[::2]),
                Section("any/keys", np.array([4, 1 << 40]), np.array([[7], [-8]])),
            ],
            [
                Section("rows", np.arange(1, 5, 2), rows[1::2]),
                Section("any/keys", np.zeros(0, np.int64), np.zeros((0, 1), np.int64)),
            ],
        ],
    )


def alike(one: Clock, other: Clock) -> bool:
    sections = zip(chain(*one.partitions), chain(*other.partitions), strict=True)
    return one.measures == other.measures and all(
        (a.table, a.values.dtype) == (b.table, b.values.dtype)
        and np.array_equal(a.keys, b.keys)
        and np.array_equal(a.values, b.values)
        for a, b in sections
    )


def vault(folder: Path, said: list[Report]) -> Vault:
    order = JobOrder(job="job", script="train.py", script_sha="")
    storage = Storage(url=(folder / "elsewhere").as_uri(), every_s=0.1)
    return Vault(order, Place(checkpoints=folder / "checkpoints", storage=storage), said.append)


def written(tmp_path: Path, reached: Reached) -> Path:
    """The folder of a keeper that has come to this clock."""
    folder = tmp_path / "tables"
    folder.mkdir()
    fill(folder, reached.clock)
    (folder / "reached.json").write_bytes(msgspec.json.encode(reached))
    return folder


def fill(folder: Path, number: int) -> None:
    for partition, sections in enumerate(clock(number).partitions):
        Folder(str(folder)).write(partition, number, sections)


def test_what_was_copied_is_found_by_a_keeper_without_a_disk(tmp_path: Path) -> None:
    said: list[Report] = []
    copying = Copying(vault(tmp_path, said), 60.0, clock)
    copying.close(3)
    assert [report.step for report in said if isinstance(report, CheckpointCopied)] == [4]
    (tmp_path / "checkpoints").rename(tmp_path / "lost")
    found = vault(tmp_path, said).recall(4, patient=True)
    assert found.saved is not None
    assert "object storage" in found.because
    assert alike(clock_of(found.saved, SERVING), clock(3))


def test_a_clock_that_is_being_read_is_kept_until_it_was(tmp_path: Path) -> None:
    """It is asked for, so it is written although no other is due; then newer ones need not wait."""
    reading, goes_on = threading.Event(), threading.Event()

    def read(number: int) -> Clock:
        reading.set()
        assert goes_on.wait(PATIENCE_S)
        return clock(number)

    copying = Copying(vault(tmp_path, []), 60.0, read)
    copying.look(2)
    assert not reading.is_set()
    copying.ask()
    copying.look(2)
    assert reading.wait(PATIENCE_S)
    assert (copying.pinned(5), copying.pinned(1)) == (2, 1)
    goes_on.set()
    copying.close(2)
    assert copying.pinned(5) == 5


def test_a_requested_clock_that_could_not_be_read_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the manager, which waits for it, would wait until it gives up."""
    monkeypatch.setattr(clocks, "AGAIN_S", 0.0)
    tried: list[int] = []

    def read(number: int) -> Clock:
        tried.append(number)
        if len(tried) in (1, 3):
            raise OSError("on purpose")
        return clock(number)

    said: list[Report] = []
    copying = Copying(vault(tmp_path, said), 60.0, read)
    copying.ask()

    def copied() -> list[int]:
        copying.look(2)
        return [report.step for report in said if isinstance(report, CheckpointCopied)]

    assert until("the copy", copied) == [3]
    until("the thread to end", lambda: not copying._busy)
    copying.look(3)
    assert tried == [2, 2]

    copying.ask()  # for a clock that was written once

    def tries() -> list[int]:
        copying.look(2)
        return tried[2:] if len(tried) > 3 else []

    assert until("two more tries", tries) == [2, 2]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"partitions": 3}, "has 2 partitions, and this job 3"),
        ({"tables": SERVING.tables[:1]}, "other tables than this job"),
        (
            {"tables": (Shape("rows", 5, 2, 2, "float32"), SERVING.tables[1])},
            "rows of 4 float32 in rows, and this job of 2",
        ),
        (
            {"tables": (Shape("rows", 6, 2, 4, "float32"), SERVING.tables[1])},
            "other keys of table 'rows' than this job, which has 0 to 5",
        ),
        (
            {"tables": (Shape("rows", 4, 2, 4, "float32"), SERVING.tables[1])},
            "other keys of table 'rows' than this job, which has 0 to 3",
        ),
    ],
)
def test_tables_that_do_not_fit_the_job_are_named(changed: dict[str, object], said: str) -> None:
    with pytest.raises(Unknown, match=said):
        clock_of(saved_of(clock(1)), msgspec.structs.replace(SERVING, **changed))


MOMENTUM = Shape("rows", 5, 2, 4, "float32", "momentum")
CHANGED = [
    (Shape("rows", 5, 2, 4, "float32", "adagrad"), "2 float32 and the arrays of 'adagrad'"),
    (Shape("rows", 5, 4, 4, "float32"), "4 float32 and 4 columns"),
    (Shape("rows", 6, 2, 4, "float32", "momentum"), "6 keys"),
    (Shape("rows", 5, 2, 4, "int32", "momentum"), "2 int32 and"),
]


@pytest.mark.parametrize(("shape", "said"), CHANGED)
def test_a_table_that_is_declared_otherwise_now_is_named(shape: Shape, said: str) -> None:
    """Its rows would be read as something else: momentum as squares, or arrays as weights."""
    saved = saved_of(clock(1)._replace(tables=(MOMENTUM, SERVING.tables[1])))
    now = msgspec.structs.replace(SERVING, tables=(shape, SERVING.tables[1]))
    before = "version 2 has table 'rows' of 5 keys, 2 float32 and the arrays of 'momentum'"
    with pytest.raises(Unknown, match=f"{before}, and this job of .*{said}"):
        clock_of(saved, now)
    for still in (MOMENTUM, SERVING.tables[0]):  # an earlier worker does not name its rule
        assert clock_of(saved, msgspec.structs.replace(now, tables=(still, SERVING.tables[1])))


UNLIKE = [
    (
        {"tables": (CHANGED[2][0], SERVING.tables[1])},
        "and this job of 6 keys, 2 float32 and the arrays of 'momentum'; declare it as it was",
    ),
    ({"partitions": 3}, "has 2 partitions, and this job 3; start the job with those that it had"),
    ({"partitions": 1}, "has 2 partitions, and this job 1; start the job with those that it had"),
    ({"tables": (MOMENTUM,)}, "and table 'any/keys' is not there any more; declare it as it was"),
    (
        {"tables": (MOMENTUM, SERVING.tables[1], Shape("new", 1, 1, 1, "int8"))},
        "and table 'new' was not there; leave it out",
    ),
]


@pytest.mark.parametrize(("changed", "told"), UNLIKE)
def test_a_disk_with_tables_that_are_declared_otherwise_is_left_as_it_is(
    tmp_path: Path, changed: dict[str, object], told: str
) -> None:
    """The script reads its sizes from a file or its machine, perhaps, which has changed since."""
    reached = Reached(1, (0.0, 1.0), 5.0, (MOMENTUM, SERVING.tables[1]), partitions=2)
    folder = written(tmp_path, reached)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    said: list[tuple[str, bool]] = []
    owner: Any = Nobody()
    owner.broken = lambda why, *, unlike=False: said.append((why, unlike))
    serving = msgspec.structs.replace(
        SERVING, **{"tables": (MOMENTUM, SERVING.tables[1]), **changed}
    )
    tables = Tables(serving, history_of(2), folder, owner, vault(tmp_path, []), 60.0)
    until("the sentence", lambda: said, PATIENCE_S)
    tables.close()
    tables.put_away()
    ((why, unlike),) = said
    assert why.endswith(told)
    assert unlike
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


class Nobody:
    """The job of tables whose workers are all away."""

    def present(self) -> dict[str, Member]:
        return {}

    def broken(self, why: str, *, unlike: bool = False) -> None:
        raise AssertionError(why, unlike)

    recall_failed = unwritten = broken


def test_the_clock_that_the_disk_names_stays_until_a_newer_one_is_named(tmp_path: Path) -> None:
    """A keeper that dies in between finds it, though the next clock is on the disk as well."""
    folder, shape = tmp_path / "tables", Shape("rows", 5, 2, 2, "float64")
    serving = msgspec.structs.replace(SERVING, partitions=1, tables=(shape,))
    folder.mkdir()
    rows = Section("rows", np.arange(5), np.zeros((5, 2)))
    Folder(str(folder)).write(0, 4, [rows])
    (folder / "reached.json").write_bytes(msgspec.json.encode(Reached(4, (0.0,) * 5)))
    owner: Any = Nobody()
    history = History(MemoryCommitLog(), "job")
    tables = Tables(serving, history, folder, owner, vault(tmp_path, []), 60.0)
    tables._copies.take(CONTROLLER, ROLL)
    tables._copies.take("w", Push(epoch=1, partition=0, clock=5, sections=[rows]))
    tables._say(CONTROLLER, [(KEPT, Save(epoch=1, clock=5, saved=5))])
    until("the next clock", (folder / "0-5.npz").exists, PATIENCE_S)
    tables.close()
    assert (folder / "0-4.npz").exists()


def test_the_result_has_tables_of_any_names(tmp_path: Path) -> None:
    """Names are a person's, and come to the end of a job when all of its clocks are done."""
    names = ["file", "allow_pickle", "a/b", "self", "weights"]
    tables = {name: np.full((3, 2), at, np.float32) for at, name in enumerate(names)}
    write_result(tmp_path / "tables.npz", tables)
    with np.load(tmp_path / "tables.npz") as found:
        assert found.files == names
        assert all(np.array_equal(found[name], tables[name]) for name in names)


def test_measures_that_somebody_cut_or_took_are_written_again(tmp_path: Path) -> None:
    path, measures = tmp_path / "measures", [float(at) for at in range(9)]
    kept = clocks.Measures(path)
    for at, harm in enumerate([None, None, Path.unlink, None, _tear, _empty, None, None, None]):
        if harm is not None:
            harm(path)
        kept.add(at, measures[at : at + 1])
    again = clocks.Measures(path)
    again.recall(8, (), kept.checksum)
    assert again.up_to(8) == tuple(measures)


def test_a_clock_writes_down_its_own_measure_and_no_other(tmp_path: Path) -> None:
    """After a month there are millions; the next keeper, and one after an earlier version's, has them all."""
    history = History(MemoryCommitLog(), "job")
    folder = written(tmp_path, Reached(1, (0.0, 1.0)))
    measures = [0.0, 1.0, *(float(at) for at in range(2, 300))]
    owner: Any = Nobody()

    def opened() -> Tables:
        tables = Tables(SERVING, history, folder, owner, vault(tmp_path, []), 60.0)
        tables.close()
        return tables

    tables, sizes = opened(), set[int]()
    for at in range(2, 300):
        tables._reach(at, measures[at : at + 1], 1.0)
        sizes.add((folder / "reached.json").stat().st_size)
    assert max(sizes) - min(sizes) < len("300") + len(f"{1 << 32}")
    fill(folder, 299)
    assert opened()._measures.up_to(299) == tuple(measures)
    fill(folder, 199)
    tables._reach(0, measures[:200], 1.0)  # from an archive, after a loss of the disk
    assert (opened()._reached.clock, opened()._measures.up_to(300)) == (199, tuple(measures[:200]))


def test_tables_that_are_left_leave_no_thread(tmp_path: Path) -> None:
    """Neither when a keeper ends, nor when a newer one has taken the job over."""
    history, owner = History(MemoryCommitLog(), "job"), Nobody()
    tables = Tables(SERVING, history, tmp_path / "tables", owner, vault(tmp_path, []), 60.0)  # type: ignore[arg-type]
    tables.leave()
    threads = (tables._thread, tables._copies._thread)
    until("both threads to end", lambda: not any(thread.is_alive() for thread in threads))


class Timed(Nobody):
    """The job of tables that end by time; it keeps that they have ended."""

    def __init__(self, history: History) -> None:
        self._history, self.ended = history, list[str]()

    def reached(self, commit: Commit, *_: Any, **__: Any) -> None:
        self._history.note(commit)

    def recalled(self, version: int, because: str) -> None:
        assert version == 5, because

    def served(self, sha: str, where: str, why: str) -> None:
        self.ended.append(why)


@pytest.mark.parametrize("lost", ["keeper", "disk", "both"])
def test_a_job_that_ends_by_time_does_not_begin_it_anew_with_each_keeper(
    tmp_path: Path, lost: str
) -> None:
    """One whose keepers or machines go more often than that would cost without an end."""
    folder = tmp_path / "tables"
    serving = msgspec.structs.replace(SERVING, seconds=50.0)
    served = clock(4)._replace(elapsed_s=51.0)
    if lost != "keeper":  # the archives have it, and an older clock may be on the disk
        Copying(vault(tmp_path, []), 60.0, lambda _: served).close(4)
        (tmp_path / "checkpoints").rename(tmp_path / "lost")
    if lost != "both":
        number, elapsed_s = (4, 51.0) if lost == "keeper" else (1, 20.0)
        written(tmp_path, Reached(number, clock(number).measures, elapsed_s))
    history = history_of(5)
    owner: Any = Timed(history)
    tables = Tables(serving, history, folder, owner, vault(tmp_path, []), 60.0)
    replicas = (Replica(workers=("one",), first=0, count=2),)
    tables.enter(Layout(generation=1, microbatches=2, replicas=replicas))
    assert until("the end", lambda: owner.ended, PATIENCE_S) == ["50 s have passed"]
    tables.close()


class Present(Nobody):
    """The job of tables whose workers are here; it keeps what it is told of them."""

    def __init__(self) -> None:
        self.said: list[tuple[int, list[Part]]] = []

    def present(self) -> dict[str, Any]:
        return {"one": None, "two": None}

    def placed(self, stage: int, parts: list[Part]) -> None:
        self.said.append((stage, parts))


def test_who_serves_and_who_computes_is_told_when_it_begins(tmp_path: Path) -> None:
    owner: Any = Present()
    history = History(MemoryCommitLog(), "job")
    tables = Tables(SERVING, history, tmp_path / "tables", owner, vault(tmp_path, []), 60.0)
    replicas = tuple(Replica(workers=(name,), first=n, count=1) for n, name in enumerate(WORKERS))
    tables.enter(Layout(generation=1, microbatches=2, replicas=replicas))
    for name in WORKERS:
        join = Join(reliable=False, machine=name, allocation="spot")
        tables._acts.put(lambda name=name, join=join: tables._take(name, join))
    for name in WORKERS:
        tables._acts.put(lambda name=name: tables._take(name, Loaded(blocks=[0, 1])))
    until("who does what", lambda: owner.said, PATIENCE_S)
    tables.close()
    stage, parts = owner.said[-1]
    assert stage == 3
    assert parts[0] == Part(KEPT, reliable=True, serves=0, copies=2, blocks=0)
    assert [part.node for part in parts[1:]] == [*WORKERS]
    assert all((part.serves, part.blocks) == (1, 1) for part in parts[1:])


class Waiting(Nobody):
    """The job of tables whose archives are read for the first time."""

    def __init__(self) -> None:
        self.unread: list[str] = []
        self.because: list[str] = []
        self.from_versions: list[int] = []

    def recall_failed(self, error: str) -> None:
        self.unread.append(error)

    def recalled(self, version: int, because: str) -> None:
        self.because.append(because)
        self.from_versions.append(version)


def history_of(commits: int) -> History:
    history = History(MemoryCommitLog(), "job")
    for version in range(1, commits + 1):
        commit = Commit(generation=1, version=version)
        history.write(commit)
        history.note(commit)
    return history


@pytest.mark.parametrize("on_disk", [0, 5])
@pytest.mark.parametrize("end", ["close", "leave"])
def test_tables_that_end_while_nothing_can_be_read_keep_their_commits(
    tmp_path: Path, on_disk: int, end: str
) -> None:
    """The next keeper looks again for what they say; what an older disk has is not put over it in the archives."""
    Copying(vault(tmp_path, []), 60.0, clock).close(39)
    (tmp_path / "checkpoints").rename(tmp_path / "lost")
    (tmp_path / "elsewhere").rename(tmp_path / "away")
    (tmp_path / "elsewhere").write_text("in the way")
    folder, history = tmp_path / "tables", history_of(40)
    if on_disk:
        written(tmp_path, Reached(on_disk - 1, clock(on_disk - 1).measures))
    owner: Any = Waiting()
    tables = Tables(SERVING, history, folder, owner, vault(tmp_path, []), 60.0)
    until("a try", lambda: owner.unread, PATIENCE_S)
    getattr(tables, end)()
    tables._thread.join(PATIENCE_S)
    (tmp_path / "elsewhere").unlink()
    (tmp_path / "away").rename(tmp_path / "elsewhere")
    if end == "close":
        tables.put_away()
    assert history.version == 40

    tables = Tables(SERVING, history, folder, owner, vault(tmp_path, []), 60.0)
    until("what was copied", lambda: owner.from_versions, PATIENCE_S)
    tables.close()
    assert (owner.from_versions, history.version) == ([40], 40)


def test_a_clock_of_the_archives_that_the_disk_does_not_take_is_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As any other clock is when there is no room: the job waits for that, and does not fail."""
    monkeypatch.setattr(tables_module, "AGAIN_S", 0.01)
    Copying(vault(tmp_path, []), 60.0, clock).close(3)
    (tmp_path / "checkpoints").rename(tmp_path / "lost")
    write, full = Folder.write, OSError(errno.ENOSPC, "no room on purpose")
    taken: list[bool] = [True, False]  # so that one of its partitions is there already

    def refusing(folder: Folder, *sections: Any) -> None:
        if taken and not taken.pop(0):
            raise full
        write(folder, *sections)

    monkeypatch.setattr(Folder, "write", refusing)
    owner: Any = Waiting()
    folder = tmp_path / "tables"
    tables = Tables(SERVING, history_of(4), folder, owner, vault(tmp_path, []), 60.0)
    until("what was copied", lambda: owner.from_versions, PATIENCE_S)
    tables.close()
    assert (owner.from_versions, len(owner.unread)) == ([4], 1)
    assert "no room on purpose" in owner.unread[0]
    assert alike(tables._clock(3), clock(3))


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) * 3 // 5] ^= 4
    path.write_bytes(data)


def _tear(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("copied", [True, False])
@pytest.mark.parametrize("harm", [_flip, _tear, _empty, Path.unlink])
@pytest.mark.parametrize("victim", ["reached.json", "measures", "1-6.npz"])
def test_a_clock_that_is_damaged_gives_way_to_a_copy(
    tmp_path: Path, victim: str, harm: Callable[[Path], None], *, copied: bool
) -> None:
    """Without one, it is said from which step the job would begin; no worker is blamed."""
    folder, owner = written(tmp_path, Reached(5, clock(5).measures)), Waiting()
    here: Any = owner
    tables = Tables(SERVING, history_of(6), folder, here, vault(tmp_path, []), 60.0)
    tables.close()
    fill(folder, 6)
    tables._reach(6, (6.0,), 1.0)
    if copied:
        Copying(vault(tmp_path, []), 60.0, clock).close(3)
    harm(folder / victim)
    history = history_of(7)
    tables = Tables(SERVING, history, folder, here, vault(tmp_path, []), 60.0)
    until("what it goes on from", lambda: owner.from_versions, PATIENCE_S)
    tables.close()
    assert owner.from_versions == [4 if copied else 0]
    assert history.version == (4 if copied else 0)
    assert copied == ("3 committed steps are lost" in owner.because[0])
    assert not copied or alike(tables._clock(3), clock(3))
    assert (victim in owner.because[0]) == ((victim, harm) != ("reached.json", Path.unlink))


def test_the_tables_of_another_job_are_not_gone_on_with(tmp_path: Path) -> None:
    folder, owner = written(tmp_path, Reached(5, clock(5).measures, job="other")), Waiting()
    here: Any = owner
    tables = Tables(SERVING, history_of(4), folder, here, vault(tmp_path, []), 60.0)
    until("what it goes on from", lambda: owner.from_versions, PATIENCE_S)
    tables.close()
    assert owner.from_versions == [0]
    assert owner.because[0].endswith("reached.json is of other")


def test_tables_that_cannot_go_on_fail_the_job_whoever_comes_next(tmp_path: Path) -> None:
    """No worker is there at that moment for whom the failure could be reported."""
    house = House(tmp_path)
    ready = Ready(microbatches=1, steps_total=1, state_bytes=0, serving=SERVING)

    def comes(name: str) -> None:
        hello = Hello(job="job", worker=name, machine_id=name, mesh_address="")
        member = house.job.join(Line(), hello)  # type: ignore[arg-type]
        assert member is not None
        house.job.receive(member, ready, memoryview(b""))
        if name == "a":
            house.job.leave(member, "connection", "it was killed")

    try:
        comes("a")
        served = house.job._served
        assert served is not None
        served.broken("the keeper cannot go on with the tables")
        assert not house.failed
        comes("b")
        house.job.tick(0.0, 0.0)
        house.job.tick(0.0, 0.0)
        assert house.failed == ["the keeper cannot go on with the tables"]
        comes("c")
        comes("d")  # otherwise they would wait for a first step that nobody begins
        house.job.tick(0.0, 0.0)
        assert house.failed == ["the keeper cannot go on with the tables"] * 3
    finally:
        house.job.close()
