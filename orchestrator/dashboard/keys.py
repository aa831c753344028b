"""The keys of the page, of which only hashes are kept.

A key has a role and an end, and lies as its SHA-256 in one file that only the owner may read. A
session is a key that the page has exchanged for two halves: the cookie, which a browser hides from
scripts but sends to every port of this machine, and the token, which the page keeps for its own port
alone. One half opens nothing. Sessions end with the house, because another user may take its port
meanwhile and hear what an open tab sends.
"""

import fcntl
import hashlib
import re
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import msgspec

from cloud import private
from cloud.clock import DAY_S
from cloud.plain_file import is_there
from orchestrator.client import House
from orchestrator.paths import Places

Role = Literal["read-only", "admin"]
KEY_S = 30 * DAY_S
SESSION_S = DAY_S
KEPT_MAX = 1_000
SESSIONS_MAX = 32  # of one key; its oldest go first
HALF_BYTES = 32
HALF = re.compile(f"[0-9a-f]{{{2 * HALF_BYTES}}}")
SEPARATOR = "."


class Access(msgspec.Struct, frozen=True, kw_only=True):
    """What a key opens; `sha256` is its name."""

    sha256: str
    role: Role
    until_s: float
    session: bool = False
    parent: str = ""  # the key that opened this session

    @property
    def root(self) -> str:
        """Return the name of the key itself, by which everything is bounded: its sessions share."""
        return self.parent or self.sha256


class Session(msgspec.Struct, frozen=True, kw_only=True):
    """The two halves of a session, which nothing stores."""

    cookie: str
    token: str
    access: Access

    @property
    def key(self) -> str:
        return joined(self.cookie, self.token)


class _Kept(msgspec.Struct, frozen=True, kw_only=True):
    what: str = "the SHA-256 of every key that opens the page; the keys themselves are kept nowhere"
    keys: tuple[Access, ...] = ()


class Keys:
    """The file of hashes, which the command line and the page's process share."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: tuple[int, int] | None = None  # inode and time of what is in `_known`
        self._known: dict[str, Access] = {}

    def begin(self) -> None:
        """End all sessions, and make the file if there is none."""
        with self._changed() as kept:
            kept[:] = [one for one in kept if not one.session]

    def make(self, role: Role, lasts_s: float = KEY_S) -> str:
        """Return a new key, of which only the hash is kept."""
        key = secrets.token_hex(HALF_BYTES)
        access = Access(sha256=_sha(key), role=role, until_s=time.time() + lasts_s)
        with self._changed() as kept:
            kept.append(access)
        return key

    def exchange(self, access: Access, cookie: str = "") -> Session:
        """Return a new session with the rights of a key, which lasts no longer than the key.

        A browser has one cookie for all its tabs: the one that it has already is used again.
        """
        if not HALF.fullmatch(cookie):
            cookie = secrets.token_hex(HALF_BYTES)
        token = secrets.token_hex(HALF_BYTES)
        until_s = min(access.until_s, time.time() + SESSION_S)
        sha = _sha(joined(cookie, token))
        opened = Access(
            sha256=sha, role=access.role, until_s=until_s, session=True, parent=access.sha256
        )
        with self._changed() as kept:
            others = [one for one in kept if one.parent == access.sha256]
            for one in others[: max(0, len(others) + 1 - SESSIONS_MAX)]:
                kept.remove(one)
            kept.append(opened)
        return Session(cookie=cookie, token=token, access=opened)

    def end(self, access: Access) -> None:
        """End a key or a session, and the sessions that the key has opened."""
        with self._changed() as kept:
            kept[:] = [one for one in kept if access.sha256 not in (one.sha256, one.parent)]

    def opened_by(self, key: str) -> Access | None:
        """Return what the key opens now; keys are looked up by their hash, which tells no time."""
        found = self._all().get(_sha(key))
        return found if found is not None and found.until_s > time.time() else None

    def _all(self) -> dict[str, Access]:
        try:
            state = self._path.stat()
        except FileNotFoundError:
            return {}
        seen = (state.st_ino, state.st_mtime_ns)
        if seen != self._seen:
            self._known = {one.sha256: one for one in self._read()}
            self._seen = seen
        return self._known

    def _read(self) -> tuple[Access, ...]:
        try:
            return msgspec.json.decode(private.secret(self._path), type=_Kept).keys
        except ValueError:
            return ()  # earlier versions kept a key itself, which opens nothing any more

    @contextmanager
    def _changed(self) -> Iterator[list[Access]]:
        """Yield the keys to change, while nobody else changes them; the expired are left out.

        Sessions are the first to go when there are too many.
        """
        with self._path.with_suffix(".lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            known = self._read() if is_there(self._path) else ()
            kept = [one for one in known if one.until_s > time.time()]
            yield kept
            kept.sort(key=lambda one: not one.session)
            content = msgspec.json.encode(_Kept(keys=tuple(kept[-KEPT_MAX:])))
            private.write(self._path, content)


def joined(cookie: str, token: str) -> str:
    """Return the key that two halves make."""
    return f"{cookie}{SEPARATOR}{token}"


def address_with_key(
    house: House, places: Places, role: Role = "admin", lasts_s: float = KEY_S
) -> str:
    """Return the address of the page with a new key in it; the page hides the key at once."""
    if not house.dashboard_url:
        return ""
    key = Keys(places.secret("dashboard")).make(role, lasts_s)
    return f"{house.dashboard_url}#key={key}"


def _sha(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()
