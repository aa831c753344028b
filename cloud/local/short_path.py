"""Short paths: links in /tmp to folders whose path is not ASCII, or too long for sockets.

Unix sockets have little room for a path, and Ray takes ASCII only. Containers that share /tmp may
each see folders that the others do not. So a link whose target is missing here may still be used in
a different container. A user of a link touches it regularly, and only a link that was not touched
for long counts as abandoned.
"""

import os
import shutil
import time
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

from cloud.plain_file import is_there

SHORT = Path("/tmp")  # noqa: S108 - the links lead into directories of mode 0700
SHORT_PATH = 24
TOUCH_S = 600.0
ABANDONED_S = 86_400.0


def short_way(directory: Path) -> Path:
    """Return a short ASCII path to the machines of a local cloud.

    Unix sockets on the machines have no room for a long path, and Ray takes ASCII only.
    """
    if len(str(directory)) <= SHORT_PATH and str(directory).isascii():
        return directory
    name = blake2b(str(directory).encode(), digest_size=4).hexdigest()
    return SHORT / f"sc-{name}"


def leads(link: Path, target: Path) -> bool:
    return link.is_symlink() and link.readlink() == target


def keep(link: Path, target: Path) -> None:
    """Make the link if it is missing, and touch it so that it does not count as abandoned.

    Files in /tmp may have been cleared, and Ray makes a folder where the link is missing; that
    folder is removed.
    """
    if leads(link, target):
        if abs(_idle_s(link)) > TOUCH_S:
            os.utime(link, follow_symlinks=False)
        return
    if link.is_dir() and not link.is_symlink():
        shutil.rmtree(link)
    link.unlink(missing_ok=True)  # it leads to a different target; raises if we may not remove it
    link.symlink_to(target)


def remove(link: Path, target: Path) -> None:
    with suppress(OSError):
        if leads(link, target):
            link.unlink()


def is_abandoned(link: Path) -> bool:
    """Return whether a link of ours has no target and was not touched for a day.

    A different user's link never counts, because it may lead to a folder that we cannot see.
    """
    try:
        ours = link.is_symlink() and link.lstat().st_uid == os.getuid()
        return ours and not is_there(link) and _idle_s(link) > ABANDONED_S
    except OSError:
        return False


def _idle_s(link: Path) -> float:
    return time.time() - link.lstat().st_mtime
