"""The command `plan`: what would be bought for a script now, or the best layout."""

import re
import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.table import Table
from rich.text import Text

from orchestrator.cli import tables
from orchestrator.cli.command import (
    JOB_FAILED,
    USAGE,
    Command,
    CommandError,
    refuse_options,
    write_file,
)
from orchestrator.cli.pack import AsModule, With, pack, start_of
from orchestrator.cli.submit import job_spec, with_limits
from orchestrator.client import NotRunning
from orchestrator.config import in_force, stale
from orchestrator.formatting import duration, memory, moment, pause, plural, usd

if TYPE_CHECKING:  # the planner takes longer to import than all other commands together
    from agent.keeper.storage.sharding import Replay
    from agent.profile import Profile
    from cloud.model import Score
    from orchestrator.planner.chains import Chain
    from orchestrator.planner.plans import Candidate, Holding, LayoutPlan, Sharding
    from orchestrator.planner.search import Task
    from orchestrator.preview import Considered, PlannedWork, Preview
    from orchestrator.sale import SecondZone

HELD = re.compile(
    r"(?P<instances>\d{1,6})(?:x(?P<each>\d{1,3}))?(?::(?P<profile>[^@]+))?(?:@(?P<zone>.+))?"
)
LISTED = 12


def plan(  # noqa: PLR0913 - a parameter per option
    command: Command,
    script: Annotated[
        Path, typer.Argument(help="The training script; with --on the profile of a model.")
    ],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[-- ARGS]", help="The script's own arguments.")
    ] = None,
    *,
    as_module: AsModule = False,
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
    """Show what would be bought for a script now, the cost, and when it would be done.

    Once a job of exactly the same script has been measured, it also shows the layout that it would
    train in, and the layouts it was compared with. With --on it shows the layout of a profiled
    model on any machines, see: orchestrator tools profile --help
    """
    if on is not None or script.suffix == ".json":
        of_a_script = {
            "-m": as_module,
            "--with": bool(with_),
            "--step-s": step_s is not None,
            "--budget": budget is not None,
            "--deadline": deadline is not None,
            "-- ARGS": bool(arguments),
        }
        refuse_options(of_a_script, "the plan of a script")
        _on_machines(command, script, on or [], (batch, sharding), steps, gantt)
        return
    refuse_options(
        {"--batch": batch is not None, "--sharding": sharding != "none"}, "a plan with --on"
    )
    if step_s is not None and not 0 < step_s < 1e6:
        raise CommandError(f"--step-s {step_s:g}: seconds above 0", USAGE)
    from orchestrator.preview import preview

    argv, words = tuple(arguments or ()), tuple(with_ or ())
    config = command.config
    start = start_of(script, as_module=as_module)
    script = start.script
    spec = with_limits(job_spec(config, script, argv), budget, deadline)
    sha = pack(start, config, words, argv).sha
    try:
        client = command.client()
    except NotRunning:
        client = None
    for said in stale(client.house().settings, in_force(config)).values() if client else ():
        command.say(Text(said, style="yellow"))
    found = preview(config, client, spec, sha, (steps, step_s))
    if found.refused:
        refused = Text(f"refused: {found.refused}")
        command.answer({"script": str(script), "refused": found.refused}, refused)
        raise typer.Exit(JOB_FAILED)
    unmeasured = "" if found.measured_by else _unmeasured(script, running=client is not None)
    if gantt is not None:
        if unmeasured:
            raise CommandError(f"--gantt {gantt}: {unmeasured}")
        if found.choice is None:
            raise CommandError(f"--gantt {gantt}: there is no layout to draw: {found.no_layout}")
        write_file(gantt, found.picture, "--gantt")
    capped = spec.budget_usd is not None or config.budget.total_usd is not None
    along = [part for word in words for part in ("--with", word)]
    bounds = [] if budget is None else ["--budget", f"{budget:.12g}"]
    bounds += [] if deadline is None else ["--deadline", deadline]
    rest = ["--", *argv] if argv else []
    command.answer(
        {**found.value(), "script": str(script), "gantt": None if gantt is None else str(gantt)},
        Text(f"prices from {found.source}", style="dim"),
        *(Text(said, style="yellow") for said in found.silent),
        _offers(found.offers),
        *_verdict(found),
        *([Text(found.too_little, style="yellow")] if found.too_little else []),
        *(
            [Text(f"a budget has to be {found.least.because}", style="dim")]
            if capped and found.least
            else []
        ),
        *([] if found.replay is None else [_replayed(found.replay, spec.max_replay_s)]),
        *([Text(found.crowded, style="yellow")] if found.crowded else []),
        *(Text(_second_zone(one), style="dim") for one in found.second_zones),
        Text(exactness(found.accelerators, exact=found.exact), style="dim"),
        *_layouts(found, unmeasured),
        *([] if gantt is None else [Text(f"the predicted step: {gantt}")]),
        then=(
            shlex.join(
                ["orchestrator", "submit", *start.words, *along, *bounds, "--follow", *rest]
            ),
        ),
    )


