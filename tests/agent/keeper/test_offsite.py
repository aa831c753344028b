"""Copies that outlive the manager's machine: made beside training, and found when nothing else is left."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import msgspec
import pytest
from backups import disk, same, saved, vault_of
from crews import until
from memory_sink import MemorySink

from agent.checksum import Buffer, crc32c
from agent.errors import CheckpointError
from agent.keeper.storage import offsite
from agent.keeper.storage.offsite import Offsite, Storage
from agent.keeper.storage.recovery import DISK, OBJECT, Shelf, newest
from agent.keeper.storage.vault import Vault
from agent.keeper.storage.versions import save
from agent.messages import CheckpointCopied, CheckpointFailed, CheckpointWritten, CopyFailed, Report
from agent.store.archive import Archive, Mark
from agent.store.encoding.format import MANIFESTS, PARTS
from agent.store.errors import Full, Unavailable, Unknown
from agent.store.places.sinks import DiskSink, Read
from orchestrator.cli.command import CommandError
from orchestrator.cli.submit import stored_at
from orchestrator.client import Client, House

NOBODY = House(
    pid=1,
    redis_url="redis://127.0.0.1:1",
    dashboard_url="",
    ray_address="",
    local_cloud="",
    deployment="default",
    started_at_s=0.0,
)


def of(said: list[Report], kind: type) -> list[Report]:
    return [report for report in said if isinstance(report, kind)]


def copied_once(tmp_path: Path) -> tuple[Vault, Storage, list[Report]]:
    """A vault that has written version 5, a state of version 3 and two sums, of which that state has been copied."""
    said: list[Report] = []
    storage = Storage(url=(tmp_path / "elsewhere").as_uri(), every_s=300.0)
    vault = vault_of(tmp_path / "here", said, storage)
    assert vault.write(saved(3, redo=2))
    until("the copy", lambda: of(said, CheckpointCopied))
    return vault, storage, said


def test_what_is_written_is_copied_without_its_sums(tmp_path: Path) -> None:
    """The state goes to the storage beside the disk, at the version that it has itself."""
    vault, storage, said = copied_once(tmp_path)
    assert newest([Shelf(OBJECT, storage.archive("job"))], 0).saved == saved(3)
    assert vault.write(saved(7)), "not due"
    assert vault.write(saved(9, redo=1), last=True)
    until("the last copy", lambda: len(of(said, CheckpointCopied)) == 2)
    assert [mark.version for mark in storage.archive("job").marks()] == [9, 3]


def test_the_last_copy_is_waited_for_and_not_for_ever(tmp_path: Path) -> None:
    """Behind the report that a closed job is on the disk, whoever asked for it ends the machine."""
    vault, _, said = copied_once(tmp_path)
    assert vault.write(saved(9), last=True, copied_s=60.0)
    assert [type(report) for report in said[-2:]] == [CheckpointCopied, CheckpointWritten]
    away = tmp_path / "elsewhere"
    away.rename(tmp_path / "away")
    away.write_bytes(b"")
    assert vault.write(saved(12), last=True, copied_s=0.1)
    assert type(said[-1]) is CheckpointWritten


def test_a_version_that_was_there_already_is_copied_as_it_lies_there(tmp_path: Path) -> None:
    """A checkpoint, and the last one at the same step: one version, and the copy is of files that exist."""
    said: list[Report] = []
    vault = vault_of(tmp_path, said, Storage(url=(tmp_path / "elsewhere").as_uri(), every_s=300.0))
    assert vault.write(saved(3))
    until("the copy", lambda: of(said, CheckpointCopied))
    assert vault.write(saved(6)), "not due"
    assert vault.write(saved(6), last=True)
    until("the last copy", lambda: len(of(said, CheckpointCopied)) == 2 or of(said, CopyFailed))
    assert not of(said, CopyFailed)


def test_the_last_state_is_copied_though_its_version_was_written_with_sums(tmp_path: Path) -> None:
    """A checkpoint that fell due behind the last commit, and before the state that the workers gave at their end."""
    vault, storage, said = copied_once(tmp_path)
    assert vault.store(saved(5).backup) is not None
    until("the last copy", lambda: len(of(said, CheckpointCopied)) == 2 or of(said, CopyFailed))
    for archive in (disk(tmp_path / "here" / "job"), storage.archive("job")):
        assert same(newest([Shelf(DISK, archive)], 5).saved, saved(5))
    assert vault.store(saved(5).backup) is not None, "what is there is not written again"
    assert [mark.version for mark in disk(tmp_path / "here" / "job").marks()] == [5, 5]


def test_copies_go_on_when_a_fenced_keeper_begins_anew(tmp_path: Path) -> None:
    """Another keeper had the job for a while, and copied from a disk of its own: what the first one writes
    afterwards is copied again, above what both have copied before."""
    ours: list[Report] = []
    theirs: list[Report] = []
    storage = Storage(url=(tmp_path / "elsewhere").as_uri(), every_s=0.0)
    first = vault_of(tmp_path / "first", ours, storage)
    second = vault_of(tmp_path / "second", theirs, storage)
    assert first.write(saved(3))
    until("the first copy", lambda: of(ours, CheckpointCopied))
    second.begin_anew(3)
    assert second.write(saved(5))
    until("the other's copy", lambda: of(theirs, CheckpointCopied))
    first.begin_anew(5)
    assert first.write(saved(7))
    until("the last copy", lambda: len(of(ours, CheckpointCopied)) == 2 or of(ours, CopyFailed))
    assert of(ours, CopyFailed) == []
    assert [mark.version for mark in storage.archive("job").marks()] == [7, 5]


def test_a_version_that_the_disk_has_not_taken_is_copied_from_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk on the manager's machine must not take the copies elsewhere along."""
    vault, storage, said = copied_once(tmp_path)
    monkeypatch.setattr(vault.offsite, "_every_s", 0.0)
    vault.offsite._due_s = 0.0
    put, here = DiskSink.put, str(tmp_path / "here")

    def full(sink: DiskSink, key: str, pieces: Sequence[Buffer]) -> None:
        if sink.name.removeprefix("file://").startswith(here):
            raise Full(f"{key}: no space left on device")
        put(sink, key, pieces)

    with monkeypatch.context() as patch:
        patch.setattr(DiskSink, "put", full)
        assert not vault.write(saved(7, redo=2))
        until("the copy", lambda: len(of(said, CheckpointCopied)) == 2)
        assert not vault.write(saved(9), last=True, copied_s=60.0)
        assert [report.step for report in of(said, CheckpointCopied)] == [3, 7, 9]
    assert same(newest([Shelf(OBJECT, storage.archive("job"))], 9).saved, saved(9))
    marks = storage.archive("job").marks()
    assert len({mark.generation for mark in marks}) == 1, "it is the same writer"
    assert vault.write(saved(11), last=True, copied_s=60.0)
    assert same(newest([Shelf(OBJECT, storage.archive("job"))], 11).saved, saved(11))
    assert not of(said, CopyFailed)


