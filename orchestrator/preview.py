"""A preview of what the manager would do about a script now, without doing any of it.

The manager's own `decide` and `think` run on a state that holds only what the market sells, so a
preview says what `submit` would do.
"""

import time
from collections import Counter
from collections.abc import Iterable, Iterator

import msgspec

from agent.keeper.storage.sharding import (
    LINK_BYTES_S,
    TOLL,
    Passing,
    Replay,
    may_pass_by,
    replay,
    replay_here,
    sums_pass,
)
from agent.profile import Profile
from agent.store.memory import machine_bytes
from bidding.markets.billing import cost_usd, rule_of
from bidding.model import Acquire, Purchase
from cloud.clock import HOUR_S
from cloud.model import InstanceType, Market, Pool, Score
from orchestrator.brain.decide import decide
from orchestrator.brain.handlers import layout_changes
from orchestrator.brain.handlers.jobs import Least, least_of
from orchestrator.brain.holdings import alike, leases, ledger
from orchestrator.brain.holdings.leases import cost_now_usd_per_h, traits_of
from orchestrator.brain.layouts import forecast, layout_choice, speeds, stragglers
from orchestrator.brain.layouts.layout_choice import Choice, Question
from orchestrator.brain.purchases.buying import think
from orchestrator.client import Client
from orchestrator.config import Config
from orchestrator.events import (
    AnyEvent,
    CatalogueSeen,
    JobSpec,
    JobSubmitted,
    ManagerStarted,
    QuotesSeen,
)
from orchestrator.formatting import memory, usd
from orchestrator.live.manager import settings_from
from orchestrator.planner import drift
from orchestrator.planner.errors import MorphError
from orchestrator.planner.plans import Candidate
from orchestrator.sale import PlannedSale, SecondZone, market_now, second_zones
from orchestrator.state import Job, State
from orchestrator.view import JobView, View

TOLD = "as told"


class PlannedWork(msgspec.Struct, frozen=True, kw_only=True):
    """How much there is to do, as far as it is known, and the source of that knowledge."""

    steps: int | None = None
    step_s: float | None = None  # of one step on one slot
    steps_from: str = ""  # the job that was measured, or `TOLD`
    step_s_from: str = ""

    @property
    def known(self) -> bool:
        return self.steps is not None and self.step_s is not None


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """What an earlier job of exactly the same script has measured of its model."""

    job: str
    profile: Profile
    microbatches: int
    stages_max: int
    uncuttable: str


class Considered(msgspec.Struct, frozen=True, kw_only=True):
    """One offer, and what the job would cost if nothing else were sold."""

    pool: str
    market: Market
    slots: int
    usd_per_h: float
    bid_usd_per_h: float | None  # None if the market takes no bids
    machines: int
    expected_usd_per_slot_h: float | None
    expected_cost_usd: float | None
    expected_s: float | None
    chosen: int
    room: int | None = None  # machines that the quotas still allow
    score: Score | None = None


