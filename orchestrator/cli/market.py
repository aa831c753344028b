"""Looking ahead: what would be bought for a script now, and how a month of it would go."""

import hashlib
import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
import typer
from rich.table import Table
from rich.text import Text

from orchestrator.cli import tables
from orchestrator.cli.desk import JOB_FAILED, USAGE, CommandError, Desk, command
from orchestrator.cli.jobs import With, all_jobs, job_spec, with_limits
from orchestrator.cli.packing import pack
from orchestrator.client import NotRunning
from orchestrator.events import JobSpec
from orchestrator.wording import clock, duration, pause, plural, usd

if TYPE_CHECKING:
    from bidding.model import Purchase
    from orchestrator.cli.planning import Considered, Foreseen, Work
    from orchestrator.config import Config


def add(app: typer.Typer) -> None:
    for function in (plan, simulate):
        command(app)(function)


# --- the plan ------------------------------------------------------------------------------------


def plan(  # noqa: PLR0913 - a parameter per option
    desk: Desk,
    script: Annotated[
        Path, typer.Argument(help="The training script; with --on the profile of a model.")
    ],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[-- ARGS]", help="The script's own arguments.")
    ] = None,
    *,
    with_: With = None,
    on: Annotated[
        list[str] | None,
        typer.Option(
            metavar="N[xK][:PROFILE][@ZONE]",
            help="Plan for these machines instead: N of K accelerators.",
        ),
    ] = None,
    batch: Annotated[
        int | None, typer.Option(metavar="SAMPLES", help="With --on: samples of a step.")
    ] = None,
    sharding: Annotated[
        Literal["none", "optimizer", "offload"],
        typer.Option(help="With --on: what else may become of the optimizer's state."),
    ] = "none",
    steps: Annotated[int | None, typer.Option(min=1, help="How many steps it has.")] = None,
    step_s: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="Time of one step on one slot.")
    ] = None,
    budget: Annotated[float | None, typer.Option(metavar="USD", help="As for submit.")] = None,
    deadline: Annotated[str | None, typer.Option(metavar="TIME", help="As for submit.")] = None,
    gantt: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw the predicted step as SVG.")
    ] = None,
) -> None:
    """What would be bought for a script now, what it would cost, and when it would be done.

    Once a job of the very same script has been measured, also the layout it would train in, and what else there was.
    With --on nothing is bought: the layout of a profiled model on any machines, see: orchestrator profile --help
    """
    if on is not None or script.suffix == ".json":
        from orchestrator.cli import footprint

        asked = footprint.Asked(
            source=script, on=tuple(on or ()), batch=batch, sharding=sharding, gantt=gantt
        )
        footprint.answer(desk, asked)
        return
    if step_s is not None and not 0 < step_s < 1e6:
        raise CommandError(f"--step-s {step_s:g}: seconds above 0", USAGE)
    argv, words = tuple(arguments or ()), tuple(with_ or ())
    spec = with_limits(job_spec(desk.config, script, argv), budget, deadline)
    _look_ahead(desk, _Ahead(script, words, spec, steps, step_s, gantt))


class _Ahead(msgspec.Struct, frozen=True):
    """What is asked of a script: what goes along with it, its limits, what is known of its work, where to draw."""

    script: Path
    words: tuple[str, ...]
    spec: JobSpec
    steps: int | None
    step_s: float | None
    gantt: Path | None


def _look_ahead(desk: Desk, asked: _Ahead) -> None:
    from orchestrator.brain.buying import think
    from orchestrator.brain.jobs import least_of
    from orchestrator.cli import planning

    config, script, argv, gantt = desk.config, asked.script, asked.spec.argv, asked.gantt
    sha = hashlib.sha256(pack(script, config, asked.words, argv).payload).hexdigest()
    try:
        client = desk.client()
    except NotRunning:
        client = None
    sold = planning.market_now(config, client)
    known = all_jobs(client) if client is not None else ()
    work = planning.work_of(known, sha, argv, asked.steps, asked.step_s)
    model = planning.model_of(client, known, sha, argv) if client is not None else None
    if gantt is not None and model is None:
        raise CommandError(f"--gantt {gantt}: {_unmeasured(script, running=client is not None)}")
    state, job = planning.ask_the_brain(config, sold, asked.spec, work, model)
    if job.status == "FAILED":
        desk.answer(
            {"script": str(script), "refused": job.because}, Text(f"refused: {job.because}")
        )
        raise typer.Exit(JOB_FAILED)
    purchase = think(state, job)
    rows = planning.considered(state, job, work, purchase)
    cost, finish_s = planning.expectation(state, job, purchase, work)
    least = least_of(state, job)
    seen = planning.foresee(state, job, purchase, model) if model is not None else None
    if gantt is not None:
        _draw(gantt, seen)
    desk.answer(
        {
            "script": str(script), "source": sold.source, "because": purchase.because,
            "runner_up": purchase.runner_up, "expected_cost_usd": cost, "expected_s": finish_s,
            "budget_least_usd": None if least is None else least.usd,
            "work": work, "offers": rows, "layout": _layout_value(seen),
            "gantt": None if gantt is None else str(gantt),
        },
        Text(f"prices from {sold.source}", style="dim"),
        _offers(rows),
        *_verdict(purchase, work, cost, finish_s),
        *(() if least is None or not _capped(config, asked.spec) else (Text(f"a budget has to be {least.because}", style="dim"),)),
        *(_layouts(seen) if seen is not None else (Text(f"layout: {_unmeasured(script, running=client is not None)}", style="dim"),)),
        *(() if gantt is None else (Text(f"the predicted step: {gantt}"),)),
        then=(_submission(script, asked.words, argv),),
    )  # fmt: skip


