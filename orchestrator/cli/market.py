"""Looking ahead: what the brain would buy for a script now, and how a month of it would go."""

import asyncio
import time
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import typer
from rich.table import Table
from rich.text import Text

from agent.layout import Layout, Replica
from bidding.model import Purchase
from cloud.local.market import LOCAL, SpotMarket
from cloud.local.provider import LocalProvider
from cloud.local.replay import read_prices
from cloud.model import InstanceType, Market, Pool, Quote
from cloud.simulated import SimulatedCloud
from orchestrator import buying
from orchestrator.brain import decide
from orchestrator.cli import tables
from orchestrator.cli.desk import JOB_FAILED, USAGE, CommandError, Desk, command
from orchestrator.cli.jobs import all_jobs, job_spec, read_script, with_limits
from orchestrator.cli.trouble import with_local_cloud
from orchestrator.client import Client, NotRunning
from orchestrator.config import Config
from orchestrator.events import CatalogueSeen, JobSpec, JobSubmitted, ManagerStarted, QuotesSeen
from orchestrator.manager import settings_from
from orchestrator.state import Job, State
from orchestrator.wording import clock, duration, plural, usd

HOUR_S = 3600.0
NO_SHA = "0" * 64


def add(app: typer.Typer) -> None:
    for function in (plan, simulate):
        command(app)(function)


class Sold(msgspec.Struct, frozen=True, kw_only=True):
    """What a provider sells now, and where the answer comes from."""

    types: tuple[InstanceType, ...]
    pools: tuple[Pool, ...]
    quotes: tuple[Quote, ...]
    source: str


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """How much there is to do, as far as it is known."""

    steps: int | None
    step_s: float | None  # of one step on one slot

    @property
    def known(self) -> bool:
        return self.steps is not None and self.step_s is not None


class Considered(msgspec.Struct, frozen=True, kw_only=True):
    """One offer, and what the job would cost if nothing else were sold."""

    pool: str
    market: Market
    slots: int
    usd_per_h: float
    machines: int
    expected_usd_per_slot_h: float | None
    expected_cost_usd: float | None
    expected_s: float | None
    chosen: int


# --- the plan ------------------------------------------------------------------------------------


def plan(
    desk: Desk,
    script: Annotated[Path, typer.Argument(help="The training script.")],
    *,
    steps: Annotated[int | None, typer.Option(min=1, help="How many steps it has.")] = None,
    step_s: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="Time of one step on one slot.")
    ] = None,
    budget: Annotated[float | None, typer.Option(metavar="USD", help="As for submit.")] = None,
    deadline: Annotated[str | None, typer.Option(metavar="TIME", help="As for submit.")] = None,
) -> None:
    """What would be bought for a script now, what it would cost, and when it would be done."""
    config = desk.config
    read_script(script, config)
    if step_s is not None and not 0 < step_s < 1e6:
        raise CommandError(f"--step-s {step_s:g}: seconds above 0", USAGE)
    try:
        client = desk.client()
    except NotRunning:
        client = None
    sold, work = _sold(config, client), _work(client, script, steps, step_s)
    spec = with_limits(job_spec(config, script, NO_SHA, ()), budget, deadline)
    state, job = ask_the_brain(config, sold, spec, work)
    if job.status == "FAILED":
        desk.answer(
            {"script": str(script), "refused": job.because}, Text(f"refused: {job.because}")
        )
        raise typer.Exit(JOB_FAILED)
    purchase = buying.think(state, job)
    rows = sorted(_considered(state, job, work, purchase), key=_by_price)
    cost, finish_s = expectation(state, purchase, work)
    desk.answer(
        {
            "script": str(script), "source": sold.source, "because": purchase.because,
            "runner_up": purchase.runner_up, "expected_cost_usd": cost, "expected_s": finish_s,
            "offers": rows,
        },
        Text(f"prices from {sold.source}", style="dim"),
        _offers(rows),
        *_verdict(purchase, work, cost, finish_s),
        then=(f"orchestrator submit {script} --follow",),
    )  # fmt: skip


def _sold(config: Config, client: Client | None) -> Sold:
    """From the running local cloud, or from the market that its seed would give now."""
    if client is not None and client.house().local_cloud:

        async def ask(cloud: LocalProvider) -> Sold:
            types, pools = await cloud.catalogue()
            quotes = await cloud.quotes()
            return Sold(
                types=tuple(types),
                pools=tuple(pools),
                quotes=tuple(quotes),
                source="the running local cloud",
            )

        return asyncio.run(with_local_cloud(client, ask))
    if not config.local.enabled:
        raise CommandError("no provider is enabled; set local.enabled = true in orchestrator.toml")
    now_s = time.time()
    prices = config.local.prices
    try:
        replay = read_prices(Path(prices), LOCAL) if prices else None
    except (OSError, ValueError) as error:
        raise CommandError(f"local.prices: {error}", USAGE) from None
    market = SpotMarket(LOCAL, seed=config.local.seed, start_s=now_s, replay=replay)
    cloud = SimulatedCloud(market, config.manager.deployment)
    types, pools = cloud.catalogue()
    source = prices or f"the local market of seed {config.local.seed}, as it begins"
    return Sold(types=types, pools=pools, quotes=tuple(cloud.quotes(now_s)), source=source)


