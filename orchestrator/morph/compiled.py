"""The one door to numba: machine code from typed functions, kept on disk between runs."""

from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

import numba
import numpy as np
from numpy.typing import NDArray

Asked = ParamSpec("Asked")
Answer = TypeVar("Answer")
Codes = NDArray[np.int64]
Reals = NDArray[np.float64]
Flags = NDArray[np.bool_]


def compiled(function: Callable[Asked, Answer]) -> Callable[Asked, Answer]:
    """Compile at the first call, or load what an earlier run has compiled; the arithmetic is exact."""
    made = numba.njit(cache=True, nogil=True, error_model="numpy")(function)
    return cast(Callable[Asked, Answer], made)


def vectorised(function: Callable[Asked, Answer]) -> Callable[Asked, Answer]:
    """For loops over finite numbers only, where minima and maxima may be taken in any order."""
    made = numba.njit(cache=True, nogil=True, error_model="numpy", fastmath={"nnan", "nsz"})
    return cast(Callable[Asked, Answer], made(function))