def test_a_disk_that_was_full_from_the_start_keeps_no_copy_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "taken").write_bytes(b"")
    said: list[Report] = []
    storage = Storage(url=(tmp_path / "elsewhere").as_uri(), every_s=0.0)
    vault = vault_of(tmp_path / "taken", said, storage)
    for version in (3, 5):
        assert not vault.write(saved(version), copied_s=60.0)
    (tmp_path / "taken").unlink()
    assert vault.write(saved(7), last=True, copied_s=60.0)
    assert [report.step for report in of(said, CheckpointCopied)] == [3, 5, 7]
    assert same(newest([Shelf(OBJECT, storage.archive("job"))], 7).saved, saved(7))


class Rival(MemorySink):
    """Somebody else writes the same version while its parts are written here."""

    def __init__(self) -> None:
        super().__init__()
        self.rivals = 1

    def settle(self) -> None:
        if self.rivals:
            self.rivals -= 1
            save(Archive(self, "job"), 1, saved(4))


def test_of_two_writers_the_loser_names_what_the_winner_wrote() -> None:
    """What is copied or told of then is there; it used to name parts that were deleted again."""
    sink = Rival()
    manifest = save(Archive(sink, "job"), 1, saved(4))
    assert {part.key for part in manifest.parts} == sink.sizes(PARTS).keys()


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("harm", [Path.unlink, _flip])
def test_a_version_that_is_damaged_is_written_again(
    tmp_path: Path, harm: Callable[[Path], None]
) -> None:
    """Its manifest is there, and a file of it is not as it was: that is no version to rest on."""
    save(disk(tmp_path), 1, saved(4))
    harm(next((tmp_path / PARTS).glob("*/0-*")))
    save(disk(tmp_path), 1, saved(4))
    assert same(newest([Shelf(DISK, disk(tmp_path))], 4).saved, saved(4))


