"""The tool `trace`: draws one step of a running job, predicted above and measured below."""

import time
from pathlib import Path
from typing import Annotated

import typer

from agent.messages import UNRECORDED
from agent.timeline import Timeline
from orchestrator.cli.command import Command, CommandError
from orchestrator.cli.jobs import find
from orchestrator.client import Client
from orchestrator.planner import gantt
from orchestrator.view import JobView

PATIENCE_S, LOOK_S = 120.0, 0.2
RUNNING = ("RUNNING", "RECOVERING", "DRAINING")


def trace(
    command: Command,
    job: Annotated[
        str | None,
        typer.Argument(help="Id of the job, or how it begins. Default: the newest that runs."),
    ] = None,
    *,
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where the SVG goes.")] = Path(
        "trace.svg"
    ),
) -> None:
    """Draw one step of a running job: predicted above, measured below."""
    client = command.client()
    one = find(client, job, RUNNING)
    if one.status not in RUNNING:
        raise CommandError(f"{one.id} is {one.status}: only a step of a running job can be drawn")
    with command.busy("waiting for the next step"):
        seen = _ask(client, one.id)
    profile = client.profile(one.id)
    out.write_text(gantt.measured(seen, profile), encoding="utf-8")
    took_s = max(m.end_s for moments in seen.workers.values() for m in moments)
    command.answer(
        {
            "job": one.id,
            "step": seen.step,
            "took_s": took_s,
            "predicted": profile is not None,
            "file": str(out),
        },
        f"step {seen.step} of {one.id} took {took_s:.3g} s: {out}",
        *(() if profile else (f"nothing is predicted: {unmeasured(one)}",)),
    )


def unmeasured(job: JobView) -> str:
    """Return why the job's model has no profile, as far as that is known."""
    if job.step == 0:
        return "the model has not been measured yet; its first worker does so in its first step"
    if job.uncuttable not in ("", UNRECORDED):
        return f"the model was not measured: {job.uncuttable}"
    return f"the model was not measured; its workers say why in: orchestrator logs {job.id}"


def _ask(client: Client, job: str) -> Timeline:
    client.ask_timeline(job)
    deadline_s = time.monotonic() + PATIENCE_S
    while (seen := client.timeline(job)) is None:
        if time.monotonic() > deadline_s:
            raise CommandError(
                f"{job} has finished no step for {PATIENCE_S:.0f} s; "
                f"look with: orchestrator status {job}"
            )
        time.sleep(LOOK_S)
    return seen
