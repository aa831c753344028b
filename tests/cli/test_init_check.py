"""Before anything runs: writing the settings, and checking the machine."""

import os
import socket
import tempfile
from pathlib import Path

import msgspec
import pytest

from cloud.local.short_path import keep
from orchestrator.cli.init_check import _importable
from orchestrator.config import template
from orchestrator.paths import SHORT, Places, StateDirError, dangling_links

OFF = ("--set", "ray.head_address=127.0.41.7")


def test_init_writes_every_setting_once(shell):
    """The file is the template; a second time it is left as it is, and the line says how to go on."""
    assert shell("init").code == 0
    written = shell.folder / "orchestrator.toml"
    assert written.read_text() == template()
    written.write_text("[job]\nslots_max = 9\n")
    again = shell("init")
    assert (again.code, "is there already" in again.line) == (1, True)
    assert written.read_text() == "[job]\nslots_max = 9\n"
    other = shell("init", "--config", "other.toml", "--json")
    assert other.json == {"path": str(shell.folder / "other.toml")}


def test_init_says_why_it_cannot_write(shell):
    """One line, with the path."""
    assert "cannot be written" in shell("init", "--config", "none/x.toml").line


def test_check_finds_this_machine_good(shell):
    """Each line has a name, what was found, and no remedy when it is good."""
    answer = shell("check", "--json", *OFF)
    names = {one["name"] for one in answer.json["checks"]}
    assert {"settings", "python", "torch", "ray", "redis", "ray port", "dashboard port"} <= names
    assert {"disk", "memory", "cores", "clock", "manager"} <= names
    assert all(one["found"] for one in answer.json["checks"])
    assert all((one["remedy"] == "") == one["ok"] for one in answer.json["checks"])
    assert answer.code == (0 if answer.json["ok"] else 1)


def test_check_names_the_remedy_of_what_fails(shell):
    """A port in use, an unwritable folder and a wrong setting are FAIL lines, not errors."""
    (shell.folder / "file").write_text("")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        wrong = f"dashboard.port={port} manager.state_dir=file/x manager.redis_url=redis://127.0.0.1:1/0"
        sets = (word for one in wrong.split() for word in ("--set", one))
        answer = shell("check", *sets, *OFF)
    assert answer.code == 1
    failed = [line for line in answer.out.splitlines() if line.startswith("FAIL")]
    assert [line.split()[1] for line in failed] == ["redis", "dashboard", "state_dir"]
    assert "set dashboard.port to a free port" in failed[1]


@pytest.mark.parametrize(
    ("setting", "line", "words"),
    [
        ("local.enabled=false", "local cloud", "no other cloud"),
        ("manager.state_dir=/proc/none/here", "state_dir", "cannot be written"),
    ],
)
def test_check_fails_where_up_would_refuse(shell, setting, line, words):
    """Else all is OK, its next line is `orchestrator up`, and that refuses at once."""
    answer = shell("check", "--json", *OFF, "--set", setting)
    found = {one["name"]: one for one in answer.json["checks"]}[line]
    assert (found["ok"], words in found["found"]) == (False, True)
    assert found["remedy"].startswith("set ")
    assert shell("up", *OFF, "--set", setting).code != 0


def test_check_writes_to_where_copies_shall_go(shell):
    """A file is in the way of the one; the other takes it, and nothing is left there."""
    in_the_way = shell.folder / "taken"
    in_the_way.write_text("")
    for place, good in ((in_the_way, False), (shell.folder / "store", True)):
        answer = shell("check", "--json", "--set", f"storage.checkpoint_url=file://{place}")
        found = next(one for one in answer.json["checks"] if one["name"] == "storage")
        assert (found["ok"], str(place) in found["found"]) == (good, True)
        assert ("storage.checkpoint_url" in found["remedy"]) is not good
    assert not [path for path in (shell.folder / "store").rglob("*") if path.is_file()]


