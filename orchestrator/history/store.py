"""The history's file: one SQLite database beside the journal, with bounded tables.

What a turn of the recorder adds comes in one transaction with the place up to which it has read, so
a kill at any moment leaves the file as after one of the turns. Numbers are kept in tiers: fine for
hours, by the minute for a week, by the hour for years. A value that does not change is one row.
"""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from cloud.clock import DAY_S
from orchestrator.errors import OrchestratorError

VERSION = 1
BUSY_MS = 5_000
WORTH_A_ROW = 20  # buckets, after which a value that has not changed is written once more
SERIES_MAX = 4_000
EVENTS_MAX = 200_000
MACHINES_MAX = 100_000
JOBS_MAX = 5_000
OUTBOX_MAX = 1_000
SPENT_DAYS_MAX = 2_000


PRIMARY = 0xFF  # the part of an error's code that is its kind
DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


class Unreadable(OrchestratorError, sqlite3.DatabaseError):  # noqa: N818 - it names what is the case
    """The file is damaged, no database, of a later version, or cannot be read now."""


class Tier(NamedTuple):
    """How long one row of a series counts, and how long it is kept."""

    bucket_s: int
    kept_s: float


TIERS = (Tier(10, DAY_S / 8), Tier(60, 8 * DAY_S), Tier(3600, 2_000 * DAY_S))

SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, value BLOB) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS series (id INTEGER PRIMARY KEY, name TEXT UNIQUE, first_s REAL, newest_s REAL);
CREATE TABLE IF NOT EXISTS points (
    series INTEGER, tier INTEGER, at_s INTEGER, n INTEGER, total REAL, least REAL, most REAL, last REAL,
    PRIMARY KEY (series, tier, at_s)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS events (
    id TEXT PRIMARY KEY, at_s REAL, kind TEXT, job TEXT, who TEXT, what TEXT, because TEXT
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS events_at ON events (at_s);
CREATE INDEX IF NOT EXISTS events_job ON events (job, at_s);
CREATE TABLE IF NOT EXISTS spent (
    day INTEGER, job TEXT, pool TEXT, market TEXT, cause TEXT, usd REAL, hours REAL, on_demand_usd REAL,
    PRIMARY KEY (day, job, pool, market, cause)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS machines (
    token TEXT PRIMARY KEY, machine TEXT, job TEXT, pool TEXT, market TEXT, from_s REAL, to_s REAL,
    on_demand_usd_per_h REAL, why TEXT
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS machines_from ON machines (from_s);
CREATE TABLE IF NOT EXISTS charges (
    token TEXT, job TEXT, cause TEXT, usd REAL, hours REAL, PRIMARY KEY (token, job, cause)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS outbox (
    id TEXT PRIMARY KEY, body BLOB, tries INTEGER, next_s REAL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS jobs (
    id TEXT PRIMARY KEY, status TEXT, submitted_s REAL, ended_s REAL, view BLOB
) WITHOUT ROWID;
"""


def reading(path: Path) -> sqlite3.Connection:
    """Open the file for questions only; raise `sqlite3.OperationalError` if there is none."""
    found = sqlite3.connect(
        f"{path.absolute().as_uri()}?mode=ro", uri=True, check_same_thread=False
    )
    return _set_up(found)


def writing(path: Path) -> sqlite3.Connection:
    """Open or make the file for its one writer.

    Raises `Unreadable` for a file that is no database, is damaged, or is of a later version.
    """
    try:
        return _opened(path)
    except sqlite3.Error as error:
        if (why := damage_in(error)) is None:
            raise
        raise Unreadable(why) from error


def damage_in(error: sqlite3.Error) -> str | None:
    """Return what is wrong with the file; None for what a later try may get past."""
    if isinstance(error, Unreadable):
        return str(error)
    code = getattr(error, "sqlite_errorcode", 0)  # without one it comes from Python's own module
    return str(error) if code & PRIMARY in DAMAGED else None


def put_aside(path: Path, why: str) -> str:
    """Move a file that cannot be read to the name `.unreadable`; return a sentence about it.

    A history that cannot be read is worth less than one that begins now. One such file is kept.
    """
    aside = path.with_name(f"{path.name}.unreadable")
    for ending in ("-wal", "-shm"):
        path.with_name(path.name + ending).unlink(missing_ok=True)
    path.replace(aside)
    return (
        f"the history could not be read ({why}), so its file was put aside as {aside.name} and a "
        "new one begins now; series of before are in that file only, and money of before is counted as other"
    )


def bring_back(file: sqlite3.Connection, path: Path) -> None:
    """Write a file again that somebody else removed while it was open here."""
    part = path.with_name(f"{path.name}.part")
    part.unlink(missing_ok=True)
    file.execute("VACUUM INTO ?", (str(part),))
    for ending in ("-wal", "-shm"):  # a reader may have begun others
        path.with_name(path.name + ending).unlink(missing_ok=True)
    part.replace(path)


def _opened(path: Path) -> sqlite3.Connection:
    made = sqlite3.connect(path, isolation_level=None)
    try:
        path.chmod(0o600)
        _set_up(made)
        made.execute("PRAGMA journal_mode = WAL")
        made.execute("PRAGMA synchronous = NORMAL")
        _look_at_version(made)
        made.executescript(SCHEMA)
        made.execute(f"PRAGMA user_version = {VERSION}")
    except BaseException:
        made.close()
        raise
    return made


def _set_up(file: sqlite3.Connection) -> sqlite3.Connection:
    """Have a damaged text read with a sign in it, because it would hide every other one."""
    file.text_factory = lambda text: text.decode(errors="replace")
    file.execute(f"PRAGMA busy_timeout = {BUSY_MS}")
    return file


def _look_at_version(file: sqlite3.Connection) -> None:
    version = file.execute("PRAGMA user_version").fetchone()[0]
    if version not in (0, VERSION):
        raise Unreadable(f"it is of version {version}, not {VERSION}")


@contextmanager
def turn(file: sqlite3.Connection) -> Iterator[None]:
    """Make all that is written inside one step, that is taken whole or not at all."""
    file.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        if file.in_transaction:  # SQLite has ended it already where the disk is full
            file.execute("ROLLBACK")
        raise
    file.execute("COMMIT")
