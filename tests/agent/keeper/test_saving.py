"""Versions of a job on a real disk: whole or not there, and the one before when one is damaged."""

import random
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from resource import RUSAGE_THREAD, getrusage
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch
from backups import disk, held, same, saved, vault_of
from hypothesis import given
from hypothesis import strategies as st
from memory_sink import MemorySink
from safetensors.torch import load_file

from agent.checksum import Buffer
from agent.errors import CheckpointError, WireError
from agent.keeper.member import WAITING_MAX
from agent.keeper.storage import vault as vault_module
from agent.keeper.storage import versions
from agent.keeper.storage.backup import Assembly, Backup, LoggedSum, Saved, StateAssembly
from agent.keeper.storage.recovery import DISK, Shelf, newest
from agent.keeper.storage.vault import REDO_BYTES_FREE
from agent.keeper.storage.versions import save
from agent.layout import data_parallel
from agent.messages import CheckpointFailed, CheckpointWritten, Report
from agent.protocol import Snapshot
from agent.store.archive import KEEP, Archive
from agent.store.encoding.format import FLOORS, PARTS, Layer, lay_out
from agent.store.encoding.weights import digest, weights_of, write
from agent.store.errors import Full, Unavailable
from agent.store.layers import LiveLayer, collect, fill, share_of
from agent.store.places.sinks import DRAFT, DiskSink
from agent.store.shares import MUCH, Extent, Gathered, Share, batches, whole
from agent.tensors.shards import bytes_of, weights_sha


def recalled(archive: Archive) -> Saved | None:
    return newest([Shelf(DISK, archive)], 0).saved


def test_the_newest_is_read_with_its_sums(tmp_path: Path) -> None:
    """State and sums come back as they were."""
    save(disk(tmp_path), 1, saved(3))
    save(disk(tmp_path), 1, saved(5, redo=2))
    assert same(recalled(disk(tmp_path)), saved(5, redo=2))


def test_every_layer_is_a_safetensors_file(tmp_path: Path) -> None:
    """Any other tool can read what we write, layer by layer and sum by sum."""
    manifest = save(disk(tmp_path), 1, saved(3, redo=1))
    files = {part.layer: load_file(tmp_path / part.key) for part in manifest.parts}
    assert torch.equal(files["0"]["model/0.weight"], torch.full((2, 3), 3.0))
    assert files["~sums"]["~sums/0000000003"].numel() == 100


