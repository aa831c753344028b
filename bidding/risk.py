"""The risk that a machine is taken away, from prices or from capacity, whichever evicts.

(a) BidBrain's: for a bid delta d over the price p(t), a machine is lost at the first t' with
    p(t') > p(t) + d; beta(d) is the share lost within the hour. Ours also uses the mood of the
    price, m: how long ago it last moved, and whether it rose. With N_m samples in that mood
        beta(d, m) = (lost_m + w) / (N_m + w / beta(d)),   w = two events, 12 samples each.
(b) Today's: pools that have capacity lose it at rate h, pools without regain it at rate r, both
    depending on how long the pool has been in that state. With a Gamma(a, b) prior and n events in
    T hours (running machines count their hours, which is the censoring)
        h = (a + n) / (b + T).
"""

import math
from collections.abc import Sequence
from functools import cached_property

import msgspec
import numpy as np
from numpy.typing import NDArray

from bidding.compiled import compiled
from bidding.markets.history import Floats, Series
from bidding.model import MATURE_H, Climate
from cloud.clock import HOUR_S

DELTAS_USD_PER_H = (0.0001, 0.001, 0.003, 0.01, 0.03, 0.05, 0.1, 0.2, 0.4)  # BidBrain's range
SAMPLE_S = 300.0
AGE_EDGES_S = np.array([0.0, 900.0, 3600.0, 4 * 3600.0, 16 * 3600.0])
MOOD_EDGES_S = HOUR_S * np.array([0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 12.0, 24.0])
MOODS = 2 * len(MOOD_EDGES_S)
RECORD_EVENTS = 2.0  # weight of a pool's whole record beside the record of one age or mood


class Gamma(msgspec.Struct, frozen=True, kw_only=True):
    """The belief about a rate, equal to having seen `events` in `hours`."""

    events: float
    hours: float

    @property
    def per_h(self) -> float:
        return self.events / self.hours

    def seen(self, events: float, hours: float) -> "Gamma":
        """Update by Bayes' rule for a Poisson rate; hours without an event count too."""
        if events < 0 or hours < 0:
            raise ValueError(f"{events} events in {hours} h: neither can be negative")
        return Gamma(events=self.events + events, hours=self.hours + hours)


HAZARD_PRIOR = Gamma(events=0.5, hours=4.0)  # wide: one loss in eight hours, soon overruled
RETURN_PRIOR = Gamma(events=0.5, hours=1.0)


@compiled
def _first_above(values: Floats, at_s: Floats, samples_s: Floats, delta: float) -> Floats:
    """Return for each sample the seconds until the price rises by more than delta.

    The points between a point and the next higher one are no higher than it, so they are skipped.
    """
    higher = np.empty(len(values), np.int64)
    for i in range(len(values) - 1, -1, -1):
        j = i + 1
        while j < len(values) and values[j] <= values[i]:
            j = higher[j]
        higher[i] = j
    out = np.empty(len(samples_s))
    start = 0
    for i in range(len(samples_s)):
        t = samples_s[i]
        while start + 1 < len(at_s) and at_s[start + 1] <= t:
            start += 1
        limit = values[start] + delta
        j = start + 1
        while j < len(at_s) and values[j] <= limit:
            j = higher[j]
        out[i] = at_s[j] - t if j < len(at_s) else np.inf
    return out


class BidTable(msgspec.Struct, frozen=True, kw_only=True):
    """The share evicted within the hour and the median life, per bid delta."""

    delta_usd_per_h: tuple[float, ...]
    beta: tuple[float, ...]
    median_s: tuple[float, ...]


def bid_table(
    series: Sequence[Series],
    from_s: float,
    to_s: float,
    deltas_usd_per_h: Sequence[float] = DELTAS_USD_PER_H,
) -> BidTable:
    """Return beta and median time to eviction of every bid delta, from price history alone."""
    samples = np.arange(from_s, to_s - HOUR_S, SAMPLE_S)
    beta, median = [], []
    for delta in deltas_usd_per_h:
        lives = np.concatenate([_first_above(s.value, s.at_s, samples, delta) for s in series])
        # A price that never moved says little, so half an event is always assumed.
        beta.append(float((np.sum(lives <= HOUR_S) + 0.5) / (len(lives) + 1)))
        median.append(float(np.median(lives)))
    return BidTable(
        delta_usd_per_h=tuple(deltas_usd_per_h),
        beta=tuple(beta),
        median_s=tuple(median),
    )


