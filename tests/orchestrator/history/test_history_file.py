"""The file of the history: tiers, bounds, and answers that do not depend on who wrote when."""

import sqlite3
import sys
import threading
from contextlib import closing
from io import TextIOWrapper

import msgspec
import pytest

from agent.keys import EVENTS
from cloud.clock import HOUR_S
from orchestrator.history import store, writer
from orchestrator.history.__main__ import run
from orchestrator.history.order import HistoryOrder
from orchestrator.history.reader import History
from orchestrator.history.recorder import Recorder
from orchestrator.history.records import Happening
from orchestrator.history.writer import Writer
from orchestrator.redis_client import connect
from orchestrator.view import Sentence

T0 = 1_800_000_000.0


def happening(number: int, at_s: float, job: str = "") -> Happening:
    return Happening(
        id=f"{number}-0",
        at_s=at_s,
        kind="note",
        job=job,
        who=f"m-{number}",
        what="note",
        because="it is so",
    )


def test_before_there_is_a_file_every_answer_is_empty(places):
    history = History.open(places)
    assert history.names() == history.events() == history.money() == history.machines() == []
    assert history.series("spent_usd", 0.0, T0) == []
    assert history.span() is None


def test_a_zoom_from_hours_to_a_month_keeps_the_range_and_the_newest_value(places):
    """A peak of one reading is in every picture that shows its time; each ends with the last value."""
    made, end_s = Writer(places.history), T0 + 40 * HOUR_S
    for number in range(40 * 360):
        at_s = T0 + 10.0 * number
        made.note("usd_per_h", at_s, 99.0 if number == 5000 else 1.0 + number % 2)
        made.seen_s = at_s
        if number % 500 == 0:
            made.flush()
    made.flush()
    history = History.open(places)
    for hours in (1, 4, 12, 40):
        found = history.series("usd_per_h", end_s - hours * HOUR_S, end_s, 100)
        assert 2 <= len(found) <= 100
        assert [point.at_s for point in found] == sorted({point.at_s for point in found})
        assert found[-1].at_s > end_s - hours * HOUR_S / 50 - 60.0
        peak_s = T0 + 50_000.0
        seen = max(point.most for point in found)
        assert (seen == 99.0) == (peak_s >= found[0].at_s)
        assert all(point.least <= point.mean <= point.most for point in found)
    fine_from_s = end_s - store.TIERS[0].kept_s - 2 * writer.PRUNE_S
    with closing(store.reading(places.history)) as file:
        oldest = file.execute("SELECT min(at_s) FROM points WHERE tier = 0").fetchone()[0]
    assert oldest > fine_from_s, "what is older than its tier keeps is removed"
    made.close()


def test_a_value_that_does_not_change_is_few_rows_and_holds(places):
    made = Writer(places.history)
    for number in range(2000):
        made.note("price/pool", T0 + 10.0 * number, 0.3 if number < 1500 else 0.4)
        made.flush()
    made.close()
    with closing(store.reading(places.history)) as file:
        rows = file.execute("SELECT count(*) FROM points WHERE tier = 0").fetchone()[0]
    assert rows < 2000 / 10
    found = History.open(places).series("price/pool", T0 + 9_000.0, T0 + 9_500.0)
    assert found[0].at_s <= T0 + 9_000.0, "the value that held at the beginning is there"
    assert {point.last for point in found} == {0.3}


def test_events_are_found_by_time_job_and_kind_and_come_once(places):
    for _ in range(2):  # a second writer reads the same again
        made = Writer(places.history)
        for number in range(100):
            made.tell(happening(number, T0 + number, "a" if number % 2 else "b"))
        made.flush()
        made.close()
    history = History.open(places)
    assert len(history.events()) == 100
    found = history.events(T0 + 10, T0 + 20, "a", "note")
    assert [one.at_s - T0 for one in found] == [11, 13, 15, 17, 19]
    assert [one.at_s - T0 for one in history.events(last=2)] == [98, 99]
    assert history.events(kind=("buy", "eviction")) == []


def test_tables_are_bounded(places, monkeypatch):
    monkeypatch.setattr(store, "EVENTS_MAX", 10)
    monkeypatch.setattr(store, "SERIES_MAX", 3)
    made = Writer(places.history)
    for number in range(50):
        made.tell(happening(number, T0 + number))
        made.note(f"series-{number}", T0 + 60.0 * number, 1.0)
    made.seen_s = T0 + 2 * writer.PRUNE_S
    made.flush(last=True)
    made.seen_s += writer.PRUNE_S
    made.note("series-49", made.seen_s, 2.0)
    made.flush(last=True)
    made.close()
    history = History.open(places)
    assert [one.id for one in history.events()] == [f"{n}-0" for n in range(40, 50)]
    assert history.names() == ["series-47", "series-48", "series-49"]


def test_a_series_that_was_removed_begins_anew(places, monkeypatch):
    """Nothing of it is remembered, in memory either, so its first value is a row again in each tier."""
    monkeypatch.setattr(store, "SERIES_MAX", 1)
    made = Writer(places.history)
    for hour, name in enumerate(("old", "new", "old")):
        made.note(name, T0 + hour * writer.PRUNE_S, 1.0)
        made.seen_s = T0 + hour * writer.PRUNE_S
        made.flush(last=True)
    made.close()
    assert History.open(places).names() == ["old"]
    with closing(store.reading(places.history)) as file:
        assert file.execute("SELECT count(*) FROM points").fetchone() == (len(store.TIERS),)