def _capped(config: "Config", spec: JobSpec) -> bool:
    """How small a budget may be is for whoever has one."""
    return spec.budget_usd is not None or config.budget.total_usd is not None


def _submission(script: Path, words: Sequence[str], argv: Sequence[str]) -> str:
    along = [part for word in words for part in ("--with", word)]
    rest = ["--", *argv] if argv else []
    return shlex.join(["orchestrator", "submit", str(script), *along, "--follow", *rest])


def _offers(rows: "list[Considered]") -> Table:
    """What is chosen stands out; amounts of the whole job only where they are known."""
    known = any(row.expected_cost_usd is not None for row in rows)
    bids = any(row.bid_usd_per_h is not None for row in rows)
    made = tables.table(
        "", "pool", "market", "alone", *(("bid#",) if bids else ()), "$/slot-h#",
        *(("cost$", "time") if known else ()),
    )  # fmt: skip
    for row in rows:
        alone = f"{row.machines} x {usd(row.usd_per_h)}/h" if row.machines else "not possible"
        bid = (usd(row.bid_usd_per_h),) if bids else ()
        whole = (usd(row.expected_cost_usd), duration(row.expected_s)) if known else ()
        made.add_row(
            f"buy {row.chosen}" if row.chosen else "", row.pool, row.market.replace("_", " "), alone, *bid,
            usd(row.expected_usd_per_slot_h), *whole, style="bold green" if row.chosen else "",
        )  # fmt: skip
    return made


def _verdict(
    purchase: "Purchase", work: "Work", cost: float | None, took_s: float | None
) -> list[Text]:
    lines = [
        Text(f"now: {purchase.because}"),
        Text(f"next best: {purchase.runner_up}", style="dim"),
        *_assumed(work),
    ]
    if cost is not None and took_s is not None:
        done = clock(time.time() + took_s)
        lines.append(
            Text(f"expected: {usd(cost)}, done in {duration(took_s)} (at {done})", style="bold")
        )
    elif not work.known:
        lines.append(
            Text(
                "cost and finish need the work, and no job of this very script with these "
                "arguments has shown it: give --steps and --step-s, or submit it once",
                style="yellow",
            )
        )
    return lines


def _assumed(work: "Work") -> list[Text]:
    """How much work is counted with, and where that comes from."""
    parts = []
    if work.steps is not None:
        parts.append(f"{plural(work.steps, 'step')} ({_source(work.steps_from)})")
    if work.step_s is not None:
        parts.append(f"{pause(work.step_s)} for one on one slot ({_source(work.step_s_from)})")
    return [Text(f"work: {', '.join(parts)}")] if parts else []


def _source(said_by: str) -> str:
    from orchestrator.cli.planning import TOLD

    return said_by if said_by == TOLD else f"as {said_by} had it"


def _unmeasured(script: Path, *, running: bool) -> str:
    """Why nothing can be said of layouts yet, and what to do."""
    if not running:
        return (
            "what was measured of a model is with the manager, and none is running: orchestrator up"
        )
    return (
        f"no job of this very {script.name} with these arguments has been measured yet; submit it once: "
        "its first worker measures the model in its first step"
    )


def _draw(file: Path, seen: "Foreseen | str | None") -> None:
    if seen is None or isinstance(seen, str):
        raise CommandError(f"--gantt {file}: there is no layout to draw: {seen}")
    try:
        file.write_text(seen.picture, encoding="utf-8")
    except OSError as error:
        raise CommandError(f"--gantt {file}: {error.strerror}", USAGE) from None


def _layout_value(seen: "Foreseen | str | None") -> object:
    if seen is None or isinstance(seen, str):
        return None if seen is None else {"refused": seen}
    return {
        "because": seen.choice.because, "known_from": seen.known_from,
        "microbatches": seen.asked.microbatches, "compared": seen.compared,
    }  # fmt: skip


def _layouts(seen: "Foreseen | str") -> "list[Text | Table]":
    """What it would train in, and what else was compared."""
    from orchestrator.cli.footprint import comparison

    if isinstance(seen, str):
        return [Text(f"layout: none: {seen}", style="yellow")]
    return [
        Text(f"layout: {seen.choice.because} (from what {seen.known_from} measured)"),
        comparison(seen.compared),
    ]


# --- the simulation ------------------------------------------------------------------------------


def simulate(
    desk: Desk,
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
    from orchestrator.simulated import simulate as run

    if not 0 < days <= 366:
        raise CommandError(f"--days {days:g}: above 0 and at most 366", USAGE)
    began_s = time.monotonic()
    what = f"{days:g} days of {plural(instances, 'instance')}"
    with desk.busy(what) as shown:
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
    desk.answer({**msgspec.to_builtins(came), "took_s": took_s}, made)