def moods(series: Series, at_s: Floats) -> NDArray[np.int64]:
    """Return when the price last moved and whether it rose, as one number per moment."""
    moved = np.concatenate(([True], np.diff(series.value) != 0))
    since_s = series.at_s[moved]
    rose = np.concatenate(([False], np.diff(series.value[moved]) > 0))
    i = np.maximum(np.searchsorted(since_s, at_s, "right") - 1, 0)
    age = np.searchsorted(MOOD_EDGES_S, np.maximum(at_s - since_s[i], 0.0), "right") - 1
    return np.asarray(2 * age + rose[i], dtype=np.int64)


def bid_odds(series: Series, from_s: float, to_s: float) -> Floats:
    """Return the share evicted within the hour by [mood, delta], from the series up to `to_s`."""
    samples = np.arange(from_s, to_s - HOUR_S, SAMPLE_S)
    mood = moods(series, samples)
    seen = np.bincount(mood, minlength=MOODS)
    record = RECORD_EVENTS * HOUR_S / SAMPLE_S
    odds = np.empty((MOODS, len(DELTAS_USD_PER_H)))
    for j, delta in enumerate(DELTAS_USD_PER_H):
        lost = _first_above(series.value, series.at_s, samples, delta) <= HOUR_S
        beta = (np.sum(lost) + 0.5) / (len(lost) + 1)
        odds[:, j] = (np.bincount(mood, lost, MOODS) + record) / (seen + record / beta)
    return odds


class CapacityRisk:
    """Rates of losing and regaining capacity in a pool, as known at any moment of its series."""

    def __init__(self, series: Series, needed: int = 1) -> None:
        on = series.value >= needed
        keep = np.concatenate(([True], on[1:] != on[:-1]))
        self.at_s: Floats = series.at_s[keep]
        self.on: NDArray[np.bool_] = on[keep]

    @cached_property
    def _spells(self) -> tuple[Floats, Floats]:
        """Return sums of (events, hours) by [spell, on or off, age bucket] before each change."""
        n, buckets = len(self.at_s), len(AGE_EDGES_S)
        events = np.zeros((n, 2, buckets))
        hours = np.zeros((n, 2, buckets))
        ends = np.append(AGE_EDGES_S[1:], np.inf)
        for i in range(n - 1):
            length = self.at_s[i + 1] - self.at_s[i]
            side = int(self.on[i])
            in_bucket = np.clip(length - AGE_EDGES_S, 0, ends - AGE_EDGES_S) / HOUR_S
            bucket = int(np.searchsorted(AGE_EDGES_S, length, "right")) - 1
            events[i + 1] = events[i]
            hours[i + 1] = hours[i]
            events[i + 1, side, bucket] += 1
            hours[i + 1, side] += in_bucket
        return events, hours

    def rates_per_h(self, at_s: float) -> tuple[float, float]:
        """Return (hazard, return) over the next hour.

        The rate of the pool's present state follows its age; the other rate is the overall one.
        """
        hazard, back = self.rates_at(np.array([at_s]))
        return float(hazard[0]), float(back[0])

    def rates_at(self, at_s: Floats) -> tuple[Floats, Floats]:
        """Return the same rates for many moments, each from its past only."""
        i = np.maximum(np.searchsorted(self.at_s, at_s, "right") - 1, 0)
        events, hours = self._spells[0][i], self._spells[1][i]
        age_s = np.maximum(0.0, at_s - self.at_s[i])[:, None]
        ends = np.append(AGE_EDGES_S[1:], np.inf)
        ahead = np.minimum(age_s + HOUR_S, ends) - np.maximum(age_s, AGE_EDGES_S)
        ahead_h = np.maximum(ahead, 0.0) / HOUR_S
        rates = []
        for side, prior in ((1, HAZARD_PRIOR), (0, RETURN_PRIOR)):
            here = self.on[i] == bool(side)
            running_h = np.where(here, age_s[:, 0] / HOUR_S, 0.0)
            seen_h = prior.hours + hours[:, side].sum(axis=1) + running_h
            overall = (prior.events + events[:, side].sum(axis=1)) / seen_h
            # The record of each age, with two events' worth of the pool's overall record as prior.
            events_h = RECORD_EVENTS / overall[:, None] + hours[:, side]
            by_age = (RECORD_EVENTS + events[:, side]) / events_h
            rates.append(np.where(here, (by_age * ahead_h).sum(axis=1), overall))
        return rates[0], rates[1]


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """Predicted and observed share of evictions within the hour, by tenth of predictions."""

    predicted: tuple[float, ...]
    observed: tuple[float, ...]
    count: tuple[int, ...]

    @property
    def mean_error(self) -> float:
        """Return the weighted mean of |predicted - observed|."""
        n = np.array(self.count, dtype=np.float64)
        gap = np.abs(np.array(self.predicted) - np.array(self.observed))
        return float(np.sum(gap * n) / np.sum(n))


