"""Following what the manager publishes, and writing it to the history.

It reads Redis and is asked by nobody, so it slows no decision. The events come once each, by their
place in their stream; numbers and money are read a few times a second, and written every `TURN_S`.
"""

import re
import sqlite3
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import redis

from agent.keys import EVENTS, READING, VIEW
from orchestrator.history import store
from orchestrator.history.kinds import kind_of
from orchestrator.history.outside.hooks import Mail
from orchestrator.history.records import Happening, Reading
from orchestrator.history.writer import Writer, order
from orchestrator.view import JobView, Sentence, View

LOOK_S = 0.5
TURN_S = 2.0
PAGE = 1_000
LOGGED_MAX = 32  # series of numbers that one script logs
SHAPE = re.compile(r"(\d+)x(\d+)")


class Recorder:
    """Reads one house's Redis into one file."""

    def __init__(self, client: "redis.Redis", path: Path, mail: Mail = lambda _: None) -> None:
        """Go on where the file ends; `mail` makes the message about an event, or None."""
        self._redis, self._path, self._mail = client, path, mail
        self._writer = Writer(path, mail)
        self._flushed_s = 0.0
        self._held = dict.fromkeys(self._writer.names("held/"))
        try:
            self._find_place()
        except BaseException:
            self.close()
            raise

    def look(self, now_s: float, *, last: bool = False) -> None:
        """Read what is new; write it, if the last turn was a while ago or this is the last one.

        If it cannot be written, what was read is forgotten, and the next look begins where the file
        ends. A damaged file is put aside, and the next look begins with all that is published still.
        """
        self._writer.keep(now_s)
        try:
            self._read()
            if last or not 0 <= now_s - self._flushed_s < TURN_S:
                self._flushed_s = now_s
                self._writer.flush(last=last)
        except sqlite3.Error as error:
            self._writer.close()
            self._writer = Writer(self._path, self._mail, store.damage_in(error) or "")
            raise

    def close(self) -> None:
        self._writer.close()

    def _find_place(self) -> None:
        """Begin with the first event if the stream ends before our place: it is another one."""
        newest: Any = self._redis.xrevrange(EVENTS, count=1)
        if newest and order(newest[0][0].decode()) < order(self._writer.place):
            self._writer.place = "0"

    def _read(self) -> None:
        """Read sentences first: the machines that they name are in the view by then."""
        while True:
            after = f"({self._writer.place}" if self._writer.place != "0" else "-"
            rows: Any = self._redis.xrange(EVENTS, min=after, count=PAGE)
            for key, row in rows:
                self._writer.place = key.decode()
                self._hear(key.decode(), row)
            if len(rows) < PAGE:
                break
        shown, read = self._redis.mget(VIEW, READING)
        # Of a manager of another version, or damaged; ours comes soon.
        with suppress(msgspec.DecodeError, UnicodeDecodeError):
            if shown:
                self._see(msgspec.json.decode(shown, type=View))
            if read:
                self._count(msgspec.json.decode(read, type=Reading))

    def _hear(self, key: str, row: dict[bytes, bytes]) -> None:
        try:
            said = msgspec.json.decode(row[b"e"], type=Sentence)
        except (KeyError, ValueError):
            return
        if said.job:
            self._writer.own(said.job, said.who)
        self._writer.tell(
            Happening(
                id=key,
                at_s=said.at_s,
                kind=kind_of(said),
                job=said.job,
                who=said.who,
                what=said.what,
                because=said.because,
            )
        )

    def _see(self, view: View) -> None:
        """Take the numbers of a view that is newer than the last one."""
        if view.at_s <= self._writer.seen_s:
            return
        self._writer.seen_s, note, cost = view.at_s, self._writer.note, view.cost
        for name in ("spent_usd", "reserved_usd", "on_demand_usd", "saved_usd", "machines"):
            note(name, view.at_s, getattr(cost, name))
        note("usd_per_h", view.at_s, cost.now_usd_per_h)
        for pool in view.pools:
            note(f"price/{pool.pool}", view.at_s, pool.spot_usd_per_h)
        for machine in view.machines:
            self._writer.own(machine.job, machine.token, machine.id)
        for job in view.jobs:
            self._writer.show(job)
            if job.ended_at_s is None or job.ended_at_s > view.at_s - TURN_S:
                self._see_job(job, view.at_s)

    def _see_job(self, job: JobView, at_s: float) -> None:
        numbers: dict[str, float | None] = {
            "loss": job.loss,
            "step": job.step,
            "step_s": job.step_s or None,
            "spent_usd": job.spent_usd,
            "usd_per_h": job.now_usd_per_h,
            "on_demand_usd": job.on_demand_usd,
            "machines": job.machines,
            "workers": job.workers,
            "preemptions": job.preemptions,
            "steps_lost": job.steps_lost,
            "checkpoint_step": job.checkpoint_step,
            "backup_step": job.backup_step,
        }
        if (shape := SHAPE.search(job.layout)) is not None:
            numbers["depth"], numbers["width"] = float(shape[1]), float(shape[2])
        logged = list(job.logged.items())[:LOGGED_MAX]
        numbers |= {f"log/{name}": value for name, value in logged}
        for name, value in numbers.items():
            self._writer.note(f"job/{job.id}/{name}", at_s, value)

    def _count(self, reading: Reading) -> None:
        """Charge what a reading adds, and count the machines of each pool."""
        self._writer.take(reading)
        held = Counter(
            f"held/{lease.pool}/{lease.market}"
            for lease in reading.leases
            if lease.ended_at_s is None
        )
        gone = self._held.keys() - held.keys()
        for name, count in [*held.items(), *((name, 0) for name in gone)]:
            self._writer.note(name, reading.at_s, count)
        self._held = dict.fromkeys(held)
