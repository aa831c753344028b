"""The command `cost`: what was spent on what, now and in the past."""

import time
from collections.abc import Sequence
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from orchestrator.cli import tables
from orchestrator.cli.command import USAGE, Command, CommandError
from orchestrator.cli.money.comparison import remembered
from orchestrator.cli.money.times import Since, day_of, past, utc_day
from orchestrator.formatting import percent, usd
from orchestrator.history.reader import History
from orchestrator.history.records import MEANING, By, Cause, Spent
from orchestrator.paths import Places

LINES_SHOWN = 40
WIDE = ("useful", "redone", "waiting", "idle")


def cost(
    command: Command,
    job: Annotated[
        str | None, typer.Argument(help="Only this job: its id, or how that begins.")
    ] = None,
    *,
    by: Annotated[
        By | None, typer.Option(help="Where the money went, also of jobs of the past.")
    ] = None,
    of: Annotated[
        Cause | None, typer.Option(help="The lines of the ledger that make what a cause cost.")
    ] = None,
    since: Since = None,
) -> None:
    """Show what was spent on what, beside the same machine time on demand.

    With --by or --of it answers from the history, so also while no manager runs. It keeps money by whole
    days (UTC), so --since counts from the beginning of its day.
    """
    if of is not None:
        if by is not None or since is not None:
            raise CommandError(
                "--of shows lines of the ledger, each a machine's whole life, so it goes with"
                " neither --by nor --since: leave those out",
                USAGE,
            )
        _entries(command, job, of)
        return
    if by is not None or since is not None or job is not None:
        _past(command, job, by or "cause", since)
        return
    view = command.client().view()
    if view is None:
        raise CommandError("the manager has not said anything yet; look again in a moment")
    shown = ("id", "pool", "market", "cost_usd", "disk_usd", "egress_usd", "bid_usd_per_h")
    command.answer(
        {
            "cost": view.cost,
            "jobs": [{"id": job.id, "spent_usd": job.spent_usd} for job in view.jobs],
            "machines": [{name: getattr(one, name) for name in shown} for one in view.machines],
        },
        tables.costs(view),
        then=("orchestrator cost --by cause",),
    )


def _past(command: Command, job: str | None, by: By, since: str | None) -> None:
    if by == "machine" and since is not None:
        raise CommandError(
            "--by machine shows what machines cost in their whole lives, so it does not go with --since:"
            " leave one of them out",
            USAGE,
        )
    from_s = 0.0 if since is None else day_of(past("--since", since, time.time()))
    history = History.open(Places(command.config.state_dir))
    job = None if job is None else remembered(history, job).id
    lines = history.money(job, by, from_s)
    total_usd = sum(line.usd for line in lines)
    value = {"by": by, "job": job, "from_s": from_s, "spent_usd": total_usd, "lines": lines}
    if not lines:
        command.answer(value, Text("nothing has been spent, as far as the history reaches"))
        return
    made = _causes(lines, total_usd) if by == "cause" else _lines(lines, by, total_usd)
    told = () if since is None else (Text(f"from {utc_day(from_s)} on", style="dim"),)
    then = "orchestrator cost --by day" if by == "cause" else "orchestrator cost --by cause"
    command.answer(value, *told, made, then=(then,))


def _entries(command: Command, job: str | None, cause: Cause) -> None:
    history = History.open(Places(command.config.state_dir))
    job = None if job is None else remembered(history, job).id
    entries = history.entries(cause, job)
    total_usd = sum(entry.usd for entry in entries)
    value = {"of": cause, "job": job, "spent_usd": total_usd, "entries": entries}
    if not entries:
        command.answer(value, Text(f"the ledger has no line for {cause}"))
        return
    made = tables.table("ledger line", "job", "pool", "spent$", "hours#")
    shown = entries[:LINES_SHOWN]
    for entry in shown:
        made.add_row(
            entry.token or "(no machine)",
            entry.job or "(the house)",
            entry.pool or "-",
            usd(entry.usd),
            f"{entry.hours:,.1f}",
        )
    made.add_section()
    if len(entries) > len(shown):
        rest_usd = total_usd - sum(entry.usd for entry in shown)
        more = f"and {len(entries) - len(shown):,} more"
        made.add_row(more, "", "", usd(rest_usd), "", style="dim")
    made.add_row("all", "", "", usd(total_usd), "", style="bold")
    command.answer(value, made, then=("orchestrator cost --by cause",))


def _causes(lines: Sequence[Spent], total_usd: float) -> Table:
    made = tables.table("cause", "spent$", "share#", "what it was")
    for line in lines:
        meaning = MEANING.get(line.key, "")  # type: ignore[call-overload]
        made.add_row(line.key, usd(line.usd), percent(line.usd, total_usd), meaning)
    made.add_section()
    made.add_row("all", usd(total_usd), "", "", style="bold")
    return made


def _lines(lines: Sequence[Spent], by: By, total_usd: float) -> Table:
    """Return the lines with the causes that matter most, and the rest of them in one column."""
    made = tables.table(by, "spent$", "hours#", *(f"{cause}$" for cause in WIDE), "rest$")
    shown = lines[-LINES_SHOWN:] if by == "day" else lines[:LINES_SHOWN]
    for line in shown:
        found = {str(cause): part_usd for cause, part_usd in line.causes.items()}
        parts = [found.get(cause, 0.0) for cause in WIDE]
        made.add_row(
            line.key or "(no machine)" if by in ("machine", "pool") else line.key or "(the house)",
            usd(line.usd),
            f"{line.hours:,.1f}",
            *(usd(part) if part else "-" for part in parts),
            usd(line.usd - sum(parts)),
        )
    made.add_section()
    if len(lines) > len(shown):
        rest = sum(line.usd for line in lines) - sum(line.usd for line in shown)
        made.add_row(f"and {len(lines) - len(shown):,} more", usd(rest), style="dim")
    made.add_row("all", usd(total_usd), style="bold")
    return made