def _offers(rows: "Sequence[Considered]") -> Table:
    """Return the table of offers, with the chosen ones in bold.

    It has the cost and time of the whole job only if they are known.
    """
    known = any(row.expected_cost_usd is not None for row in rows)
    bids = any(row.bid_usd_per_h is not None for row in rows)
    rooms = any(row.room is not None for row in rows)
    scores = any(row.score is not None for row in rows)
    made = tables.table(
        "",
        "pool",
        "market",
        "alone",
        *(("bid#",) if bids else ()),
        "$/slot-h#",
        *(("room#",) if rooms else ()),
        *(("score#",) if scores else ()),
        *(("cost$", "time") if known else ()),
    )
    for row in rows:
        alone = f"{row.machines} x {usd(row.usd_per_h)}/h" if row.machines else "not possible"
        bid = (usd(row.bid_usd_per_h),) if bids else ()
        room = ("-" if row.room is None else f"{row.room:,}",) if rooms else ()
        score = (_score(row.score),) if scores else ()
        whole = (usd(row.expected_cost_usd), duration(row.expected_s)) if known else ()
        made.add_row(
            f"buy {row.chosen}" if row.chosen else "",
            row.pool,
            row.market.replace("_", " "),
            alone,
            *bid,
            usd(row.expected_usd_per_slot_h),
            *room,
            *score,
            *whole,
            style="bold green" if row.chosen else "",
        )
    return made


def _score(score: "Score | None") -> str:
    return "-" if score is None else f"{score}/10" if isinstance(score, int) else score


def _verdict(found: "Preview") -> list[Text]:
    lines = [
        Text(f"now: {found.because}"),
        Text(f"next best: {found.runner_up}", style="dim"),
        *_assumed(found.work),
    ]
    if found.expected_cost_usd is not None and found.expected_s is not None:
        now_s = time.time()
        done = f"{duration(found.expected_s)} (at {moment(now_s + found.expected_s, now_s)})"
        lines.append(
            Text(f"expected: {usd(found.expected_cost_usd)}, done in {done}", style="bold")
        )
    elif not found.work.known:
        lines.append(
            Text(
                "cost and finish need the work, and no job of this very script with these "
                "arguments has shown it: give --steps and --step-s, or submit it once",
                style="yellow",
            )
        )
    return lines


def _replayed(replay: "Replay", max_replay_s: float) -> Text:
    """Return what is trained again if everything is lost at once."""
    writes = (
        "workers write a snapshot into storage.checkpoint_url in {}, at a tenth of their network"
        if replay.stored
        else "a snapshot is at the manager's machine in {}, and no step waits until its gradients are there"
    )
    said = (
        f"if everything is lost at once: {duration(replay.most_s)} are trained again at most, {duration(replay.mean_s)} on "
        f"average; {writes.format(duration(replay.writes_s))}"
    )
    if 2 * replay.writes_s <= max_replay_s:
        return Text(f"{said} (job.max_replay_s = {max_replay_s:g})", style="dim")
    more = "is not kept: allow more, or train with more machines"
    return Text(f"{said}; job.max_replay_s = {max_replay_s:g} {more}", style="yellow")


def _second_zone(one: "SecondZone") -> str:
    """Return what it costs to have half of the machines in another zone."""
    rate = f"{usd(one.usd_per_gb)} per GB between zones"
    if one.usd_per_step is None:
        return f"a second zone on {one.cloud}: {rate}, both ways; how much is sent is known once the job ran"
    job = "" if one.usd_per_job is None else f", {usd(one.usd_per_job)} for all of them"
    return f"a second zone on {one.cloud}: {usd(one.usd_per_step)} a step{job} ({one.gb_per_step:.3g} GB at {rate})"


