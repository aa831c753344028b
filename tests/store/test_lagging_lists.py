"""A store whose lists lag behind, or that denies once what it has just taken: no version is lost by that."""

import pytest
from memory_sink import MemorySink
from states import make_state, read_state, tensors_of, write_state

from agent.store.archive import Archive
from agent.store.encoding.format import FENCES, MANIFESTS, PARTS
from agent.store.errors import Damaged
from agent.store.places.sinks import Sink


def save(archive: Archive, version: int, generation: int = 1) -> bool:
    state = make_state(version)
    return archive.commit(write_state(archive.sink, state, archive.job, version, generation))


def whole(sink: Sink) -> list[int]:
    """The versions of which all can be read, by a reader whose lists are true."""
    sink.unlisted = set()
    archive = Archive(sink, "job")
    versions = [manifest.version for manifest in archive.sound()]
    for manifest in archive.sound():
        assert read_state(sink, manifest) == tensors_of(make_state(manifest.version))
    return versions


class Lagging(MemorySink):
    """Its lists lack some files, the first `true` of them excepted."""

    def __init__(self) -> None:
        super().__init__()
        self.unlisted: set[str] = set()
        self.true = 0

    def sizes(self, prefix):
        found = super().sizes(prefix)
        if prefix != MANIFESTS:
            return found
        self.true -= 1
        return {
            key: size for key, size in found.items() if self.true >= 0 or key not in self.unlisted
        }


def newest_key(sink: MemorySink) -> str:
    return max(MemorySink.sizes(sink, MANIFESTS))


def test_a_sweep_spares_a_version_that_its_writer_has_just_made():
    """At the end of a job it follows upon the last version, whose files would go."""
    sink = Lagging()
    archive = Archive(sink, "job")
    generation = archive.take_over(0)
    for version in (3, 4):
        assert save(archive, version, generation)
    sink.unlisted = {newest_key(sink)}
    archive.sweep(generation)
    assert whole(sink) == [4, 3]


@pytest.mark.parametrize("true", range(6))
def test_pruning_spares_a_version_that_not_every_list_has(true):
    """It is of an earlier writer, from which this one goes on; lists are of several servers of the store."""
    sink = Lagging()
    earlier = Archive(sink, "job")
    generation = earlier.take_over(0)
    for version in (3, 4, 5):
        assert save(earlier, version, generation)
    sink.unlisted, sink.true = {newest_key(sink)}, true
    archive = Archive(sink, "job")
    archive.prune(generation)
    assert whole(sink)[:2] == [5, 4]


class Denying(MemorySink):
    """What was just written is said to be missing, once."""

    def __init__(self) -> None:
        super().__init__()
        self._denied: set[str] = set()

    def _view(self, key):
        if key not in self._denied:
            self._denied.add(key)
            raise Damaged(f"{self.name}/{key} is missing")
        return super()._view(key)


def test_a_version_that_is_denied_once_is_made():
    sink = Denying()
    archive = Archive(sink, "job")
    assert save(archive, 3)
    assert save(archive, 4)
    assert [manifest.version for manifest in Archive(sink, "job").sound()] == [4, 3]
    assert not MemorySink.sizes(sink, "bad")
    assert MemorySink.sizes(sink, PARTS)
    assert not MemorySink.sizes(sink, FENCES)
