"""Fit links to the times of messages and exchanges: latency, bandwidth, jitter, lanes."""

import math
import statistics
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from agent.profile import Link

SAME = 1e-9


class RingTime(msgspec.Struct, frozen=True, kw_only=True):
    """A measured all-reduce: the workers, the bytes, and how many share the link at once."""

    workers: int
    size_bytes: float
    at_once: int = 1
    seconds: float


def fit_link(sizes_bytes: Sequence[float], seconds: Sequence[float]) -> Link:
    """Fit latency and bandwidth of a link to messages of several sizes.

    Small and large messages count alike, because the sum of squared relative errors is minimised.
    """
    found = _lines(np.array([np.ones(len(sizes_bytes)), sizes_bytes]).T, np.array(seconds))
    return Link(bandwidth_bytes_per_s=1 / max(found[1], 1e-15), latency_s=found[0])


def jitter_s(seconds: Sequence[float]) -> float:
    """Return the mean delay of messages of one size, exponential as the simulator draws it.

    The mean is the median over ln 2. The median is used because one message in many that waited for
    a busy machine says nothing about the link.
    """
    least = min(seconds)
    return (statistics.median(seconds) - least) / math.log(2)


def fit_ring(times: Sequence[RingTime], lanes: int = 0) -> Link:
    """Fit 2 (D-1) hop + 2 (D-1)/D * bytes * max(1, k / lanes) / bandwidth to all-reduces.

    If `lanes` is not given, it is the number that explains best what several at once took; the
    least, if several do.
    """
    options = [lanes] if lanes else range(1, max(t.at_once for t in times) + 1)
    fits = [_ring(times, each) for each in options]
    least = min(off for off, _ in fits)
    return next(link for off, link in fits if off <= least * (1 + SAME) + SAME)


def _ring(times: Sequence[RingTime], lanes: int) -> tuple[float, Link]:
    rows = np.array(
        [
            (
                2.0 * (t.workers - 1),
                2 * (t.workers - 1) / t.workers * t.size_bytes * max(1.0, t.at_once / lanes),
            )
            for t in times
        ]
    )
    seconds = np.array([t.seconds for t in times])
    hop, pace = _lines(rows, seconds)
    off = float(((rows @ np.array([hop, pace]) / seconds - 1) ** 2).sum())
    return off, Link(bandwidth_bytes_per_s=1 / max(pace, 1e-15), latency_s=hop, lanes=lanes)


def _lines(rows: Any, seconds: Any) -> tuple[float, float]:
    """Return two coefficients, neither below zero, with the least relative errors."""
    scaled = rows / seconds[:, None]
    both = np.linalg.lstsq(scaled, np.ones(len(seconds)), rcond=None)[0]
    if both.min() >= 0:
        return float(both[0]), float(both[1])
    alone = []
    for column in (0, 1):
        one = scaled[:, column]
        factor = max(float(one @ np.ones(len(one)) / max(one @ one, 1e-300)), 0.0)
        alone.append((float(((one * factor - 1) ** 2).sum()), column, factor))
    _, column, factor = min(alone)
    return (factor, 0.0) if column == 0 else (0.0, factor)
