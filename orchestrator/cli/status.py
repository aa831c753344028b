"""The command `status`: what is held and trained, and what it costs."""

import time
from typing import Annotated, Any

import typer
from rich.console import Group
from rich.live import Live
from rich.text import Text

from orchestrator.cli import tables
from orchestrator.cli.command import Command
from orchestrator.cli.jobs import OnlyJob, find
from orchestrator.cli.watch import age, panel, sentences_of, why_silent
from orchestrator.paths import Places
from orchestrator.view import View

WATCH_S = 1.0
LINES_S = 5.0  # without a terminal
ENDING = "the manager gives everything back, and ends then"
NOTHING_YET: dict[str, Any] = {
    "at_s": None,
    "epoch": 0,
    "deployment": "",
    "jobs": [],
    "machines": [],
    "pools": [],
    "cost": None,
    "events": [],
}


def status(
    command: Command,
    job: OnlyJob = None,
    *,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Redraw until Ctrl-C.")] = False,
) -> None:
    """Show what is spent, held and trained: in all, or by one job."""
    client, places = command.client(), Places(command.config.state_dir)
    one = find(client, job).id if job is not None else None
    if not watch or command.json:
        view = client.view()
        shown: Any = view if view is None or one is None else _of_job(view, one)
        command.answer(shown or NOTHING_YET, *seen(view, places, one), then=_next_of(view))
    elif command.out.is_terminal:
        with Live(console=command.out, auto_refresh=False) as live:
            while True:
                live.update(Group(*seen(client.view(), places, one)), refresh=True)
                time.sleep(WATCH_S)
    else:
        while True:
            command.out.print(*seen(client.view(), places, one), sep="\n")
            time.sleep(LINES_S)


def _of_job(view: View, job_id: str) -> dict[str, Any]:
    """Return one job with its costs, its machines, and what was done for it."""
    return {
        "at_s": view.at_s,
        "job": next((one for one in view.jobs if one.id == job_id), None),
        "machines": [one for one in view.machines if one.job == job_id],
        "events": sentences_of(view, job_id),
    }


def seen(view: View | None, places: Places, job_id: str | None) -> tuple[Any, ...]:
    """Return the parts that `status` shows of a view."""
    why = why_silent(view, places)
    if view is None:
        return (Text(f"the manager has not said anything yet; {why or 'look again in a moment'}"),)
    ending = ENDING if view.ending and not age(view) else ""  # a next house has yet to speak
    old = "; ".join(filter(None, (age(view), why, ending)))
    job = next((one for one in view.jobs if one.id == job_id), None)
    if job is not None:
        machines = [one for one in view.machines if one.job == job.id]
        table = (Text(), tables.machines(machines, view.at_s, job.machines)) if machines else ()
        return (panel(view, job, (old,) if old else ()), *table, Text())
    parts: list[Any] = [tables.cost_line(view)]
    if old:
        parts.insert(0, Text(old, style="yellow"))
    parts += [Text(line, style="yellow") for line in view.costly]
    if view.jobs:
        parts += [Text(), tables.jobs(view.jobs)]
    if view.machines:
        parts += [Text(), tables.machines(view.machines, view.at_s, tables.live(view))]
    return (*parts, Text()) if len(parts) > 1 else (*parts,)


def _next_of(view: View | None) -> tuple[str, ...]:
    live = [job for job in view.jobs if job.ended_at_s is None] if view else []
    if live:
        return (f"orchestrator logs -f {live[-1].id}",)
    return ("orchestrator submit SCRIPT --follow",)
