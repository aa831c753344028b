"""The paths of everything: all files lie in one state directory, and none outside it.

The path of a Unix socket may have at most 107 characters. Ray needs about 65 of them for itself and
takes ASCII only, and in the address of a Redis `%`, `?` and `#` have other meanings. So if the
state directory's path is too long or not plain, a symbolic link with a short name in /tmp leads to
it. The house restores the link if it is deleted, and removes it when it ends.
"""

import errno
import hashlib
import os
import re
import tempfile
from pathlib import Path

from cloud import private
from cloud.errors import NotPrivate, WeakSecret
from cloud.local import short_path
from cloud.local.short_path import SHORT
from orchestrator.errors import OrchestratorError

RUN_PATH_MAX = 40
BACK_S = 5.0  # until a removed file is brought back: a folder that goes as a whole has gone by then
ROOM_BYTES = 4 * 1024 * 1024
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
NO_FILES = {errno.EMFILE, errno.ENFILE}
PLAIN = re.compile(r"[A-Za-z0-9/._-]+")
LINKS = ("spot-" + "[0-9a-f]" * 12, "sc-" + "[0-9a-f]" * 8)  # links of houses, of local clouds


class StateDirError(OrchestratorError):
    """The state directory cannot be used."""


class Places:
    """Every path that the house and its parts use, derived from the state directory."""

    def __init__(self, state_dir: Path) -> None:
        self.state_dir = state_dir.resolve()
        try:
            self.identity = hashlib.sha256(str(self.state_dir).encode()).hexdigest()[:12]
        except UnicodeEncodeError:
            raise self._unfit("its path is not UTF-8") from None
        try:
            self.house.stat()
        except (FileNotFoundError, NotADirectoryError):
            pass
        except OSError as error:  # it is another user's, or its name is too long
            raise self._unfit(error.strerror) from None

    def make(self) -> None:
        """Make the state directory, private to its owner, and the short link to it."""
        try:
            self.state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            (self.state_dir / "run").mkdir(mode=0o700, exist_ok=True)
            (self.state_dir / "logs").mkdir(mode=0o700, exist_ok=True)
            # On a read-only disk the folders may exist, and only opening a file fails.
            self.lock.open("a").close()
        except OSError as error:
            raise self._unfit(error.strerror) from error
        self.make_way()

    def _unfit(self, why: str | None) -> StateDirError:
        return StateDirError(
            f"{self.state_dir} cannot be the state directory ({why}); set manager.state_dir to a folder of yours"
        )

    def secure(self) -> list[str]:
        """Keep other users out, and return what they could reach until now.

        This must run before any part that uses a secret, because exposed secrets are removed, and
        those that could be guessed are refused.
        """
        tokens = [*sorted(self.state_dir.glob("*.token")), self.cloud_dir / "token"]
        try:
            said = private.mend(self.state_dir, tokens)
            for token in filter(Path.exists, tokens):
                private.secret(token)
        except NotPrivate as error:
            raise StateDirError(
                f"{error}, or set manager.state_dir to a folder of yours"
            ) from error
        except WeakSecret as error:
            raise StateDirError(str(error)) from error
        return said

    def make_way(self) -> None:
        """Make the short link to the state directory, if its path needs one."""
        if not self._needs_link():
            return
        link, run = self._link(), self.state_dir / "run"
        try:
            short_path.keep(link, run)
        except OSError as error:
            raise StateDirError(
                f"{link} cannot lead to {run} ({error.strerror}), whose path is too long or not plain enough for a socket; "
                "set manager.state_dir to a folder with a short one"
            ) from error

    def remove_links(self) -> None:
        """Remove the short links to this directory, and that of a local cloud that was killed."""
        if self._needs_link():
            short_path.remove(self._link(), self.state_dir / "run")
        machines = self.cloud_dir.resolve() / "machines"
        short_path.remove(short_path.short_way(machines), machines)

    @property
    def run(self) -> Path:
        """Return the directory for sockets, whose path is short enough for them."""
        return self._link() if self._needs_link() else self.state_dir / "run"

    @property
    def redis_socket(self) -> Path:
        return self.run / "redis.sock"

    @property
    def redis_dir(self) -> Path:
        return self.state_dir / "redis"

    @property
    def ray_dir(self) -> Path:
        return self.run / "ray"

    @property
    def cloud_dir(self) -> Path:
        return self.state_dir / "cloud"

    @property
    def checkpoints(self) -> Path:
        return self.state_dir / "checkpoints"

    @property
    def rehearsed(self) -> Path:
        """Return the file with the checksums of rehearsed scripts, one on each line."""
        return self.state_dir / "rehearsed"

    @property
    def quotes(self) -> Path:
        """Return the folder with the price history, for `orchestrator tools backtest --data`."""
        return self.state_dir / "quotes"

    @property
    def history(self) -> Path:
        """Return the file with the history: series, events and money of the past."""
        return self.state_dir / "history.db"

    @property
    def lock(self) -> Path:
        return self.state_dir / "house.lock"

    @property
    def house(self) -> Path:
        """Return the file in which a client finds the running house."""
        return self.state_dir / "house.json"

    @property
    def settings(self) -> Path:
        """Return the file with the settings that the house was started with."""
        return self.state_dir / "settings.toml"

    @property
    def door(self) -> Path:
        """Return the file with the address of the join door and its certificate's fingerprint."""
        return self.state_dir / "door.json"

    @property
    def given_back(self) -> Path:
        """Return the file that exists once every machine is given back; the house ends then."""
        return self.state_dir / "stop"

    @property
    def superseded(self) -> Path:
        """Return the file that exists once another house's manager has taken over.

        It holds the reason as a sentence, and the house ends when it appears.
        """
        return self.state_dir / "superseded"

    @property
    def broke_off(self) -> Path:
        """Return the file with the reason why a manager of this house last ended by itself."""
        return self.state_dir / "broke_off"

    def secret(self, name: str) -> Path:
        return self.state_dir / f"{name}.token"

    def log(self, name: str) -> Path:
        return self.state_dir / "logs" / f"{name}.log"

    def _needs_link(self) -> bool:
        path = str(self.state_dir / "run")
        return len(path) > RUN_PATH_MAX or not PLAIN.fullmatch(path)

    def _link(self) -> Path:
        return SHORT / f"spot-{self.identity}"


def dangling_links() -> list[Path]:
    """Return our short links to deleted state directories, unused for long."""
    found = (link for name in LINKS for link in SHORT.glob(name))
    return sorted(link for link in found if short_path.is_abandoned(link))


GOES_ON = (
    "and all goes on by itself; what was committed is kept. Machines that are held cost money meanwhile: `orchestrator down "
    "--force` ends the house, and after limits.silent_after_s they end themselves"
)


TAKES_NOTHING = "{} takes nothing more ({}): make room on that disk, {}"
UP_AGAIN = "then: orchestrator up"


def no_room(folder: Path, then: str = GOES_ON) -> str:
    """Return why nothing can be written in the folder, as a sentence; "" if it can.

    It is found by writing, because a quota may be full although the disk is not. `then` is what
    comes of it when it is put right.
    """
    try:
        with tempfile.TemporaryFile(dir=folder) as probe:
            os.posix_fallocate(probe.fileno(), 0, ROOM_BYTES)
    except OSError as error:
        if error.errno in FULL:
            return TAKES_NOTHING.format(folder, error.strerror, then)
        if error.errno in NO_FILES:
            return (
                f"no more files can be opened here ({error.strerror}): end what holds so many, or raise the limit "
                f"(ulimit -n), {then}"
            )
        return f"{folder} cannot be written ({error.strerror}): put that right, {then}"
    return ""