def _work(client: Client | None, script: Path, steps: int | None, step_s: float | None) -> Work:
    """As told; else as a job of the same script has shown."""
    if client is not None:
        for job in sorted(all_jobs(client), key=lambda one: -one.submitted_at_s):
            if Path(job.script).name == script.name:
                steps = steps or job.steps_total or None
                if step_s is None and job.step_s > 0 and job.workers > 0:
                    step_s = job.step_s * job.workers
    return Work(steps=steps, step_s=step_s)


def ask_the_brain(config: Config, sold: Sold, spec: JobSpec, work: Work) -> tuple[State, Job]:
    """The manager's own thinking, on a state that holds nothing yet. No action is performed."""
    now_s = time.time()
    state = State()
    for event in (
        ManagerStarted(at_s=now_s, epoch=1, settings=settings_from(config)),
        CatalogueSeen(at_s=now_s, provider="local", types=sold.types, pools=sold.pools),
        QuotesSeen(at_s=now_s, provider="local", quotes=sold.quotes),
        JobSubmitted(at_s=now_s, spec=spec),
    ):
        state, _ = decide(state, event)
    job = state.jobs[spec.job]
    if work.steps is not None and work.step_s is not None:
        one = Replica(workers=("w",), first=0, count=1)
        job.steps_total, job.step_s = work.steps, work.step_s
        job.layout = Layout(generation=0, microbatches=1, replicas=(one,))
    return state, job


def expectation(state: State, purchase: Purchase, work: Work) -> tuple[float | None, float | None]:
    """Dollars and seconds for the whole job on what the purchase holds, evictions counted in."""
    per_work = purchase.cost_usd_per_work
    if work.steps is None or work.step_s is None or per_work is None or not purchase.acquire:
        return None, None
    slots = sum(
        part.count * state.types[part.pool.type].slots * state.types[part.pool.type].speed
        for part in purchase.acquire
    )
    return per_work * work.steps, state.settings.start_s + work.steps * work.step_s / slots


def _considered(state: State, job: Job, work: Work, chosen: Purchase) -> list[Considered]:
    """Every offer as if it were the only one."""
    bought = {(part.pool, part.market): part.count for part in chosen.acquire}
    rows = []
    for offer in buying.offers(state):
        alone = buying.think(_only(state, offer.pool, offer.market), job)
        cost, took_s = expectation(state, alone, work)
        per_work = alone.cost_usd_per_work
        work_s = work.step_s if work.known and work.step_s else 1.0  # slot-seconds in one work
        per_slot_h = None if per_work is None else per_work * HOUR_S / work_s
        rows.append(
            Considered(
                pool=offer.pool.key, market=offer.market, slots=offer.type.slots,
                usd_per_h=offer.price_usd_per_h, machines=sum(part.count for part in alone.acquire),
                expected_usd_per_slot_h=per_slot_h, expected_cost_usd=cost, expected_s=took_s,
                chosen=bought.get((offer.pool, offer.market), 0),
            )
        )  # fmt: skip
    return rows


def _only(state: State, pool: Pool, market: Market) -> State:
    """The same state in a world that sells nothing but this."""
    known = state.pools[pool.key]
    if market == "on_demand":
        known = msgspec.structs.replace(known, spot_usd_per_h=None)
    settings = msgspec.structs.replace(state.settings, on_demand_allowed=market == "on_demand")
    return msgspec.structs.replace(state, pools={pool.key: known}, settings=settings)


def _by_price(row: Considered) -> tuple[float, str, str]:
    return (row.expected_usd_per_slot_h or float("inf"), row.pool, row.market)


def _offers(rows: list[Considered]) -> Table:
    """What is chosen stands out; amounts of the whole job only where they are known."""
    known = any(row.expected_cost_usd is not None for row in rows)
    made = tables.table(
        "", "pool", "market", "alone", "$/slot-h#", *(("cost$", "time") if known else ())
    )
    for row in rows:
        alone = f"{row.machines} x {usd(row.usd_per_h)}/h" if row.machines else "not possible"
        whole = (usd(row.expected_cost_usd), duration(row.expected_s)) if known else ()
        made.add_row(
            f"buy {row.chosen}" if row.chosen else "", row.pool, row.market.replace("_", " "), alone,
            usd(row.expected_usd_per_slot_h), *whole, style="bold green" if row.chosen else "",
        )  # fmt: skip
    return made


def _verdict(
    purchase: Purchase, work: Work, cost: float | None, took_s: float | None
) -> list[Text]:
    lines = [
        Text(f"now: {purchase.because}"),
        Text(f"next best: {purchase.runner_up}", style="dim"),
    ]
    if cost is not None and took_s is not None:
        done = clock(time.time() + took_s)
        lines.append(
            Text(f"expected: {usd(cost)}, done in {duration(took_s)} (at {done})", style="bold")
        )
    elif not work.known:
        lines.append(
            Text(
                "cost and finish need the work: give --steps and --step-s, or submit it once",
                style="yellow",
            )
        )
    return lines


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
    with desk.busy(f"{days:g} days of {plural(instances, 'instance')}"):
        came = run(days=days, instances=instances, seed=seed, faults=faults, journal_path=journal)
    took_s = max(1e-9, time.monotonic() - began_s)
    made = tables.table("", "#")
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