class Preview(msgspec.Struct, frozen=True, kw_only=True):
    """What the manager would do, and what is known of the job."""

    source: str  # of the prices
    work: PlannedWork
    refused: str = ""
    because: str = ""
    runner_up: str = ""
    offers: list[Considered] = []
    expected_cost_usd: float | None = None
    expected_s: float | None = None
    least: Least | None = None
    too_little: str = ""  # which budget ends before the job, if one does
    measured_by: str = ""  # the job whose profile is used, if there is one
    asked: Question | None = None
    choice: Choice | None = None
    no_layout: str = ""  # why there is none
    silent: tuple[str, ...] = ()  # places that could not be asked, and why
    sum_bytes: float | None = None  # of the gradients of a step, in the format of their exchange
    float32_bytes: float | None = None  # of the same gradients in that format
    second_zones: list[SecondZone] = []
    replay: Replay | None = None  # None if the state passes the manager's machine, or is unknown
    crowded: str = ""  # why the manager's machine has too little memory for that, if so
    exact: bool = True
    accelerators: tuple[str, ...] = ()  # of what is sold

    @property
    def compared(self) -> tuple[Candidate, ...]:
        assert self.choice is not None
        assert self.choice.plan is not None
        return self.choice.plan.candidates

    @property
    def picture(self) -> str:
        assert self.asked is not None
        assert self.choice is not None
        return layout_choice.picture(self.asked, self.choice)

    def value(self) -> dict[str, object]:
        """Return the preview as plain values for programs."""
        layout: object = None
        if self.asked is not None and self.choice is not None:
            layout = {
                "because": self.choice.because,
                "known_from": self.measured_by,
                "microbatches": self.asked.microbatches,
                "sum_bytes": self.sum_bytes,
                "float32_bytes": self.float32_bytes,
                "compared": self.compared,
            }
        elif self.measured_by:
            layout = {"refused": self.no_layout}
        return {
            "source": self.source,
            "because": self.because,
            "runner_up": self.runner_up,
            "expected_cost_usd": self.expected_cost_usd,
            "expected_s": self.expected_s,
            "budget_least_usd": None if self.least is None else self.least.usd,
            "too_little": self.too_little,
            "work": self.work,
            "offers": self.offers,
            "layout": layout,
            "silent": self.silent,
            "second_zones": self.second_zones,
            "replay": self.replay,
            "crowded": self.crowded,
            "exact": self.exact,
            "accelerators": self.accelerators,
        }


def preview(
    config: Config,
    client: Client | None,
    spec: JobSpec,
    sha: str,
    told: tuple[int | None, float | None],
) -> Preview:
    """Return what would be done for a script.

    `told` has the number of its steps and the seconds of one step, if a person gives them.
    """
    sold = market_now(config, client)
    view = client.view() if client is not None else None
    known = view.jobs if view is not None else ()
    work = work_of(known, sha, spec.argv, *told)
    model = model_of(client, known, sha, spec.argv) if client is not None else None
    state, job = ask_the_brain(config, sold, spec, work, model)
    if job.status == "FAILED":
        return Preview(source=sold.source, work=work, refused=job.because)
    purchase = think(state, job)
    cost_usd, took_s = expectation(state, job, purchase, work)
    asked, choice, no_layout = None, None, "nothing would be bought"
    sum_bytes = None if model is None else model.profile.sum_bytes
    if model is not None and (asked := _question(state, job, purchase)) is not None:
        try:
            choice = layout_choice.choose(asked)
        except MorphError as error:
            no_layout = str(error)
    slots = _slots(state, purchase)
    step_s = work.step_s / slots if work.step_s is not None and slots else 0.0
    return Preview(
        source=sold.source,
        work=work,
        replay=_replay(config, spec, model, sum(one.count for one in purchase.acquire), step_s),
        crowded=_crowded(config, spec, model, step_s),
        because=purchase.because,
        runner_up=purchase.runner_up,
        offers=considered(state, job, work, purchase, sold),
        expected_cost_usd=cost_usd,
        expected_s=took_s,
        least=least_of(state, job),
        too_little=_too_little(state, job, purchase, cost_usd, view),
        measured_by=model.job if model is not None else "",
        asked=asked,
        choice=choice,
        no_layout=no_layout,
        silent=sold.silent,
        sum_bytes=sum_bytes,
        float32_bytes=None if model is None else model.profile.parameter_bytes,
        exact=job.exact,
        accelerators=alike.accelerators_sold(state),
        second_zones=second_zones(sold.traits, sum_bytes, slots, work.steps),
    )


def _passing(spec: JobSpec, model: Model, step_s: float) -> Passing:
    profile = model.profile
    beside = sum(section.optimizer_bytes for section in profile.sections)
    return Passing(
        state_bytes=int(profile.parameter_bytes + beside),
        sum_bytes=int(profile.sum_bytes),
        every=spec.backup_every_steps,
        step_s=step_s,
        bytes_s=LINK_BYTES_S,
        memory_bytes=machine_bytes(),
    )


