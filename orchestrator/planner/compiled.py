"""The planner's use of numba, through `bidding.compiled`.

So both share one set of options, and one rule for stale machine code.
"""

from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

import numpy as np
from numpy.typing import NDArray

from bidding.compiled import cache_of, machine_code

Asked = ParamSpec("Asked")
Answer = TypeVar("Answer")
Codes = NDArray[np.int64]
Reals = NDArray[np.float64]
Flags = NDArray[np.bool_]

HERE = Path(__file__).parent
# Compiled functions take callees and constants from each other's files only.
SOURCES = [path for path in HERE.rglob("*.py") if b"\n@compiled\n" in path.read_bytes()]
CACHE = cache_of(HERE, SOURCES)


def compiled(function: Callable[Asked, Answer]) -> Callable[Asked, Answer]:
    """Compile at the first call, or load an earlier run's machine code; arithmetic is exact."""
    return machine_code(function, CACHE)
