"""Watching a job: a panel that is redrawn, or plain lines if there is no terminal.

Watching only reads the view, so it costs the manager nothing and may be stopped at any time. If the
view is old or the job waits for something, the notes say so.
"""

import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, NamedTuple, Protocol

import redis
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from cloud.clock import ticks
from orchestrator.client import House, NoRoom, NotRunning
from orchestrator.formatting import (
    as_path,
    clock,
    duration,
    loss,
    moment,
    of_budget,
    pause,
    percent,
    plural,
    told,
    usd,
)
from orchestrator.paths import Places
from orchestrator.view import JobView, Sentence, View
from orchestrator.wishes import ENDED

LOOK_S = 0.25
UNKNOWN_S_MAX = 30.0
AWAY_S_MAX = 60.0
SILENT_S = 1.0
OLD_S = 15.0
STILL_S, STILL_STEPS = 15.0, 5
LINE_EVERY_S = 5.0
SENTENCES_SHOWN = 5
TONES = {
    "RUNNING": "cyan",
    "SUCCEEDED": "green",
    "FAILED": "red",
    "CANCELLED": "magenta",
    "working": "green",
    "ready": "green",
    "noticed": "red",
    "leaving": "red",
    "silent": "red",
    "ended": "dim",
}


class ViewSource(Protocol):
    """The part of `orchestrator.client.Client` that watching needs."""

    def view(self) -> View | None: ...

    def house(self) -> House: ...


def ended(job: JobView) -> bool:
    return job.status in ENDED


class Look(NamedTuple):
    """A view, the job in it, and notes on what the job waits for and how old the view is."""

    view: View
    job: JobView
    notes: tuple[str, ...]


def looks(client: ViewSource, job_id: str) -> Iterator[Look]:
    """Yield the view with the job in it again and again; wait for a Redis that is restarting."""
    last: Look | None = None
    answered_s = known_s = time.monotonic()
    silence, step, stepped_s = "", -1, 0.0
    asked = _reading(client)
    while True:
        try:
            view = _answer(asked)
        except (Empty, redis.RedisError) as error:
            if not isinstance(error, Empty):
                _give_up(client, job_id, error, time.monotonic() - answered_s)
                silence, asked = str(error), _reading(client)
            known_s = time.monotonic()
            if last is not None:
                age = f"as of {duration(time.monotonic() - answered_s)} ago"
                yield last._replace(notes=(f"{age}: {silence or 'Redis does not answer'}",))
            continue
        answered_s, silence = time.monotonic(), ""
        job = next((one for one in view.jobs if one.id == job_id), None) if view else None
        if view is not None and job is not None:
            known_s = answered_s
            if job.step != step:
                step, stepped_s = job.step, answered_s
            last = Look(view, job, tuple(_notes(view, job, answered_s - stepped_s)))
            yield last
        elif answered_s - known_s > UNKNOWN_S_MAX:
            raise TimeoutError(
                f"the manager has said nothing of {job_id} for {UNKNOWN_S_MAX:.0f} s; "
                "look with: orchestrator status"
            )
        time.sleep(LOOK_S)
        asked = _reading(client)


def _reading(client: ViewSource) -> "SimpleQueue[View | Exception | None]":
    """Start reading the view, and return the queue that will get it or the exception.

    A thread reads it, because an answer may take longer than a person should wait for a line.
    """
    answer: SimpleQueue[View | Exception | None] = SimpleQueue()

    def read() -> None:
        try:
            answer.put(client.view())
        except Exception as error:  # `_answer` raises it
            answer.put(error)

    Thread(target=read, name="look", daemon=True).start()
    return answer


def _answer(asked: "SimpleQueue[View | Exception | None]") -> View | None:
    found = asked.get(timeout=SILENT_S)
    if isinstance(found, Exception):
        raise found
    return found


def _give_up(client: ViewSource, job_id: str, error: Exception, away_s: float) -> None:
    """Raise `NotRunning` if the house is dead, or silent for longer than `AWAY_S_MAX`.

    A living house that only waits for room on the disk is waited for without a limit.
    """
    lives = Path(f"/proc/{client.house().pid}").exists()
    if not lives or (away_s > AWAY_S_MAX and not isinstance(error, NoRoom)):
        raise NotRunning(
            f"the manager went away while {job_id} was watched; `orchestrator up` brings "
            "it back, and the job goes on from its last step"
        ) from None
    time.sleep(LOOK_S)


