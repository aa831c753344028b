"""Why nothing can be written: each reason has its own remedy."""

import os
import resource
from pathlib import Path

import pytest
from somebody import as_somebody_else

from agent.output import catalog
from cloud import private
from cloud.local import short_path
from orchestrator.client import Client, NotRunning
from orchestrator.door.address import read_door
from orchestrator.paths import Places, StateDirError, no_room


def test_lack_of_files_is_not_called_a_full_disk(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert no_room(tmp_path) == ""
    highest = max(int(file.name) for file in Path("/proc/self/fd").iterdir())
    taken = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, hard))
    try:
        with pytest.raises(OSError, match="Too many"):
            while True:
                taken.append(os.open("/dev/null", os.O_RDONLY))
        said = no_room(tmp_path)
    finally:
        for handle in taken:
            os.close(handle)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert said.startswith("no more files can be opened here (Too many open files): ")
    assert "disk" not in said


def test_a_state_directory_of_somebody_else_is_refused_at_once(tmp_path):
    """It was said that nothing runs there, or only that permission is denied."""
    (tmp_path / "state").mkdir(mode=0o700)
    refusal = r"state cannot be the state directory \(Permission denied\); set manager.state_dir"
    with as_somebody_else(), pytest.raises(StateDirError, match=refusal):
        Places(tmp_path / "state")


def test_a_state_directory_with_too_long_a_name_is_refused_at_once(tmp_path):
    with pytest.raises(StateDirError, match=r"\(File name too long\); set manager.state_dir"):
        Places(tmp_path / ("x" * 300))


def test_full_disk_is_said_with_what_comes_then(tmp_path):
    kept, most = resource.getrlimit(resource.RLIMIT_FSIZE), resource.RLIM_INFINITY
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, most))
    try:
        said = no_room(tmp_path, "then: orchestrator up")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, kept)
    assert (
        said
        == f"{tmp_path} takes nothing more (File too large): make room on that disk, then: orchestrator up"
    )


def test_the_short_way_of_a_local_cloud_that_was_killed_is_removed_with_its_house(tmp_path):
    """One that leads to the machines of another house stays."""
    ours, theirs = (tmp_path / name / "state" / "cloud" / "machines" for name in ("a", "b"))
    ways = [short_path.short_way(machines) for machines in (ours, theirs)]
    try:
        for way, machines in zip(ways, (ours, theirs), strict=True):
            short_path.keep(way, machines)
        Places(tmp_path / "a" / "state").remove_links()
        assert [way.is_symlink() for way in ways] == [False, True]
    finally:
        for way in ways:
            way.unlink(missing_ok=True)


@pytest.mark.parametrize("name", ["dashboard", "mesh", "ray", "cloud"])
def test_secret_that_could_be_guessed_is_refused_before_anything_starts(tmp_path, name):
    """One sentence for each of them, which names the file and the remedy."""
    places = Places(tmp_path / "state")
    places.cloud_dir.mkdir(mode=0o700, parents=True)
    places.state_dir.chmod(0o700)
    token = places.cloud_dir / "token" if name == "cloud" else places.secret(name)
    private.write(token, b"")
    with pytest.raises(StateDirError, match=f"^{token} has 0 characters"):
        places.secure()
    token.unlink()
    private.made_secret(token)
    assert places.secure() == []


def test_a_note_whose_text_is_damaged_counts_as_none(tmp_path):
    """One flipped bit makes a text that is no text, for which msgspec has an error of another kind."""
    places = Places(tmp_path)
    places.house.write_bytes(b'{"redis_url": "unix:\xaf"}')
    places.door.write_bytes(b'{"address": "127.0.0.1\xba1"}')
    (tmp_path / catalog.LIST).write_bytes(b'[{"path": "s0.\xf4xt"}]')
    with pytest.raises(NotRunning, match="nothing is running"):
        Client.connect(tmp_path)
    assert read_door(places) is None
    assert catalog.listed(tmp_path) == ()
