"""What others read: plain weights, and torch's own checkpoint."""

import contextlib
import fcntl
import os
import resource
import signal
import threading
from pathlib import Path

import pytest
import torch
from memory_sink import MemorySink
from models import make, same
from safetensors.torch import load_file
from test_layers import store
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from agent.errors import CheckpointError
from agent.store.export import main, save_weights, to_torch, weights
from agent.store.places.sinks import DiskSink


@pytest.fixture
def saved():
    """A model after two steps, and the store that holds it in three shares."""
    objects, step = make("tied")
    step(0), step(1)
    sink = MemorySink()
    return objects, sink, store(sink, objects, holders=3)


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_weights_are_a_plain_state_dict(saved, tmp_path, suffix):
    """The file is what the model's own state_dict would be, and a new model takes it strictly."""
    objects, sink, manifest = saved
    path = tmp_path / "out" / f"weights{suffix}"
    save_weights(path, sink, manifest)
    found = load_file(path) if suffix == ".safetensors" else torch.load(path, weights_only=True)
    assert same(dict(objects["model"].state_dict()), found)
    fresh = make("tied", seed=3)[0]["model"]
    fresh.load_state_dict(found, strict=True)
    assert [item.name for item in path.parent.iterdir()] == [path.name]


def test_an_object_that_is_not_there_is_said_by_name(saved):
    """Asking for a module that was never saved is one clear line."""
    _, sink, manifest = saved
    with pytest.raises(CheckpointError, match="version 1 of job holds no object named other"):
        weights(sink, manifest, "other")


def test_torch_reads_the_whole_state(saved, tmp_path):
    """torch's own converter reads the exported folder: weights, optimizer by name, schedule."""
    objects, sink, manifest = saved
    to_torch(tmp_path / "dcp", sink, manifest)
    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "all.pt")
    found = torch.load(tmp_path / "all.pt", weights_only=True)
    assert same(dict(objects["model"].state_dict()), found["model"])
    named = dict(objects["model"].named_parameters())
    assert set(found["opt"]["state"]) == set(named)
    for name, item in named.items():
        assert same(dict(objects["opt"].state[item]), found["opt"]["state"][name])
    groups = found["opt"]["param_groups"]
    assert sorted(group["lr"] for group in groups) == [0.001, 0.02]
    assert same(objects["plan"].state_dict()["best"], found["plan"]["best"])


def test_the_command_writes_the_newest_version(tmp_path, capsys, monkeypatch):
    """A person names a job's folder and a file; a mistake is one line."""
    objects, step = make("tied")
    step(0)
    sink = DiskSink(tmp_path / "job")
    manifest = store(sink, objects)
    out = tmp_path / "model.pt"
    monkeypatch.setattr("sys.argv", ["export", str(tmp_path / "job"), str(out)])
    assert main() == 0
    assert torch.load(out, weights_only=True).keys() == weights(sink, manifest).keys()
    monkeypatch.setattr("sys.argv", ["export", str(tmp_path / "nobody"), str(out)])
    assert main() == 1
    assert "no version of a job lies there" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["model.pt", "folder"])
def test_what_is_damaged_or_let_go_of_while_it_is_read_is_passed_over(
    tmp_path, capsys, monkeypatch, name
):
    """The version before it is written then, and the person hears which one that is. Who exports changes nothing there."""
    objects, step = make("tied")
    step(0)
    sink = DiskSink(tmp_path / "job")
    store(sink, objects)
    newest = store(sink, objects, version=2)
    with (tmp_path / "job" / newest.parts[0].key).open("rb+") as part:
        part.seek(newest.parts[0].header_bytes)
        part.write(b"\xff\xff")
    before = content(tmp_path / "job")
    monkeypatch.setattr("sys.argv", ["export", str(tmp_path / "job"), str(tmp_path / name)])
    assert main() == 0
    assert capsys.readouterr().out == f"version 1 is in {tmp_path / name}\n"
    assert content(tmp_path / "job") == before


