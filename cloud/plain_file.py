"""Looking at, and reading, a file that a person names, which may be none."""

import errno
from pathlib import Path


def is_there(path: Path) -> bool:
    """Return whether there is such a file or folder; raise OSError if that cannot be seen.

    From Python 3.14 on `Path.exists` says no to both.
    """
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def read(path: Path, bytes_max: int = -1) -> bytes:
    """Return what is in a file, or its first bytes; raise OSError if it is none.

    A pipe would be waited for, and a device has no end.
    """
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise OSError(errno.EINVAL, "not a file", str(path))
    with path.open("rb") as stream:
        return stream.read(bytes_max)
