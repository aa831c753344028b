"""The tool `track`: what a job's script logs goes to a tracker, each step once, as one run."""

import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Annotated

import typer
from rich.text import Text

from orchestrator.cli.command import Command
from orchestrator.cli.jobs import Job, find
from orchestrator.cli.tools.trackers import Numbers, open_tracker
from orchestrator.client import Client
from orchestrator.formatting import plural
from orchestrator.wishes import ENDED

LOOK_S = 1.0


def track(
    command: Command,
    job: Job = None,
    *,
    to: Annotated[
        str,
        typer.Option(
            metavar="WHERE",
            help="tensorboard:FOLDER, wandb:PROJECT, mlflow:EXPERIMENT or trackio:PROJECT.",
        ),
    ],
    once: Annotated[bool, typer.Option("--once", help="End with what is there now.")] = False,
) -> None:
    """Tell a tracker what a job's script logs, until the job ends: each step once, as one run.

    The run is named after the job, so it goes on in the same one after every recovery, and when this
    is started again.
    """
    client = command.client()
    name = find(client, job).id
    tracker = open_tracker(to, name, command.config.state_dir / "tracked")
    last, sent = tracker.last(), 0
    try:
        with suppress(KeyboardInterrupt):
            for step, numbers in _news(client, name, last, once=once):
                tracker.tell(step, numbers)
                sent += 1
    finally:
        tracker.close()
    said = f"{plural(sent, 'step')} of {name} sent to {to}"
    command.answer({"job": name, "to": to, "sent": sent}, Text(said))


def _news(client: Client, job: str, last: int, *, once: bool) -> Iterator[tuple[int, Numbers]]:
    """Yield the steps after the last one, in order, as they come; a step is logged when it counts."""
    after = "0"
    while True:
        over = once or find(client, job).status in ENDED
        while page := client.logged(job, after):
            for after, step, numbers in page:  # noqa: B007 - the last one is where to go on
                if step > last:
                    last = step
                    yield step, numbers
        if over:
            return
        time.sleep(LOOK_S)