class Troubled(MemorySink):
    """A store that answers 503 for a while, or not at all until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.refusals, self.memory_errors, self.asked = 0, 0, False
        self.open_again = threading.Event()
        self.open_again.set()

    def put(self, key: str, pieces: object) -> None:
        self.asked = True
        self.open_again.wait()
        if self.memory_errors:
            self.memory_errors -= 1
            raise MemoryError
        if self.refusals:
            self.refusals -= 1
            raise Unavailable(f"{self.name}/{key}: 503 Service Unavailable")
        super().put(key, pieces)  # type: ignore[arg-type]


@pytest.fixture
def troubled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Troubled, list[Report], Offsite]:
    monkeypatch.setattr(offsite, "PAUSE_S", 0.01)
    sink, said = Troubled(), list[Report]()
    copies = Offsite("job", disk(tmp_path), lambda: Archive(sink, "job"), 0.0, said.append)
    return sink, said, copies


def test_a_store_that_answers_503_is_reported_and_tried_again(
    tmp_path: Path, troubled: tuple[Troubled, list[Report], Offsite]
) -> None:
    """One sentence for the failure, then the copy."""
    sink, said, copies = troubled
    sink.refusals = 2
    copies.offer(save(disk(tmp_path), 1, saved(4)), 0, last=False)
    until("the copy", lambda: of(said, CheckpointCopied))
    (failed,) = of(said, CopyFailed)
    assert "503 Service Unavailable" in failed.error  # type: ignore[attr-defined]


def test_a_copy_for_which_there_is_no_memory_is_reported_and_not_the_last_one(
    tmp_path: Path, troubled: tuple[Troubled, list[Report], Offsite]
) -> None:
    """All tries of one version fail for lack of memory; the next version is copied."""
    sink, said, copies = troubled
    sink.memory_errors = offsite.TRIES
    copies.offer(save(disk(tmp_path), 1, saved(4)), 0, last=False)
    until("the failure", lambda: of(said, CopyFailed) and not sink.memory_errors)
    assert of(said, CopyFailed)[0].error == "MemoryError"  # type: ignore[attr-defined]
    copies.offer(save(disk(tmp_path), 1, saved(5)), 0, last=False)
    until("the copy", lambda: of(said, CheckpointCopied))


class Forgetful(MemorySink):
    """A store that says of some files that it has taken them, and has not."""

    def __init__(self, lost: str) -> None:
        super().__init__()
        self.lost, self.left = lost, 1

    def _forgets(self, key: str) -> bool:
        forgets = key.startswith(f"{self.lost}/") and self.left > 0
        self.left -= forgets
        return forgets

    def put(self, key: str, pieces: Sequence[Buffer]) -> None:
        if not self._forgets(key):
            super().put(key, pieces)

    def create(self, key: str, data: bytes) -> bool:
        return self._forgets(key) or super().create(key, data)


@pytest.mark.parametrize("lost", [PARTS, MANIFESTS])
@pytest.mark.parametrize("in_memory", [False, True])
def test_what_a_store_only_says_that_it_has_taken_is_no_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: str, *, in_memory: bool
) -> None:
    """It is looked for before it counts and the copies before it go; what is not there is copied once more."""
    monkeypatch.setattr(offsite, "PAUSE_S", 0.01)
    sink, said = Forgetful(lost), list[Report]()
    copies = Offsite("job", disk(tmp_path), lambda: Archive(sink, "job"), 0.0, said.append)
    copies.offer(saved(4) if in_memory else save(disk(tmp_path), 1, saved(4)), 0, last=True)
    copies.wait(20.0)
    assert [report.step for report in of(said, CheckpointCopied)] == [4]  # type: ignore[attr-defined]
    (failed,) = of(said, CopyFailed)
    assert "is missing" in failed.error  # type: ignore[attr-defined]
    assert same(newest([Shelf(OBJECT, Archive(sink, "job"))], 4).saved, saved(4))


def test_a_store_that_hangs_holds_up_nothing(
    tmp_path: Path, troubled: tuple[Troubled, list[Report], Offsite]
) -> None:
    """Versions are written and pruned meanwhile; the one that is being copied stays, and the one that is next, which is
    the newest. None stays for their sake."""
    sink, said, copies = troubled
    sink.open_again.clear()
    source = copies._source
    for version in range(1, 8):
        copies.offer(save(source, 1, saved(version)), 0, last=False)
        if version == 1:
            until("the copy to begin", lambda: sink.asked)
    assert not of(said, CheckpointCopied)
    assert {path.name for path in (tmp_path / PARTS).iterdir()} == {
        f"{version:010d}" for version in (1, 6, 7)
    }
    sink.open_again.set()
    until("the newest copy", lambda: len(of(said, CheckpointCopied)) == 2)
    assert [report.step for report in of(said, CheckpointCopied)] == [1, 7]  # type: ignore[attr-defined]
    assert not of(said, CopyFailed)


def test_a_place_that_cannot_be_opened_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mistake in the address is a sentence; the disk has the version all the same."""
    monkeypatch.setattr(offsite, "PAUSE_S", 0.0)
    said: list[Report] = []
    vault = vault_of(tmp_path, said, Storage(url="file:///proc/nowhere", every_s=0.0))
    assert vault.write(saved(3))
    until("the failure", lambda: of(said, CopyFailed))
    assert not of(said, CheckpointFailed)


