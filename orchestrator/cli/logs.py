"""The commands `logs` and `events`: what workers print, and what the manager did and why."""

import re
import sys
import time
from collections.abc import Callable
from typing import Annotated, Any

import typer
from rich.text import Text

from orchestrator.cli import tables
from orchestrator.cli.command import USAGE, Command, CommandError, write_json
from orchestrator.cli.jobs import Job, OnlyJob, find
from orchestrator.cli.money.comparison import remembered
from orchestrator.cli.money.times import Since, past
from orchestrator.client import Client
from orchestrator.history.reader import History
from orchestrator.kinds import KINDS, Kind
from orchestrator.paths import Places
from orchestrator.view import JobView, Sentence
from orchestrator.wishes import ENDED

EVENTS_S = 0.5
BLOCK_MS = 500
PAGE = 1000

Events = list[tuple[str, Sentence]]  # each with its place in the stream


def logs(
    command: Command,
    job: Job = None,
    go_on: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on until the job ends.")
    ] = False,
    grep: Annotated[
        str | None, typer.Option(metavar="PATTERN", help="Only lines in which this is found.")
    ] = None,
) -> None:
    """Show what a job's workers print. With -f --json: one JSON document per line."""
    wanted = _pattern(grep)
    client = command.client()
    one = find(client, job)
    if command.json and not go_on:
        lines = [
            {"worker": worker, "line": text}
            for _, worker, text in read_logs(client, one.id)
            if wanted.search(text)
        ]
        write_json({"job": one.id, "lines": lines})
        return
    after = "0"
    if not client.logs(one.id, after, block_ms=None, count=1):
        nothing = (
            ", and no line of it is kept" if one.status in ENDED else " and has printed nothing yet"
        )
        sys.stderr.write(f"{one.id} is {one.status}{nothing}\n")
    while True:
        over = not go_on or find(client, one.id).status in ENDED
        page = client.logs(one.id, after, block_ms=None if over else BLOCK_MS, count=PAGE)
        for after, worker, line in page:  # noqa: B007 - the last one is where to go on
            if not wanted.search(line):
                continue
            text = Text.assemble((worker, "dim"), " ", line)
            command.line({"worker": worker, "line": line}, text)
        if over and not page:
            break


def _pattern(grep: str | None) -> "re.Pattern[str]":
    try:
        return re.compile(grep or "")
    except re.error as error:
        raise CommandError(f"--grep {grep}: no regular expression: {error}", USAGE) from None


def read_logs(client: Client, job_id: str) -> list[tuple[str, str, str]]:
    """Read all lines of a job: where each is in the stream, the worker, and the line."""
    return _pages(lambda after: client.logs(job_id, after, count=PAGE))


def events(
    command: Command,
    job: OnlyJob = None,
    *,
    go_on: Annotated[bool, typer.Option("--follow", "-f", help="Go on until Ctrl-C.")] = False,
    last: Annotated[int, typer.Option("--last", "-n", min=1, help="How many to begin with.")] = 50,
    since: Since = None,
    kind: Annotated[
        list[str] | None,
        typer.Option(metavar="KIND", help="Only such: eviction, buy, failure ..."),
    ] = None,
) -> None:
    """Show what was done, and why: time, name, one sentence.

    With -f --json: one document per line. With --since or --kind it answers from the history, also
    while no manager runs.
    """
    if since is not None or kind:
        if go_on:
            raise CommandError("--follow shows what comes, --since what was: choose one", USAGE)
        _past(command, job, since, [_kind(name) for name in kind or KINDS], last)
        return
    client = command.client()
    one = find(client, job) if job is not None else None
    every = _pages(lambda after: client.sentences(after, PAGE))
    page = _of_job(client, one, every)[-last:]
    if not go_on:
        shown = [said for _, said in page]
        texts = [tables.sentence(said) for said in shown] or [Text("nothing has happened yet")]
        command.answer({"events": shown}, *texts)
        return
    after = every[-1][0] if every else "0"
    while True:
        for _, said in page:
            command.line(said, tables.sentence(said))
        time.sleep(EVENTS_S)
        every = client.sentences(after)
        after = every[-1][0] if every else after
        page = _of_job(client, one, every)


def _kind(name: str) -> Kind:
    found = next((kind for kind in KINDS if kind == name), None)
    if found is None:
        raise CommandError(f"--kind {name}: one of {', '.join(KINDS)}", USAGE)
    return found


def _past(
    command: Command, job: str | None, since: str | None, kinds: list[Kind], last: int
) -> None:
    """Show the newest events of the past, from the history."""
    from_s = 0.0 if since is None else past("--since", since, time.time())
    history = History.open(Places(command.config.state_dir))
    job = None if job is None else remembered(history, job).id
    found = history.events(from_s, job=job, kind=kinds, last=last)
    texts = [
        tables.sentence(Sentence(at_s=one.at_s, who=one.who, what=one.what, because=one.because))
        for one in found
    ]
    command.answer({"events": found}, *(texts or [Text("nothing such has happened")]))


def _of_job(client: Client, job: JobView | None, found: Events) -> Events:
    """Return the sentences about a job or its machines in the view, and those that name it."""
    view = client.view() if job is not None and found else None
    if job is None or view is None:
        return found
    own = {job.id} | {n for m in view.machines if m.job == job.id for n in (m.id, m.token)}
    return [(at, said) for at, said in found if said.who in own or job.id in said.because]


def _pages(read: Callable[[str], list[Any]]) -> list[Any]:
    """Read a stream to its end, page by page; `read` gets the id after which to go on."""
    found: list[Any] = []
    while page := read(found[-1][0] if found else "0"):
        found += page
    return found