def test_check_says_when_copies_lie_on_the_disk_of_the_states(shell):
    """As they do where the disk that an address names is not mounted: nothing outlives that disk."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as other:
        for place, same in ((shell.folder / "store", True), (Path(other), False)):
            answer = shell("check", "--json", "--set", f"storage.checkpoint_url=file://{place}")
            found = next(one for one in answer.json["checks"] if one["name"] == "storage")
            assert found["ok"]
            assert ("on the disk of manager.state_dir, and lost with it" in found["found"]) is same


def test_a_file_of_a_persons_own_is_not_taken_for_a_package(tmp_path, monkeypatch):
    """A `random.py` beside the settings made torch and Ray look broken, to be installed again."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "msgspec.py").write_text("raise SystemExit('a file of my own')\n")
    found = _importable("msgspec", "msgspec.__version__")
    assert (found.ok, found.found) == (True, msgspec.__version__)


def test_check_goes_on_after_a_wrong_setting(shell):
    """The wrong line of the file is the first finding; the rest is checked with the defaults."""
    shell.script("orchestrator.toml", "[job]\nnan = 3\n")
    answer = shell("check", "--json")
    first = answer.json["checks"][0]
    assert (first["name"], first["ok"]) == ("settings", False)
    assert first["found"].startswith("orchestrator.toml:2: job.nan: found 3")
    assert len(answer.json["checks"]) > 5


def test_a_short_way_that_leads_elsewhere_is_replaced(tmp_path):
    """Its name can be guessed, so where it leads is looked at before anything private goes there."""
    places = Places(tmp_path / ("long" * 20))
    short = places.run
    short.symlink_to(tmp_path)
    places.make()
    assert short.readlink() == places.state_dir / "run"
    places.remove_links()
    assert not short.is_symlink()


def test_a_folder_in_place_of_a_short_way_is_replaced(tmp_path):
    """Somebody has cleared up in /tmp, and Ray has made the path that it was told."""
    places = Places(tmp_path / ("long" * 20))
    (places.run / "ray").mkdir(parents=True)
    places.remove_links()  # which is none
    places.make()
    assert places.run.readlink() == places.state_dir / "run"
    places.remove_links()


@pytest.mark.parametrize("name", ["a b", "20%20", "is it?", "#1", "é"])
def test_what_is_no_plain_path_has_a_plain_way(name):
    """A Redis is found by an address, where these letters mean something else."""
    assert Places(SHORT / name).run.name.startswith("spot-")


@pytest.mark.parametrize("command", ["up", "down"])
def test_a_state_directory_that_takes_no_file_is_told_with_the_remedy(shell, command):
    """As one on a disk that is mounted read-only, where the folders are there already."""
    shell.places.make()
    shell.places.lock.unlink()
    shell.places.lock.symlink_to("/proc/none")
    answer = shell(command)
    assert answer.code == 1
    assert f"{shell.places.state_dir} cannot be the state directory (No such file" in answer.line
    assert "set manager.state_dir" in answer.line


def test_a_short_way_that_cannot_be_made_is_told_with_the_remedy(tmp_path, monkeypatch):
    monkeypatch.setattr("orchestrator.paths.SHORT", tmp_path / "none")
    with pytest.raises(
        StateDirError, match=r"cannot lead to .*\(No such file.*set manager.state_dir"
    ):
        Places(tmp_path / ("long" * 20)).make()


def test_a_short_way_that_cannot_be_followed_is_left_alone(tmp_path, monkeypatch):
    """As that of another person's house, whose folder is private."""
    monkeypatch.setattr("orchestrator.paths.SHORT", tmp_path)
    closed, gone = (tmp_path / f"spot-{digit * 12}" for digit in "01")
    closed.symlink_to("x" * 300)
    gone.symlink_to(tmp_path / "gone")
    for link in (closed, gone):
        os.utime(link, (0, 0), follow_symlinks=False)
    assert [link for link in dangling_links() if link.parent == tmp_path] == [gone]


def test_a_short_way_that_somebody_may_need_is_left_alone(tmp_path, monkeypatch):
    """A house in another container sees a folder that we do not; it says now and then that it lives."""
    monkeypatch.setattr("orchestrator.paths.SHORT", tmp_path)
    link = tmp_path / f"spot-{'0' * 12}"
    link.symlink_to(tmp_path / "elsewhere")
    assert dangling_links() == []
    os.utime(link, (0, 0), follow_symlinks=False)
    assert dangling_links() == [link]
    keep(link, tmp_path / "elsewhere")
    assert dangling_links() == []
