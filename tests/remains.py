"""What is left of a run of the tests: processes, links in /tmp, folders in memory."""

import os
from contextlib import suppress
from pathlib import Path

LINKS, SHARED = Path("/tmp"), Path("/dev/shm")
ENDS_WITH_US = b"from multiprocessing."  # Python's own helpers, which hear of it by a pipe


def remains(mark: str, folder: Path) -> list[str]:
    """What is left of a run with this mark and this folder, a line for each."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has just ended, or is another user's
            words, environment = (place / "cmdline").read_bytes(), (place / "environ").read_bytes()
            is_ours = mark.encode() in environment or f"{folder}/".encode() in words + environment
            if is_ours and not _ends(place, words):
                found.append(f"process {place.name}: {words.replace(bytes(1), b' ').decode()}")
    for link in [*LINKS.glob("spot-*"), *LINKS.glob("sc-*")]:
        with suppress(OSError):
            if link.readlink().is_relative_to(folder):
                found.append(f"link {link}")
    for home in SHARED.glob("spot-keeper-*/home"):
        with suppress(OSError):
            if Path(home.read_text()).is_relative_to(folder):
                found.append(f"folder {home.parent}")
    return found


def _ends(place: Path, words: bytes) -> bool:
    """Whether it is this process, ends with it, or only waits to be reaped."""
    if int(place.name) == os.getpid() or ENDS_WITH_US in words:
        return True
    return (place / "stat").read_text().rpartition(")")[2].split()[0] in "ZX"