def exactness(accelerators: "Sequence[str]", *, exact: bool) -> str:
    """Return whether machines that round differently may train together."""
    if not exact:
        return (
            "exact = false: machines that round differently train together, and the last bits of the weights depend on "
            "which computes what"
        )
    said = "exact: only machines that round alike (card or processor, driver, libraries) train together"
    if len(accelerators) < 2:
        return said
    kinds = " and ".join(sorted(accelerators))
    return f"{said}: {kinds} are not mixed; exact = false would mix them, and give up the same bits"


def _assumed(work: "PlannedWork") -> list[Text]:
    """Return the amount of work that is assumed, and where the figures come from."""
    parts = []
    if work.steps is not None:
        parts.append(f"{plural(work.steps, 'step')} ({_source(work.steps_from)})")
    if work.step_s is not None:
        parts.append(f"{pause(work.step_s)} for one on one slot ({_source(work.step_s_from)})")
    return [Text(f"work: {', '.join(parts)}")] if parts else []


def _source(said_by: str) -> str:
    return said_by if said_by == "as told" else f"as {said_by} had it"


def _unmeasured(script: Path, *, running: bool) -> str:
    """Return why nothing is known of layouts yet, and what to do about it."""
    if not running:
        return (
            "what was measured of a model is with the manager, and none is running: orchestrator up"
        )
    return (
        f"no job of this very {script.name} with these arguments has been measured yet; submit it once: "
        "its first worker measures the model in its first step"
    )


def _layouts(found: "Preview", unmeasured: str) -> list[Text | Table]:
    """Return the layout that it would train in, and what else was compared."""
    if unmeasured:
        return [Text(f"layout: {unmeasured}", style="dim")]
    if found.choice is None:
        return [Text(f"layout: none: {found.no_layout}", style="yellow")]
    measured = f"layout: {found.choice.because} (from what {found.measured_by} measured)"
    return [Text(measured), _comparison(found.compared), Text(_exchange(found), style="dim")]


def _exchange(found: "Preview") -> str:
    """Return how large a sum is that the workers of a step exchange."""
    size, wide = found.sum_bytes or 0.0, found.float32_bytes or 0.0
    rounded = f"in bfloat16; float32 would be {memory(wide)}" if size < wide else "in float32"
    return f"exchange: {memory(size)} of gradients a step, {rounded}"


def _comparison(rows: "Sequence[Candidate]") -> Table:
    made = tables.table(
        "", "layout", "as", "step#", "slower#", "computing#", "waiting#", "reduce and apply#"
    )
    for row in rows:
        slower = "" if row.chosen else f"{row.step_s / rows[0].step_s - 1:.1%}"
        made.add_row(
            "take" if row.chosen else "",
            row.layout,
            row.way,
            pause(row.step_s),
            slower,
            pause(row.computing_s),
            pause(row.waiting_s),
            pause(row.reduce_s),
            style="bold green" if row.chosen else "",
        )
    return made


# --- for machines that are named ------------------------------------------------------------------


def _on_machines(
    command: Command,
    source: Path,
    on: Sequence[str],
    asked: "tuple[int | None, Sharding]",
    steps: int | None,
    gantt: Path | None,
) -> None:
    """Answer with the best layout for these machines, its stages, and what else was compared."""
    from orchestrator.planner import unlike_machines

    known, holdings = _held(source, on)
    profile = known[str(source)]
    task = _task(source, profile, *asked)
    began_s = time.perf_counter()
    found, chains = unlike_machines.best_mix(known, task, holdings)
    took_s = time.perf_counter() - began_s
    if gantt is not None:
        write_file(gantt, unlike_machines.picture(known, task, holdings, found, chains), "--gantt")
    names = [group.instance_type for group in unlike_machines.in_order(known, task, holdings)]
    command.answer(
        {
            "profile": str(source),
            "on": on,
            "because": found.because,
            "plan": found,
            "chains": [[names[g] for g in chain.groups] for chain in chains],
            "compared": found.candidates,
            "took_s": took_s,
            "steps_s": None if steps is None else steps * found.step_s,
            "gantt": None if gantt is None else str(gantt),
        },
        Text(found.because),
        _comparison(found.candidates),
        _stages(found, profile),
        Text(_shares(found, chains, names)),
        *([] if steps is None else [Text(_lasts(steps, found.step_s))]),
        *([] if gantt is None else [Text(f"the predicted step: {gantt}")]),
    )