def _notes(view: View, job: JobView, still_s: float) -> Iterator[str]:
    """Yield why the job seems to stand still, so that a person does not take it for hanging."""
    if ended(job):
        return
    if old := age(view):
        yield old
    mine = [one for one in view.machines if one.job == job.id]
    if booting := [one for one in mine if one.state in ("intended", "pending", "booting")]:
        first_s = view.at_s - min(one.launched_at_s for one in booting)
        yield f"{plural(len(booting), 'machine')} booting for {duration(first_s)}"
    if not job.workers and any(one.state == "ready" for one in mine):
        yield "its workers start"
    to_come = not job.steps_total or job.step < job.steps_total
    if to_come and job.workers and still_s > max(STILL_S, STILL_STEPS * job.step_s):
        yield f"no step for {duration(still_s)}"


def why_silent(view: View | None, places: Places) -> str:
    """Return why managers end by themselves while Ray restarts them, or "" if they do not."""
    try:
        why = places.broke_off.read_text()
    except OSError:
        return ""
    if view is not None and not age(view):
        return ""  # the next manager works
    why = why or "no reason could be written, as on a full disk"
    return f"it ended by itself, again and again: {why}. More is in {places.log('loop')}"


def age(view: View) -> str:
    """Return the age of the view in words if it is over `OLD_S`, else "".

    The manager renews the view all the time, so an old view means that it is away.
    """
    old_s = ticks() - view.tick_s
    return (
        f"as of {duration(old_s)} ago: the manager has said nothing since" if old_s > OLD_S else ""
    )


def follow(
    client: ViewSource, job_id: str, until: Callable[[JobView], bool], console: Console
) -> JobView:
    """Show the job until `until` is true of it; return the job in that state."""
    if not console.is_terminal:
        return _lines(client, job_id, until, console)
    with Live(Text(f"waiting for {job_id}"), console=console, auto_refresh=False) as live:
        for look in looks(client, job_id):
            live.update(panel(look.view, look.job, look.notes), refresh=True)
            if until(look.job):
                return look.job
    raise AssertionError("looking never ends by itself")


def _lines(
    client: ViewSource, job_id: str, until: Callable[[JobView], bool], console: Console
) -> JobView:
    """Print a line at every change of status, and every `LINE_EVERY_S` in between."""
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
    """Return all that there is to say about a running job, in a dozen lines."""
    head = Text.assemble(
        (job.id, "bold"),
        "  ",
        (job.status, f"bold {TONES.get(job.status, 'yellow')}"),
        "  ",
        (job.because, "dim"),
        no_wrap=True,
        overflow="ellipsis",
    )
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim")
    facts.add_column()
    facts.add_row("layout", _layout(job))
    if job.given and not ended(job):
        facts.add_row("help", _help(job))
    if job.bits:
        facts.add_row("bits", Text(job.bits))
    facts.add_row("money", _money(job))
    facts.add_row("", _beside(job))
    if job.deadline_s is not None:
        facts.add_row("deadline", deadline(job, view.at_s))
    facts.add_row("so far", _so_far(job))
    if job.export_uri:
        facts.add_row("model", Text(as_path(job.export_uri)))
    if notes:
        facts.add_row("now", Text(" · ".join(notes), style="yellow"))
    said = [
        sentence(one, view.at_s, no_wrap=True, overflow="ellipsis")
        for one in sentences_of(view, job.id)[-SENTENCES_SHOWN:]
    ]
    return Group(head, _bar(job), facts, *said)


def sentences_of(view: View, job_id: str) -> list[Sentence]:
    """Return the sentences about a job and its machines, and those about nobody else's until it ended."""
    others = {one.id for one in view.jobs if one.id != job_id}
    others |= {name for one in view.machines if one.job != job_id for name in (one.id, one.token)}
    own = {
        job_id,
        *(name for one in view.machines if one.job == job_id for name in (one.id, one.token)),
    }
    ended_s = [
        one.ended_at_s for one in view.jobs if one.id == job_id and one.ended_at_s is not None
    ]
    until_s = min(ended_s, default=math.inf)
    return [
        one
        for one in view.events
        if one.who in own or (one.who not in others and one.at_s <= until_s)
    ]