def _replay(
    config: Config, spec: JobSpec, model: Model | None, machines: int, step_s: float
) -> Replay | None:
    """Return what is trained again if all is lost; None if the keeper has every step."""
    has_store = config.storage.checkpoint_url is not None
    if model is None or not machines:
        return None
    passing = _passing(spec, model, step_s)
    if passing.costly and may_pass_by(spec.sums, has_store=has_store):
        link = model.profile.network.inter
        return replay(passing, machines, link.bandwidth_bytes_per_s, spec.max_replay_s)
    delays = bool(step_s) and passing.delays(TOLL, spec.max_replay_s)
    if sums_pass(spec.sums, passing.sum_bytes, machines, delays=delays):
        return None
    return replay_here(passing, spec.max_replay_s)


def _crowded(config: Config, spec: JobSpec, model: Model | None, step_s: float) -> str:
    """Say if this machine has to hold more than it has memory for, and what to do about it."""
    has_store = config.storage.checkpoint_url is not None
    if model is None or may_pass_by(spec.sums, has_store=has_store):
        return ""
    passing = _passing(spec, model, step_s)
    if not passing.crowds:
        return ""
    return (
        f"the manager's machine would hold up to {memory(passing.held_bytes)} of this job's state and sums, and has "
        f"{memory(passing.memory_bytes)} in all: "
        + ('leave job.sums at "auto"' if has_store else "set storage.checkpoint_url")
        + ", and workers write the state into the store themselves"
    )


def _slots(state: State, purchase: Purchase) -> int:
    return sum(part.count * state.types[part.pool.type].slots for part in purchase.acquire)


def work_of(
    known: Iterable[JobView],
    script_sha: str,
    argv: tuple[str, ...],
    steps: int | None,
    step_s: float | None,
) -> PlannedWork:
    """Return the given steps and step time; fill in what is missing from earlier jobs.

    The newest job with exactly the same script and arguments comes first.
    """
    work = PlannedWork(
        steps=steps,
        step_s=step_s,
        steps_from=TOLD if steps else "",
        step_s_from=TOLD if step_s else "",
    )
    for job in _alike(known, script_sha, argv):
        if work.steps is None and job.steps_total:
            work = msgspec.structs.replace(work, steps=job.steps_total, steps_from=job.id)
        if work.step_s is None and job.slot_step_s > 0:
            work = msgspec.structs.replace(work, step_s=job.slot_step_s, step_s_from=job.id)
    return work


def _alike(known: Iterable[JobView], script_sha: str, argv: tuple[str, ...]) -> list[JobView]:
    """Return the jobs with this script and these arguments, newest first."""
    same = [job for job in known if (job.script_sha, job.argv) == (script_sha, argv)]
    return sorted(same, key=lambda one: -one.submitted_at_s)


def model_of(
    client: Client, known: Iterable[JobView], script_sha: str, argv: tuple[str, ...]
) -> Model | None:
    """Return the model as measured in the newest job with exactly this script and arguments.

    Jobs without a measurement are skipped; None if no job has one.
    """
    for job in _alike(known, script_sha, argv):
        profile = client.profile(job.id) if job.microbatches else None
        if profile is not None:
            return Model(
                job=job.id,
                profile=profile,
                microbatches=job.microbatches,
                stages_max=job.stages_max,
                uncuttable=job.uncuttable,
            )
    return None


def ask_the_brain(
    config: Config, sold: PlannedSale, spec: JobSpec, work: PlannedWork, model: Model | None = None
) -> tuple[State, Job]:
    """Run the manager's own thinking on a state that holds no machines; perform no action."""
    now_s = time.time()
    state = State()
    events: tuple[AnyEvent, ...] = (
        ManagerStarted(at_s=now_s, epoch=1, settings=settings_from(config)),
        *(
            CatalogueSeen(at_s=now_s, place=place, sold=one, traits=sold.traits.get(place.cloud))
            for place, one in sold.places.items()
        ),
        *(
            QuotesSeen(at_s=now_s, place=place, quotes=sold.quotes_of(place))
            for place in sold.places
        ),
        JobSubmitted(at_s=now_s, spec=spec),
    )
    for event in events:
        state, _ = decide(state, event)
    for lease in list(state.leases.values()):
        leases.drop(state, [], lease, "it is only planned")
    job = state.jobs[spec.job]
    if model is not None:
        job.layouts.microbatches, job.layouts.stages_max = model.microbatches, model.stages_max
        job.layouts.uncuttable = model.uncuttable
        stragglers.believe(job, model.profile, _narrowest(state, model.profile))
        job.layouts.profile = _as_shown(job, work)
        if work.known and work.step_s is not None:
            job.progress.steps_total, job.progress.step_s = work.steps or 0, work.step_s
    elif work.steps is not None and work.step_s is not None:
        job.progress.steps_total = work.steps
        job.progress.step_s = job.progress.slot_step_s = work.step_s
    return state, job


