"""Finish by a moment at least cost: when to run on spot, when to wait, when to pay on-demand.

Spot capacity comes and goes as a two-state Markov chain (lost at rate h, back at rate r). In units
of the on-demand price and of the full on-demand rate, with t left and w to do:
    V(t, w, a, m) = min over m' of  price(m') dt + E_a' [ V(t - dt, w - progress(m, m'), a', m') ]
    progress      = dt when m' = m, dt - overhead when m' is newly started, 0 when idle
Work left at t = 0 costs more than anything else can. Outside the grid stands a guard that needs no
model: on-demand starts while there is still exactly time enough for it.
"""

import math
from functools import lru_cache
from typing import Literal

import numba
import numpy as np
from numpy.typing import NDArray

Mode = Literal["idle", "spot", "on_demand"]
MODES: tuple[Mode, ...] = ("idle", "on_demand", "spot")
STEPS = 128
UNFINISHED = 50.0  # per hour of work left over, in on-demand prices
RATE_STEP = 1.25  # rates and prices are rounded to powers of this, so that tables are shared


@numba.njit(cache=True)
def _value(table: NDArray[np.float64], w: float) -> float:
    """Linear between whole steps of work."""
    if w <= 0:
        return 0.0
    i = min(int(w), len(table) - 2)
    return table[i] + (table[i + 1] - table[i]) * (w - i)


@numba.njit(cache=True)
def _solve(
    steps: int, lose: float, regain: float, spot_price: float, overhead: float
) -> NDArray[np.uint8]:
    """Best mode by [steps left, work left, spot there?, mode now]. All times in steps."""
    work = np.arange(steps + 2) * 1.0
    after = np.empty((2, 3, steps + 2))
    for a in range(2):
        for m in range(3):
            after[a, m] = work * UNFINISHED
    best = np.zeros((steps + 1, steps + 2, 2, 3), dtype=np.uint8)
    for t in range(1, steps + 1):
        now = np.empty_like(after)
        for a in range(2):
            gone = lose if a == 1 else 1 - regain
            for m in range(3):
                for w in range(steps + 2):
                    lowest = np.inf
                    for n in range(3):
                        if n == 2 and a == 0:
                            continue
                        price = 0.0 if n == 0 else (1.0 if n == 1 else spot_price)
                        done = 0.0 if n == 0 else (1.0 if n == m else 1.0 - overhead)
                        left = w - done
                        used = 1.0 if left >= 0 or done == 0 else max(0.0, w / done)
                        lost = 0 if n == 2 else n
                        cost = (
                            price * used
                            + gone * _value(after[0, lost], left)
                            + (1 - gone) * _value(after[1, n], left)
                        )
                        if cost < lowest - 1e-12:
                            lowest = cost
                            best[t, w, a, m] = n
                    now[a, m, w] = 0.0 if w == 0 else lowest
        after = now
    return best


@lru_cache(maxsize=512)
def _table(lose: float, regain: float, spot_price: float, overhead: float) -> NDArray[np.uint8]:
    table: NDArray[np.uint8] = _solve(STEPS, lose, regain, spot_price, overhead)
    return table


def _rounded(x: float) -> float:
    return float(RATE_STEP ** round(math.log(max(x, 1e-4), RATE_STEP)))


def best_mode(
    work_left_h: float, time_left_h: float, spot_price: float | None, rates_per_h: tuple[float, float],
    overhead_h: float, now: Mode,
) -> Mode:  # fmt: skip
    """What to run now. `spot_price` is in on-demand prices, `None` when there is no capacity.

    `rates_per_h` are (lost, back); `work_left_h` counts hours on demand at full size.
    """
    if work_left_h <= 0:
        return "idle"
    horizon_h = max(time_left_h, 1e-6)
    step_h = 2.0 ** math.ceil(math.log2(horizon_h / STEPS))
    hazard, back = (_rounded(r) for r in rates_per_h)
    price = min(1.0, round(20 * (spot_price if spot_price is not None else 1 / 3)) / 20)
    overhead = min(1.0, math.ceil(20 * overhead_h / step_h) / 20)
    table = _table(
        -math.expm1(-hazard * step_h), -math.expm1(-back * step_h), price, overhead
    )  # fmt: skip
    t = min(STEPS, int(time_left_h / step_h))
    w = min(STEPS + 1, math.ceil(work_left_h / step_h))
    chosen = MODES[int(table[t, w, int(spot_price is not None), MODES.index(now)])]
    return "on_demand" if t == 0 else chosen