def one_line(view: View, job: JobView, notes: tuple[str, ...] = ()) -> str:
    """Return the state of the job in one plain line."""
    parts = [
        f"{clock(view.at_s)} {job.id} {job.status} step {_steps(job)}",
        f"loss {loss(job.loss)}",
        f"layout {job.layout or '-'}",
        plural(job.machines, "machine"),
        f"{usd(job.now_usd_per_h)}/h",
        f"spent {usd(job.spent_usd)}{of_budget(job.budget_usd, job.short_usd)}",
        f"saved {usd(job.saved_usd)}",
    ]
    if job.status != "RUNNING" or job.step == job.steps_total:
        parts.append(job.because)
    return " · ".join([*parts, *notes])


def _bar(job: JobView) -> RenderableType:
    row = Table.grid(padding=(0, 2))
    tone = TONES.get(job.status, "yellow")
    total = job.steps_total or None
    bar = ProgressBar(
        total=total,
        completed=job.step,
        width=40,
        pulse=total is None and not ended(job),
        complete_style=tone,
        finished_style="green",
    )
    left = duration(job.eta_s) + " left" if job.eta_s is not None else ""
    row.add_row(bar, f"step [bold]{_steps(job)}[/]", f"loss [bold]{loss(job.loss)}[/]", left)
    return row


def _layout(job: JobView) -> str:
    none = "none any more" if ended(job) else "none yet"
    parts = [f"[bold]{job.layout or none}[/]", plural(job.machines, "machine")]
    if job.step_s > 0:
        parts.append(f"{pause(job.step_s)} per step")
    return " · ".join([*parts, f"generation {job.generation}"])


def _help(job: JobView) -> str:
    """Return how much of the newest work slower workers have given to faster ones."""
    parts = "grains" if job.tables_stage else "microbatches"
    return f"{job.given:,} of the last {job.computed:,} {parts} were given to faster workers"


def _money(job: JobView) -> str:
    budget = of_budget(job.budget_usd, job.short_usd)
    return (
        f"[bold]{usd(job.now_usd_per_h)}/h[/] · spent [bold]{usd(job.spent_usd)}[/]{budget} · "
        f"saved [bold]{usd(job.saved_usd)}[/] "
        f"({percent(job.saved_usd, job.on_demand_usd)})"
    )


def deadline(job: JobView, now_s: float) -> str:
    """Return when a job has to be done, and whether that was or would be kept; "" if never."""
    if job.deadline_s is None:
        return ""
    left_s = job.deadline_s - (now_s if job.ended_at_s is None else job.ended_at_s)
    if job.ended_at_s is not None:
        kept = "kept" if job.status == "SUCCEEDED" else "not reached"
        said = kept if left_s >= 0 else f"missed by {duration(-left_s)}"
    elif left_s < 0:
        said = f"passed {duration(-left_s)} ago"
    else:
        late_s = (job.eta_s or 0.0) - left_s
        said = f"in {duration(left_s)}"
        said += f"; at this pace {duration(late_s)} too late" if late_s > 0 else ""
    return f"{moment(job.deadline_s, now_s)}, {said}"


def _beside(job: JobView) -> str:
    """Return what is reserved for giving machines back, and their cost on demand."""
    return f"reserved {usd(job.reserved_usd)} · on demand {usd(job.on_demand_usd)}"


def _so_far(job: JobView) -> str:
    parts = [plural(job.preemptions, "preemption"), f"{plural(job.steps_lost, 'step')} lost"]
    if job.failures:
        parts.append(plural(job.failures, "script failure"))
    if job.recoveries_s:
        parts.append(f"last recovery {pause(job.recoveries_s[-1])}")
    return " · ".join(parts)


def sentence(said: Sentence, now_s: float, **look: Any) -> Text:
    """Return what was done, when and why; `look` has the options of the text."""
    return Text.assemble(
        (moment(said.at_s, now_s), "dim"),
        " ",
        (said.who, "bold"),
        " ",
        told(said.who, said.what, said.because),
        **look,
    )


def _steps(job: JobView) -> str:
    return f"{job.step:,}/{job.steps_total:,}" if job.steps_total else f"{job.step:,}"
