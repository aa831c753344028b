"""The one door to numba: machine code from typed functions, kept on disk between runs."""

from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import ParamSpec, TypeVar, cast

import numba
import numpy as np
from numpy.typing import NDArray

Asked = ParamSpec("Asked")
Answer = TypeVar("Answer")
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]

HERE = Path(__file__).parent


def _edition() -> str:
    """Numba looks at one file only to see whether its cache is stale; callees live in others."""
    sources = sorted(HERE.glob("*.py"))
    return sha256(b"".join(p.read_bytes() for p in sources)).hexdigest()[:16]


CACHE = str(HERE / "__pycache__" / f"numba-{_edition()}")


def compiled(function: Callable[Asked, Answer]) -> Callable[Asked, Answer]:
    """Compile at the first call, or load what an earlier run has compiled; the arithmetic is exact."""
    before = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = CACHE
    try:
        made = numba.njit(cache=True, nogil=True, error_model="numpy")(function)
    finally:
        numba.config.CACHE_DIR = before
    return cast(Callable[Asked, Answer], made)
