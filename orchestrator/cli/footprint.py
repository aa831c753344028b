"""Layouts of a measured model for any machines, bought or not: no market, no manager.

What a job's worker measured can be written to a file, looked at, and planned with for other machines.
"""

import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.table import Table
from rich.text import Text

from agent.profile import Profile, render
from orchestrator.cli import tables
from orchestrator.cli.desk import USAGE, CommandError, Desk, command
from orchestrator.cli.jobs import find
from orchestrator.cli.tracing import unmeasured
from orchestrator.morph import mixed, profiles
from orchestrator.morph.errors import DoesNotFit, MorphError
from orchestrator.morph.formations import Chain
from orchestrator.morph.plans import Cost, Holding, Plan, Sharding, Way
from orchestrator.morph.search import WORKERS_MAX, Task
from orchestrator.wording import memory, pause, plural

HELD = re.compile(
    r"(?P<instances>\d{1,6})(?:x(?P<each>\d{1,3}))?(?::(?P<profile>[^@]+))?(?:@(?P<zone>.+))?"
)
LISTED, SECTIONS_LISTED = 12, 60
WRITE = "a measured job's is written by: orchestrator profile JOB --out FILE"


class Compared(msgspec.Struct, frozen=True, kw_only=True):
    """One layout of those that were compared."""

    layout: str
    way: str
    step_s: float
    computing_s: float  # of the worker that has most to do
    waiting_s: float  # inside the pipeline
    reduce_s: float
    chosen: bool


def compared(plan: Plan) -> tuple[Compared, ...]:
    """The plan, and those that were not taken."""
    others = (_row(o.way, o.width, o.cost, chosen=False) for o in plan.runners_up)
    return (_row(plan.way, plan.width, plan.cost, chosen=True), *others)


def _row(way: Way, width: int, cost: Cost, *, chosen: bool) -> Compared:
    return Compared(
        layout=f"{way.depth}x{width}", way=way.describe(), step_s=cost.step_s, chosen=chosen,
        computing_s=cost.busy_s, waiting_s=max(0.0, cost.bubble_s), reduce_s=max(0.0, cost.reduce_s),
    )  # fmt: skip


def comparison(rows: Sequence[Compared]) -> Table:
    made = tables.table(
        "", "layout", "as", "step#", "slower#", "computing#", "waiting#", "reduce and apply#"
    )
    for row in rows:
        slower = "" if row.chosen else f"{row.step_s / rows[0].step_s - 1:.1%}"
        made.add_row(
            "take" if row.chosen else "", row.layout, row.way, pause(row.step_s), slower,
            pause(row.computing_s), pause(row.waiting_s), pause(row.reduce_s),
            style="bold green" if row.chosen else "",
        )  # fmt: skip
    return made


