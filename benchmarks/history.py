"""How soon does a month of 1,000 instances open?

A month is written with the recorder's own writer: the numbers of 20 jobs and 24 pools every minute in its
last two days and every ten minutes before, and every ten minutes a reading of 1,000 machines, one in a
hundred of them taken and replaced, each with its events.
Then everything is asked that a page of that month shows, from a file that was just opened.

    python benchmarks/history.py [--days 30] [--instances 1000] [--keep FOLDER]

With `--keep` the file stays, and the next call asks the same file again.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

from rich.console import Console
from rich.table import Table

from orchestrator.history.reader import History
from orchestrator.history.records import Happening, JobReading, LeaseReading, Reading
from orchestrator.history.writer import Writer
from orchestrator.paths import Places

BEGAN_S = 1_800_000_000.0
JOBS, POOLS = 20, 24
MINUTE_S, READ_S, HOUR_S, DAY_S = 60, 600, 3600.0, 86_400.0
FINE_MINUTES = 2_880


class Month:
    """Machines that come and go, as readings of a ledger."""

    def __init__(self, instances: int, seed: int = 1) -> None:
        self.dice, self.serial, self.told = Random(seed), 0, 0
        self.closed = dict.fromkeys(range(JOBS), 0.0)
        self.live = [self.new(BEGAN_S) for _ in range(instances)]

    def new(self, at_s: float) -> tuple[str, int, int, float, float]:
        self.serial += 1
        price = self.dice.uniform(0.1, 0.9)
        return f"m-{self.serial}", self.serial % JOBS, self.dice.randrange(POOLS), at_s, price

    def reading(self, at_s: float) -> tuple[Reading, list[Happening]]:
        gone = self.dice.sample(range(len(self.live)), len(self.live) // 100)
        spent, found, events = dict(self.closed), [], []
        for place, one in enumerate(self.live):
            token, job, pool, from_s, price = one
            usd = price * (at_s - from_s) / HOUR_S
            spent[job] += usd
            cause = "useful" if self.dice.random() < 0.9 else "restoring"
            ended = at_s if place in gone else None
            found.append(
                LeaseReading(
                    token,
                    token,
                    f"job-{job}",
                    f"cloud/zone-{pool}/type",
                    "spot",
                    from_s,
                    ended,
                    usd,
                    0.0,
                    0.0,
                    price,
                    1.0,
                    ((cause, 1.0),),
                    "the cheapest work",
                )
            )
            if ended is not None:
                self.closed[job] += usd
                self.live[place] = self.new(at_s)
                events += [self.event(at_s, "eviction", job), self.event(at_s, "buy", job)]
        jobs = tuple(JobReading(f"job-{job}", usd, 0.0) for job, usd in spent.items())
        whole = sum(spent.values())
        read = Reading(
            at_s=at_s,
            ledger="one",
            spent_usd=whole,
            manager_usd=0.0,
            leases=tuple(found),
            jobs=jobs,
        )
        return read, events

    def event(self, at_s: float, kind: str, job: int) -> Happening:
        self.told += 1
        return Happening(
            id=f"{int(at_s)}-{self.told}",
            at_s=at_s,
            kind=kind,
            job=f"job-{job}",
            who="m",
            what="note",
            because="m was taken by the provider; held 2.00 h for $1.2345",
        )


def write(places: Places, days: float, instances: int) -> float:
    """Write the month; return the seconds of processor time that a day of it took."""
    writer, month = Writer(places.history), Month(instances)
    began_s = time.process_time()
    minutes = int(days * DAY_S) // MINUTE_S
    for minute in range(minutes):
        at_s = BEGAN_S + minute * MINUTE_S
        if at_s % READ_S and minute < minutes - FINE_MINUTES:
            continue
        for job in range(JOBS):
            for name in ("loss", "step", "spent_usd", "usd_per_h", "machines", "step_s"):
                writer.note(f"job/job-{job}/{name}", at_s, month.dice.random())
        for pool in range(POOLS):
            writer.note(f"price/cloud/zone-{pool}/type", at_s, minute // 300)
            writer.note(f"held/cloud/zone-{pool}/type/spot", at_s, month.dice.randrange(40, 44))
        writer.note("spent_usd", at_s, float(minute))
        if at_s % READ_S == 0:
            read, events = month.reading(at_s)
            writer.take(read)
            for event in events:
                writer.tell(event)
        writer.seen_s = at_s
        if at_s % HOUR_S == 0:
            writer.flush()
    writer.flush(last=True)
    writer.close()
    return (time.process_time() - began_s) / days


def questions(history: History, to_s: float) -> dict[str, Callable[[], object]]:
    """Return what a page of the month asks."""
    held = [f"held/cloud/zone-{pool}/type/spot" for pool in range(POOLS)]
    return {
        "names of series": history.names,
        "spent, a month in 400 points": lambda: history.series("spent_usd", BEGAN_S, to_s),
        f"footprint, {POOLS} pools": lambda: [history.series(n, BEGAN_S, to_s) for n in held],
        "footprint of the last day": lambda: [history.series(n, to_s - DAY_S, to_s) for n in held],
        "money by cause, job, pool, day": lambda: [
            history.money(by=by) for by in ("cause", "job", "pool", "day")
        ],
        "the newest 1,000 events": history.events,
        "every eviction of one job": lambda: history.events(job="job-3", kind="eviction"),
        "the newest 1,000 machines": history.machines,
    }


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    words.add_argument("--days", type=float, default=30.0)
    words.add_argument("--instances", type=int, default=1000)
    words.add_argument("--keep", type=Path)
    given = words.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        places = Places(given.keep or Path(folder))
        took_s = 0.0 if places.history.exists() else write(places, given.days, given.instances)
        table = Table(title=f"{given.days:g} days of {given.instances:,} instances")
        for column in ("asked", "seconds", "of processor time"):
            table.add_column(column)
        whole_s = computed_s = 0.0
        for asked, ask in questions(History.open(places), BEGAN_S + given.days * DAY_S).items():
            began_s, begun_s = time.perf_counter(), time.process_time()
            ask()
            whole_s += (passed_s := time.perf_counter() - began_s)
            computed_s += (used_s := time.process_time() - begun_s)
            table.add_row(asked, f"{passed_s:.3f}", f"{used_s:.3f}")
        table.add_row("all of it", f"{whole_s:.3f}", f"{computed_s:.3f}")
        table.add_row("size of the file", f"{places.history.stat().st_size / 1e6:.0f} MB")
        if took_s:
            table.add_row("writing a day of it", "", f"{took_s:.1f}")
        Console(width=100).print(table)


if __name__ == "__main__":
    main()