def test_the_newest_of_disk_and_storage_is_gone_on_from(tmp_path: Path) -> None:
    """Nobody gives up a step for a nearer copy; of equal ones the disk's is read."""
    here, there = disk(tmp_path / "here"), disk(tmp_path / "there")
    shelves = [Shelf(DISK, here), Shelf(OBJECT, there)]
    save(there, 1, saved(3))
    found = newest(shelves, 5)
    assert same(found.saved, saved(3))
    assert "from object storage; 2 committed steps are lost" in found.because
    save(here, 1, saved(3))
    assert "from local disk" in newest(shelves, 5).because
    save(here, 1, saved(3, redo=2))
    found = newest(shelves, 5)
    assert same(found.saved, saved(3, redo=2))
    assert "up to 2 steps applied again" in found.because


def test_a_damaged_version_on_the_disk_gives_way_to_the_copy(tmp_path: Path) -> None:
    """Flipped bytes are found while they are read, and the decision is made again."""
    here, there = disk(tmp_path / "here"), disk(tmp_path / "there")
    save(here, 1, saved(5))
    save(there, 1, saved(4))
    (victim,) = (tmp_path / "here" / PARTS).glob("*/0-*")
    victim.write_bytes(victim.read_bytes()[:-1] + b"?")
    found = newest([Shelf(DISK, here), Shelf(OBJECT, there)], 5)
    assert same(found.saved, saved(4))
    assert here.marks() == []


def test_a_copy_beyond_what_redis_knows_is_gone_on_from(tmp_path: Path) -> None:
    """Of a state folder that was put back an hour later: going on from its disk would make the newer copy void."""
    storage = Storage(url=(tmp_path / "there").as_uri(), every_s=0.0)
    vault = vault_of(tmp_path / "here", [], storage)
    save(disk(tmp_path / "here" / "job"), 1, saved(5))
    assert same(vault.recall(5, patient=True).saved, saved(5))
    save(storage.archive("job"), 1, saved(9))
    found = vault.recall(5, patient=True)
    assert same(found.saved, saved(9))
    assert "Redis knows only the first 5 commits, so it is an older copy" in found.because


