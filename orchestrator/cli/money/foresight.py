"""The command `what-if`: what the manager would decide for a running job under other terms."""

import asyncio
import time
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from orchestrator import wishes
from orchestrator.cli import tables
from orchestrator.cli.command import Command, CommandError
from orchestrator.cli.jobs import BY, Job, find
from orchestrator.cli.submit import check_budget, deadline_s
from orchestrator.dashboard.foresight import state_of
from orchestrator.formatting import duration, plural, usd
from orchestrator.wishes import ENDED, LIVE

if TYPE_CHECKING:  # the brain takes longer to import than all other commands together
    from orchestrator.what_if import Outcome, Terms


def what_if(  # noqa: PLR0913 - a parameter per option
    command: Command,
    job: Job = None,
    *,
    budget: Annotated[
        float | None, typer.Option(metavar="USD", help="Another budget of the job.")
    ] = None,
    deadline: Annotated[
        str | None, typer.Option(metavar="TIME", help="Another deadline: 90m, 2h, 1d, a date.")
    ] = None,
    regions: Annotated[
        str | None, typer.Option(metavar="A,B", help="Other regions to buy in.")
    ] = None,
    slots_max: Annotated[
        int | None, typer.Option(min=1, max=10_000, help="Another most of slots.")
    ] = None,
    on_demand: Annotated[
        bool | None, typer.Option("--on-demand/--no-on-demand", help="Whether to buy on demand.")
    ] = None,
) -> None:
    """Show what would be bought and given back for a job under other terms; nothing is done.

    The manager's own decision is made on a copy of its state, as it is now and as it would be.
    """
    from orchestrator.what_if import Terms

    check_budget(budget)
    client = command.client()
    one = find(client, job, LIVE)
    if one.status in ENDED:
        raise CommandError(f"{one.id} has ended: {one.status}; for a new job: orchestrator plan")
    if budget is not None:  # one that a change would refuse is refused in the same words
        wishes.change(one, budget, "kept", wishes.Asker(by=BY, at_s=time.time()))
    ends_at_s = None if deadline is None else deadline_s(deadline, time.time()) + client.ahead_s()
    names = None if regions is None else tuple(part for part in regions.split(",") if part)
    terms = Terms(
        budget_usd=budget,
        deadline_s=ends_at_s,
        regions=names,
        slots_max=slots_max,
        on_demand=on_demand,
    )
    now, then = _outcomes(client.house().redis_url, one.id, terms)
    command.answer({"job": one.id, "now": now, "then": then}, _table(now, then), *_said(then))


def _outcomes(url: str, job: str, terms: "Terms") -> "tuple[Outcome, Outcome]":
    """Return the decision as things are, and the one under other terms, each on its own copy."""
    from orchestrator.what_if import Terms, what_if
    from orchestrator.world import decode_state

    data = asyncio.run(state_of(url))
    if job not in decode_state(data).jobs:
        raise CommandError(f"the manager has no job {job} any more")
    return what_if(decode_state(data), job, Terms()), what_if(decode_state(data), job, terms)


def _table(now: "Outcome", then: "Outcome") -> Table:
    made = tables.table("", "as it is#", "what if#")
    both = (now, then)
    made.add_row("machines", *(f"{one.machines:,}" for one in both))
    made.add_row("per hour", *(usd(one.usd_per_h) for one in both))
    made.add_row(
        "steps/s", *("-" if not one.steps_per_s else f"{one.steps_per_s:.3g}" for one in both)
    )
    made.add_row("done in", *(duration(one.finish_in_s) for one in both))
    made.add_row("final cost", *(usd(one.final_usd) for one in both), style="bold")
    return made


def _said(then: "Outcome") -> list[Text]:
    lines = [
        Text(
            f"buy {plural(one.count, 'machine')} in {one.pool} ({one.market}) at {usd(one.usd_per_h)}/h: {one.because}"
        )
        for one in then.buys
    ]
    lines += [
        Text(f"give back {one.machine} in {one.pool}: {one.because}") for one in then.gives_back
    ]
    lines = lines or [Text(f"nothing would change: {then.because}")]
    if then.over_budget:
        lines.append(Text("the budget ends before the job does", style="yellow"))
    return lines