def _narrowest(state: State, profile: Profile) -> InstanceType | None:
    """Return the type that the profile was measured on.

    If that type is not sold here, return the type with the least memory per slot.
    """
    if profile.instance_type in state.types:
        return state.types[profile.instance_type]
    return min(state.types.values(), key=lambda kind: kind.memory_bytes / kind.slots, default=None)


def _as_shown(job: Job, work: PlannedWork) -> Profile:
    """Return the job's profile, scaled to the step time in `work` if that is known."""
    profile, foretold_s = job.layouts.profile, _slot_s(job)
    assert profile is not None
    if foretold_s is None or work.step_s is None:
        return profile
    return drift.refit(profile, work.step_s / foretold_s)


def _slot_s(job: Job) -> float | None:
    """Return the slot-seconds of a step in the least layout of the job's profile."""
    profile = job.layouts.profile
    if profile is None:
        return None
    task = layout_choice.task_of(
        profile, job.layouts.microbatches, job.spec.depth, job.layouts.stages_max, 1
    )
    plans = layout_choice.book_of(profile, task, job.workers_max).plans
    least = next((plan for plan in plans if plan is not None), None)
    return None if least is None else least.step_s * least.way.depth * least.width


def _question(state: State, job: Job, purchase: Purchase) -> Question | None:
    """Return the question for the layout of the machines to buy; None if there are none."""
    seats = []
    for part in purchase.acquire:
        price = cost_now_usd_per_h(state, part.pool, part.market) + state.settings.disk_usd_per_h
        kind = state.types[part.pool.type]
        seat = layout_changes.seat_in(state, job, part.pool, kind, price)
        for n in range(part.count * seat.slots):
            machine, slot = f"{part.pool.key}/{n // seat.slots}", n % seat.slots
            seats.append(msgspec.structs.replace(seat, worker=f"{machine}/{slot}", machine=machine))
    return (
        layout_changes.question_of(state, job, tuple(seats[: job.workers_max])) if seats else None
    )


def expectation(
    state: State, job: Job, purchase: Purchase, work: PlannedWork
) -> tuple[float | None, float | None]:
    """Return the expected dollars and seconds of the whole job, with start-up and evictions.

    The price of work spreads the cost of a start over the work that follows it, and over more work
    than there is if the job is shorter than its start. So the cost is at least what the machines
    cost from their launch until the job is done.
    """
    per_work = purchase.cost_usd_per_work
    if work.steps is None or work.step_s is None or per_work is None or not purchase.acquire:
        return None, None
    speed = forecast.speed_of(state, job)
    if speed is not None:
        counts: Counter[str] = Counter()
        for part in purchase.acquire:
            counts[part.pool.type] += part.count
        works_s = work.steps / speed.work_per_s(counts)
    else:
        kinds = speeds.types_for(state, job)
        slots = sum(
            part.count * kinds[part.pool.type].slots * kinds[part.pool.type].speed
            for part in purchase.acquire
        )
        works_s = work.steps * work.step_s / slots
    took_s = state.settings.start_s + works_s
    return max(per_work * work.steps, _held_usd(state, purchase, took_s)), took_s


def _held_usd(state: State, purchase: Purchase, seconds: float) -> float:
    """Return the cost of the purchase and the manager's machine if no machine is evicted."""
    hours = seconds / HOUR_S
    held_usd = state.settings.manager_usd_per_h * hours
    for part in purchase.acquire:
        prices = [(0.0, cost_now_usd_per_h(state, part.pool, part.market))]
        rule = rule_of(traits_of(state, part.pool.place).billing, part.pool.cloud, part.market)
        each = cost_usd(rule, 0.0, seconds, prices, "user") + state.settings.disk_usd_per_h * hours
        held_usd += part.count * each
    return held_usd