def test_storage_has_to_answer_only_if_the_disk_does_not_have_it_all(tmp_path: Path) -> None:
    """A store that is away is no obstacle to a job whose disk is whole; without it, it is one."""
    storage = Storage(url="file:///proc/nowhere", every_s=0.0)
    vault = vault_of(tmp_path, [], storage)
    save(disk(tmp_path / "job"), 1, saved(5))
    assert same(vault.recall(5, patient=True).saved, saved(5))
    assert same(vault.recall(9, patient=False).saved, saved(5))
    assert vault_of(tmp_path / "empty", [], storage).recall(0, patient=True).saved is None


class BadDisk(DiskSink):
    """Of some files the disk gives an error, each time that they are read."""

    bad = ""

    @contextmanager
    def open(self, key: str) -> Iterator[Read]:
        self._touch(key)
        with super().open(key) as read:
            yield read

    def get(self, key: str) -> bytes:
        self._touch(key)
        return super().get(key)

    def sizes(self, prefix: str) -> dict[str, int]:
        self._touch(prefix)
        return super().sizes(prefix)

    def _touch(self, key: str) -> None:
        if self.bad and self.bad in key:
            raise Unavailable(f"{self.root / key}: Input/output error")


@pytest.mark.parametrize("bad", ["parts/0000000005/0-", "manifests/0000000005"])
def test_a_version_that_the_disk_does_not_give_is_passed_over_in_the_end(
    tmp_path: Path, bad: str
) -> None:
    """Whoever is patient is told of it; then it is the version before, and nothing is deleted for it."""
    sink = BadDisk(tmp_path)
    archive = Archive(sink, "job")
    for version in (3, 5):
        save(archive, 1, saved(version))
    sink.bad = bad
    shelves = [Shelf(DISK, archive)]
    with pytest.raises(Unavailable, match="Input/output error"):
        newest(shelves, 5)
    found = newest(shelves, 5, patient=False)
    assert same(found.saved, saved(3))
    assert "2 committed steps are lost" in found.because
    sink.bad = ""
    assert same(newest(shelves, 5).saved, saved(5))


@pytest.mark.parametrize("bad", ["parts/", "manifests", "fences"])
def test_a_disk_that_gives_nothing_is_not_an_empty_one(tmp_path: Path, bad: str) -> None:
    """The copy elsewhere will do, once nobody is patient any more; without one the job does not begin anew."""
    sink = BadDisk(tmp_path / "here")
    archive, there = Archive(sink, "job"), disk(tmp_path / "there")
    save(archive, 1, saved(5))
    sink.bad = bad
    shelves = [Shelf(DISK, archive), Shelf(OBJECT, there)]
    with pytest.raises(Unavailable, match="Input/output error"):
        newest(shelves, 5, patient=False)
    save(there, 1, saved(4))
    assert same(newest(shelves, 5, patient=False).saved, saved(4))


@pytest.mark.parametrize(
    "other",
    [('"format":2', '"format":3'), ('"format":2', '"format":1'), ('"dtype":"U8"', '"dtype":"F8"')],
)
def test_a_version_that_another_software_wrote_is_neither_passed_over_nor_deleted(
    tmp_path: Path, other: tuple[str, str]
) -> None:
    """A later one, or one whose sums lie otherwise. It is sound, and the newest: whoever cannot read it says so, and leaves it to who can."""
    archive = disk(tmp_path)
    for version in (3, 5):
        save(archive, 1, saved(version, redo=1))
    key = Mark(6, 1).key(MANIFESTS)
    envelope = msgspec.json.decode(archive.sink.get(key))
    body = msgspec.json.encode(envelope["manifest"]).replace(*(word.encode() for word in other))
    written = msgspec.json.encode({"crc32c": crc32c(0, body), "manifest": msgspec.Raw(body)})
    archive.sink.delete([key])
    archive.sink.create(key, written)
    for patient in (True, False):
        with pytest.raises(Unknown, match="start the version that wrote it"):
            newest([Shelf(DISK, archive)], 6, patient=patient)
    assert archive.sink.get(key) == written


