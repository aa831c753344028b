"""What others may not read: files, folders, and secrets that are none any more."""

import os
import stat
from pathlib import Path

import pytest

from cloud import private
from cloud.errors import NotPrivate


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_private_folder_stays_unchanged(tmp_path):
    tmp_path.chmod(0o700)
    token = tmp_path / "token"
    private.write(token, b"secret")
    assert private.mend(tmp_path, [token, tmp_path / "none"]) == []
    assert (token.read_bytes(), mode(token)) == (b"secret", 0o600)


@pytest.mark.parametrize("bits", [0o777, 0o755, 0o750, 0o701, 0o720])
def test_open_folder_is_closed_and_named(tmp_path, bits):
    tmp_path.chmod(bits)
    (line,) = private.mend(tmp_path, [])
    assert line.startswith(f"{tmp_path} was open to other users (mode {bits:04o})")
    assert mode(tmp_path) == 0o700


@pytest.mark.parametrize("bits", [0o666, 0o644, 0o640, 0o602])
def test_open_secret_is_removed_and_named(tmp_path, bits):
    tmp_path.chmod(0o700)
    token, kept = tmp_path / "a.token", tmp_path / "b.token"
    for path in (token, kept):
        private.write(path, b"secret")
    token.chmod(bits)
    (line,) = private.mend(tmp_path, [token, kept])
    assert line.startswith(f"{token} was open to other users (mode {bits:04o})")
    assert (token.exists(), kept.exists()) == (False, True)


def test_linked_secret_is_removed_and_its_target_kept(tmp_path):
    tmp_path.chmod(0o700)
    target, token = tmp_path / "target", tmp_path / "token"
    private.write(target, b"known to others")
    token.symlink_to(target)
    assert len(private.mend(tmp_path, [token])) == 1
    assert (os.path.lexists(token), target.exists()) == (False, True)


@pytest.mark.parametrize("name", [".", "planted"])
def test_another_users_file_is_refused(tmp_path, name):
    """As root there is a file of another user; for everyone else the root of the disk is one."""
    folder = tmp_path if os.geteuid() == 0 else Path("/")
    if os.geteuid() == 0:
        (folder / name).mkdir(exist_ok=True)
        os.chown(folder / name, 1, 1)
    with pytest.raises(NotPrivate, match=r"belongs to another user \(uid \d+\).*chown"):
        private.mend(folder, [])
