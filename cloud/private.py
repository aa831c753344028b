"""Files and folders that only their owner may read or write."""

import os
import secrets
import stat
from collections.abc import Iterable
from pathlib import Path

from cloud.errors import NotPrivate, WeakSecret

ROOT = 0
OTHERS = stat.S_IRWXG | stat.S_IRWXO
CHARACTERS_MIN = 32  # of a secret; ours have 64


def secret(path: Path) -> str:
    """Return the secret in a file, or raise if others may know or guess it."""
    try:
        mode, text = _mode(path), path.read_text().strip()
    except UnicodeDecodeError:
        mode, text = _mode(path), ""
    if mode & OTHERS:
        raise NotPrivate(
            f"{path} is open to other users (mode {mode:04o}), so it is no secret any more; remove it and "
            "start again: a new one is made"
        )
    if len(text) < CHARACTERS_MIN:
        raise WeakSecret(
            f"{path} has {len(text)} characters of text, and with fewer than {CHARACTERS_MIN} anybody could "
            "guess it; remove it and start again: a new one is made"
        )
    return text


def made_secret(path: Path) -> str:
    """Return the secret in a file, and make one first if there is no file."""
    if not path.exists():
        write(path, secrets.token_hex(32).encode())
    return secret(path)


def environment(path: Path) -> dict[str, str]:
    """Return the NAME=VALUE lines of a file that only its owner may read.

    Raises ValueError for a file that others can read, and for a line of another form.
    """
    if path.stat().st_mode & 0o077:
        raise ValueError(f"{path}: others can read it; it holds secrets, so: chmod 600 {path}")
    found = {}
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        name, equals, value = line.partition("=")
        if not equals or not name.isidentifier():
            raise ValueError(f"{path}, line {number}: expected NAME=VALUE")
        found[name] = value
    return found


def write(path: Path, content: bytes) -> None:
    """Write all of it or nothing, readable by the owner alone, and wait until the disk has it.

    Without the wait a loss of power would leave an empty file under the new name.
    """
    part = path.with_suffix(".part")
    part.unlink(missing_ok=True)
    with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as sink:
        sink.write(content)
        sink.flush()
        os.fsync(sink.fileno())
    part.replace(path)
    flush(path.parent)


def flush(folder: Path) -> None:
    """Wait until the disk has the names in a folder, which a loss of power would take back."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def mend(folder: Path, secrets: Iterable[Path]) -> list[str]:
    """Close a folder to other users and remove secrets they may know; say each in a sentence.

    The parts that need a secret make a new one when it is gone. Raises `NotPrivate` if something
    belongs to a different user, because its owner can open it again at any moment; root always can.
    """
    for path in (folder, *sorted(folder.iterdir())):
        if (owner := path.lstat().st_uid) not in {os.geteuid(), ROOT}:
            raise NotPrivate(
                f"{path} belongs to another user (uid {owner}), who can read and change what is kept "
                "there; give it to the user who runs this (chown)"
            )
    said = []
    if (mode := _mode(folder)) & OTHERS:
        _close(folder)
        said.append(
            f"{folder} was open to other users (mode {mode:04o}), who may have read or changed what is "
            "in it; only its owner can open it now (mode 0700)"
        )
    for secret in secrets:
        if os.path.lexists(secret) and ((mode := _mode(secret)) & OTHERS or secret.is_symlink()):
            secret.unlink()
            said.append(
                f"{secret} was open to other users (mode {mode:04o}), so it is no secret any more; a new "
                "one is made"
            )
    return said


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def _close(folder: Path) -> None:
    """Close a folder to other users, or raise if its file system keeps no modes."""
    refusal = "its file system keeps no modes"
    try:
        folder.chmod(0o700)
    except OSError as error:
        refusal = str(error.strerror)
    if _mode(folder) & OTHERS:
        raise NotPrivate(
            f"{folder} is open to other users and cannot be closed to them ({refusal}), so they could "
            "read its secrets; use a folder on another disk"
        )