def calibrate(pools: Sequence[CapacityRisk], step_s: float = HOUR_S) -> Calibration | None:
    """Compare predictions for every pool with capacity, every `step_s`, with the next hour.

    Each prediction knows only the past. Return `None` if no pool had capacity after its first day.
    """
    said: list[float] = []
    was: list[bool] = []
    for pool in pools:
        for t in np.arange(pool.at_s[0] + 24 * HOUR_S, pool.at_s[-1] - HOUR_S, step_s):
            i = int(np.searchsorted(pool.at_s, t, "right")) - 1
            if pool.on[i]:
                said.append(-math.expm1(-pool.rates_per_h(float(t))[0]))
                was.append(bool(pool.at_s[i + 1] - t <= HOUR_S))
    if not said:
        return None
    order = np.argsort(said, kind="stable")
    parts = [p for p in np.array_split(order, 10) if len(p)]
    said_a, was_a = np.array(said), np.array(was, dtype=np.float64)
    return Calibration(
        predicted=tuple(float(said_a[p].mean()) for p in parts),
        observed=tuple(float(was_a[p].mean()) for p in parts),
        count=tuple(len(p) for p in parts),
    )


def all_gone(hazards_per_h: Sequence[float], returns_per_h: Sequence[float]) -> tuple[float, float]:
    """Return (hazard, return) of "some pool has capacity", for independent pools.

    u_i = h_i / (h_i + r_i)     share of time that pool i has none
    U   = prod u_i              share of time that none has any
    R   = sum r_i               rate at which that ends;   H = R U / (1 - U) balances it
    """
    gone = math.prod(
        h / (h + r) if h + r > 0 else 0.0 for h, r in zip(hazards_per_h, returns_per_h, strict=True)
    )
    back = sum(returns_per_h)
    return (back * gone / (1 - gone) if gone < 1 else math.inf), back


def climate_at(spells: CapacityRisk, at_s: float) -> Climate:
    """Return how all capacity came and went before a moment, by young and old stretches."""
    i = max(0, int(np.searchsorted(spells.at_s, at_s, "right")) - 1)
    lengths_h = np.diff(spells.at_s[: i + 1]) / HOUR_S
    on = spells.on[:i]
    age_h = max(0.0, at_s - float(spells.at_s[i])) / HOUR_S
    rates = []
    for side, prior in ((True, HAZARD_PRIOR), (False, RETURN_PRIOR)):
        ended = lengths_h[on == side]
        running = age_h if bool(spells.on[i]) == side else 0.0
        young_h = float(np.minimum(ended, MATURE_H).sum()) + min(running, MATURE_H)
        old_h = float(np.maximum(ended - MATURE_H, 0).sum()) + max(running - MATURE_H, 0.0)
        young = int(np.sum(ended < MATURE_H))
        rates.append(prior.seen(young, young_h).per_h)
        rates.append(prior.seen(len(ended) - young, old_h).per_h)
    return Climate(
        lost_young=rates[0], lost_old=rates[1], back_young=rates[2], back_old=rates[3], age_h=age_h
    )


def phases(spells: CapacityRisk, at_s: Floats) -> NDArray[np.int64]:
    """Return 0 or 1 for capacity since less or more than `MATURE_H`, 2 or 3 for none."""
    i = np.maximum(np.searchsorted(spells.at_s, at_s, "right") - 1, 0)
    old = at_s - spells.at_s[i] >= MATURE_H * HOUR_S
    return np.asarray(np.where(spells.on[i], 0, 2) + old, dtype=np.int64)
