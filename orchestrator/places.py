"""Where everything lies: one state directory, and nothing outside it.

Unix sockets may not have paths of more than 107 characters, and Ray needs about 65 of them for
itself, and takes ASCII only. When the state directory's own path is too long, or has other letters, a
symbolic link with a short name in the temporary directory leads to it; the house removes the link when
it ends.
"""

import hashlib
import os
import tempfile
from pathlib import Path

RUN_PATH_MAX = 40
LINKS = ("spot-" + "[0-9a-f]" * 12, "sc-" + "[0-9a-f]" * 8)  # of houses, and of local clouds


class Places:
    """Every path that the house and its parts use, from the state directory."""

    def __init__(self, state_dir: Path) -> None:
        self.state_dir = state_dir.resolve()
        self.identity = hashlib.sha256(str(self.state_dir).encode()).hexdigest()[:12]

    def make(self) -> None:
        """Make the state directory, private to its owner, and the short way to it."""
        try:
            self.state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            (self.state_dir / "run").mkdir(mode=0o700, exist_ok=True)
            (self.state_dir / "logs").mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise OSError(
                f"{self.state_dir} cannot be the state directory ({error.strerror}); set manager.state_dir to a folder of yours"
            ) from error
        link = self._link()
        if not self._needs_link():
            return
        if link.is_symlink() and link.readlink() != self.state_dir / "run":
            link.unlink()  # somebody else's way; raises if we may not
        if not link.is_symlink():
            link.symlink_to(self.state_dir / "run")

    def remove_link(self) -> None:
        if self._needs_link():
            self._link().unlink(missing_ok=True)

    @property
    def run(self) -> Path:
        """The directory for sockets: short enough for them."""
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
    def quotes(self) -> Path:
        """The prices that were seen; `orchestrator backtest --data` reads this folder."""
        return self.state_dir / "quotes"

    @property
    def lock(self) -> Path:
        return self.state_dir / "house.lock"

    @property
    def house(self) -> Path:
        """What a client needs to find the running house."""
        return self.state_dir / "house.json"

    @property
    def given_back(self) -> Path:
        """There when the manager has given back every machine; the house ends then."""
        return self.state_dir / "stop"

    @property
    def superseded(self) -> Path:
        """There, with a sentence, when another house's manager has taken over; the house ends then."""
        return self.state_dir / "superseded"

    @property
    def broke_off(self) -> Path:
        """Why a manager of this house ended last, if one has ended by itself."""
        return self.state_dir / "broke_off"

    def secret(self, name: str) -> Path:
        return self.state_dir / f"{name}.token"

    def log(self, name: str) -> Path:
        return self.state_dir / "logs" / f"{name}.log"

    def _needs_link(self) -> bool:
        path = str(self.state_dir / "run")
        return len(path) > RUN_PATH_MAX or not path.isascii()

    def _link(self) -> Path:
        base = os.environ.get("XDG_RUNTIME_DIR", tempfile.gettempdir())
        if len(base) > RUN_PATH_MAX - 18:
            base = "/tmp"  # noqa: S108 - the link leads into a directory of mode 0700
        return Path(base) / f"spot-{self.identity}"


def dangling_links() -> list[Path]:
    """Our short ways to state directories that are gone, in every temporary folder that we use."""
    folders = {
        Path(os.environ.get("XDG_RUNTIME_DIR", tempfile.gettempdir())),
        Path(tempfile.gettempdir()),
    }
    found = (link for folder in folders for name in LINKS for link in folder.glob(name))
    return sorted(link for link in found if _ours_to_nowhere(link))


def _ours_to_nowhere(link: Path) -> bool:
    """Another person's may lead where we may not look."""
    try:
        ours = link.is_symlink() and link.lstat().st_uid == os.getuid()
        return ours and not link.exists()
    except OSError:
        return False