def test_a_file_that_is_no_history_is_put_aside(places):
    places.history.write_bytes(b"this is no database at all, not by any means" * 100)
    made = Writer(places.history)
    made.tell(happening(1, T0))
    made.flush()
    made.close()
    found = {one.who: one.because for one in History.open(places).events()}
    assert found["m-1"] == "it is so"
    assert "file is not a database" in found["history"]
    assert "put aside as history.db.unreadable" in found["history"]
    assert places.history.with_name("history.db.unreadable").exists()


@pytest.mark.parametrize(
    ("name", "value"), [("books", b'{"at_s":\xff}'), ("seen", b"1\xb7"), ("place", b"1-\xb0")]
)
def test_a_value_that_is_damaged_is_put_aside_as_well(places, name, value):
    """SQLite has no checksums, so a flipped byte in a value is found by who reads the value."""
    made = Writer(places.history)
    made.flush()
    made._keep(name, value)
    made.close()
    made = Writer(places.history)
    made.flush()
    made.close()
    (said,) = History.open(places).events()
    assert "put aside as history.db.unreadable" in said.because


def test_a_text_that_is_damaged_hides_no_other(places):
    made = Writer(places.history)
    made.tell(happening(1, T0))
    made.tell(happening(2, T0))
    made.flush()
    made._file.execute("UPDATE events SET because = CAST(x'6869FF' AS TEXT) WHERE id = '1-0'")
    made.close()
    assert [one.because for one in History.open(places).events()] == ["hi\ufffd", "it is so"]


def test_a_file_that_cannot_be_opened_now_is_one_sentence(places):
    """As on a full or read-only disk, where SQLite cannot make the file that readers share."""
    places.history.mkdir()
    with pytest.raises(store.Unreadable, match=r"history\.db cannot be read: "):
        History.open(places).events()


def test_nobody_else_reads_it(places):
    Writer(places.history).close()
    assert places.history.stat().st_mode & 0o077 == 0


def test_a_turn_that_fails_leaves_the_file_as_it_was(places):
    made = Writer(places.history)
    made.tell(happening(1, T0))
    made.flush()
    made.tell(happening(2, T0 + 1))
    made._file.execute("DROP TABLE jobs")
    made.seen_s = T0
    made._jobs["a"] = None  # type: ignore[assignment]
    with pytest.raises((sqlite3.Error, AttributeError)):
        made.flush()
    made.close()
    assert [one.id for one in History.open(places).events()] == ["1-0"]


def test_a_turn_for_which_there_is_no_room_says_so(places):
    made = Writer(places.history)
    pages = made._file.execute("PRAGMA page_count").fetchone()[0]
    made._file.execute(f"PRAGMA max_page_count = {pages}")
    for number in range(500):
        made.tell(happening(number, T0))
    with pytest.raises(sqlite3.OperationalError, match="is full"):
        made.flush()
    made.close()


def test_a_history_that_cannot_even_complain_goes_on(places, monkeypatch):
    """Its log lies on the disk that is full."""
    over = threading.Event()
    over.set()
    with open("/dev/full", "wb", buffering=0) as full:  # noqa: PTH123
        monkeypatch.setattr(sys, "stderr", TextIOWrapper(full, write_through=True))
        run(places, HistoryOrder(redis_url="unix:///nowhere"), over)


@pytest.mark.processes
def test_a_file_that_is_damaged_inside_says_so_and_is_put_aside_by_the_recorder(
    server, publisher, places
):
    """Its first page is sound, so it opens; what is published still is read again into the new one."""
    client = connect(server.url)
    said = Sentence(at_s=T0, who="m-1", what="note", because="it is so")
    client.xadd(EVENTS, {"e": msgspec.json.encode(said)})
    recorder = Recorder(client, places.history)
    for number in range(500):
        recorder._writer.tell(happening(number, T0 + number, "a"))
    recorder.look(T0, last=True)
    recorder.close()
    with closing(sqlite3.connect(places.history)) as file:
        file.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    with places.history.open("r+b") as damaged:
        size = damaged.seek(0, 2)
        damaged.seek(4096)
        damaged.write(b"\xa5" * (size - 4096))
    history = History.open(places)
    with pytest.raises(store.Unreadable, match="A running manager puts it aside"):
        history.events()
    recorder = Recorder(client, places.history)
    recorder.look(T0, last=True)
    recorder.close()
    found = {one.who: one.because for one in history.events()}
    assert found["m-1"] == "it is so"
    assert "put aside as history.db.unreadable" in found["history"]
    assert places.history.with_name("history.db.unreadable").stat().st_size == size


@pytest.mark.processes
def test_a_file_that_somebody_removes_is_brought_back_with_all_that_was_in_it(
    server, publisher, places
):
    """Else the recorder would write on where nobody reads, and all would be gone with its end."""
    recorder = Recorder(connect(server.url), places.history)
    recorder._writer.tell(happening(1, T0, "a"))
    recorder.look(T0, last=True)
    for file in places.history.parent.glob("history.db*"):
        file.unlink()
    recorder._writer.tell(happening(2, T0, "a"))
    recorder.look(T0 + 9.0, last=True)
    recorder._writer.tell(happening(3, T0, "a"))
    recorder.look(T0 + 18.0, last=True)
    recorder.close()
    assert {one.id for one in History.open(places).events()} >= {
        happening(1, T0, "a").id,
        happening(3, T0, "a").id,
    }