def _lasts(steps: int, step_s: float) -> str:
    return f"{plural(steps, 'step')}: {duration(steps * step_s)}, if no machine is lost"


def _held(source: Path, on: Sequence[str]) -> "tuple[dict[str, Profile], list[Holding]]":
    """Return the profiles by file, and the machines of each."""
    from orchestrator.planner import profiles
    from orchestrator.planner.plans import Holding
    from orchestrator.planner.search import WORKERS_MAX

    if not on:
        raise CommandError(
            f"{source}: say what it shall train on, e.g. --on 16, or --on 4x8 for four machines of eight "
            "accelerators",
            USAGE,
        )
    known, holdings = {str(source): profiles.load(source)}, []
    for words in on:
        found = HELD.fullmatch(words)
        if found is None or found["each"] == "0":
            raise CommandError(
                f"--on {words}: write INSTANCES[xACCELERATORS][:PROFILE][@ZONE], e.g. 4x8 or 2x8:a100.json@b",
                USAGE,
            )
        file = found["profile"] or str(source)
        if file not in known:
            known[file] = profiles.load(Path(file))
        holdings.append(
            Holding(
                instance_type=file,
                instances=int(found["instances"]),
                per_instance=int(found["each"] or 1),
                zone=found["zone"] or "",
            )
        )
    workers = sum(holding.workers for holding in holdings)
    if workers > WORKERS_MAX:
        raise CommandError(
            f"--on: {workers:,} accelerators; plans are made for at most {WORKERS_MAX:,}", USAGE
        )
    return known, holdings


def _task(source: Path, profile: "Profile", batch: int | None, sharding: "Sharding") -> "Task":
    from orchestrator.planner.search import Task

    sizes = profile.microbatch_sizes
    if batch is None:
        raise CommandError(
            f"{source}: say how many samples a step has, e.g. --batch {256 * sizes[-1]}; "
            f"measured are microbatches of {', '.join(map(str, sizes))}",
            USAGE,
        )
    if sharding == "offload" and not profile.host_bytes_per_s:
        raise CommandError(
            f"--sharding offload: {source} does not say how fast host memory is (host_bytes_per_s)",
            USAGE,
        )
    shardings: tuple[Sharding, ...] = ("none",) if sharding == "none" else ("none", sharding)
    return Task(global_batch=batch, shardings=shardings)


def _stages(found: "LayoutPlan", profile: "Profile") -> Table:
    """Return the table of stages: which sections each computes, and the memory it needs."""
    made = tables.table("stage", "sections", "from", "holds#")
    for stage, (first, end) in enumerate(found.stages[:LISTED]):
        made.add_row(
            str(stage),
            f"{first}..{end - 1}",
            profile.sections[first].name,
            memory(found.memory_bytes[stage]),
        )
    if len(found.stages) > LISTED:
        made.caption = f"and {len(found.stages) - LISTED} more stages: --json"
    return made


def _shares(found: "LayoutPlan", chains: "Sequence[Chain]", names: Sequence[str]) -> str:
    """Return in words how many microbatches the replicas get; for a mix, on which machines."""
    kinds: dict[tuple[tuple[str, ...], int], int] = {}
    for chain, share in zip(chains, found.shares, strict=True):
        of = tuple(names[group] for group in chain.groups)
        kinds[of, share] = kinds.get((of, share), 0) + 1
    mixed = len({of for of, _ in kinds}) > 1 or any(len(set(of)) > 1 for of, _ in kinds)
    said = [
        f"{plural(count, 'replica')} of {plural(share, 'microbatch').replace('hs', 'hes')}"
        + (f" on {' + '.join(dict.fromkeys(of))}" if mixed else "")
        for (of, share), count in list(kinds.items())[:LISTED]
    ]
    more = f", and {len(kinds) - LISTED} more kinds" if len(kinds) > LISTED else ""
    return "; ".join(said) + more
