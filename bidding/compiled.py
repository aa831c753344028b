"""The one place that calls numba: machine code of typed functions, kept between runs.

`orchestrator/planner` uses it too. Numba checks only a function's own file to see whether its cache
is stale, but callees and constants live in other files. So the cache of a package lies under a name
that depends on all of its sources that matter. Processes that begin together compile a function once:
one does, and the others load what it made. Where the package belongs to somebody else, its cache is in
the user's own folder, and if that takes nothing either, each process compiles for itself.
"""

import fcntl
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache, wraps
from hashlib import sha256
from pathlib import Path
from shutil import rmtree
from typing import Any, ParamSpec, TypeVar, cast

import numba
import numpy as np
from numba.core.compiler_lock import global_compiler_lock
from numpy.typing import NDArray

Asked = ParamSpec("Asked")
Answer = TypeVar("Answer")
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]

EDITIONS_KEPT = 3
HERE = Path(__file__).parent


def cache_of(package: Path, sources: Iterable[Path]) -> str:
    """Return the folder that keeps the machine code of these sources."""
    edition = sha256(b"".join(path.read_bytes() for path in sorted(sources))).hexdigest()[:16]
    beside = package / "__pycache__" / f"numba-{edition}"
    if not _takes_files(beside):
        with suppress(RuntimeError):  # of a user without a home
            return str(Path.home() / ".cache" / "spot-orchestrator" / package.name / beside.name)
    return str(beside)


@lru_cache  # it is asked for each function of a package
def _takes_files(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "probe").touch()
    except OSError:
        return False
    return True


def forget_old(cache: str) -> None:
    """Remove machine code of older sources, except the newest few, which may still be running."""
    with suppress(OSError):  # a different process may remove it at the same time
        older = [path for path in Path(cache).parent.glob("numba-*") if path != Path(cache)]
        older.sort(key=lambda path: path.stat().st_mtime)
        for path in older[:-EDITIONS_KEPT]:
            rmtree(path, ignore_errors=True)


CACHE = cache_of(HERE, HERE.rglob("*.py"))


def machine_code(
    function: Callable[Asked, Answer], cache: str, fastmath: Collection[str] = ()
) -> Callable[Asked, Answer]:
    """Compile at the first call, or load what an earlier run has compiled."""
    before, kept = numba.config.CACHE_DIR, _takes_files(Path(cache))
    numba.config.CACHE_DIR = cache
    try:
        made = numba.njit(cache=kept, nogil=True, error_model="numpy", fastmath=set(fastmath))(
            function
        )
        if kept:
            made.compile = _once(made.compile, Path(cache) / f"{function.__qualname__}.lock")
        return cast(Callable[Asked, Answer], made)
    finally:
        numba.config.CACHE_DIR = before


def _once(compile_: Callable[[Any], Any], lock: Path) -> Callable[[Any], Any]:
    """Load or compile a function in one process at a time.

    A caller's lock is held while its callees are asked for, so no circle of calls may be compiled.
    Threads queue first: they have one lock for all functions, and a second way round would be a circle.
    """

    @wraps(compile_)
    def alone(signature: Any) -> Any:
        with global_compiler_lock, _held(lock):
            return compile_(signature)

    return alone


@contextmanager
def _held(lock: Path) -> Iterator[None]:
    lock.parent.mkdir(parents=True, exist_ok=True)  # newer sources may have had it removed
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def compiled(function: Callable[Asked, Answer]) -> Callable[Asked, Answer]:
    """Compile a function of this package, with exact arithmetic."""
    return machine_code(function, CACHE)
