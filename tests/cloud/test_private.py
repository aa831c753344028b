"""What others may not read: files, folders, and secrets that are none any more."""

import os
import stat
from pathlib import Path

import pytest

from cloud import private
from cloud.errors import NotPrivate, WeakSecret


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
def test_another_users_file_is_refused(tmp_path, name, monkeypatch):
    (tmp_path / name).mkdir(exist_ok=True)
    if os.geteuid() == 0:
        os.chown(tmp_path / name, 1, 1)
    else:  # only root can give a file away: here we are the other user
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(NotPrivate, match=r"belongs to another user \(uid \d+\).*chown"):
        private.mend(tmp_path, [])


def test_folder_without_modes_is_refused():
    """No mode can be set in /proc, as on some other file systems."""
    with pytest.raises(NotPrivate, match="cannot be closed to them"):
        private.mend(Path(f"/proc/{os.getpid()}"), [])


@pytest.mark.parametrize("content", [b"", b"\n", b"x" * 31, b" " * 40, b"\xff" * 40])
def test_secret_that_could_be_guessed_is_refused(tmp_path, content):
    """An empty file is what a loss of power leaves of a file that was not waited for."""
    token = tmp_path / "mesh.token"
    private.write(token, content)
    for read in (private.secret, private.made_secret):
        with pytest.raises(WeakSecret, match=f"^{token} has .* remove it and start again"):
            read(token)


def test_secret_that_others_can_read_is_refused(tmp_path):
    token = tmp_path / "mesh.token"
    private.made_secret(token)
    token.chmod(0o640)
    with pytest.raises(
        NotPrivate, match=rf"^{token} is open to other users \(mode 0640\).* remove it"
    ):
        private.secret(token)


def test_secret_is_made_once(tmp_path):
    token = tmp_path / "mesh.token"
    made = private.made_secret(token)
    assert (len(made) >= private.CHARACTERS_MIN, private.made_secret(token)) == (True, made)
    assert (private.secret(token), mode(token)) == (made, 0o600)


def test_file_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    """And so is the name: a loss of power leaves the old content or the new one."""
    seen = []
    sync = os.fsync

    def noted(handle: int) -> None:
        sync(handle)
        seen.append((Path(f"/proc/self/fd/{handle}").readlink(), (tmp_path / "a.token").exists()))

    monkeypatch.setattr(os, "fsync", noted)
    private.write(tmp_path / "a.token", b"content")
    assert seen == [(tmp_path / "a.part", False), (tmp_path, True)]
