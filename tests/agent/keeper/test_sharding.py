"""A state that workers write into the store: when, how fast, and what becomes of it on a bad day."""

import math
import threading
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from backups import vault_of
from crews import until
from s3_server import S3Server, s3_sink

from agent.errors import WireError
from agent.keeper.proofs import Question
from agent.keeper.storage import sharding, versions
from agent.keeper.storage.backup import LoggedSum
from agent.keeper.storage.offsite import Storage
from agent.keeper.storage.sharding import Passing, between, replay
from agent.keeper.storage.vault import Vault
from agent.layout import data_parallel
from agent.messages import BackupHeld, CheckpointFailed, Report
from agent.protocol import PROVING, Digest, Prepared, Reached, Snapshot, Unread
from agent.store.archive import Archive
from agent.store.encoding.format import MANIFESTS, PARTS
from agent.store.errors import Full, Unavailable
from agent.store.layers import LiveLayer, collect, share_of
from agent.store.memory import Again, Copying
from agent.store.places import objects
from agent.store.places.objects import Retries
from agent.store.places.sinks import DiskSink, Sink
from agent.store.reading import Want
from agent.worker.state import shards as writing
from agent.worker.state.shards import Bucket, CopyTime, ShareWriter, Stores, file_bytes

LAYOUT = data_parallel(1, 2, ("a", "b"))
GIB = 1 << 30


# --- which way, how often, how fast ---------------------------------------------------------------


def passing(
    state: float, sum_: float, step_s: float, every: int = 10, memory: float = 256
) -> Passing:
    return Passing(
        state_bytes=int(state * GIB),
        sum_bytes=int(sum_ * GIB),
        every=every,
        step_s=step_s,
        bytes_s=1.25e9,
        memory_bytes=int(memory * GIB),
    )


@pytest.mark.parametrize(
    ("what", "costly"),
    [
        (passing(0.01, 0.003, 0.01), False),  # small, however quick a step is
        (passing(0.3, 0.1, 0.5), True),
        (passing(0.3, 0.1, 60.0), False),
        (passing(15.6, 5.2, 4.0), True),
        (passing(15.6, 5.2, 600.0), False),
        (passing(0.9, 0.3, 0.0), False),  # no step was timed
        (passing(1.1, 0.3, 0.0), True),
        (passing(0.6, 0.2, 60.0, memory=4), False),
        (passing(0.7, 0.2, 60.0, memory=4), True),  # with sums and the next one it is over a half
        (passing(0.03, 0.01, 0.0, memory=0.1), True),
    ],
)
def test_the_keeper_is_used_while_it_costs_little_of_a_step(what: Passing, *, costly: bool) -> None:
    assert what.costly == costly


@pytest.mark.parametrize("writes_s", [1.0, 10.0, 30.0, 45.0, 90.0])
def test_the_newest_complete_one_is_never_older_than_allowed(writes_s: float) -> None:
    """Whenever all is lost. If two in a row take longer than that, one follows the other."""
    allowed_s, age_s = 60.0, 0.0
    every_s = between(writes_s, allowed_s)
    begun = [n * every_s for n in range(6)]
    for at in range(int(10 * (begun[1] + writes_s)), int(10 * begun[-1])):
        newest = max(b for b in begun if b + writes_s <= at / 10)
        age_s = max(age_s, at / 10 - newest)
    told = replay(passing(0.1 * writes_s, 0.1, 0.0), 1, GIB, allowed_s)
    assert age_s <= max(allowed_s, 2 * writes_s)
    assert math.isclose(told.most_s, age_s, abs_tol=0.2)


