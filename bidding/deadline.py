"""Finish by a deadline at least cost: when to run on spot, wait, or pay on-demand.

Spot capacity comes and goes. Stretches with and without it are either short or long, so each has
two phases: young ones end fast, and those that grow old (rate 1/MATURE_H) end slowly. That is
a Markov chain with four states a. In units of the on-demand price and of the full on-demand rate,
with t left and w to do, in mode m:
    V(t, w, a, m) = min over m' of  price(m') dt + E_a' [ V(t - dt, w - progress(m, m'), a', m') ]
    progress      = dt when m' = m, dt - overhead when m' is newly started, 0 when idle
Work left at t = 0 costs more than any other outcome. A guard around the table needs no model: it
starts on-demand while there is still just enough time for it.
"""

import math
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bidding.compiled import Floats, compiled
from bidding.model import MATURE_H, Climate

Mode = Literal["idle", "on_demand", "spot"]
MODES: tuple[Mode, ...] = ("idle", "on_demand", "spot")
IDLE, ON_DEMAND, SPOT = 0, 1, 2
ON_YOUNG, ON_OLD, OFF_YOUNG, OFF_OLD = 0, 1, 2, 3
STEPS = 192
UNFINISHED = 50.0  # the penalty per hour of unfinished work, in on-demand prices
RATE_STEP = 1.2  # rates are rounded to powers of this, so that tables are shared


class Odds(NamedTuple):
    """The chain for one step, the spot price in on-demand prices, and the overhead in steps."""

    lost_young: float
    lost_old: float
    back_young: float
    back_old: float
    mature: float
    spot_price: float
    overhead: float


class Book(NamedTuple):
    """The best mode by [steps left, work left in steps, phase, mode now]; steps of `step_h`."""

    table: NDArray[np.uint8]
    step_h: float


NO_BOOK = Book(np.zeros((1, 2, 4, 3), dtype=np.uint8), 1.0)


def phase_of(climate: Climate, spot_there: bool) -> int:
    old = climate.age_h >= MATURE_H
    return (ON_OLD if old else ON_YOUNG) if spot_there else (OFF_OLD if old else OFF_YOUNG)


@compiled
def _value(table: Floats, w: float) -> float:
    """Return the value for `w` steps of work, linear between whole steps."""
    if w <= 0:
        return 0.0
    i = min(int(w), len(table) - 2)
    return float(table[i] + (table[i + 1] - table[i]) * (w - i))


@compiled
def _expected(after: Floats, odds: Odds, phase: int, n: int, left: float) -> float:
    """Return E over the next phase; if spot capacity is lost, spot mode becomes idle."""
    lost = IDLE if n == SPOT else n
    if phase <= ON_OLD:
        gone = odds.lost_young if phase == ON_YOUNG else odds.lost_old
        older = odds.mature if phase == ON_YOUNG else 1.0
        stay = (1.0 - older) * _value(after[ON_YOUNG, n], left) + older * _value(
            after[ON_OLD, n], left
        )
        return gone * _value(after[OFF_YOUNG, lost], left) + (1.0 - gone) * stay
    back = odds.back_young if phase == OFF_YOUNG else odds.back_old
    older = odds.mature if phase == OFF_YOUNG else 1.0
    stay = (1.0 - older) * _value(after[OFF_YOUNG, n], left) + older * _value(
        after[OFF_OLD, n], left
    )
    return back * _value(after[ON_YOUNG, n], left) + (1.0 - back) * stay


@compiled
def _best(after: Floats, odds: Odds, phase: int, m: int, w: int) -> tuple[int, float]:
    best, lowest = IDLE, np.inf
    for n in range(3):
        if n == SPOT and phase >= OFF_YOUNG:
            continue
        price = 0.0 if n == IDLE else (1.0 if n == ON_DEMAND else odds.spot_price)
        done = 0.0 if n == IDLE else (1.0 if n == m else 1.0 - odds.overhead)
        left = w - done
        used = 1.0 if left >= 0 or done <= 0 else max(0.0, w / done)
        cost = price * used + _expected(after, odds, phase, n, left)
        if cost < lowest - 1e-12:
            best, lowest = n, cost
    return best, lowest


