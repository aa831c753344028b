"""The command `compare`: two jobs side by side, also such as ended long ago."""

from collections.abc import Callable, Iterable
from typing import Annotated

import typer
from rich.text import Text

from orchestrator.cli import tables
from orchestrator.cli.command import USAGE, Command, CommandError
from orchestrator.cli.jobs import ids
from orchestrator.dashboard.comparison import Compared, compared
from orchestrator.formatting import duration, loss, pause, percent, usd
from orchestrator.history.reader import History
from orchestrator.history.records import CAUSES, Cause, Remembered
from orchestrator.paths import Places

Name = Annotated[
    str, typer.Argument(metavar="JOB", help="Id of a job, or how it begins.", autocompletion=ids)
]


def compare(command: Command, one: Name, other: Name) -> None:
    """Show two jobs side by side: steps, loss, time, money and what it was spent on."""
    history = History.open(Places(command.config.state_dir))
    found = [compared(history, remembered(history, name)) for name in (one, other)]
    made = tables.table("", *(f"{each.id}#" for each in found))
    for name, shown in _rows():
        made.add_row(name, *(shown(each) for each in found))
    for cause in CAUSES:
        if any(each.causes.get(cause) for each in found):
            made.add_row(f"  {cause}", *(_share(each, cause) for each in found), style="dim")
    command.answer({"jobs": found}, made, then=(f"orchestrator cost {found[0].id} --by cause",))


def _share(each: Compared, cause: Cause) -> Text:
    part_usd, whole_usd = each.causes.get(cause, 0.0), sum(each.causes.values())
    return Text(f"{usd(part_usd)} {percent(part_usd, whole_usd):>5}" if part_usd else "-")


def _rows() -> Iterable[tuple[str, Callable[[Compared], str]]]:
    return (
        ("status", lambda each: each.job.status),
        ("steps", lambda each: f"{each.job.step:,}"),
        ("loss", lambda each: loss(each.job.loss)),
        ("time", lambda each: duration(each.job.took_s)),
        ("a step", lambda each: pause(each.job.step_s) if each.job.step_s else "-"),
        ("layout", lambda each: each.job.layout or "-"),
        ("machines taken away", lambda each: f"{each.job.preemptions:,}"),
        ("steps lost", lambda each: f"{each.job.steps_lost:,}"),
        ("machine hours", lambda each: f"{each.machine_hours:,.2f}"),
        ("on demand", lambda each: usd(each.job.on_demand_usd)),
        ("saved", lambda each: usd(each.job.saved_usd)),
        ("1,000 steps", lambda each: usd(each.usd_per_1000_steps)),
        ("spent", lambda each: usd(each.job.spent_usd)),
    )


def remembered(history: History, name: str) -> Remembered:
    """Return a job of the past by its id, or by how that begins; refuse a name of none."""
    known = history.jobs()
    exact = [one for one in known if one.id == name]
    found = exact or [one for one in known if one.id.startswith(name)]
    if len(found) == 1:
        return found[0]
    names = ", ".join(one.id for one in (found or known)[:10]) or "none"
    if found:
        raise CommandError(f"{name} may be any of: {names}", USAGE)
    raise CommandError(f"the history has no job {name}; it has: {names}", USAGE)