def test_a_disk_that_gives_nothing_gives_way_to_the_storage(tmp_path: Path) -> None:
    """The whole way of it: three times the person hears of it, then the job goes on from the copy."""
    storage = Storage(url=(tmp_path / "there").as_uri(), every_s=0.0)
    vault = vault_of(tmp_path / "here", [], storage)
    save(storage.archive("job"), 1, saved(4))
    (tmp_path / "here" / "job").mkdir(parents=True)
    (tmp_path / "here" / "job" / "manifests").write_text("in the way")
    with pytest.raises(Unavailable, match="Not a directory"):
        vault.recall(5, patient=True)
    assert same(vault.recall(5, patient=False).saved, saved(4))


@pytest.mark.parametrize("patient", [True, False])
def test_what_the_disk_only_seemed_to_have_is_looked_for_elsewhere(
    tmp_path: Path, patient: bool
) -> None:
    """By its manifest the disk has it all, and its bytes are others: the copy is newer than what the disk has before it."""
    storage = Storage(url=(tmp_path / "there").as_uri(), every_s=0.0)
    vault = vault_of(tmp_path / "here", [], storage)
    here = disk(tmp_path / "here" / "job")
    for version in (3, 5):
        save(here, 1, saved(version))
    save(storage.archive("job"), 1, saved(4))
    (victim,) = (tmp_path / "here" / "job" / PARTS).glob("0000000005/0-*")
    victim.write_bytes(victim.read_bytes()[:-1] + b"?")
    assert same(vault.recall(5, patient=patient).saved, saved(4))


def test_a_job_goes_on_from_what_another_one_stored(tmp_path: Path) -> None:
    """A new job names the folder of an old one, and reads its newest version without changing it."""
    old = Archive(disk(tmp_path / "old").sink, "old")
    save(old, 1, saved(8))
    vault = vault_of(tmp_path / "here", [], from_url=(tmp_path / "old").as_uri())
    assert same(vault.recall(0, patient=True).saved, saved(8))
    assert old.marks() == [Mark(8, 1)]
    other = vault_of(tmp_path / "here", [], from_url="s4://nowhere/old")
    with pytest.raises(CheckpointError, match="s4://nowhere/old"):
        other.recall(0, patient=True)