def test_a_bucket_keeps_its_rate_and_a_file_its_burst() -> None:
    now_s, rate, sent = 0.0, 40e6, 0

    def wait(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds

    bucket, size = Bucket(rate, lambda: now_s, wait), file_bytes(rate)
    assert size <= rate * writing.BURST_S
    for _ in range(50):
        bucket.take(size)
        sent += size
        assert sent <= rate * now_s + size
    now_s += 100.0  # what was not used is not saved up
    before_s = now_s
    for _ in range(3):
        bucket.take(size)
    assert now_s - before_s >= 2 * size / rate * 0.99


# --- a vault and its workers ----------------------------------------------------------------------


def link_of(said: list[Unread]) -> Any:
    return SimpleNamespace(send=said.append, stuck=SimpleNamespace(aided=nullcontext))


def live_of(version: int) -> list[LiveLayer]:
    torch.manual_seed(version)
    blocks = [torch.nn.Linear(300, 200) for _ in range(3)]
    model = torch.nn.Sequential(*blocks)
    optimizer = torch.optim.Adam(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return collect({"model": model, "optimizer": optimizer}).finish()


class Scene:
    """A vault that goes straight to the store, two workers that write there, and what is reported."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, **order: object) -> None:
        for name in ("SMALL_STATE_BYTES", "LARGE_STATE_BYTES", "AGAIN_S"):
            monkeypatch.setattr(sharding, name, 0)
        self.said: list[Report] = []
        self.folder = folder / "elsewhere" / "job"
        storage = Storage(url=(folder / "elsewhere").as_uri(), every_s=0.0)
        options = {"sums": "auto", "max_replay_s": 1e-3, **order}
        self.vault: Vault = vault_of(folder / "here", self.said, storage, **options)
        self.vault.choose(0.0, begun_bytes=1)
        self.stores = Stores()

    def ask(self, version: int) -> None:
        assert self.vault.open, "commits wait for a snapshot"
        assert self.vault.wants
        self.vault.ask(LAYOUT, version)

    def write(self, version: int, worker: str) -> None:
        """As `agent.worker.snapshots` does."""
        wanted = self.vault.shards(1)
        assert wanted is not None
        live = live_of(version)
        share, pieces = share_of(live, 2, "ab".index(worker))
        forms = {layer.form.name: layer.form for layer in live}
        said = Snapshot(
            generation=1, version=version, forms=(), extents=(), last=False, stored=True
        )
        self.tell(worker, msgspec.structs.replace(said, forms=share.forms))
        writer = ShareWriter(self.stores.sink(wanted.place), wanted, version)
        for part in writer.write(share, Copying(lambda: pieces, Again()), forms):
            self.tell(worker, msgspec.structs.replace(said, parts=(part,)))
        self.tell(worker, msgspec.structs.replace(said, last=True))

    def tell(self, worker: str, message: Snapshot) -> None:
        again = msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=Snapshot)
        assert self.vault.take(again, memoryview(b""), worker, LAYOUT) is None

    def land(self) -> None:
        until("what became of it", lambda: self.vault.advance(patient=False))
        beside = [thread for thread in threading.enumerate() if thread.name == "manifest"]
        for thread in beside:
            thread.join(60.0)  # it deletes what is old

    def snapshot(self, version: int) -> None:
        self.ask(version)
        for worker in LAYOUT.workers:
            self.write(version, worker)
        self.land()

    def restored(self) -> dict[str, bytes]:
        """What a worker reads of the backup."""
        backup, said = self.vault.backup, list[Unread]()
        assert backup is not None
        state, payload = backup.told(PROVING)
        assert not payload
        gathered = self.stores.gathered(state, memoryview(b""), link_of(said))
        found = {
            name: memoryview(bytearray(form.layer_bytes)) for name, form in gathered.layers.items()
        }
        gathered.read(Want(layer=name, start=0, into=into) for name, into in found.items())
        return {name: bytes(body) for name, body in found.items()}

    def parts(self) -> set[Path]:
        return set((self.folder / PARTS).glob("*/*"))

    def failures(self) -> list[str]:
        return [one.error for one in self.said if isinstance(one, CheckpointFailed)]

    def damage(self, part: Path) -> None:
        data = bytearray(part.read_bytes())
        data[-1] ^= 1
        part.write_bytes(data)


def bytes_of(version: int) -> dict[str, bytes]:
    return {
        layer.form.name: b"".join(layer.pieces(0, layer.form.layer_bytes))
        for layer in live_of(version)
    }


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(tmp_path, monkeypatch)


def test_what_workers_write_is_what_workers_read(scene: Scene) -> None:
    """The keeper has no byte of it, in memory or on its disk. A keeper after it finds the same."""
    scene.snapshot(3)
    backup = scene.vault.backup
    assert backup is not None
    assert (backup.version, dict(backup.bodies)) == (3, {})
    assert scene.restored() == bytes_of(3)
    assert [said.step for said in scene.said if isinstance(said, BackupHeld)] == [3]
    assert not scene.vault.due()
    found = scene.vault._place.storage.archive("job").newest()
    assert found is not None
    assert found.sharded
    scene.vault.drop()
    saved = scene.vault.recall(3, patient=True).saved
    assert saved is not None
    scene.vault.adopt(saved)
    assert scene.restored() == bytes_of(3)


def test_old_ones_go_and_half_ones_are_not_left_for_ever(scene: Scene) -> None:
    scene.ask(1)
    scene.write(1, "a")  # and all are killed
    half = scene.parts()
    scene.vault.stop_asking()
    for version in (2, 3, 4):
        scene.snapshot(version)
    assert half
    assert not half & scene.parts()
    # The folder of a state has the version of the step after it, which is not in this manifest.
    assert min(int(part.parent.name) for part in scene.parts()) >= 3
    assert scene.restored() == bytes_of(4)


def test_what_a_keeper_still_uses_is_not_swept(scene: Scene) -> None:
    """The backup that newcomers prove themselves by may be older than the newest two."""
    scene.snapshot(1)
    first = scene.vault._newest
    scene.vault._aside = first
    for version in (2, 3, 4):
        scene.snapshot(version)
    scene.vault.backup = first.backup
    assert scene.restored() == bytes_of(1)


def test_a_provable_state_goes_when_none_becomes_provable_any_more(scene: Scene) -> None:
    """Where no sum is sent after a snapshot: else it would be held, and pinned in the store, for ever."""
    vault = scene.vault
    scene.snapshot(1)
    vault._question = Question(
        version=1, script_step=1, microbatches=(0,), commits=1, complete=True, known=()
    )
    vault.sum_bytes = 1 << 60
    scene.snapshot(2)
    assert vault._older.backup.version == 1, "nothing is known of the step after 2 so far"
    reached = Reached(version=2, layers=(Digest("l", 9, (3.0,)),), machine="m")
    told = Prepared(generation=1, step=2, loss=0.5, present=b"", script_step=2, reached=reached)
    assert vault.proofs.hear("a", told) == ""
    vault.look()
    assert vault._older is None
    assert vault.asked(partly=False).backup.version == 2
    scene.snapshot(3)
    scene.snapshot(4)
    assert min(int(part.parent.name) for part in scene.parts()) >= 2


@pytest.mark.parametrize("how", ["missing", "short", "flipped"])
def test_a_torn_one_is_never_used(scene: Scene, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """Its manifest is not made, its files are deleted, and the next one is tried."""
    if how != "flipped":
        monkeypatch.setattr(versions, "SAMPLED", 1)  # lengths are looked at of every file
    scene.snapshot(1)
    before = scene.parts()
    scene.ask(2)
    scene.write(2, "a")
    torn = max(scene.parts() - before)
    if how == "missing":
        torn.unlink()
    elif how == "short":
        torn.write_bytes(torn.read_bytes()[:-1])
    else:
        for part in scene.parts() - before:
            scene.damage(part)
    scene.write(2, "b")
    scene.land()
    assert len(scene.failures()) == 1
    assert scene.parts() == before
    assert scene.restored() == bytes_of(1)
    scene.snapshot(3)
    assert scene.restored() == bytes_of(3)


def test_a_manifest_that_was_made_and_not_answered_for_is_taken_back(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would count, and name what was deleted."""
    scene.snapshot(1)
    before, create = scene.parts(), DiskSink.create

    def lost(sink: DiskSink, key: str, data: bytes) -> bool:
        made = create(sink, key, data)
        if key.startswith(MANIFESTS):
            raise Unavailable("no answer")
        return made

    scene.ask(2)
    for worker in LAYOUT.workers:
        scene.write(2, worker)
    monkeypatch.setattr(DiskSink, "create", lost)
    scene.land()
    monkeypatch.setattr(DiskSink, "create", create)
    assert scene.failures() == ["no answer"]
    assert scene.parts() == before
    archive = scene.vault._place.storage.archive("job")
    assert [archive.read(mark).version for mark in archive.marks()] == [1]


def test_damage_is_found_by_who_reads_and_the_one_before_is_used(scene: Scene) -> None:
    scene.snapshot(1)
    before = scene.parts()
    scene.snapshot(2)
    for part in scene.parts() - before:
        scene.damage(part)
    backup, said = scene.vault.backup, list[Unread]()
    state, _ = backup.told(1)
    gathered = scene.stores.gathered(state, memoryview(b""), link_of(said))
    (layer, *_) = [form for form in state.layers if form.layer_bytes]
    into = memoryview(bytearray(layer.layer_bytes))
    with pytest.raises(WireError, match="does not have its checksum"):
        gathered.read([Want(layer=layer.name, start=0, into=into)])
    (unread,) = said
    assert scene.vault.forget(unread.manifest)
    scene.vault.unread(unread.manifest, unread.why)
    scene.vault.drop()
    saved = scene.vault.recall(2, patient=True).saved
    assert saved is not None
    scene.vault.adopt(saved)
    assert scene.restored() == bytes_of(1)


def test_nobody_proves_itself_by_what_could_not_be_read(scene: Scene) -> None:
    """Each newcomer would be lost on it, for ever where none is left whose steps make the next one provable."""
    vault = scene.vault
    scene.snapshot(1)
    vault._question = Question(
        version=1, script_step=1, microbatches=(0,), commits=1, complete=True, known=()
    )
    scene.snapshot(2)
    before = vault.asked(partly=True).backup
    assert before.version == 1
    assert not vault.forget(before.stored.manifest), "the job goes on from version 2"
    assert vault.asked(partly=True) is None
    assert scene.restored() == bytes_of(2)


def test_what_is_half_written_goes_with_the_job(scene: Scene) -> None:
    """No newer version comes any more that would sweep it."""
    scene.snapshot(1)
    before = scene.parts()
    scene.ask(2)
    scene.write(2, "a")
    assert scene.parts() > before
    assert scene.vault.write(scene.vault.saved, last=True)
    assert scene.parts() == before
    assert scene.restored() == bytes_of(1)


class Refusing(DiskSink):
    """A store that takes so many files, and then none."""

    def __init__(self, root: Path, takes: int) -> None:
        super().__init__(root)
        self.takes = takes

    def put(self, key: str, pieces: object) -> None:
        if not self.takes:
            raise Full(f"{self.root}/{key}: No space left on device")
        self.takes -= 1
        super().put(key, pieces)


class Changing(DiskSink):
    """Somebody changes the state when the first file is here."""

    def __init__(self, root: Path, copying: Copying, live: list[LiveLayer]) -> None:
        super().__init__(root)
        self.copying, self.live = copying, live

    def put(self, key: str, pieces: object) -> None:
        super().put(key, pieces)
        self.copying.let_change()
        for layer in self.live:
            for tensor in layer.tensors:
                tensor.detach().zero_()


def test_a_share_that_is_written_slowly_has_the_bytes_of_its_version(scene: Scene) -> None:
    """It is read where it lies, so what is not written yet is copied before it changes."""
    scene.snapshot(1)
    scene.ask(2)
    scene.write(2, "b")
    live, shards = live_of(2), scene.vault.shards(1)
    share, pieces = share_of(live, 2, 0)
    forms = {layer.form.name: layer.form for layer in live}
    copying, calm = Copying(lambda: pieces, Again()), CopyTime()
    calm.copy(Copying(lambda: [memoryview(b"some")], Again()))
    calm.begin()
    calm._calm_s = 1e6
    said = Snapshot(generation=1, version=2, forms=(), extents=(), last=False, stored=True)
    scene.tell("a", msgspec.structs.replace(said, forms=share.forms))
    writer = ShareWriter(Changing(scene.folder, copying, live), shards, 2, calm)
    for part in writer.write(share, copying, forms, once=True):
        scene.tell("a", msgspec.structs.replace(said, parts=(part,)))
    scene.tell("a", msgspec.structs.replace(said, last=True))
    scene.land()
    assert scene.restored() == bytes_of(2)


def test_a_copy_begins_in_time_and_not_before() -> None:
    now_s, source = 0.0, bytearray(10)
    calm = CopyTime(lambda: now_s)

    def made() -> Copying:
        copying = Copying(lambda: [memoryview(source)], Again())
        copying.begin()
        calm.begin()
        return copying

    assert calm.is_late(made(), 0.0), "nobody knows yet how long it may wait"

    class Slow(Copying):
        def finish(self) -> None:
            nonlocal now_s
            super().finish()
            now_s += 1.0

    calm.copy(Slow(lambda: [memoryview(source)], Again()))
    made()
    now_s += 20.0
    calm.end()
    copying = made()
    assert not calm.is_late(copying, 16.9)
    assert calm.is_late(copying, 17.1)
    copying.finish()
    assert not calm.is_late(copying, 19.0), "there is nothing left"


def test_a_full_store_is_said_and_leaves_nothing_half(scene: Scene) -> None:
    """As `Snapshots._write_all` does it: what is there of the share is deleted, and the keeper hears why."""
    scene.snapshot(1)
    before = scene.parts()
    scene.ask(2)
    live = live_of(2)
    share, pieces = share_of(live, 2, 0)
    forms = {layer.form.name: layer.form for layer in live}
    writer = ShareWriter(Refusing(scene.folder, 2), scene.vault.shards(1), 2)
    with pytest.raises(Full) as refused:
        list(writer.write(share, Copying(lambda: pieces, Again()), forms))
    assert scene.parts() > before
    writer.undo()
    assert scene.parts() == before
    said = Snapshot(generation=1, version=2, forms=(), extents=(), last=True, stored=True)
    scene.tell("a", msgspec.structs.replace(said, why=str(refused.value)))
    assert "No space left" in scene.failures()[0]
    assert scene.vault.open, "training goes on"
    scene.snapshot(3)
    assert scene.restored() == bytes_of(3)


def test_a_store_that_never_took_one_is_given_up(scene: Scene) -> None:
    """Workers may have no key to it. Then the keeper helps, at whatever cost."""
    said = Snapshot(generation=1, version=1, forms=(), extents=(), last=True, stored=True, why="no")
    for _ in range(sharding.REFUSALS_MAX):
        assert scene.vault.sharding.on
        scene.ask(1)
        scene.tell("a", said)
    assert not scene.vault.sharding.on
    scene.vault.ask(LAYOUT, 1)
    assert scene.vault.shards(1) is None


def test_sums_of_states_that_were_given_up_are_not_kept(scene: Scene) -> None:
    """A state may be given up at each step, and its sum has been sent by then."""
    vault = scene.vault
    scene.snapshot(1)
    held = list[int]()
    for step in range(1, 19):
        vault.log(LoggedSum(step, b"", memoryview(bytes(4))))
        held.append(len(vault.redo) + len(vault._ahead))
        vault.ask(LAYOUT, step + 1)
        if step % 3:  # others are given up after their sum has come
            vault.stop_asking_for(step + 1)
    assert max(held) <= 2, held
    assert [one.step for one in vault.redo] == [1]
    scene.write(19, "a")
    vault.log(LoggedSum(19, b"", memoryview(bytes(4))))
    scene.write(19, "b")
    scene.land()
    assert (vault.backup.version, [one.step for one in vault.redo]) == (19, [19])


def test_a_key_outside_of_its_version_is_refused(scene: Scene) -> None:
    scene.snapshot(1)
    part = scene.vault.backup.stored.parts[0]
    scene.ask(5)
    said = Snapshot(
        generation=1, version=5, forms=(), extents=(), last=False, stored=True, parts=(part,)
    )
    with pytest.raises(WireError, match="the place of its version"):
        scene.tell("a", said)


def test_an_object_store_that_answers_503_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a while; then it is as a full one. The same files lie there as in a folder."""
    monkeypatch.setattr(Retries, "pause_s", 0.01)
    monkeypatch.setattr(Retries, "pause_s_max", 0.02)
    with S3Server() as server:

        def opened(_: str) -> Sink:
            return s3_sink(server)

        monkeypatch.setattr(objects, "open_sink", opened)
        scene = Scene(tmp_path, monkeypatch)
        server.refuse = 3
        scene.snapshot(1)
        assert scene.restored() == bytes_of(1)
        assert [mark.version for mark in Archive(s3_sink(server), "job").marks()] == [1]
        scene.ask(2)
        server.refuse = 1000
        with pytest.raises(Unavailable, match="503"):
            scene.write(2, "a")
        server.refuse = 0
        scene.vault.stop_asking()
        scene.snapshot(3)
        assert scene.restored() == bytes_of(3)
