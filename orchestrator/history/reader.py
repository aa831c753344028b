"""The reading side of the history: series, events and money of any time, from any process.

A `History` may be shared by threads, and outlives the file being made, put aside or moved. Before
there is a file, every answer is empty.
"""

import sqlite3
from collections.abc import Iterable, Sequence
from math import inf
from threading import Lock
from typing import Any

import msgspec

from cloud.clock import DAY_S
from orchestrator.history import store
from orchestrator.history.records import (
    By,
    Cause,
    Daily,
    Entry,
    Happening,
    Held,
    Point,
    Remembered,
    Spent,
)
from orchestrator.kinds import Kind
from orchestrator.paths import Places, no_room

POINTS_MAX = 400
EVENTS_MAX = 1_000
MACHINES_MAX = 1_000
NAMES_MAX = 4_000
FINER = 8  # times as many rows may be read as points are asked for
COARSEST = len(store.TIERS) - 1
ASK_AGAIN = "then ask again"
MENDS = "A running manager puts it aside when it writes next, and begins a new one"
_COLUMNS: dict[By, str] = {
    "cause": "cause",
    "job": "job",
    "pool": "pool || CASE market WHEN '' THEN '' ELSE ' ' || market END",
    "day": "date(day * 86400, 'unixepoch')",
    "machine": "token",
}


