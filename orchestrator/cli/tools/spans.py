"""The tool `spans`: each recovery of a job goes to a collector as one trace, once."""

import hashlib
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich.text import Text

from agent.keys import READING
from cloud import private
from orchestrator.cli.command import USAGE, Command, CommandError
from orchestrator.cli.jobs import Job, find
from orchestrator.client import Client
from orchestrator.formatting import plural
from orchestrator.history.outside.otlp import HEADERS, Collector, NotTaken
from orchestrator.history.outside.recoveries import Recoveries
from orchestrator.history.records import Reading
from orchestrator.journal import page_after
from orchestrator.redis_client import connect
from orchestrator.wishes import ENDED
from orchestrator.world import Entry

if TYPE_CHECKING:
    import redis

LOOK_S = 1.0
FIRST = "0-0"


def spans(
    command: Command,
    job: Job = None,
    *,
    to: Annotated[
        str, typer.Option(metavar="URL", help="A collector, e.g. http://localhost:4318.")
    ],
    once: Annotated[bool, typer.Option("--once", help="End with what is there now.")] = False,
) -> None:
    """Send each recovery of a job to an OpenTelemetry collector, as one trace.

    It goes on until the job ends, and sends each once, also when it is started again. Headers come from
    OTEL_EXPORTER_OTLP_HEADERS.
    """
    client = command.client()
    name, house = find(client, job).id, client.house()
    try:
        collector = Collector(to, house.deployment, os.environ.get(HEADERS, ""))
    except ValueError as error:
        raise CommandError(f"--to {to}: {error}", USAGE) from None
    store, sent, rejected = connect(house.redis_url), 0, 0
    ledger = _ledger(store)
    place = _Place(command.config.state_dir / "tracked", name, ledger, to)
    heard = Recoveries(ledger, name)
    try:
        with suppress(KeyboardInterrupt):
            for key, entry in _news(client, store, name, once=once):
                trace = heard.hear(entry)
                if trace and place.is_new(key):
                    rejected += collector.send(trace)
                    place.note(key)
                    sent += 1
    except NotTaken as error:
        again = (
            "start this command again when that is mended: it goes on with the first one not taken"
        )
        raise CommandError(f"{error}; {again}") from None
    finally:
        collector.close()
        store.close()
    refused = f"; it rejected {plural(rejected, 'span')}" if rejected else ""
    said = f"{plural(sent, 'trace')} of {name} sent to {to}{refused}"
    command.answer({"job": name, "to": to, "sent": sent, "rejected": rejected}, Text(said))


class _Place:
    """A file with the id of the journal's entry up to which a collector has everything."""

    def __init__(self, folder: Path, job: str, ledger: str, to: str) -> None:
        folder.mkdir(exist_ok=True)
        digest = hashlib.sha256(f"{ledger}\0{to}".encode()).hexdigest()[:16]
        self._file = folder / f"otel.{job}.{digest}.place"
        self._last = self._file.read_text() if self._file.exists() else FIRST

    def is_new(self, key: str) -> bool:
        return _order(key) > _order(self._last)

    def note(self, key: str) -> None:
        private.write(self._file, key.encode())


def _order(key: str) -> tuple[int, ...]:
    return tuple(int(part) for part in key.split("-"))


def _ledger(store: "redis.Redis") -> str:
    """Return the name of the journal, which is the same for all lives of its manager."""
    data: Any = store.get(READING)
    try:
        return msgspec.json.decode(data or b"", type=Reading).ledger
    except ValueError:
        raise CommandError("the manager has just begun; try again in a moment") from None


def _news(
    client: Client, store: "redis.Redis", job: str, *, once: bool
) -> Iterator[tuple[str, Entry]]:
    """Yield the journal from its beginning, each entry with its id, until the job has ended."""
    after = FIRST
    while True:
        over = once or find(client, job).status in ENDED
        while page := page_after(store, after):
            yield from page
            after = page[-1][0]
        if over:
            return
        time.sleep(LOOK_S)
