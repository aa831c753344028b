"""Which versions exist, which count, and that nobody can break what another has written."""

import random
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st
from memory_sink import MemorySink
from states import make_state, read_state, tensors_of, write_state

from agent.store.archive import TRIES, Archive, Mark, copy, counts
from agent.store.encoding.format import CLAIMS, FENCES, FLOORS, MANIFESTS, PARTS, encode
from agent.store.errors import CheckpointError, Damaged, Full, Outdated
from agent.store.places.sinks import DRAFT, DiskSink


def save(archive, version, generation=1, seed=None):
    """Write and commit a version whose bytes follow from its number."""
    state = make_state(version if seed is None else seed)
    manifest = write_state(archive.sink, state, archive.job, version, generation)
    return manifest if archive.commit(manifest) else None


def begin(archive, generation, version):
    """Fence off what older generations write after this version, as `take_over` does for a generation that it chooses."""
    archive.sink.create(Mark(version, generation).key(FENCES), b"{}")


def check_newest(archive, version):
    """The newest version is this one, and all of it can be read."""
    manifest = archive.newest()
    assert manifest is not None
    assert manifest.version == version
    assert read_state(archive.sink, manifest) == tensors_of(make_state(version))


def test_the_newest_whole_version_is_found(sink):
    """On every sink: nothing at first, then always the version that was committed last."""
    archive = Archive(sink, "job")
    assert archive.newest() is None
    begin(archive, 1, 0)
    for version in (3, 5, 9):
        assert save(archive, version)
        check_newest(Archive(sink, "job"), version)
    assert archive.newest(not_above=5).version == 5


def test_parts_without_a_manifest_are_no_version(sink):
    """A writer that died before its manifest has written nothing."""
    archive = Archive(sink, "job")
    save(archive, 3)
    write_state(sink, make_state(8), version=8)
    check_newest(archive, 3)