def test_a_version_is_set_aside_between_two_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a commit could read the list of versions while one of them goes."""
    copies = Offsite("job", disk(tmp_path), partial(disk, tmp_path / "far"), 0.0, print)
    kept = save(disk(tmp_path / "far"), 1, saved(3))
    alone = list[bool]()
    aside = Archive.set_aside

    def seen(archive: Archive, mark: Mark, why: str) -> None:
        alone.append(copies._writing.locked())
        aside(archive, mark, why)

    monkeypatch.setattr(Archive, "set_aside", seen)
    copies.set_aside(kept.key, "a worker could not read it")
    assert alone == [True]
    assert disk(tmp_path / "far").marks() == []


@pytest.mark.parametrize("damaged", [False, True])
def test_a_job_goes_on_from_the_step_that_its_address_names_or_from_none(
    tmp_path: Path, damaged: bool
) -> None:
    """Neither a newer nor an older version takes its place: a person has chosen that one."""
    folder = tmp_path / "old"
    for version in (3, 5, 8):
        save(Archive(disk(folder).sink, "old", 3), 1, saved(version))
    named, lacking = f"{folder.as_uri()}#5", f"{folder.as_uri()}#4"
    vault = vault_of(tmp_path / "here", [], from_url=named)
    if damaged:
        (victim,) = (folder / PARTS).glob("*5/0-*")
        victim.write_bytes(victim.read_bytes()[:-1] + b"?")
        with pytest.raises(CheckpointError, match=r"nothing sound is stored at .*#5"):
            vault.recall(0, patient=True)
    else:
        assert same(vault.recall(0, patient=True).saved, saved(5))
    assert stored_at(named) == named
    with pytest.raises(CommandError, match="there are: 8, 5, 3"):
        stored_at(lacking)
    with pytest.raises(CheckpointError, match="nothing sound"):
        vault_of(tmp_path / "here", [], from_url=lacking).recall(0, patient=True)


@pytest.mark.parametrize("where", [f"{MANIFESTS}/*8-*", f"{PARTS}/*8/0-*"])
def test_what_is_damaged_at_an_earlier_job_is_passed_over_and_left_as_it_is(
    tmp_path: Path, where: str
) -> None:
    """It is somebody else's, who may mend it: what a new job goes on from is only read, by the command that names it as well.
    Whoever pays for steps that were paid for before is told why."""
    folder = tmp_path / "old"
    for version in (3, 8):
        save(Archive(disk(folder).sink, "old"), 1, saved(version))
    (victim,) = folder.glob(where)
    victim.write_bytes(victim.read_bytes()[:-1] + b"?")
    before = files_of(folder)
    assert stored_at(folder.as_uri()) == folder.as_uri()
    vault = vault_of(tmp_path / "here", [], from_url=folder.as_uri())
    for _ in range(2):
        found = vault.recall(0, patient=True)
        assert same(found.saved, saved(3))
        assert "; version 8 is damaged: " in found.because
    assert files_of(folder) == before


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("step", ["", "#8"])
@pytest.mark.parametrize("stored", [True, False])
def test_a_job_that_has_lost_all_of_its_own_goes_back_to_where_it_began(
    tmp_path: Path, step: str, stored: bool
) -> None:
    """Not to step 0, with or without a store of its own; and what it has of its own comes first, whatever it reaches."""
    old = disk(tmp_path / "job")
    save(old, 1, saved(8))
    storage = Storage(url=(tmp_path / "there").as_uri(), every_s=0.0) if stored else None
    vault = vault_of(tmp_path / "here", [], storage, from_url=old.sink.name + step)
    assert same(vault.recall(0, patient=True).saved, saved(8))
    found = vault.recall(20, patient=True)
    assert same(found.saved, saved(8))
    assert "12 committed steps are lost" in found.because
    own = storage.archive("job") if storage is not None else disk(tmp_path / "here" / "job")
    save(own, 1, saved(10))
    if not step:
        save(old, 1, saved(30))
    assert same(vault.recall(20, patient=True).saved, saved(10))


@pytest.mark.parametrize("patient", [True, False])
def test_a_job_does_not_go_back_to_where_it_began_while_its_own_cannot_be_read(
    tmp_path: Path, patient: bool
) -> None:
    """It may have all of the steps, and would lose them for good."""
    old = disk(tmp_path / "job")
    save(old, 1, saved(8))
    (tmp_path / "there").write_text("in the way")
    storage = Storage(url=(tmp_path / "there").as_uri(), every_s=0.0)
    vault = vault_of(tmp_path / "here", [], storage, from_url=old.sink.name)
    with pytest.raises(CheckpointError, match="there"):
        vault.recall(20, patient=patient)


def test_a_job_that_shall_go_on_from_what_is_not_there_does_not_begin_anew(tmp_path: Path) -> None:
    """Nobody pays for steps that were paid for before. Nor does it behind its first step, if all of its own is lost, too."""
    old = Archive(disk(tmp_path / "old").sink, "old")
    save(old, 1, saved(8))
    (manifest,) = (tmp_path / "old" / "manifests").iterdir()
    manifest.write_bytes(manifest.read_bytes()[:-9])
    for name in ("old", "nothing"):
        vault = vault_of(tmp_path / "here", [], from_url=(tmp_path / name).as_uri())
        for committed in (0, 5):
            with pytest.raises(CheckpointError, match=f"nothing sound is stored at file:.*{name}"):
                vault.recall(committed, patient=False)


def test_checkpoints_on_the_disk_are_listed_with_their_address(tmp_path: Path) -> None:
    """As the keeper wrote them; what is damaged is not among them, and a job without any has none."""
    folder = tmp_path / "checkpoints" / "job"
    archive = Archive(disk(folder).sink, "job", 3)
    for version in (3, 5, 8):
        save(archive, 1, saved(version))
    (victim,) = folder.glob(f"{MANIFESTS}/*8-*")
    victim.write_bytes(b"?")
    client = Client(NOBODY, tmp_path)
    found = client.checkpoints("job")
    assert [one.step for one in found] == [5, 3]
    assert found[0].uri == f"{folder.resolve().as_uri()}#5"
    assert stored_at(found[1].uri) == found[1].uri
    assert client.checkpoints("nobody") == []
