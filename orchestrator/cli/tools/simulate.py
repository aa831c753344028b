"""The tool `simulate`: runs the manager's loop through virtual days on a simulated cloud."""

import time
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import typer

from orchestrator.cli import tables
from orchestrator.cli.command import USAGE, Command, CommandError
from orchestrator.formatting import plural, usd
from orchestrator.simulated import simulate as run


def simulate(
    command: Command,
    *,
    days: Annotated[float, typer.Option(help="How long, in virtual days.")] = 30.0,
    instances: Annotated[int, typer.Option(min=1, help="How many instances are wanted.")] = 1000,
    seed: Annotated[int, typer.Option(min=0, help="Same seed, same journal.")] = 7,
    faults: Annotated[
        Literal["none", "mixed"], typer.Option(help="What goes wrong besides evictions.")
    ] = "none",
    journal: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the journal as JSON lines.")
    ] = None,
) -> None:
    """Run the manager's own loop through virtual days, on a simulated cloud."""
    if not 0 < days <= 366:
        raise CommandError(f"--days {days:g}: above 0 and at most 366", USAGE)
    began_s = time.monotonic()
    what = f"{days:g} days of {plural(instances, 'instance')}"
    with command.busy(what) as shown:
        came = run(days, instances, seed, journal, faults, lambda day: shown(f"day {day}: {what}"))
    took_s = max(1e-9, time.monotonic() - began_s)
    made = tables.table("", "")
    made.show_header = False
    for name, value in (
        ("events", f"{came.events:,} ({came.events / took_s:,.0f} per second)"),
        ("actions", f"{came.actions:,}"),
        ("launches", f"{came.launches:,}"),
        ("evictions", f"{came.evictions:,}"),
        ("steps committed", f"{came.steps:,}"),
        ("steps lost", f"{came.steps_lost:,}"),
        ("spent", usd(came.spent_usd)),
        ("the same on demand", usd(came.on_demand_usd)),
        ("journal", f"{came.journal_bytes / 1e6:,.1f} MB, sha256 {came.journal_sha256[:16]}"),
    ):
        made.add_row(name, value)
    command.answer({**msgspec.to_builtins(came), "took_s": took_s}, made)