# --- a plan for machines -------------------------------------------------------------------------


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What a person wants a layout for."""

    source: Path
    on: tuple[str, ...]
    batch: int | None
    sharding: Sharding
    gantt: Path | None


def answer(desk: Desk, asked: Asked) -> None:
    """The best layout for these machines, what else was compared, and who computes what."""
    try:
        known, holdings = _held(asked)
        task = _task(asked, known[str(asked.source)])
        began_s = time.perf_counter()
        plan, chains = mixed.best_mix(known, task, holdings)
        took_s = time.perf_counter() - began_s
        drawn = None if asked.gantt is None else mixed.picture(known, task, holdings, plan, chains)
    except MorphError as error:
        raise CommandError(str(error), 1 if isinstance(error, DoesNotFit) else USAGE) from None
    if asked.gantt is not None and drawn is not None:
        write(asked.gantt, drawn, "--gantt")
    names = [group.instance_type for group in mixed.in_order(known, task, holdings)]
    desk.answer(
        {
            "profile": str(asked.source), "on": asked.on, "because": plan.because, "plan": plan,
            "chains": [[names[g] for g in chain.groups] for chain in chains],
            "compared": compared(plan), "took_s": took_s,
            "gantt": None if asked.gantt is None else str(asked.gantt),
        },
        Text(plan.because),
        comparison(compared(plan)),
        _stages(plan, known[str(asked.source)]),
        Text(_shares(plan, chains, names)),
        *(() if asked.gantt is None else (Text(f"the predicted step: {asked.gantt}"),)),
    )  # fmt: skip


def _held(asked: Asked) -> tuple[dict[str, Profile], list[Holding]]:
    """The profiles by file, and what is held of each."""
    if not asked.on:
        raise CommandError(
            f"{asked.source}: say what it shall train on, e.g. --on 16, or --on 4x8 for four machines of eight "
            "accelerators",
            USAGE,
        )
    known, holdings = {str(asked.source): load(asked.source)}, []
    for words in asked.on:
        found = HELD.fullmatch(words)
        if found is None or found["each"] == "0":
            raise CommandError(
                f"--on {words}: write INSTANCES[xACCELERATORS][:PROFILE][@ZONE], e.g. 4x8 or 2x8:a100.json@b",
                USAGE,
            )
        file = found["profile"] or str(asked.source)
        if file not in known:
            known[file] = load(Path(file))
        holdings.append(
            Holding(
                instance_type=file, instances=int(found["instances"]),
                per_instance=int(found["each"] or 1), zone=found["zone"] or "",
            )
        )  # fmt: skip
    workers = sum(holding.workers for holding in holdings)
    if workers > WORKERS_MAX:
        raise CommandError(
            f"--on: {workers:,} accelerators; plans are made for at most {WORKERS_MAX:,}", USAGE
        )
    return known, holdings


def load(path: Path) -> Profile:
    try:
        return profiles.load(path)
    except MorphError as error:
        raise CommandError(f"{error} ({WRITE})", USAGE) from None


def _task(asked: Asked, profile: Profile) -> Task:
    sizes = ", ".join(map(str, profile.microbatch_sizes))
    if asked.batch is None:
        raise CommandError(
            f"{asked.source}: say how many samples a step has, e.g. --batch {256 * profile.microbatch_sizes[-1]}; "
            f"measured are microbatches of {sizes}",
            USAGE,
        )
    if asked.sharding == "offload" and not profile.host_bytes_per_s:
        raise CommandError(
            f"--sharding offload: {asked.source} does not say how fast host memory is (host_bytes_per_s)",
            USAGE,
        )
    shardings: tuple[Sharding, ...] = ("none",)
    if asked.sharding != "none":
        shardings = ("none", asked.sharding)
    return Task(global_batch=asked.batch, shardings=shardings)


def _stages(plan: Plan, profile: Profile) -> Table:
    """Who computes what, and what it holds."""
    made = tables.table("stage", "sections", "from", "holds#")
    for stage, (first, end) in enumerate(plan.stages[:LISTED]):
        made.add_row(
            str(stage), f"{first}..{end - 1}", profile.sections[first].name,
            memory(plan.memory_bytes[stage]),
        )  # fmt: skip
    if len(plan.stages) > LISTED:
        made.caption = f"and {len(plan.stages) - LISTED} more stages: --json"
    return made


def _shares(plan: Plan, chains: Sequence[Chain], names: Sequence[str]) -> str:
    """How many microbatches the replicas get; of a mix, on what."""
    kinds: dict[tuple[tuple[str, ...], int], int] = {}
    for chain, share in zip(chains, plan.shares, strict=True):
        of = tuple(names[group] for group in chain.groups)
        kinds[of, share] = kinds.get((of, share), 0) + 1
    mixed_ = len({of for of, _ in kinds}) > 1 or any(len(set(of)) > 1 for of, _ in kinds)
    said = [
        f"{plural(count, 'replica')} of {plural(share, 'microbatch').replace('hs', 'hes')}"
        + (f" on {' + '.join(dict.fromkeys(of))}" if mixed_ else "")
        for (of, share), count in list(kinds.items())[:LISTED]
    ]
    more = f", and {len(kinds) - LISTED} more kinds" if len(kinds) > LISTED else ""
    return "; ".join(said) + more


def write(file: Path, text: str, option: str) -> None:
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise CommandError(f"{option} {file}: {error.strerror}", USAGE) from None


# --- profiles ------------------------------------------------------------------------------------


def add(app: typer.Typer) -> None:
    command(app)(profile)


def profile(
    desk: Desk,
    source: Annotated[
        str | None,
        typer.Argument(
            metavar="[JOB|FILE]", help="A measured job, or a file. Default: the newest job."
        ),
    ] = None,
    *,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write it there.")] = None,
) -> None:
    """What was measured of a model, section by section; with --out it is written to a file."""
    found = _found(desk, source)
    if out is not None:
        write(out, render(found), "--out")
    desk.answer(
        {"profile": found, "file": None if out is None else str(out)},
        Text(_head(found)),
        _sections(found),
        *(() if out is None else (Text(f"written: {out}"),)),
        then=() if out is None else (f"orchestrator plan {out} --on 4 --batch {_batch(found)}",),
    )


def _found(desk: Desk, source: str | None) -> Profile:
    path = None if source is None else Path(source)
    if path is None or not (path.suffix or path.exists()):
        job = find(desk.client(), source)
        measured = desk.client().profile(job.id)
        if measured is None:
            raise CommandError(f"{job.id}: {unmeasured(job)}")
        return measured
    return load(path)


def _batch(profile: Profile) -> int:
    return 16 * profile.microbatch_sizes[-1]


def _head(profile: Profile) -> str:
    sizes = ", ".join(map(str, profile.microbatch_sizes))
    link = profile.network.inter
    where = f" on {profile.instance_type}" if profile.instance_type else ""
    return (
        f"{profile.model}{where}: {plural(len(profile.sections), 'section')}, microbatches of {sizes}; "
        f"{memory(profile.memory_bytes)}; {link.bandwidth_bytes_per_s / 1e9:.3g} GB/s after "
        f"{link.latency_s * 1e6:.0f} us between machines ({profile.network_from})"
    )


def _sections(profile: Profile) -> Table:
    """Times of the largest microbatch, bytes a sample."""
    made = tables.table(
        "#", "section", "forward#", "backward#", "sends#", "keeps#", "parameters#", "optimizer#"
    )
    for number, one in enumerate(profile.sections[:SECTIONS_LISTED]):
        made.add_row(
            str(number), one.name, _ms(one.forward_s[-1]), _ms(one.backward_s[-1]),
            _mb(one.activation_bytes), _mb(one.stash_bytes), _mb(one.parameter_bytes), _mb(one.optimizer_bytes),
        )  # fmt: skip
    if len(profile.sections) > SECTIONS_LISTED:
        made.caption = f"and {len(profile.sections) - SECTIONS_LISTED} more: --json"
    return made


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


def _mb(size_bytes: float) -> str:
    return f"{size_bytes / 1e6:.3g} MB"
