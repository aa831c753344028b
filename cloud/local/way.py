"""Short ways: links in /tmp to folders whose own path is too long for a Unix socket, or not plain.

Several who share /tmp may each see folders that the others do not, as containers do: that a link leads nowhere here
does not say that nobody lives behind it. Who does touches it now and then, and only what has not been touched for
long is anybody's to remove.
"""

import os
import shutil
import time
from contextlib import suppress
from pathlib import Path

SHORT = Path("/tmp")  # noqa: S108 - the links lead into directories of mode 0700
TOUCH_S = 600.0
ABANDONED_S = 86_400.0


def leads(link: Path, target: Path) -> bool:
    return link.is_symlink() and link.readlink() == target


def keep(link: Path, target: Path) -> None:
    """The way, if it is not there. Somebody may have cleared up in /tmp, and Ray makes a folder of what is missing."""
    if leads(link, target):
        if abs(_idle_s(link)) > TOUCH_S:
            os.utime(link, follow_symlinks=False)
        return
    if link.is_dir() and not link.is_symlink():
        shutil.rmtree(link)
    link.unlink(missing_ok=True)  # somebody else's way; raises if we may not
    link.symlink_to(target)


def remove(link: Path, target: Path) -> None:
    with suppress(OSError):
        if leads(link, target):
            link.unlink()


def is_abandoned(link: Path) -> bool:
    """Ours, to nowhere, and for a day nobody has said that it is needed. Another person's may lead where we may not look."""
    try:
        ours = link.is_symlink() and link.lstat().st_uid == os.getuid()
        return ours and not link.exists() and _idle_s(link) > ABANDONED_S
    except OSError:
        return False


def _idle_s(link: Path) -> float:
    return time.time() - link.lstat().st_mtime
