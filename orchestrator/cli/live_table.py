"""A job as it runs, in the terminal: a panel that is redrawn, or plain lines where there is no terminal.

It only reads the view, so watching costs the manager nothing and may be stopped at any time.
"""

import time
from collections.abc import Callable

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from orchestrator.cli.looking import Source, ended, looks
from orchestrator.view import JobView, Sentence, View
from orchestrator.wording import clock, duration, loss, pause, percent, plural, told, usd

LINE_EVERY_S = 5.0
SENTENCES_SHOWN = 5
TONES = {
    "RUNNING": "cyan", "SUCCEEDED": "green", "FAILED": "red", "CANCELLED": "magenta",
    "working": "green", "ready": "green", "noticed": "red", "leaving": "red", "ended": "dim",
}  # fmt: skip


def follow(
    client: Source, job_id: str, until: Callable[[JobView], bool], console: Console
) -> JobView:
    """Show the job until `until` says so; return it as it was then."""
    if not console.is_terminal:
        return _lines(client, job_id, until, console)
    with Live(Text(f"waiting for {job_id}"), console=console, auto_refresh=False) as live:
        for look in looks(client, job_id):
            live.update(panel(look.view, look.job, look.notes), refresh=True)
            if until(look.job):
                return look.job
    raise AssertionError("looking never ends by itself")


def _lines(
    client: Source, job_id: str, until: Callable[[JobView], bool], console: Console
) -> JobView:
    """Every change of status at once, progress now and then."""
    said, said_at_s = "", -LINE_EVERY_S
    for view, job, notes in looks(client, job_id):
        over, now_s = until(job), time.monotonic()
        if over or job.status != said or now_s - said_at_s >= LINE_EVERY_S:
            console.print(one_line(view, job, notes), markup=False, highlight=False, soft_wrap=True)
            said, said_at_s = job.status, now_s
        if over:
            return job
    raise AssertionError("looking never ends by itself")


def panel(view: View, job: JobView, notes: tuple[str, ...] = ()) -> RenderableType:
    """All there is to say about a running job in a dozen lines."""
    head = Text.assemble(
        (job.id, "bold"), "  ", (job.status, f"bold {TONES.get(job.status, 'yellow')}"), "  ",
        (job.because, "dim"), no_wrap=True, overflow="ellipsis",
    )  # fmt: skip
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim")
    facts.add_column()
    facts.add_row("layout", _layout(job))
    facts.add_row("money", _money(job))
    facts.add_row("", _beside(job))
    facts.add_row("so far", _so_far(job))
    if job.export_uri:
        facts.add_row("model", job.export_uri)
    if notes:
        facts.add_row("now", Text(" · ".join(notes), style="yellow"))
    said = sentences_of(view, job.id)[-SENTENCES_SHOWN:]
    return Group(head, _bar(job), facts, *(_sentence(one) for one in said))


def sentences_of(view: View, job_id: str) -> list[Sentence]:
    """What is not about another job or its machines."""
    others = {one.id for one in view.jobs if one.id != job_id}
    others |= {name for one in view.machines if one.job != job_id for name in (one.id, one.token)}
    return [one for one in view.events if one.who not in others]


def one_line(view: View, job: JobView, notes: tuple[str, ...] = ()) -> str:
    """The same in one plain line."""
    parts = [
        f"{clock(view.at_s)} {job.id} {job.status} step {_steps(job)}",
        f"loss {loss(job.loss)}", f"layout {job.layout or '-'}",
        plural(job.machines, "machine"), f"{usd(job.now_usd_per_h)}/h",
        f"spent {usd(job.spent_usd)}", f"saved {usd(job.saved_usd)}",
    ]  # fmt: skip
    if job.status != "RUNNING":
        parts.append(job.because)
    return " · ".join([*parts, *notes])


def _bar(job: JobView) -> RenderableType:
    row = Table.grid(padding=(0, 2))
    tone = TONES.get(job.status, "yellow")
    total = job.steps_total or None
    bar = ProgressBar(
        total=total, completed=job.step, width=40, pulse=total is None and not ended(job),
        complete_style=tone, finished_style="green",
    )  # fmt: skip
    left = duration(job.eta_s) + " left" if job.eta_s is not None else ""
    row.add_row(bar, f"step [bold]{_steps(job)}[/]", f"loss [bold]{loss(job.loss)}[/]", left)
    return row


def _layout(job: JobView) -> str:
    none = "none any more" if ended(job) else "none yet"
    parts = [f"[bold]{job.layout or none}[/]", plural(job.machines, "machine")]
    if job.step_s > 0:
        parts.append(f"{pause(job.step_s)} per step")
    return " · ".join([*parts, f"generation {job.generation}"])


def _money(job: JobView) -> str:
    budget = f" of {usd(job.budget_usd)}" if job.budget_usd is not None else ""
    return (
        f"[bold]{usd(job.now_usd_per_h)}/h[/] · spent [bold]{usd(job.spent_usd)}[/]{budget} · "
        f"saved [bold]{usd(job.saved_usd)}[/] "
        f"({percent(job.saved_usd, job.on_demand_usd)})"
    )


def _beside(job: JobView) -> str:
    """What is reserved for giving its machines back, and what they cost on demand."""
    return f"reserved {usd(job.reserved_usd)} · on demand {usd(job.on_demand_usd)}"


def _so_far(job: JobView) -> str:
    parts = [plural(job.preemptions, "preemption"), f"{plural(job.steps_lost, 'step')} lost"]
    if job.failures:
        parts.append(plural(job.failures, "script failure"))
    if job.recoveries_s:
        parts.append(f"last recovery {pause(job.recoveries_s[-1])}")
    return " · ".join(parts)


def _sentence(said: Sentence) -> Text:
    return Text.assemble(
        (clock(said.at_s), "dim"), " ", (said.who, "bold"), " ", told(said.who, said.what, said.because),
        no_wrap=True, overflow="ellipsis",
    )  # fmt: skip


def _steps(job: JobView) -> str:
    return f"{job.step:,}/{job.steps_total:,}" if job.steps_total else f"{job.step:,}"
