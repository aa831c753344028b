"""Writing the history: what was read since the last turn, as one transaction.

In memory is only what came since the last turn, and the open row of each series. So after a kill, or
a failure to write, the file says where to go on, and the next reading makes up for all money.
"""

import sqlite3
from collections.abc import Iterable
from math import isfinite
from os.path import samestat
from pathlib import Path
from typing import Any

import msgspec

from cloud.clock import CLOCK, DAY_S
from orchestrator.history import store
from orchestrator.history.books import Books, Charge
from orchestrator.history.outside.hooks import Mail
from orchestrator.history.records import Happening, LeaseReading, Reading
from orchestrator.paths import BACK_S
from orchestrator.view import JobView

NAMED_MAX = 20_000
PRUNE_S = 3600.0


class Bucket(msgspec.Struct):
    """What a series was in the time of one row of a tier, as far as it was seen."""

    at_s: int
    n: int
    total: float
    least: float
    most: float
    last: float

    def add(self, value: float) -> None:
        self.n += 1
        self.total += value
        self.least, self.most = min(self.least, value), max(self.most, value)
        self.last = value


class Writer:
    """The one writer of a file. Each `flush` is a turn."""

    def __init__(self, path: Path, mail: Mail = lambda _: None, damage: str = "") -> None:
        """Open the file; `mail` makes the message about an event, or None.

        If `damage` says what is wrong with the file, or it cannot be opened for good, it is put
        aside, and a sentence in the new one says so.
        """
        self._mail = mail
        said = store.put_aside(path, damage) if damage else ""
        try:
            self._begin(path)
        except sqlite3.Error as error:
            if (why := store.damage_in(error)) is None:
                raise
            said = store.put_aside(path, why)
            self._begin(path)
        if said:
            self.tell(_of_itself(said, CLOCK.now_s()))

    def _begin(self, path: Path) -> None:
        """Open the file, and go on where it ends."""
        self._file = store.writing(path)
        self._path, self._opened, self._is_open = path, path.stat(), True
        self._there_s = 0.0
        self._open: dict[tuple[str, int], Bucket] = {}
        self._closed: list[tuple[str, int, Bucket]] = []
        self._written: dict[tuple[str, int], tuple[int, float]] = {}
        self._charges: list[Charge] = []
        self._events: list[Happening] = []
        self._machines: dict[str, LeaseReading] = {}
        self._jobs: dict[str, JobView] = {}
        self._owners: dict[str, str] = {}
        self._pruned_s = 0.0
        try:
            self._read()
        except BaseException:
            self._file.close()
            raise

    def _read(self) -> None:
        saved = self._meta("books") or b"{}"
        try:
            self.place = (self._meta("place") or b"0").decode()  # of the last event that was read
            self.books = msgspec.json.decode(saved, type=Books)
            self.seen_s = float(self._meta("seen") or b"0")  # when the last view was made
            order(self.place)
        except ValueError as error:
            raise store.Unreadable(f"the place at which it ends is damaged: {error}") from error
        self._series: dict[str, int] = dict(self._file.execute("SELECT name, id FROM series"))
        rows = self._file.execute(
            "SELECT token, machine, job FROM machines ORDER BY from_s DESC LIMIT ?",
            (NAMED_MAX // 2,),
        )
        for token, machine, job in rows:
            self.own(job, token, machine)

    def close(self) -> None:
        self._is_open = False
        self._file.close()

    def keep(self, now_s: float) -> None:
        """Go on in the file that has the name now; one that somebody else removed is brought back first.

        That is not done at once, because the whole folder may be on its way out.
        """
        if not self._is_open:
            return
        if not self._path.exists():
            if 0 <= now_s - self._there_s < BACK_S:
                return
            store.bring_back(self._file, self._path)
        self._there_s = now_s
        if not samestat(self._path.stat(), self._opened):
            self.close()
            self._begin(self._path)

    # --- what is read -----------------------------------------------------------------------

    def note(self, name: str, at_s: float, value: float | None) -> None:
        """Add a number to a series; what is no number is left out."""
        if value is None or not isfinite(value):
            return
        for number, tier in enumerate(store.TIERS):
            bucket_s = int(at_s // tier.bucket_s) * tier.bucket_s
            bucket = self._open.get((name, number))
            if bucket is None or bucket.at_s != bucket_s:
                if bucket is not None:
                    self._closed.append((name, number, bucket))
                bucket = Bucket(bucket_s, 0, 0.0, value, value, value)
                self._open[name, number] = bucket
            bucket.add(value)

    def take(self, reading: Reading) -> None:
        """Charge what a reading of the ledger adds."""
        self._charges += self.books.take(reading)
        for lease in reading.leases:
            self._machines[lease.token] = lease
            self.own(lease.job, lease.token, lease.machine)

    def own(self, job: str, *names: str) -> None:
        """Remember the job of a machine or a launch, so that events about it find the job."""
        for name in names:
            if self._owners.get(name) != job:
                self._owners[name] = job
                self._owners.setdefault(name.partition("/")[0], job)
        while len(self._owners) > NAMED_MAX:
            del self._owners[next(iter(self._owners))]

    def show(self, job: JobView) -> None:
        """Remember a job as it is shown now."""
        self._jobs[job.id] = job
        self.own(job.id, job.id)

    def tell(self, event: Happening) -> None:
        """Add an event; its job is looked up when it is written, as it may be known by then."""
        self._events.append(event)

    def names(self, prefix: str) -> list[str]:
        """Return the names of the series that begin so."""
        return [name for name in self._series if name.startswith(prefix)]

    def _close_past(self, now_s: float) -> None:
        """Close the rows whose time is over, because a job that has ended notes nothing more."""
        for (name, tier), bucket in list(self._open.items()):
            if bucket.at_s + store.TIERS[tier].bucket_s <= now_s:
                self._closed.append((name, tier, bucket))
                del self._open[name, tier]

    # --- a turn -----------------------------------------------------------------------------

    def flush(self, *, last: bool = False) -> list[Happening]:
        """Write all that was read since the last turn, and return its events with their jobs.

        A row of numbers is written when its time is over, or in the last turn.
        """
        if last:
            self._closed += [(name, tier, bucket) for (name, tier), bucket in self._open.items()]
            self._open.clear()
        now_s = max(self.seen_s, self.books.at_s)  # the manager's time, not that of this process
        self._close_past(now_s)
        events = [self._placed(event) for event in self._events]
        with store.turn(self._file):
            self._write_points()
            self._write_money()
            self._file.executemany(
                "INSERT OR IGNORE INTO events VALUES (?, ?, ?, ?, ?, ?, ?)",
                [msgspec.structs.astuple(event) for event in events],
            )
            self._post(events)
            self._file.executemany(
                "INSERT OR REPLACE INTO jobs VALUES (?, ?, ?, ?, ?)",
                [
                    (job.id, job.status, job.submitted_at_s, job.ended_at_s, _encoded(job))
                    for job in self._jobs.values()
                ],
            )
            self._keep("books", msgspec.json.encode(self.books))
            self._keep("place", self.place.encode())
            self._keep("seen", repr(self.seen_s).encode())
            if now_s >= self._pruned_s + PRUNE_S:
                self._pruned_s = now_s
                self._prune(now_s)
        self._charges, self._events = [], []
        self._machines.clear()
        self._jobs.clear()
        return events

    def _post(self, events: list[Happening]) -> None:
        """Put the messages about events into the outbox, which keeps the newest."""
        messages = [(event.id, body) for event in events if (body := self._mail(event))]
        if not messages:
            return
        self._file.executemany("INSERT OR IGNORE INTO outbox VALUES (?, ?, 0, 0)", messages)
        self._file.execute(
            "DELETE FROM outbox WHERE id IN (SELECT id FROM outbox ORDER BY id DESC LIMIT -1 OFFSET ?)",
            (store.OUTBOX_MAX,),
        )

    def _placed(self, event: Happening) -> Happening:
        if event.job or event.who not in self._owners:
            return event
        return msgspec.structs.replace(event, job=self._owners[event.who])

    def _write_points(self) -> None:
        rows: list[tuple[Any, ...]] = []
        newest: dict[str, int] = {}
        for name, tier, bucket in self._closed:
            series = self._series.get(name) or self._new_series(name, bucket.at_s)
            newest[name] = bucket.at_s
            if self._is_news(name, tier, bucket):
                self._written[name, tier] = bucket.at_s, bucket.last
                rows.append((series, tier, *msgspec.structs.astuple(bucket)))
        self._file.executemany(
            "INSERT INTO points VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET"
            " n = n + excluded.n, total = total + excluded.total, least = min(least, excluded.least),"
            " most = max(most, excluded.most), last = excluded.last",
            rows,
        )
        self._file.executemany(
            "UPDATE series SET newest_s = max(newest_s, ?) WHERE name = ?",
            [(at_s, name) for name, at_s in newest.items()],
        )
        self._closed = []

    def _is_news(self, name: str, tier: int, bucket: Bucket) -> bool:
        """Return whether a row says anything that the row before does not."""
        before = self._written.get((name, tier))
        if before is None or before[0] == bucket.at_s:
            return True
        same = bucket.least == bucket.most == before[1]
        return not same or bucket.at_s >= before[0] + store.WORTH_A_ROW * store.TIERS[tier].bucket_s

    def _new_series(self, name: str, at_s: float) -> int:
        made = self._file.execute(
            "INSERT INTO series (name, first_s, newest_s) VALUES (?, ?, ?)", (name, at_s, at_s)
        )
        self._series[name] = int(made.lastrowid or 0)
        return self._series[name]

    def _write_money(self) -> None:
        self._file.executemany(
            "INSERT INTO spent VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET"
            " usd = usd + excluded.usd, hours = hours + excluded.hours,"
            " on_demand_usd = on_demand_usd + excluded.on_demand_usd",
            [row for charge in self._charges for row in _by_day(charge)],
        )
        self._file.executemany(
            "INSERT INTO charges VALUES (?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET"
            " usd = usd + excluded.usd, hours = hours + excluded.hours",
            [(one.token, one.job, one.cause, one.usd, one.hours) for one in self._charges],
        )
        self._file.executemany(
            "INSERT OR REPLACE INTO machines VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            [
                (
                    lease.token,
                    lease.machine,
                    lease.job,
                    lease.pool,
                    lease.market,
                    lease.from_s,
                    lease.ended_at_s,
                    lease.on_demand_usd_per_h,
                    lease.why,
                )
                for lease in self._machines.values()
            ],
        )

    def _prune(self, now_s: float) -> None:
        """Remove what is older than is kept, or more than is kept."""
        for number, tier in enumerate(store.TIERS):
            self._file.executemany(
                "DELETE FROM points WHERE series = ? AND tier = ? AND at_s < ?",
                [(series, number, now_s - tier.kept_s) for series in self._series.values()],
            )
        newest = "SELECT name FROM series ORDER BY newest_s DESC LIMIT -1 OFFSET ?"
        old = [name for (name,) in self._file.execute(newest, (store.SERIES_MAX,))]
        for name in old:
            series = self._series.pop(name)
            self._file.execute("DELETE FROM points WHERE series = ?", (series,))
            self._file.execute("DELETE FROM series WHERE id = ?", (series,))
            for number in range(len(store.TIERS)):
                self._written.pop((name, number), None)
        for table, key, order, most in (
            ("events", "id", "at_s", store.EVENTS_MAX),
            ("jobs", "id", "submitted_s", store.JOBS_MAX),
            ("machines", "token", "from_s", store.MACHINES_MAX),
        ):
            self._file.execute(
                f"DELETE FROM {table} WHERE {key} IN"  # noqa: S608 - names of ours
                f" (SELECT {key} FROM {table} ORDER BY {order} DESC LIMIT -1 OFFSET ?)",
                (most,),
            )
        self._fold_old_charges()
        self._file.execute(
            "DELETE FROM spent WHERE day < ?", (now_s // DAY_S - store.SPENT_DAYS_MAX,)
        )

    def _fold_old_charges(self) -> None:
        """Add the charges of machines that are forgotten to the line without a machine."""
        gone = "token <> '' AND token NOT IN (SELECT token FROM machines)"
        self._file.execute(
            "INSERT INTO charges SELECT '', job, cause, sum(usd), sum(hours) FROM charges"  # noqa: S608
            f" WHERE {gone} GROUP BY job, cause ON CONFLICT DO UPDATE SET"
            " usd = usd + excluded.usd, hours = hours + excluded.hours"
        )
        self._file.execute(f"DELETE FROM charges WHERE {gone}")  # noqa: S608

    def _meta(self, name: str) -> bytes | None:
        row = self._file.execute("SELECT value FROM meta WHERE name = ?", (name,)).fetchone()
        return None if row is None else bytes(row[0])

    def _keep(self, name: str, value: bytes) -> None:
        self._file.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (name, value))


def _of_itself(said: str, at_s: float) -> Happening:
    return Happening(
        id=f"{int(1000 * at_s)}-history",
        at_s=at_s,
        kind="failure",
        job="",
        who="history",
        what="note",
        because=said,
    )


def _encoded(job: JobView) -> bytes:
    return msgspec.json.encode(job)


def _by_day(charge: Charge) -> Iterable[tuple[Any, ...]]:
    """Return the rows of a charge, one for each day (UTC) that it reaches into."""
    first, last = int(charge.from_s // DAY_S), int(charge.to_s // DAY_S)
    whole_s = charge.to_s - charge.from_s
    for day in range(first, last + 1):
        begins_s = max(charge.from_s, day * DAY_S)
        ends_s = min(charge.to_s, (day + 1) * DAY_S)
        part = (ends_s - begins_s) / whole_s if whole_s > 0 else 1.0
        if part > 0:
            yield (
                day,
                charge.job,
                charge.pool,
                charge.market,
                charge.cause,
                charge.usd * part,
                charge.hours * part,
                charge.on_demand_usd * part,
            )


def order(place: str) -> tuple[int, int]:
    """Return what sorts places of events in time; raise `ValueError` if it is none."""
    at_ms, _, nth = place.partition("-")
    return int(at_ms), int(nth or 0)