@pytest.mark.parametrize("name", ["model.pt", "model.safetensors", "folder"])
def test_a_disk_that_fills_leaves_what_was_there(saved, tmp_path, name):
    """One line for the person, whichever library writes; what was exported before is whole, and nothing else lies there."""
    _, sink, manifest = saved
    out = tmp_path / "out" / name
    write = to_torch if name == "folder" else save_weights
    write(out, sink, manifest)
    before = content(tmp_path)
    with files_of_at_most(700), pytest.raises(CheckpointError) as caught:
        write(out, sink, manifest)
    assert str(out) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert content(tmp_path) == before
    write(out, sink, manifest)
    assert content(tmp_path).keys() == before.keys()


def content(folder):
    return {str(path): path.is_file() and path.read_bytes() for path in folder.rglob("*")}


@contextlib.contextmanager
def files_of_at_most(count):
    """As on a disk that is full: what goes beyond is refused by the system."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (count, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)


@pytest.mark.parametrize("name", ["model.pt", "model.safetensors", "folder"])
def test_a_folder_that_was_made_in_vain_does_not_stay(saved, tmp_path, name):
    """The reason is the system's, and neither the folder nor those above it are left behind."""
    _, sink, manifest = saved
    write = to_torch if name == "folder" else save_weights
    (tmp_path / "was there").mkdir()
    out = tmp_path / "was there" / "new" / "newer" / name
    with files_of_at_most(700), pytest.raises(CheckpointError) as caught:
        write(out, sink, manifest)
    assert str(caught.value) == f"{out}: File too large"
    assert list(content(tmp_path)) == [str(tmp_path / "was there")]


def test_two_exports_into_one_folder_come_one_after_the_other(saved, tmp_path):
    """What lies there is one version's, whole, until the other one's turn has come."""
    _, sink, manifest = saved
    out = tmp_path / "out"
    to_torch(out, sink, manifest)
    before = {path: path.stat().st_ino for path in out.iterdir()}
    other = threading.Thread(target=to_torch, args=(out, sink, manifest))
    handle = os.open(out, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        other.start()
        while other.is_alive() and not list(out.glob(".*/.metadata")):
            other.join(0.01)
        other.join(0.3)
        assert {path: path.stat().st_ino for path in before} == before
    finally:
        os.close(handle)
    other.join()
    assert {path.name for path in out.iterdir()} == {path.name for path in before}
    assert {path: path.stat().st_ino for path in before} != before


def test_nobody_need_listen_to_what_was_written(tmp_path, monkeypatch):
    """A closed or full standard output is no reason for a traceback: the file is there."""
    objects, step = make("tied")
    step(0)
    store(DiskSink(tmp_path / "job"), objects)
    with Path("/dev/full").open("w") as full:
        for number, deaf in enumerate((None, full)):
            out = tmp_path / f"{number}.pt"
            monkeypatch.setattr("sys.argv", ["export", str(tmp_path / "job"), str(out)])
            monkeypatch.setattr("sys.stdout", deaf)
            assert main() == 0
            assert out.exists()


@pytest.mark.parametrize("name", ["model.pt", "folder"])
def test_an_export_that_is_broken_off_leaves_nothing(tmp_path, monkeypatch, name):
    """Ctrl-C is an exit code and no traceback; neither a draft nor a new folder stays."""
    objects, step = make("tied")
    step(0)
    store(DiskSink(tmp_path / "job"), objects)
    before = content(tmp_path)
    out = tmp_path / "new" / name
    monkeypatch.setattr("sys.argv", ["export", str(tmp_path / "job"), str(out)])
    monkeypatch.setattr("agent.store.export.torch_save_checkpoint", broken_off)
    monkeypatch.setattr("torch.save", broken_off)
    assert main() == 130
    assert content(tmp_path) == before


def broken_off(*_, **__):
    raise KeyboardInterrupt