def _tear(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[random.Random(7).randrange(len(data))] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("damage", [_tear, _flip, Path.unlink], ids=["torn", "flipped", "missing"])
@pytest.mark.parametrize("victim", ["parts/*7/2-*", "parts/*7/_sums-*00100-*", "manifests/*7-*"])
def test_a_damaged_one_is_passed_over(tmp_path: Path, damage: object, victim: str) -> None:
    """Torn, flipped or missing, a layer, a sum or the manifest: the version before is used."""
    save(disk(tmp_path), 1, saved(3, redo=1))
    save(disk(tmp_path), 1, saved(5, redo=2))
    (path,) = tmp_path.glob(victim)
    damage(path)  # type: ignore[operator]
    assert same(recalled(disk(tmp_path)), saved(3, redo=1))


def test_only_the_newest_few_are_kept(tmp_path: Path) -> None:
    """Older ones go, files and all; nothing else is left over."""
    for version in (1, 2):  # of the second, nothing else is written
        draft = tmp_path / PARTS / f"000000000{version}" / "of-a-writer-that-was-killed.part"
        draft.parent.mkdir(parents=True)
        draft.write_bytes(b"")
    for version in (1, 3, 4, 5, 6, 7):
        save(disk(tmp_path), 1, saved(version, redo=version % 2))
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len([path for path in files if path.parent.name == "manifests"]) == KEEP
    assert len({path.parent.name for path in files if PARTS in path.parts}) == KEEP


class Narrow(DiskSink):
    """A folder on a disk with so much room for all that lies in it; somebody else's files take some of it."""

    def __init__(self, root: Path, room: int) -> None:
        super().__init__(root)
        self.room, self.others, self.dies_after = room, 0, -1

    @property
    def used(self) -> int:
        return sum(path.stat().st_size for path in self.root.rglob("*") if path.is_file())

    def _place(self, key: str, pieces: Sequence[Buffer]) -> bool:
        size = sum(memoryview(piece).nbytes for piece in pieces)
        if not self.dies_after:
            draft = self.root / f"{key}.0badcafe{DRAFT}"
            draft.parent.mkdir(parents=True, exist_ok=True)
            draft.write_bytes(b"x" * min(size // 2, max(0, self.room - self.others - self.used)))
            raise KeyboardInterrupt
        self.dies_after -= 1
        if self.used + self.others + size > self.room:
            raise Full(f"{key}: No space left on device")
        return super()._place(key, pieces)

    def die(self, after: int, act: Callable[[], object]) -> None:
        """Its process is killed in the middle of writing, and cleans up nothing."""
        delete, self.dies_after = self.delete, after
        self.delete = lambda _: None  # type: ignore[method-assign]
        with suppress(KeyboardInterrupt, CheckpointError):
            act()
        self.delete, self.dies_after = delete, -1  # type: ignore[method-assign]


def bytes_of_one(folder: Path) -> int:
    sink = Narrow(folder, 1 << 30)
    save(Archive(sink, "job"), 1, saved(3, redo=1))
    return sink.used


def test_what_killed_keepers_have_left_makes_room(tmp_path: Path) -> None:
    """There is room for three versions and a half, and each of three keepers was killed in the middle of one."""
    room = bytes_of_one(tmp_path / "one") * 7 // 2
    sink = Narrow(tmp_path / "disk", room)
    archive = Archive(sink, "job")
    for version in (1, 2):
        save(archive, 1, saved(version, redo=1))
    for version in (3, 4, 5):
        sink.die(2, lambda version=version: save(archive, 1, saved(version, redo=1)))  # type: ignore[misc]
    for version in (6, 7, 8):
        save(archive, 1, saved(version, redo=1))
    assert same(recalled(archive), saved(8, redo=1))


@pytest.mark.parametrize("seed", range(2))
def test_a_disk_that_is_full_again_and_again(tmp_path: Path, seed: int) -> None:
    """Others fill it and make room, keepers are killed: as soon as there is room there is a new version, the newest that
    was written is read back each time, and there is never more than a few versions' worth of files."""
    dice, newest, generation = random.Random(seed), 0, 0
    one = bytes_of_one(tmp_path / "one")
    sink = Narrow(tmp_path / "disk", 4 * one)
    archive = Archive(sink, "job")
    for version in range(1, 40):
        if not generation or dice.random() < 0.1:
            sink.others = 0
            generation = archive.take_over(version)
        sink.others = dice.choice([0, 0, one, 2 * one, 3 * one, 4 * one])
        attempt = partial(save, archive, generation, saved(version, redo=1))
        if dice.random() < 0.3:
            sink.die(dice.randrange(6), attempt)
        else:
            try:
                attempt()
                newest = version + 1
            except Full:
                assert sink.others
        found = recalled(archive)
        assert found is not None or not newest
        if found is not None:
            assert found.reached in (newest, version + 1)  # who dies may have got so far
            newest = found.reached
            assert same(found, saved(newest - 1, redo=1))
        assert sink.used <= 4 * one


def test_an_attempt_that_fails_at_its_end_leaves_nothing(tmp_path: Path) -> None:
    """The parts are there and the manifest cannot be: each attempt would leave a whole state behind."""

    class Refusing(DiskSink):
        def create(self, key: str, data: bytes) -> bool:
            super().create(key, data)
            raise Unavailable(f"{key}: Input/output error")

    sink = Refusing(tmp_path)
    for version in range(3):
        with pytest.raises(Unavailable):
            save(Archive(sink, "job"), 1, saved(version))
    assert sink.sizes(PARTS) == {}
    assert recalled(disk(tmp_path)) is None


def test_what_cannot_be_pruned_is_a_checkpoint_all_the_same(tmp_path: Path) -> None:
    """The version is there and is told of, although what is old could not be deleted."""
    said: list[Report] = []
    vault = vault_of(tmp_path, said)
    for version in (3, 4):
        assert vault.write(saved(version))
    shutil.rmtree(tmp_path / "job" / FLOORS)
    (tmp_path / "job" / FLOORS).symlink_to(tmp_path / "nowhere" / "else")
    assert vault.write(saved(5))
    assert [type(report) for report in said] == [CheckpointWritten] * 3
    assert same(recalled(disk(tmp_path / "job")), saved(5))


def test_a_folder_that_cannot_be_made_is_a_checkpoint_that_failed(tmp_path: Path) -> None:
    """As on a full disk: it is reported, and nothing is raised into whoever closes the job."""
    (tmp_path / "taken").write_bytes(b"")
    said: list[Report] = []
    assert not vault_of(tmp_path / "taken", said).write(saved(3))
    assert [type(report) for report in said] == [CheckpointFailed]


def test_what_there_is_no_memory_for_is_a_checkpoint_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever winds a job up tries again, and does not end in the middle."""
    said: list[Report] = []
    vault = vault_of(tmp_path, said)

    def scarce(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(versions, "_files", scarce)
        assert vault.store(saved(3).backup) is None
    assert [report.error for report in said] == ["MemoryError"]  # type: ignore[attr-defined]
    assert vault.store(saved(3).backup) is not None


@pytest.mark.parametrize("full", [True, False])
def test_the_newest_is_written_though_the_one_to_prove_a_step_by_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full: bool
) -> None:
    """That one comes too late, behind newer ones that were written meanwhile; or there is room for one only."""
    told: list[Report] = []
    vault, save = vault_of(tmp_path, told), versions.save
    for version in (3, 5, 7):
        assert vault.write(saved(version))

    def refuse(archive: Archive, generation: int, what: Saved) -> object:
        if full and what.reached == 2:
            raise Full("No space left on device")
        return save(archive, generation, what)

    monkeypatch.setattr(versions, "save", refuse)
    assert vault.write(saved(9), beside=saved(1, redo=1))
    assert same(recalled(disk(tmp_path / "job")), saved(9))
    assert not [one for one in told if isinstance(one, CheckpointFailed)]


def test_what_an_earlier_keeper_writes_late_does_not_count(tmp_path: Path) -> None:
    """A keeper that was replaced wakes up and writes: its versions from after the change are void."""
    said: list[Report] = []
    earlier, later = vault_of(tmp_path, said), vault_of(tmp_path, said)
    later.since = 5
    assert earlier.write(saved(5))
    assert later.write(saved(6))
    assert not earlier.write(saved(9))
    assert [type(r) for r in said] == [CheckpointWritten, CheckpointWritten, CheckpointFailed]
    assert same(recalled(disk(tmp_path / "job")), saved(6))


def begun(version: int, step: int) -> Snapshot:
    """A byte of a state that is on its way."""
    return Snapshot(
        generation=1,
        version=version,
        forms=(),
        extents=(Extent("l", step, 1, 64),),
        last=False,
        final=False,
    )


@pytest.mark.parametrize("lost_s", [60.0, -1.0])
def test_a_state_that_is_on_its_way_is_not_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost_s: float
) -> None:
    """One that comes slowly is waited for, over as many steps as there is room for sums; one of which nothing has come
    for a while is asked for again, at every step or as soon as nothing is committed any more."""
    monkeypatch.setattr(vault_module, "LOST_S", lost_s)
    layout, vault, asked = (
        data_parallel(1, 2, ("w",)),
        vault_of(tmp_path, [], backup_every_steps=1),
        [],
    )
    vault.adopt(saved(0))
    body = np.empty(REDO_BYTES_FREE // 8, dtype=np.uint8).data
    for step in range(8):
        assert vault.open
        vault.log(LoggedSum(step, b"", body))
        if vault.wants:
            asked.append(step)
            vault.ask(layout, step + 1)
    assert asked == ([0] if lost_s > 0 else list(range(8)))
    assert not vault.open
    assert vault.wants == (lost_s < 0)


@pytest.mark.parametrize(
    ("step_s", "asked"), [(10, list(range(20))), (6, [*range(0, 20, 2)]), (1, [0, 7, 14])]
)
def test_a_state_that_takes_long_is_asked_for_seldom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step_s: int, asked: list[int]
) -> None:
    """After it comes as long a time without any, so that short steps are not slowed down without end; they are
    committed all the same. Where a step takes longer than both, the state of every step is asked for."""
    now_s = 0
    clock = SimpleNamespace(monotonic=lambda: now_s, time=lambda: now_s)
    monkeypatch.setattr(vault_module, "time", clock)
    layout, vault = data_parallel(1, 2, ("w",)), vault_of(tmp_path, [], backup_every_steps=1)
    vault.adopt(saved(0))
    found, form, coming = [], lay_out("l", [("model/l", "U8", (4,))]), list[Snapshot]()
    for now_s in range(1, 20 * step_s + 1):
        if coming:
            vault.take(coming.pop(0), memoryview(b"x"), "w", layout)
        if (now_s - 1) % step_s == 0:
            step = (now_s - 1) // step_s
            assert vault.open
            vault.log(LoggedSum(step, b"", memoryview(bytes(8))))
            if vault.wants:
                found.append(step)
                vault.ask(layout, step + 1)
                coming = [one_of_four(form, step + 1, at) for at in range(4)]
    assert found == asked


def one_of_four(form: Layer, version: int, at: int) -> Snapshot:
    extents = (Extent("l", at, 1, 4),)
    return Snapshot(generation=1, version=version, forms=(form,), extents=extents, last=at == 3)


def test_what_has_come_of_a_state_stays_when_it_is_asked_for_again(tmp_path: Path) -> None:
    """The same version is asked for once more: what lies here need not come again."""
    layout, vault = data_parallel(1, 2, ("w",)), vault_of(tmp_path, [])
    vault.ask(layout, 1)
    for at in range(32):
        vault.take(begun(1, at), memoryview(b"x"), "w", layout)
    vault.ask(layout, 1)
    for at in range(32, 64):
        vault.take(begun(1, at), memoryview(b"x"), "w", layout)
    form = lay_out("l", [("model/l", "U8", (64,))])
    last = Snapshot(generation=1, version=1, forms=(form,), extents=(), last=True, final=False)
    assert vault.take(last, memoryview(b""), "w", layout) is not None


def test_a_last_state_that_is_on_its_way_is_not_asked_for_as_another(tmp_path: Path) -> None:
    """A keeper that was restarted asks for a state as soon as all are back. Who was first has sent its share of the last
    one by then, and waits for the end: it would never be whole."""
    layout, vault = data_parallel(1, 2, ("v", "w")), vault_of(tmp_path, [])
    form = lay_out("l", [("model/l", "U8", (64,))])
    half = msgspec.structs.replace(
        begun(1, 0), forms=(form,), extents=(Extent("l", 0, 32, 64),), last=True, final=True
    )
    assert vault.take(half, memoryview(bytes(32)), "v", layout) is None
    vault.ask(layout, 1)
    other = msgspec.structs.replace(half, extents=(Extent("l", 32, 32, 64),))
    assert vault.take(other, memoryview(bytes(32)), "w", layout) is not None


def test_a_state_lands_where_the_one_before_the_last_did(tmp_path: Path) -> None:
    """No page of its memory has to be made first; and the newest state stays as it is."""
    layout, vault, size = data_parallel(1, 2, ("w",)), vault_of(tmp_path, []), 1 << 26
    form, made = lay_out("l", [("model/l", "U8", (size,))]), []
    for version in range(6):
        payload = memoryview(bytes([version]) * size)
        before = getrusage(RUSAGE_THREAD).ru_minflt
        vault.ask(layout, version)
        share = Snapshot(
            generation=1,
            version=version,
            forms=(form,),
            extents=(Extent("l", 0, size, size),),
            last=True,
        )
        old = vault.backup
        vault.take(share, payload, "w", layout)
        made.append(getrusage(RUSAGE_THREAD).ru_minflt - before)
        assert old is None or bytes(old.bodies["l"][-9:]) == bytes([version - 1]) * 9
        assert vault.backup is not None and vault.backup.bodies["l"] == payload
        del old
    assert max(made[2:]) < 10 < min(made[:2])


def test_no_more_sums_are_logged_than_one_can_be_sent(tmp_path: Path) -> None:
    """However rarely a state is asked for: a newcomer's queue takes all that it has to apply again."""
    vault, step = vault_of(tmp_path, [], backup_every_steps=1_000_000), 0
    vault.adopt(saved(0))
    while vault.open and step < WAITING_MAX:
        vault.log(LoggedSum(step, b"", memoryview(b"")))
        step += 1
    assert step < WAITING_MAX // 2


def test_large_sums_are_not_held_in_any_number(tmp_path: Path) -> None:
    """A new state is asked for when the sums have as many bytes as the state, and nothing is committed any
    more when they have four times as many; small ones are counted only."""
    vault = vault_of(tmp_path, [], backup_every_steps=100)
    vault.adopt(saved(1))
    body, asked, step = np.empty(REDO_BYTES_FREE // 4, dtype=np.uint8).data, 0, 0
    while vault.open:
        vault.log(LoggedSum(1 + step, b"", body))
        step, asked = step + 1, asked or vault.wants * (step + 1)
    assert (asked, step) == (4, 16)
    vault.adopt(saved(1))
    for step in range(1, 100):
        vault.log(LoggedSum(step, b"", memoryview(bytes(100))))
    assert vault.open and not vault.wants


def test_the_same_version_twice_is_one(tmp_path: Path) -> None:
    """A version that is there already is a success, and leaves no second copy."""
    said: list[Report] = []
    vault = vault_of(tmp_path, said)
    assert vault.write(saved(4))
    files = sorted(tmp_path.rglob("*"))
    assert vault.write(saved(4))
    assert sorted(tmp_path.rglob("*")) == files


@given(st.lists(st.integers(0, 5000), max_size=6), st.integers(1, 5), st.randoms())
def test_shares_in_any_order_make_the_whole(
    sizes: list[int], holders: int, dice: random.Random
) -> None:
    """However many holders, in whatever batches and order, and how often any of them comes."""
    data = {f"l{at}": dice.randbytes(size) for at, size in enumerate(sizes)}
    live = [_live(name, body) for name, body in data.items()]
    assembly, sent = StateAssembly(1, 7, map(str, range(holders)), final=False), []
    for index in range(holders):
        share, pieces = share_of(live, holders, index)
        payload, at = memoryview(bytearray().join(pieces)), 0
        for forms, extents in [(share.forms, ()), *(((), b) for b in batches(share.extents, 777))]:
            size = sum(extent.size for extent in extents)
            sent.append((forms, extents, payload[at : at + size]))
            at += size
    for forms, extents, payload in dice.sample([*sent, sent[0]], len(sent) + 1):
        assembly.take(forms, extents, payload)
        assert assembly.whole() is None
    for index in range(holders):
        assembly.end(str(index))
    backup = assembly.whole()
    assert backup is not None
    assert {form.name for form in backup.layers} == set(data)
    assert {name: bytes(body) for name, body in backup.bodies.items()} == {
        name: body for name, body in data.items() if body
    }


@given(
    st.lists(st.integers(0, 5000), max_size=6), st.integers(1, 1000).map(lambda size: size * MUCH)
)
def test_much_of_a_layer_is_sent_by_itself(sizes: list[int], bytes_max: int) -> None:
    """It then lands where it belongs, and nobody carries it there; only little pieces share a message."""
    extents = [Extent(str(at), 7, size, size + 9) for at, size in enumerate(sizes)]
    sent = list(batches(extents, bytes_max))
    pieces = [piece for batch in sent for piece in batch]
    for extent in extents:
        of_it = [piece for piece in pieces if piece.layer == extent.layer]
        starts = [7, *(piece.start + piece.size for piece in of_it)]
        assert starts == [*(piece.start for piece in of_it), 7 + extent.size]
    assert [int(piece.layer) for piece in pieces] == sorted(int(piece.layer) for piece in pieces)
    assert all(0 < sum(piece.size for piece in batch) <= bytes_max for batch in sent)
    assert all(len(batch) == 1 or max(p.size for p in batch) * MUCH < bytes_max for batch in sent)


def _live(name: str, body: bytes) -> LiveLayer:
    form = lay_out(name, [(f"model/{name}", "U8", (len(body),))])
    tensor = torch.tensor(list(body), dtype=torch.uint8)
    return LiveLayer(form=form, tensors=(tensor,))


def test_what_lies_beyond_the_whole_is_refused() -> None:
    """Nobody writes past the end, and nobody says another length than the others."""
    with pytest.raises(WireError):
        Assembly(100).take(64, memoryview(bytes(64)))
    assembly = StateAssembly(1, 7, ["w"], final=False)
    assembly.take((), (Extent("l", 0, 64, 100),), memoryview(bytes(64)))
    with pytest.raises(WireError, match="others say 100"):
        assembly.take((), (Extent("l", 64, 64, 128),), memoryview(bytes(64)))
    with pytest.raises(WireError, match="64 bytes of layers are announced"):
        assembly.take((), (Extent("l", 0, 64, 100),), memoryview(bytes(63)))


class _Counter:
    """A schedule of somebody's own."""

    def __init__(self) -> None:
        self.state: dict[str, object] = {"n": 1, "names": ("a", "b"), 3: [None, True, 0.5]}

    def state_dict(self) -> dict[str, object]:
        return self.state

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        self.state = state_dict


def test_a_whole_training_state_comes_back_from_the_shares_of_three() -> None:
    """Weights, optimizer, schedules: tensors and everything that is not one."""

    def made() -> dict[str, object]:
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4)).double()
        return {"model": model, "adam": torch.optim.AdamW(model.parameters()), "c": _Counter()}

    ours, theirs = made(), made()
    ours["model"](torch.randn(5, 3).double()).sum().backward()  # type: ignore[operator]
    ours["adam"].step()  # type: ignore[attr-defined]
    ours["c"].state["n"] = 2  # type: ignore[attr-defined]
    gathered = Gathered()
    for index in range(3):
        share, pieces = share_of(collect(ours).finish(), 3, index)  # type: ignore[arg-type]
        gathered.add(share, memoryview(bytearray().join(pieces)))
    fill(gathered.layers.values(), gathered.read, theirs)  # type: ignore[arg-type]
    assert held(theirs, 1) == held(ours, 1)
    assert theirs["c"].state == ours["c"].state  # type: ignore[attr-defined]


def test_the_model_on_its_own_is_what_its_state_dict_says(tmp_path: Path) -> None:
    """The digest is that of torch, tied weights and buffers included, and the file is plain safetensors."""
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 4)
    )
    model[2].weight = model[0].weight
    backup = held({"model": model, "sgd": torch.optim.SGD(model.parameters(), lr=0.1)}, 1)
    weights = weights_of(backup.layers, backup.bodies)
    assert digest(weights) == weights_sha(model.state_dict())
    write(tmp_path / "out" / "model.safetensors", weights)
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert {name: bytes(bytes_of(item)) for name, item in found.items()} == {
        name: bytes(bytes_of(item)) for name, item in model.state_dict().items()
    }


def test_a_state_without_tensors_is_a_state() -> None:
    """A schedule alone has a layer of no bytes, and comes back."""
    archive = Archive(MemorySink(), "job")
    form = Layer(name="~rest", tensors=(), values='{"c":{"$map":[]}}')
    backup = Backup(generation=1, version=2, layers=(form,), bodies={})
    save(archive, 1, Saved(backup, ()))
    found = recalled(archive)
    assert found is not None
    gathered = Gathered()
    gathered.add(
        Share(forms=found.backup.layers, extents=whole(found.backup.layers)), memoryview(b"")
    )
    counter = _Counter()
    fill(gathered.layers.values(), gathered.read, {"c": counter})
    assert counter.state == {}