class History:
    """Answers from the file of one state directory."""

    def __init__(self, places: Places) -> None:
        self._path = places.history
        self._lock = Lock()
        self._file: sqlite3.Connection | None = None
        self._inode = 0

    def close(self) -> None:
        with self._lock:
            self._let_go()

    @classmethod
    def open(cls, places: Places) -> "History":
        """Return the history of a state directory, also while there is none yet."""
        return cls(places)

    # --- series ---------------------------------------------------------------------------------

    def names(self, prefix: str = "") -> list[str]:
        """Return the names of all series that begin so, in order.

        They are `spent_usd`, `reserved_usd`, `usd_per_h`, `on_demand_usd`, `saved_usd`, `machines`;
        `held/POOL/MARKET` in machines; `price/POOL` in dollars per hour on spot; and of each job
        `job/JOB/` with loss, step, step_s, spent_usd, usd_per_h, on_demand_usd, machines, workers,
        depth, width, preemptions, steps_lost, checkpoint_step, backup_step, and `log/NAME` for
        what its script logs.
        """
        sql = "SELECT name FROM series WHERE name >= ? AND name < ? ORDER BY name LIMIT ?"
        return [name for (name,) in self._rows(sql, prefix, prefix + "\U0010ffff", NAMES_MAX)]

    def series(
        self, name: str, from_s: float, to_s: float, points_max: int = POINTS_MAX
    ) -> list[Point]:
        """Return a series from `from_s` to `to_s`, in at most so many points, oldest first.

        The first point may lie before `from_s`: it is the value that held then.
        """
        points_max = max(2, points_max)
        first = self._rows("SELECT first_s FROM series WHERE name = ?", name)
        if not first:
            return []
        begins_s = max(from_s, first[0][0])
        found: list[Point] = []
        for number, tier in enumerate(store.TIERS):
            if (to_s - begins_s) / tier.bucket_s > FINER * points_max and number < COARSEST:
                continue
            found = self._points(name, number, from_s, to_s)
            if found and found[0].at_s <= begins_s + tier.bucket_s:
                break  # else this tier does not reach back so far any more
        return _thinned([*found, *self._tail(name, number, found, to_s)], points_max)

    def _tail(self, name: str, number: int, found: list[Point], to_s: float) -> list[Point]:
        """Return what finer tiers know of the time whose row is still open."""
        tail: list[Point] = []
        for finer in reversed(range(number)):
            newest = tail or found
            after_s = newest[-1].at_s + store.TIERS[finer + 1].bucket_s if newest else 0.0
            more = self._points(name, finer, after_s, to_s)
            tail += [point for point in more if point.at_s >= after_s]
        return tail

    def _points(self, name: str, tier: int, from_s: float, to_s: float) -> list[Point]:
        """Return the rows of a tier, with the one before them."""
        sql = (
            "SELECT at_s, total / n, least, most, last FROM points"
            " WHERE series = (SELECT id FROM series WHERE name = ?1) AND tier = ?2"
            " AND at_s <= ?4 AND at_s >= coalesce((SELECT max(at_s) FROM points"
            " WHERE series = (SELECT id FROM series WHERE name = ?1) AND tier = ?2"
            " AND at_s <= ?3), ?3) ORDER BY at_s"
        )
        return [
            Point(at_s=float(at_s), mean=mean, least=least, most=most, last=last)
            for at_s, mean, least, most, last in self._rows(sql, name, tier, from_s, to_s)
        ]

    # --- events ---------------------------------------------------------------------------------

    def events(
        self,
        from_s: float = 0.0,
        to_s: float = inf,
        job: str | None = None,
        kind: Kind | Iterable[Kind] | None = None,
        *,
        last: int = EVENTS_MAX,
    ) -> list[Happening]:
        """Return the newest events of a time, of a job, of some kinds; the oldest of them first."""
        where, words = ["at_s >= ?", "at_s <= ?"], [from_s, min(to_s, 1e18)]
        asked: list[Any] = list(words)
        if job is not None:
            where.append("job = ?")
            asked.append(job)
        if kind is not None:
            kinds = [kind] if isinstance(kind, str) else list(kind)
            where.append(f"kind IN ({','.join('?' * len(kinds))})")
            asked += kinds
        sql = (
            f"SELECT id, at_s, kind, job, who, what, because FROM events WHERE {' AND '.join(where)}"  # noqa: S608
            " ORDER BY at_s DESC, id DESC LIMIT ?"
        )
        rows = self._rows(sql, *asked, last)
        names = Happening.__struct_fields__
        return [Happening(**dict(zip(names, row, strict=True))) for row in reversed(rows)]

    # --- money ----------------------------------------------------------------------------------

    def money(
        self,
        job: str | None = None,
        by: By = "cause",
        from_s: float = 0.0,
        to_s: float = inf,
    ) -> list[Spent]:
        """Return where the money of a job, or of all, went; the dearest line first, days in order.

        The lines add up to what the ledger says was spent. Times are rounded to whole days (UTC).
        By machine, times are ignored, and what no machine explains has the key "".
        """
        column = _COLUMNS[by]
        if by == "machine":
            return self._by_machine(job)
        sql = (
            f"SELECT {column}, cause, sum(usd), sum(hours) FROM spent"  # noqa: S608 - one of ours
            " WHERE day >= ? AND day <= ? AND (?3 IS NULL OR job = ?3) GROUP BY 1, 2"
        )
        days = (from_s // DAY_S, min(to_s, 1e18) // DAY_S)
        lines = _lines(self._rows(sql, *days, job))
        return lines if by == "day" else sorted(lines, key=lambda line: -line.usd)

    def _by_machine(self, job: str | None) -> list[Spent]:
        sql = (
            "SELECT token, cause, sum(usd), sum(hours) FROM charges"
            " WHERE ?1 IS NULL OR job = ?1 GROUP BY 1, 2"
        )
        return sorted(_lines(self._rows(sql, job)), key=lambda line: -line.usd)

    def entries(self, cause: Cause, job: str | None = None, most: int = -1) -> list[Entry]:
        """Return the lines of the ledger that make what a cause cost, the dearest first.

        Without `most` they add up to that cause's line of `money`, of a job or of all.
        """
        sql = (
            "SELECT token, coalesce(machine, ''), coalesce(pool, ''), coalesce(market, ''),"
            " from_s, to_s, charges.job, cause, usd, hours"
            " FROM charges LEFT JOIN machines USING (token)"
            " WHERE cause = ?1 AND (?2 IS NULL OR charges.job = ?2)"
            " ORDER BY abs(usd) DESC, token, charges.job LIMIT ?3"
        )
        names = Entry.__struct_fields__
        rows = self._rows(sql, cause, job, most)
        return [Entry(**dict(zip(names, row, strict=True))) for row in rows]

    def daily(self, from_s: float = 0.0, to_s: float = inf, job: str | None = None) -> list[Daily]:
        """Return the money by day, job, pool and cause, in that order."""
        sql = (
            "SELECT day, job, pool, market, cause, usd, hours, on_demand_usd FROM spent"
            " WHERE day >= ?1 AND day <= ?2 AND (?3 IS NULL OR job = ?3) ORDER BY 1, 2, 3, 4, 5"
        )
        days = (from_s // DAY_S, min(to_s, 1e18) // DAY_S)
        names = Daily.__struct_fields__
        return [Daily(**dict(zip(names, row, strict=True))) for row in self._rows(sql, *days, job)]

    def machines(
        self,
        from_s: float = 0.0,
        to_s: float = inf,
        job: str | None = None,
        *,
        last: int = MACHINES_MAX,
    ) -> list[Held]:
        """Return the machines that were held in a time, with their money, the newest first."""
        sql = (
            "SELECT token, machine, job, pool, market, from_s, to_s, on_demand_usd_per_h, why"
            " FROM machines WHERE from_s <= ?1 AND coalesce(to_s, 1e18) >= ?2"
            " AND (?3 IS NULL OR job = ?3) ORDER BY from_s DESC LIMIT ?4"
        )
        rows = self._rows(sql, min(to_s, 1e18), from_s, job, last)
        tokens = msgspec.json.encode([row[0] for row in rows]).decode()
        charged: dict[str, dict[Cause, float]] = {}
        for token, cause, usd in self._rows(
            "SELECT token, cause, sum(usd) FROM charges"
            " WHERE token IN (SELECT value FROM json_each(?)) GROUP BY 1, 2",
            tokens,
        ):
            charged.setdefault(token, {})[cause] = usd
        names = ("token", "machine", "job", "pool", "market", "from_s", "to_s")
        return [
            Held(
                **dict(zip(names, row[:7], strict=True)),
                on_demand_usd_per_h=row[7],
                why=row[8],
                usd=sum(charged.get(row[0], {}).values()),
                causes=charged.get(row[0], {}),
            )
            for row in rows
        ]

    # --- jobs -----------------------------------------------------------------------------------

    def jobs(self) -> list[Remembered]:
        """Return every job that is remembered, the newest first."""
        sql = "SELECT id, status, submitted_s, ended_s, view FROM jobs ORDER BY submitted_s DESC"
        return [
            Remembered(
                id=name,
                status=status,
                submitted_at_s=submitted_s,
                ended_at_s=ended_s,
                view=msgspec.Raw(view),
            )
            for name, status, submitted_s, ended_s, view in self._rows(sql)
        ]

    def span(self) -> tuple[float, float] | None:
        """Return the first and the last moment of which something is known."""
        rows = self._rows("SELECT min(first_s), max(newest_s) FROM series")
        if not rows or rows[0][0] is None:
            return None
        return float(rows[0][0]), float(rows[0][1])

    def _rows(self, sql: str, *words: Any) -> list[tuple[Any, ...]]:
        with self._lock:
            try:
                inode = self._path.stat().st_ino
                if self._file is None or inode != self._inode:
                    self._let_go()
                    self._file, self._inode = store.reading(self._path), inode
                return self._file.execute(sql, words).fetchall()
            except FileNotFoundError:
                return []
            except sqlite3.DatabaseError as error:
                self._let_go()
                if "no such table" in str(error) or not self._path.exists():
                    return []  # it is just being made, or was just moved
                then = MENDS if store.damage_in(error) else no_room(self._path.parent, ASK_AGAIN)
                why = f"{self._path} cannot be read: {error}{then and f'. {then}'}"
                raise store.Unreadable(why) from error

    def _let_go(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = None

    def __del__(self) -> None:
        self._let_go()


def _lines(rows: Sequence[tuple[Any, ...]]) -> list[Spent]:
    """Gather rows of a key, a cause, dollars and hours into one line for each key."""
    causes: dict[str, dict[Cause, float]] = {}
    hours: dict[str, float] = {}
    for key, cause, usd, took_h in rows:
        causes.setdefault(key, {})[cause] = usd
        hours[key] = hours.get(key, 0.0) + took_h
    return [
        Spent(key=key, usd=sum(found.values()), hours=hours[key], causes=found)
        for key, found in causes.items()
    ]


def _thinned(points: list[Point], most: int) -> list[Point]:
    """Return at most so many points; what is left out is in the range of one that is not."""
    if len(points) <= most:
        return points
    width = -(-len(points) // most)
    parts = [points[start : start + width] for start in range(0, len(points), width)]
    return [
        Point(
            at_s=part[0].at_s,
            mean=sum(point.mean for point in part) / len(part),
            least=min(point.least for point in part),
            most=max(point.most for point in part),
            last=part[-1].last,
        )
        for part in parts
    ]