@pytest.mark.parametrize("harm", ["flip manifest", "cut manifest", "cut part", "remove part"])
def test_the_version_before_a_damaged_one_is_used(sink, harm):
    """Whatever happened to the newest version, it is set aside and the one before it is read."""
    archive = Archive(sink, "job")
    save(archive, 3)
    manifest = save(archive, 4)
    key = manifest.key if "manifest" in harm else manifest.parts[-1].key
    content = bytearray(sink.get(key))
    sink.delete([key])
    if "flip" in harm:
        content[len(content) // 2] ^= 1
        sink.put(key, [content])
    elif "cut" in harm:
        sink.put(key, [content[: len(content) // 2]])
    check_newest(archive, 3)
    assert [mark.version for mark in archive.marks()] == [3]


def test_a_flip_in_a_part_is_found_by_reading_and_set_aside_by_the_reader():
    """Lengths are checked at once, contents while they are read; then the one before is next."""
    sink = MemorySink()
    archive = Archive(sink, "job")
    save(archive, 3)
    manifest = save(archive, 4)
    key = manifest.parts[0].key
    content = bytearray(sink.get(key))
    content[-1] ^= 1
    sink.delete([key])
    sink.put(key, [content])
    found = archive.newest()
    assert found == manifest
    with pytest.raises(Damaged, match="checksum") as caught:
        read_state(sink, found)
    archive.set_aside(Mark(4, 1), str(caught.value))
    check_newest(archive, 3)


class Spoiling(MemorySink):
    """What is read of some files is spoilt on its way, for the first so many reads."""

    victim, left = "", 0

    def _view(self, key):
        view = super()._view(key)
        if not self.victim or self.victim not in key or not self.left:
            return view
        self.left -= 1
        content = bytearray(view)
        content[-1] ^= 1
        return memoryview(content)


@pytest.mark.parametrize("victim", [MANIFESTS, PARTS])
def test_a_read_that_is_spoilt_on_its_way_costs_no_version(victim):
    """What is stored is whole, so the next read is: nobody goes back to the version before."""
    sink = Spoiling()
    archive = Archive(sink, "job")
    save(archive, 3)
    save(archive, 4)
    sink.victim, sink.left = victim, 1
    check_newest(archive, 4)
    assert not sink.left
    check_newest(Archive(sink, "job"), 4)


def test_what_seemed_damaged_for_a_while_is_found_when_nothing_else_is_left():
    """What answers in place of the store, or what its reader's memory makes of it, is not what is stored."""
    sink = Spoiling()
    archive = Archive(sink, "job")
    save(archive, 3)
    save(archive, 4)
    sink.victim, sink.left = MANIFESTS, 4
    assert archive.newest() is None
    assert archive.newest() is None
    assert Archive(sink, "job").marks() == []
    check_newest(Archive(sink, "job"), 4)
    save(archive, 5)
    check_newest(Archive(sink, "job"), 5)
    assert [mark.version for mark in Archive(sink, "job").marks()] == [5]


def test_a_version_that_was_set_aside_may_be_written_again():
    """By its own writer, whose memory has it whole; and it makes way as others do."""
    sink = MemorySink()
    archive = Archive(sink, "job", keep=1)
    save(archive, 3)
    archive.set_aside(Mark(3, 1), "a flipped bit")
    save(archive, 3)
    check_newest(archive, 3)
    check_newest(Archive(sink, "job"), 3)
    archive.set_aside(Mark(3, 1), "another")
    save(archive, 4)
    archive.prune(1)
    assert [*sink.sizes(MANIFESTS)] == [Mark(4, 1).key(MANIFESTS)]
    assert archive.sweep(1) is False


def test_of_two_writers_of_a_version_one_wins(sink):
    """The second to commit hears that it lost, its parts go, and the winner's state is whole."""
    one, two = Archive(sink, "job"), Archive(sink, "job")
    first = write_state(sink, make_state(4), version=4)
    second = write_state(sink, make_state(99), version=4)
    assert one.commit(first)
    assert not two.commit(second)
    check_newest(two, 4)
    assert set(sink.sizes(PARTS)) == {part.key for part in first.parts}


def test_a_commit_whose_answer_was_lost_may_be_repeated(sink):
    """The same manifest twice is one commit, and both callers are told that it is there."""
    archive = Archive(sink, "job")
    manifest = write_state(sink, make_state(4), version=4)
    assert archive.commit(manifest)
    assert archive.commit(manifest)
    check_newest(archive, 4)


def test_an_older_generation_is_refused(sink):
    """After generation 2 began at version 5, generation 1 commits nothing newer than that."""
    old, new = Archive(sink, "job"), Archive(sink, "job")
    begin(old, 1, 0)
    begin(new, 2, 5)
    with pytest.raises(Outdated, match="version 6 of generation 1 comes too late"):
        save(old, 6)
    assert save(old, 5), "what was committed before the change still counts"
    assert save(new, 6, generation=2)
    check_newest(new, 6)
    assert {key.split("/")[1] for key in sink.sizes(PARTS)} == {"0000000005", "0000000006"}


def test_a_ghost_that_writes_its_manifest_late_does_not_count():
    """Even a manifest that slips in between fence and check is void, by rule and not by luck."""
    sink = MemorySink()
    ghost = write_state(sink, make_state(1), version=7, generation=1)
    new = Archive(sink, "job")
    begin(new, 2, 5)
    save(new, 6, generation=2)
    sink.create(ghost.key, encode(ghost))
    check_newest(new, 6)


def test_a_job_that_was_set_back_goes_on_from_there():
    """Versions that were written before the rewind are void; the new ones count."""
    sink = MemorySink()
    archive = Archive(sink, "job")
    for version in (10, 20, 30):
        save(archive, version)
    begin(archive, 2, 10)
    check_newest(archive, 10)
    save(archive, 15, generation=2)
    archive.prune()
    check_newest(archive, 15)
    begin(archive, 3, 0)
    assert archive.newest() is None
    save(archive, 2, generation=3)
    check_newest(archive, 2)


def test_pruning_keeps_the_newest_and_their_files(sink):
    """After many versions, two are left, whole, and nothing else takes room."""
    archive = Archive(sink, "job", keep=2)
    for generation in (1, 2, 3):
        begin(archive, generation, generation * 10 - 10)
        for version in range(generation * 10 - 9, generation * 10 + 1, 3):
            save(archive, version, generation)
            archive.prune()
    check_newest(archive, 30)
    kept = [archive.read(mark) for mark in archive.marks()]
    assert [manifest.version for manifest in kept] == [30, 27]
    named = {part.key for manifest in kept for part in manifest.parts}
    assert set(sink.sizes(PARTS)) == named
    assert len(sink.sizes(FENCES)) <= 2
    assert len(sink.sizes(FLOORS)) == 1


def test_what_is_being_read_stays_and_what_came_after_it_does_not(sink):
    """However long the reading takes: its files are spared, and nothing else is kept for its sake."""
    archive = Archive(sink, "job", keep=2)
    slow = save(archive, 1)
    archive.pinned = frozenset([1])
    for version in range(2, 9):
        save(archive, version)
        archive.prune()
    named = {part.key for mark in archive.marks() for part in archive.read(mark).parts}
    assert set(sink.sizes(PARTS)) == named | {part.key for part in slow.parts}
    assert [mark.version for mark in archive.marks()] == [8, 7]
    archive.pinned = frozenset()
    archive.prune()
    assert set(sink.sizes(PARTS)) == named


def test_what_a_branch_begins_from_counts_until_it_has_begun(sink):
    """It is read like the newest, although newer ones came; those between it and them go as always."""
    archive = Archive(sink, "job", keep=2)
    branched = save(archive, 1)
    archive.branched = {1}
    for version in range(2, 9):
        save(archive, version)
        archive.prune()
    assert [mark.version for mark in archive.marks()] == [8, 7, 1]
    assert Archive(sink, "job", ours=False).newest(1) == branched
    named = {part.key for mark in archive.marks() for part in archive.read(mark).parts}
    assert set(sink.sizes(PARTS)) == named
    archive.branched = set()
    archive.prune()
    assert [mark.version for mark in archive.marks()] == [8, 7]
    assert {key.split("/")[1] for key in sink.sizes(PARTS)} == {"0000000007", "0000000008"}


def test_a_named_version_is_read_however_many_newer_ones_are_kept(disk):
    """As many are looked at as a job keeps at most, and what a branch begins from lies behind those."""
    archive = Archive(disk, "job", keep=TRIES)
    branched = save(archive, 1)
    archive.branched = {1}
    for version in range(2, TRIES + 2):
        save(archive, version)
    archive.prune()
    assert len(archive.marks()) == TRIES + 1
    assert Archive(disk, "job", ours=False).newest(1) == branched


def test_a_damaged_version_that_a_branch_begins_from_does_not_hinder_pruning(sink):
    archive = Archive(sink, "job", keep=2)
    key = save(archive, 1).key
    sink.delete([key])
    sink.create(key, b"{")
    archive.branched = {1}
    for version in range(2, 5):
        save(archive, version)
    archive.prune()
    assert [mark.version for mark in archive.marks()][:2] == [4, 3]
    assert "0000000002" not in {key.split("/")[1] for key in sink.sizes(PARTS)}


def test_what_nobody_names_is_swept(disk):
    """What killed writers have left goes, drafts too; versions, what is being read, and files of others stay."""
    archive = Archive(disk, "job")
    generation = archive.take_over(0)
    whole = save(archive, 3, generation)
    write_state(disk, make_state(9), version=4)
    reading = write_state(disk, make_state(9), version=2)
    archive.pinned = frozenset([2])
    (disk.root / f"{PARTS}/0000000004/a.0badcafe{DRAFT}").write_bytes(b"half")
    (disk.root / f"{PARTS}/notes.txt").write_bytes(b"somebody's own")
    assert archive.sweep(generation)
    stay = {part.key for part in (*whole.parts, *reading.parts)}
    assert set(disk.sizes(PARTS)) == stay | {f"{PARTS}/notes.txt"}
    assert not archive.sweep(generation)
    archive.prune()
    check_newest(archive, 3)


def test_who_was_replaced_sweeps_nothing(sink):
    """The newer writer's files have no manifest yet."""
    old, new = Archive(sink, "job"), Archive(sink, "job")
    generation = old.take_over(0)
    new.take_over(5)
    write_state(sink, make_state(6), version=6)
    before = sink.sizes(PARTS)
    assert not old.sweep(generation)
    assert sink.sizes(PARTS) == before


class Lagging(MemorySink):
    """It lists what there was when it last looked."""

    seen = None

    def sizes(self, prefix):
        now = super().sizes(prefix)
        if self.seen is None:
            return now
        return {key: size for key, size in now.items() if key in self.seen}

    def look(self, *folders):
        self.seen = {key for folder in folders for key in super(Lagging, self).sizes(folder)}


def test_a_list_that_lags_behind_damages_nothing():
    """A part that is not listed yet is asked for itself: its version is not set aside."""
    sink = Lagging()
    archive = Archive(sink, "job")
    save(archive, 3)
    save(archive, 4)
    sink.look(MANIFESTS)
    check_newest(archive, 4)
    assert [mark.version for mark in archive.marks()] == [4, 3]


def test_a_list_that_lags_behind_keeps_nobody_from_beginning():
    """Claims that are not listed yet are found taken, one after the other."""
    sink = Lagging()
    taken = [Archive(sink, "job").take_over(0) for _ in range(2)]
    sink.look()
    assert Archive(sink, "job").take_over(5) not in taken


def test_a_slow_writer_below_the_floor_does_no_harm():
    """Its parts were pruned while it wrote; its manifest is refused, or void if it slips in."""
    sink = MemorySink()
    archive = Archive(sink, "job", keep=1)
    slow = write_state(sink, make_state(3), version=3)
    save(archive, 8)
    archive.prune()
    assert set(sink.sizes(PARTS)).isdisjoint(part.key for part in slow.parts)
    with pytest.raises(Outdated):
        archive.commit(slow)
    sink.create(slow.key, encode(slow))
    assert [mark.version for mark in archive.marks()] == [8]
    check_newest(archive, 8)


class Interrupting(MemorySink):
    """Before the first file of a folder is created, or the first time that it is listed, somebody else acts."""

    def __init__(self, folder, act):
        super().__init__()
        self._folder, self._act = folder, act

    def create(self, key, data):
        if key.startswith(self._folder) and self._act is not None:
            act, self._act = self._act, None
            act(self)
        return super().create(key, data)

    def sizes(self, prefix):
        if prefix == self._folder == PARTS and self._act is not None:
            act, self._act = self._act, None
            act(self)
        return super().sizes(prefix)


@pytest.mark.parametrize("folder", [CLAIMS, FENCES])
def test_of_two_who_take_over_at_once_each_has_a_generation_of_its_own(folder):
    """They go on from two versions, and so their fences are two files: what one of them writes is void all the same."""
    taken = []
    sink = Interrupting(folder, lambda sink: taken.append(Archive(sink, "job").take_over(5)))
    taken.append(Archive(sink, "job").take_over(3))
    assert len(set(taken)) == 2
    for generation in taken:
        with suppress(Outdated):
            save(Archive(sink, "job"), 7, generation)
    assert [mark.generation for mark in Archive(sink, "job").marks()] == [max(taken)]


@pytest.mark.parametrize("folder", [FLOORS, PARTS])
def test_a_ghost_that_prunes_late_deletes_nothing_of_a_newer_generation(folder):
    """It was held up before its floor or behind it; meanwhile the job went back, and on from there: those files lie below it."""

    def go_on(sink):
        newer = Archive(sink, "job")
        assert save(newer, 4, newer.take_over(3))

    sink = Interrupting(folder, go_on)
    ghost = Archive(sink, "job", keep=1)
    generation = ghost.take_over(0)
    for version in (3, 6):
        save(ghost, version, generation)
    ghost.prune()
    check_newest(Archive(sink, "job"), 4)


class Dies(Exception):  # noqa: N818 - it names what happened
    """The machine went away here."""


class Mortal(MemorySink):
    """A memory sink whose owner dies after so many changes."""

    def __init__(self, files, left):
        super().__init__()
        self._files, self._left = files, left

    def _spend(self):
        self._left -= 1
        if self._left < 0:
            raise Dies

    def put(self, key, pieces):
        self._spend()
        super().put(key, pieces)

    def create(self, key, data):
        self._spend()
        return super().create(key, data)

    def delete(self, keys):
        for key in keys:
            self._spend()
            super().delete([key])


@given(st.integers(0, 10**6))
def test_death_at_any_change_leaves_a_whole_version(seed):
    """Writers die at every single change, in saves and prunes; what was committed is never lost."""
    draw = random.Random(seed)
    files, committed = {}, []
    for generation in range(1, 6):
        archive = Archive(Mortal(files, draw.randint(0, 40)), "job", keep=draw.randint(1, 3))
        try:
            last = committed[-1] if committed else 0
            begin(archive, generation, last)
            for version in range(last + 1, last + 8):
                if save(archive, version, generation):
                    committed.append(version)
                archive.prune()
        except Dies:
            pass
        safe = Archive(Mortal(files, 10**6), "job")
        if committed or safe.newest() is not None:
            newest = safe.newest().version
            # The answer to the last create may have died with its writer.
            assert newest - (committed[-1] if committed else 0) in (0, 1)
            check_newest(safe, newest)
            committed.append(newest)
        for mark in safe.marks():
            assert read_state(safe.sink, safe.read(mark)) == tensors_of(make_state(mark.version))


@given(st.data())
def test_dropping_covered_fences_changes_nothing(data):
    """Pruned fences and floors said nothing that those that are kept do not say as well."""
    marks = st.builds(Mark, st.integers(0, 12), st.integers(0, 6))
    fences = data.draw(st.lists(marks, max_size=6))
    floor = data.draw(marks)
    below = [fence for fence in fences if fence.version < floor.version]
    last = max((fence.generation for fence in below), default=0)
    kept = [fence for fence in fences if fence not in below or fence.generation == last]
    ghost = data.draw(marks)
    if ghost.generation <= floor.generation:
        assert counts(ghost, fences, [floor]) == counts(ghost, kept, [floor])


def test_a_version_is_carried_from_sink_to_sink(disk):
    """What the backup tier holds goes to disk and elsewhere as it is, and twice is once."""
    memory, other = MemorySink(), MemorySink()
    backup = Archive(memory, "job")
    manifest = save(backup, 4)
    targets = [Archive(disk, "job"), Archive(other, "job")]
    for _ in range(2):
        copy(manifest, memory, targets)
        for target in targets:
            check_newest(target, 4)
    assert disk.get(manifest.key) == memory.get(manifest.key)


def test_half_a_file_is_no_copy(disk):
    """Somebody else's tool has left the first half of a part where the copy goes: it is written again."""
    memory = MemorySink()
    manifest = save(Archive(memory, "job"), 4)
    part = max(manifest.parts, key=lambda part: part.file_bytes)
    disk.put(part.key, [memory.get(part.key)[: part.file_bytes // 2]])
    copy(manifest, memory, [Archive(disk, "job")])
    check_newest(Archive(disk, "job"), 4)


def test_a_damaged_copy_is_not_carried_on(disk):
    """Bytes that lost their checksum in one sink do not reach the next."""
    memory = MemorySink()
    manifest = save(Archive(memory, "job"), 4)
    key = manifest.parts[0].key
    content = bytearray(memory.get(key))
    content[-1] ^= 1
    memory.delete([key])
    memory.put(key, [content])
    with pytest.raises(Damaged, match="checksums"):
        copy(manifest, memory, [Archive(disk, "job")])
    assert Archive(disk, "job").newest() is None


def test_another_jobs_manifest_is_not_ours(tmp_path):
    """A folder that holds another job's state is said to, and not loaded."""
    sink = DiskSink(tmp_path)
    save(Archive(sink, "theirs"), 4)
    with pytest.raises(CheckpointError, match="belongs to job theirs, not ours"):
        Archive(sink, "ours").newest()
    assert sink.sizes(MANIFESTS)


def test_a_share_that_does_not_fit_leaves_nothing_behind():
    """A disk that is full in the middle of a share is not filled with its first half."""

    class Small(MemorySink):
        def put(self, key, pieces):
            if len(self._files) == 2:
                raise Full("scripted: no room")
            super().put(key, pieces)

    sink = Small()
    with pytest.raises(Full):
        write_state(sink, make_state(4, layers=5), holders=1)
    assert sink.sizes(PARTS) == {}