def _too_little(
    state: State, job: Job, purchase: Purchase, cost_usd: float | None, view: View | None
) -> str:
    """Say which budget ends before the job does, if one does.

    What is reserved for giving machines back is not spent on steps, so it comes on top of the cost.
    """
    if cost_usd is None:
        return ""
    reserve_usd = sum(part.count * _reserve_usd(state, part) for part in purchase.acquire)
    own_usd, all_usd = job.spec.budget_usd, state.account.cap_usd
    if view is not None and (all_usd := view.cost.budget_usd) is not None:
        all_usd -= view.cost.spent_usd + view.cost.reserved_usd
    bounds = (
        (own_usd, f"a budget of {usd(own_usd)}"),
        (all_usd, f"budget.total_usd, of which {usd(all_usd)} are left,"),
    )
    takes = f"it takes {usd(cost_usd + reserve_usd)}, {usd(reserve_usd)} of it reserved for giving machines back"
    short = (name for left, name in bounds if left is not None and left < cost_usd + reserve_usd)
    return next((f"{name} ends before that: {takes}" for name in short), "")


def _reserve_usd(state: State, part: Acquire) -> float:
    """Return what is reserved for one machine of a purchase."""
    known, settings = state.pools[part.pool.key], state.settings
    ceiling_usd_per_h = ledger.ceiling_usd_per_h(
        known.kind, part.market, known.spot_usd_per_h, settings.disk_usd_per_h, part.bid_usd_per_h
    )
    billing = traits_of(state, part.pool.place).billing
    return ledger.reserve_usd(settings, billing, ceiling_usd_per_h)


def considered(
    state: State, job: Job, work: PlannedWork, chosen: Purchase, sold: PlannedSale
) -> list[Considered]:
    """Return every offer, each evaluated as if it were the only one, cheapest work first."""
    bought = {(part.pool, part.market): part.count for part in chosen.acquire}
    # Without a measured step, the unit of work is a second of a slot.
    work_s = (work.step_s if work.known else None) or _slot_s(job) or 1.0
    rows = []
    for pool, market, price_usd_per_h in _sold_now(state):
        alone = think(_only(state, pool, market), job)
        cost, took_s = expectation(state, job, alone, work)
        per_work = alone.cost_usd_per_work
        rows.append(
            Considered(
                pool=pool.key,
                market=market,
                slots=state.types[pool.type].slots,
                usd_per_h=price_usd_per_h,
                bid_usd_per_h=next((part.bid_usd_per_h for part in alone.acquire), None),
                machines=sum(part.count for part in alone.acquire),
                expected_usd_per_slot_h=None if per_work is None else per_work * HOUR_S / work_s,
                expected_cost_usd=cost,
                expected_s=took_s,
                chosen=bought.get((pool, market), 0),
                room=sold.room(pool, market),
                score=sold.score(pool, market),
            )
        )
    return sorted(rows, key=_by_price)


def _sold_now(state: State) -> Iterator[tuple[Pool, Market, float]]:
    for known in state.pools.values():
        if known.spot_usd_per_h is not None:
            yield known.pool, "spot", known.spot_usd_per_h
        if state.settings.on_demand_allowed:
            yield known.pool, "on_demand", known.kind.on_demand_usd_per_h


def _only(state: State, pool: Pool, market: Market) -> State:
    """Return the same state in a world that sells only this pool in this market."""
    known = state.pools[pool.key]
    if market == "on_demand":
        known = msgspec.structs.replace(known, spot_usd_per_h=None)
    settings = msgspec.structs.replace(state.settings, on_demand_allowed=market == "on_demand")
    return msgspec.structs.replace(state, pools={pool.key: known}, settings=settings)


def _by_price(row: Considered) -> tuple[float, str, str]:
    return (row.expected_usd_per_slot_h or float("inf"), row.pool, row.market)
