"""Checkpoints on a real disk: whole or not there, and the one before when one is damaged."""

import random
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from agent import checkpoint, shards
from agent.backup import Assembly, Backup, LoggedSum, StateAssembly
from agent.checkpoint import Saved
from agent.errors import StateError, WireError
from agent.messages import CheckpointFailed, Report
from agent.vault import Vault


def body_of(state: shards.StateBytes) -> memoryview:
    return memoryview(bytearray().join(state.pieces(0, state.total)))


def saved(version: int, redo: int = 0) -> Saved:
    model = torch.nn.Linear(3, 2)
    with torch.no_grad():
        model.weight.fill_(version)
        model.bias.fill_(version)
    state = shards.write({"model": model})
    body = body_of(state)
    sums = tuple(LoggedSum(version + n, b"\1", memoryview(bytes([n] * 100))) for n in range(redo))
    return Saved(Backup(generation=1, version=version, header=state.header, body=body), sums)


def test_the_newest_is_read_with_its_sums(tmp_path: Path) -> None:
    """State and sums come back as they were."""
    checkpoint.write(tmp_path, "job", saved(3))
    checkpoint.write(tmp_path, "job", saved(5, redo=2))
    found = checkpoint.newest(tmp_path)
    assert found is not None
    assert found.reached == 7
    assert bytes(found.backup.body) == bytes(saved(5).backup.body)
    assert [(s.step, bytes(s.body)) for s in found.redo] == [
        (s.step, bytes(s.body)) for s in saved(5, redo=2).redo
    ]


def test_a_state_is_a_safetensors_file(tmp_path: Path) -> None:
    """Any other tool can read what we write."""
    _, manifest = checkpoint.write(tmp_path, "job", saved(3))
    tensors = load_file(tmp_path / manifest.file)
    assert torch.equal(tensors["model/weight"], torch.full((2, 3), 3.0))


def _tear(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[random.Random(7).randrange(len(data))] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("damage", [_tear, _flip, Path.unlink], ids=["torn", "flipped", "missing"])
@pytest.mark.parametrize("suffix", [".safetensors", ".sums", ".json"])
def test_a_damaged_one_is_passed_over(tmp_path: Path, damage: object, suffix: str) -> None:
    """Torn, flipped or missing, the state, its sums or its manifest: the one before is used."""
    checkpoint.write(tmp_path, "job", saved(3, redo=1))
    checkpoint.write(tmp_path, "job", saved(5, redo=2))
    (victim,) = [
        p for p in tmp_path.iterdir() if p.name.startswith("0000000007") and p.suffix == suffix
    ]
    damage(victim)  # type: ignore[operator]
    found = checkpoint.newest(tmp_path)
    assert found is not None
    assert found.reached == 4


def test_only_the_newest_few_are_kept(tmp_path: Path) -> None:
    """Older ones go, files and all; nothing else is left over."""
    (tmp_path / "0000000002-0123.safetensors.4567.part").write_bytes(b"of a writer that was killed")
    for version in range(6):
        checkpoint.write(tmp_path, "job", saved(version, redo=version % 2))
    assert len(list(tmp_path.glob("*.json"))) == checkpoint.KEEP
    assert len(list(tmp_path.glob("*.safetensors"))) == checkpoint.KEEP
    assert list(tmp_path.glob("*.part")) == []


def test_a_folder_that_cannot_be_made_is_a_checkpoint_that_failed(tmp_path: Path) -> None:
    """As on a full disk: it is reported, and nothing is raised into whoever closes the job."""
    (tmp_path / "taken").write_bytes(b"")
    said: list[Report] = []
    vault = Vault("job", tmp_path / "taken" / "job", said.append, 10, 60.0)
    assert not vault.write(saved(3))
    assert [type(report) for report in said] == [CheckpointFailed]


def test_of_two_writers_of_one_step_one_wins(tmp_path: Path) -> None:
    """Both may try at once; what is there afterwards is whole."""
    writers = [
        threading.Thread(target=checkpoint.write, args=(tmp_path, "job", saved(4)))
        for _ in range(4)
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert len(list(tmp_path.glob("*.safetensors"))) == 1
    assert checkpoint.newest(tmp_path) is not None


@given(st.integers(0, 5000), st.integers(1, 9), st.randoms())
def test_slices_in_any_order_make_the_whole(total: int, parts: int, dice: random.Random) -> None:
    """However a state is cut, and in whatever order and how often its slices come."""
    data = dice.randbytes(total)
    slices = [shards.cut(total, parts, index) for index in range(parts)]
    assembly = StateAssembly(1, 7, final=False)
    order = [*slices, dice.choice(slices)]
    dice.shuffle(order)
    for start, end in order:
        head = b"header" if (start, end) == slices[0] else b""
        payload = memoryview(bytearray(head + data[start:end]))
        assembly.take(start, payload, total, len(head))
    whole = assembly.whole()
    assert whole is not None
    assert whole.header == b"header"
    assert bytes(whole.body) == data


def test_slices_beyond_the_whole_are_refused() -> None:
    """Nobody writes past the end."""
    with pytest.raises(WireError):
        Assembly(100).take(64, memoryview(bytes(64)))


class _Counter:
    """A schedule of somebody's own."""

    def __init__(self) -> None:
        self.state: dict[str, object] = {"n": 1, "names": ("a", "b"), 3: [None, True, 0.5]}

    def state_dict(self) -> dict[str, object]:
        return self.state

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        self.state = state_dict


def test_a_whole_training_state_comes_back() -> None:
    """Weights, optimizer, schedules: tensors and everything that is not one."""

    def made() -> dict[str, shards.Stateful]:
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4)).double()
        return {"model": model, "adam": torch.optim.AdamW(model.parameters()), "c": _Counter()}

    ours, theirs = made(), made()
    ours["model"](torch.randn(5, 3).double()).sum().backward()  # type: ignore[operator]
    ours["adam"].step()  # type: ignore[attr-defined]
    ours["c"].state["n"] = 2  # type: ignore[attr-defined]
    state = shards.write(ours)
    shards.read(state.header, body_of(state), theirs)
    again = shards.write(theirs)
    assert again.header == state.header
    assert body_of(again) == body_of(state)
    assert theirs["c"].state == ours["c"].state  # type: ignore[attr-defined]


def test_a_state_of_other_objects_is_refused_in_words() -> None:
    """What does not fit says what was expected."""
    state = shards.write({"model": torch.nn.Linear(3, 2)})
    body = body_of(state)
    with pytest.raises(StateError, match="give Session the same objects"):
        shards.read(state.header, body, {"other": torch.nn.Linear(3, 2)})
    with pytest.raises(StateError, match="does not take the state"):
        shards.read(state.header, body, {"model": torch.nn.Linear(4, 2)})
    odd = _Counter()
    odd.state = {"f": object()}
    with pytest.raises(StateError, match="c/f is a object"):
        shards.write({"c": odd})
