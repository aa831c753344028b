"""One step of a running job as a picture: what was predicted above, what happened below."""

import time
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from agent.layout import Replica
from agent.messages import UNRECORDED
from agent.profile import Profile
from agent.schedule import Kind
from agent.timeline import Timeline
from orchestrator.cli.command import Command, CommandError
from orchestrator.cli.jobs import find
from orchestrator.client import Client
from orchestrator.morph import costing, gantt
from orchestrator.morph.engine import Costs
from orchestrator.morph.gantt import Panel
from orchestrator.morph.plans import Way
from orchestrator.morph.simulator import Bar, timeline
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
    out.write_text(picture(seen, profile), encoding="utf-8")
    took_s = max(m.end_s for moments in seen.workers.values() for m in moments)
    command.answer(
        {"job": one.id, "step": seen.step, "took_s": took_s, "predicted": profile is not None, "file": str(out)},
        f"step {seen.step} of {one.id} took {took_s:.3g} s: {out}",
        *(() if profile else (f"nothing is predicted: {unmeasured(one)}",)),
    )  # fmt: skip


def unmeasured(job: JobView) -> str:
    """Why nothing is known of its model, as far as that is known."""
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


def picture(seen: Timeline, profile: Profile | None) -> str:
    """All workers, replica by replica; without a profile there is nothing to predict with."""
    layout = seen.layout
    rows = {name: row for row, name in enumerate(layout.workers)}
    measured = [
        Bar(
            worker=rows[name], kind=Kind(m.kind), stage=m.stage, microbatch=m.microbatch,
            start_s=m.start_s, end_s=m.end_s,
        )
        for name, moments in seen.workers.items()
        for m in moments
    ]  # fmt: skip
    panels = [Panel("measured", tuple(measured), layout.workers)]
    if profile is not None:
        bars = tuple(predicted(seen, profile))
        panels.insert(0, Panel("predicted", bars, layout.workers))
    return gantt.panels(f"step {seen.step} of {seen.job}: {layout.describe()}", panels)


def predicted(seen: Timeline, profile: Profile) -> list[Bar]:
    """The same layout, played with the profile's costs."""
    found, row, depth = [], 0, seen.layout.depth
    for replica in seen.layout.replicas:
        bars = _replica(seen, profile, replica)
        found += [
            Bar(
                worker=row + bar.worker, kind=bar.kind, stage=bar.stage,
                microbatch=replica.first + bar.microbatch, start_s=bar.start_s, end_s=bar.end_s,
            )
            for bar in bars
        ]  # fmt: skip
        row += depth
    return found


def _replica(seen: Timeline, profile: Profile, replica: Replica) -> list[Bar]:
    layout, tables = seen.layout, costing.tables(profile)
    schedule = layout.schedule_of(replica)
    # Where the workers cut between two of the profile's sections, the nearest boundary behind it is taken.
    ends = [section.after if section.after >= 0 else 1 << 62 for section in profile.sections]
    firsts = (0, *(1 + int(np.searchsorted(ends[:-1], cut)) for cut in seen.cuts))
    if len(set(firsts)) < len(firsts) or firsts[-1] >= len(ends):
        return []
    way = Way(
        schedule=schedule.name,
        depth=layout.depth,
        microbatch_size=profile.microbatch_sizes[0],
        recompute=layout.recompute,
        chunks=schedule.stages // layout.depth,
    )
    costs = Costs(
        costing.seconds(tables, firsts, way),
        np.ones(layout.depth),
        costing.wires(tables, firsts, way, 1, layout.width),
        0,
    )
    bars = list(timeline(schedule, costs))
    tail_s = costing.tails(tables, firsts, way, np.array([float(layout.width)]), 1)[:, 0]
    for stage, seconds in enumerate(tail_s):
        done_s = max(bar.end_s for bar in bars if bar.stage == stage)
        host = schedule.host(stage, 0)
        bars.append(
            Bar(
                worker=host, kind=Kind.REDUCE, stage=stage, microbatch=0,
                start_s=done_s, end_s=done_s + float(seconds),
            )
        )  # fmt: skip
    return bars