@compiled
def _solve(steps: int, odds: Odds) -> NDArray[np.uint8]:
    work = np.arange(steps + 2) * 1.0
    after = np.empty((4, 3, steps + 2))
    for a in range(4):
        for m in range(3):
            after[a, m] = work * UNFINISHED
    best = np.zeros((steps + 1, steps + 2, 4, 3), dtype=np.uint8)
    best[0, :, :, :] = ON_DEMAND
    for t in range(1, steps + 1):
        now = np.zeros_like(after)
        for a in range(4):
            for m in range(3):
                for w in range(1, min(t + 3, steps + 2)):
                    best[t, w, a, m], now[a, m, w] = _best(after, odds, a, m, w)
                for w in range(t + 3, steps + 2):
                    best[t, w, a, m] = ON_DEMAND
                    now[a, m, w] = now[a, m, t + 2] + (w - t - 2) * UNFINISHED
        after = now
    return best


def step_for(time_left_h: float) -> float:
    """Return the step length for the time left, rounded up so that tables are shared."""
    return float(2.0 ** (math.ceil(2 * math.log2(max(time_left_h, 1e-3) / STEPS)) / 2))


@lru_cache(maxsize=256)
def _table(odds: Odds) -> NDArray[np.uint8]:
    return _solve(STEPS, odds)


def _rounded(per_h: float) -> float:
    return float(RATE_STEP ** round(math.log(max(per_h, 1e-3), RATE_STEP)))


def book(climate: Climate, time_left_h: float, spot_price: float, overhead_h: float) -> Book:
    """Return the table for this climate; `spot_price` is in on-demand prices."""
    step_h = step_for(time_left_h)

    def chance(per_h: float) -> float:
        return -math.expm1(-_rounded(per_h) * step_h)

    odds = Odds(
        lost_young=chance(climate.lost_young),
        lost_old=chance(climate.lost_old),
        back_young=chance(climate.back_young),
        back_old=chance(climate.back_old),
        mature=-math.expm1(-step_h / MATURE_H),
        spot_price=min(1.0, round(20 * spot_price) / 20),
        overhead=min(1.0, math.ceil(20 * overhead_h / step_h) / 20),
    )
    return Book(_table(odds), step_h)


@compiled
def look_up(book: Book, time_left_h: float, work_left_h: float, phase: int, now: int) -> int:
    """Return the table's mode; time is rounded down and work up, which is the safe way."""
    if work_left_h <= 0:
        return IDLE
    t = min(book.table.shape[0] - 1, int(time_left_h / book.step_h))
    w = min(book.table.shape[1] - 1, int(np.ceil(work_left_h / book.step_h)))
    return int(book.table[max(0, t), w, phase, now])


@compiled
def guarded(
    book: Book,
    left_h: tuple[float, float, float],
    costs_h: tuple[float, float],
    phase: int,
    now: int,
) -> int:
    """Return the table's mode, or on-demand if no other mode is sure to finish.

    `left_h` are the hours to go, the hours of work on demand, and those of work on what works now.
    `costs_h` are the hours that a change to on demand would take (its start, a loss just before it,
    the time between two decisions), and the hours that a start on spot takes. A starting machine
    uses spare time, so it must cover both. A job that is too late all the same stays on spot if it
    ends there before another machine could work.
    """
    time_h, work_h, rest_h = left_h
    margin_h, start_h = costs_h
    if work_h <= 0:
        return IDLE
    spare_h = time_h - work_h
    if now == SPOT and phase < OFF_YOUNG and spare_h < start_h and rest_h <= start_h:
        return SPOT
    if spare_h <= (0.0 if now == ON_DEMAND else margin_h):
        return ON_DEMAND
    mode = look_up(book, time_h, work_h, phase, now)
    if mode == SPOT and now != SPOT and spare_h <= margin_h + start_h:
        mode = ON_DEMAND
    if mode == IDLE and spare_h <= margin_h:
        mode = ON_DEMAND
    return mode
