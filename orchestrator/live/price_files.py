"""The history of prices, kept outside the state: bounded, and read by the backtest too.

The manager decides when prices are kept (`buying.keep_quotes`); the worlds do so with the store
below. The odds of bids are computed here as well, because that needs the whole history.
"""

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np

from bidding.errors import HistoryError
from bidding.markets.files import TYPES_FILE, listed_types, stored_prices, write_prices
from bidding.markets.history import Point, Series, build, merge
from bidding.risk import DELTAS_USD_PER_H, bid_odds, moods
from cloud.model import InstanceType, Pool, Quote
from orchestrator.actions import KeepQuotes
from orchestrator.events import Odds, QuotesKept

FILE, BROKEN = "prices.npz", ".broken"
K = TypeVar("K")
V = TypeVar("V")
POINTS_KEPT = 20_000  # per pool, the newest
POOLS_KEPT = 10_000
LOOK_BACK_S = 7 * 86_400.0  # the part of the history that odds are computed from
LOOK_BACK_POINTS = 2_000
LEAST_S = 2 * 3600.0  # the shortest history from which odds are computed


class QuoteStore:
    """The history in `folder`; without a folder it lasts as long as this object."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._history: dict[Pool, Series] | None = None
        self._types: dict[str, InstanceType] = {}

    def keep(self, action: KeepQuotes, at_s: float) -> QuotesKept:
        """Add prices, write the history whole or not at all, and return the event of it.

        An error is in the event.
        """
        error = ""
        if self._history is None:
            self._history, error = self._recalled()
        self._history = added(self._history, action.quotes)
        self._types.update({kind.name: kind for kind in action.types})
        try:
            self._write()
        except OSError as e:
            error = f"{e.filename or self._folder}: prices cannot be kept: {e.strerror}; free some space or check who owns it"
        pools = sorted(self._history) if action.bids else ()
        odds = {pool.key: odds_of(self._history[pool], at_s) for pool in pools}
        return QuotesKept(
            at_s=at_s, odds={key: some for key, some in odds.items() if some}, error=error
        )

    def _recalled(self) -> tuple[dict[Pool, Series], str]:
        """Return the history of an earlier manager, and what was wrong with its files.

        Only a file that cannot be read is moved away.
        """
        if self._folder is None:
            return {}, ""
        types, bad_types = _read(self._folder / TYPES_FILE, lambda path: listed_types(path.parent))
        prices, bad_prices = _read(self._folder / FILE, stored_prices)
        self._types = dict(types)
        return dict(prices), "; ".join(filter(None, (bad_types, bad_prices)))

    def _write(self) -> None:
        if self._folder is None or not self._history:
            return
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        rows = io.StringIO()
        table = csv.writer(rows, lineterminator="\n")
        table.writerow(("type", "slots", "speed", "on_demand_usd_per_h"))
        for name, kind in sorted(self._types.items()):
            table.writerow((name, kind.slots, kind.speed, kind.on_demand_usd_per_h))
        part = self._folder / f"{TYPES_FILE}.part"
        part.write_text(rows.getvalue())
        part.replace(self._folder / TYPES_FILE)
        write_prices(self._folder / FILE, self._history)


def _read(path: Path, read: Callable[[Path], Mapping[K, V]]) -> tuple[Mapping[K, V], str]:
    if not path.exists():
        return {}, ""
    try:
        return read(path), ""
    except (HistoryError, OSError, ValueError) as e:
        broken = path.with_name(f"{path.name}{BROKEN}")
        why = str(e).removeprefix(str(path)).removeprefix(": ")
        try:
            path.replace(broken)
        except OSError as other:
            return {}, f"{path}: {why}; it cannot be moved out of the way either: {other.strerror}"
        return {}, f"{path}: {why}; it is kept as {broken.name}, and a new one begins"


def added(history: Mapping[Pool, Series], quotes: Sequence[Quote]) -> dict[Pool, Series]:
    """Return the history with these quotes, without absurd ones.

    Above the limits the oldest points and the newest pools are left out.
    """
    fresh, _ = build(Point(q.pool, q.at_s, q.price_usd_per_h) for q in quotes)
    touched = merge([{p: history[p] for p in fresh if p in history}, fresh])
    grown = {**history, **{pool: _newest(series) for pool, series in touched.items()}}
    return dict(list(grown.items())[:POOLS_KEPT])


def _newest(series: Series) -> Series:
    return Series(at_s=series.at_s[-POINTS_KEPT:], value=series.value[-POINTS_KEPT:])


def odds_of(series: Series, at_s: float) -> tuple[Odds, ...]:
    """Return the eviction odds of each bid above the price, in the market's present mood.

    It is empty if the history is shorter than `LEAST_S`.
    """
    from_s = max(float(series.at_s[-LOOK_BACK_POINTS:][0]), at_s - LOOK_BACK_S)
    if at_s - from_s < LEAST_S:
        return ()
    first = max(0, int(np.searchsorted(series.at_s, from_s, "right")) - 1)
    recent = Series(at_s=series.at_s[first:], value=series.value[first:])
    (mood,) = moods(recent, np.array([at_s]))
    lost = bid_odds(recent, from_s, at_s)[mood].tolist()
    return tuple(
        Odds(above_usd_per_h=delta, evicted_in_1h=beta)
        for delta, beta in zip(DELTAS_USD_PER_H, lost, strict=True)
    )
