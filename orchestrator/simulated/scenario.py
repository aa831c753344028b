"""Scenarios as values: their size and length, the pace of the parts, and what goes wrong."""

from random import Random

import msgspec

from agent.profile import Link, Network, Profile, Section
from cloud.clock import HOUR_S
from cloud.market import GIB, Catalogue, Conduct, SpotMarket, Zone
from cloud.model import InstanceType, Traits
from cloud.simulated import SimulatedCloud
from orchestrator.events import JobSpec
from orchestrator.settings import Settings

STATE_BYTES = GIB // 8
JOB_SLOTS = 50
STEPS_FOREVER = 10**9


class Faults(msgspec.Struct, frozen=True, kw_only=True):
    """What goes wrong: probabilities per case, rates, and the durations of bad times."""

    report_lost: float = 0.0
    report_twice: float = 0.0
    report_late: float = 0.0
    unreachable: float = 0.0
    never_joins: float = 0.0
    killed: float = 0.0
    clock_set_back: float = 0.0  # per restart of the manager: its wall clock is late from then on
    worker_dies_per_h: float = 0.0
    script_fails_per_h: float = 0.0
    agent_dies_per_h: float = 0.0
    keeper_lost_every_s: float = 0.0
    false_notice_every_s: float = 0.0
    bulk_loss_every_s: float = 0.0
    drought_every_s: float = 0.0
    drought_s: float = 0.0
    clock_jump_every_s: float = 0.0
    listing_lag_s: float = 0.0
    slow_per_h: float = 0.0  # per worker: spells in which it takes several times as long
    silent_every_s: float = 0.0  # a region answers nothing for `silent_s`
    silent_s: float = 0.0
    refused: float = 0.0  # of launches, with any scope
    throttled: float = 0.0  # of launches and lists
    launch_fails: float = 0.0  # after the answer; what was made has to be ended
    leaves_disk: float = 0.0  # of machines that end
    notice_twice: float = 0.0  # by two ways, with deadlines a few seconds apart
    nothing_sold_s: float = 0.0  # from the start on there is no capacity anywhere


PLACES = Faults(
    silent_every_s=1800.0,
    silent_s=600.0,
    refused=0.1,
    throttled=0.05,
    launch_fails=0.1,
    leaves_disk=0.2,
    notice_twice=0.5,
)
FAULTS = {
    "none": Faults(),
    "mixed": Faults(
        report_lost=0.02,
        report_twice=0.05,
        report_late=0.05,
        unreachable=0.05,
        never_joins=0.03,
        killed=0.002,
        clock_set_back=0.2,
        worker_dies_per_h=0.2,
        agent_dies_per_h=0.2,
        keeper_lost_every_s=7200.0,
        false_notice_every_s=7200.0,
        bulk_loss_every_s=2400.0,
        drought_every_s=3600.0,
        drought_s=600.0,
        clock_jump_every_s=3600.0,
        listing_lag_s=10.0,
        slow_per_h=1.0,
    ),
}


class Pace(msgspec.Struct, frozen=True, kw_only=True):
    """How fast the simulated parts are."""

    join_s: float = 4.0
    worker_start_s: float = 6.0
    detect_s: float = 0.1
    result_s: float = 2.0  # from the last commit until the trained model is stored
    agent_detect_s: float = 3.0
    notice_poll_s: float = 1.0
    answer_s: float = 1.0
    morph_s: float = 0.3
    restart_s: float = 5.0
    progress_every_s: float = 60.0
    slot_step_s: float = 4.0  # one slot computes a step this long; n slots share it
    overhead_s: float = 0.02  # of a step, in any layout


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """One simulated deployment: the same scenario gives the same journal, byte for byte.

    With `calm_after_s` nothing goes wrong from then on, and the simulation ends with a shutdown
    when all jobs have ended.
    """

    seed: int = 0
    days: float = 1.0
    instances: int = 8
    job_slots: int = 4
    jobs: int = 1
    steps: int = 1000
    microbatches: int = 64
    sections: int = 0  # of the model, which is measured at the first step; 0: it is not measured
    crashes_at_step: int | None = None  # the script crashes its process in this step, every time
    misjudged: float = 1.0  # real time of a step divided by its measured time
    speeds: dict[str, float] = {}  # of types, in which the catalogue is wrong; it says 1 of all
    kinds: int = 0  # hardware keys, one for each pool; 0: workers tell none
    mixed: float = 0.0  # of machines, how many have any of these keys instead
    room: float = 4.0  # memory of an accelerator divided by that of the whole model
    budget_usd: float | None = None
    calm_after_s: float | None = None
    faults: Faults = Faults()
    pace: Pace = Pace()
    conduct: Conduct = Conduct()
    settings: Settings = Settings(deployment="simulated")
    traits: Traits | None = None  # of the cloud, as it says itself


def month(days: float, instances: int, seed: int, faults: str = "none") -> Scenario:
    """Return a scenario with jobs of up to 50 slots that fill the fleet all the time."""
    if days <= 0 or instances < 1:
        raise ValueError(f"simulate: days={days} and instances={instances} must be positive")
    if faults not in FAULTS:
        raise ValueError(f"simulate: faults={faults!r} is not one of {', '.join(FAULTS)}")
    job_slots = min(JOB_SLOTS, instances)
    return Scenario(
        seed=seed,
        days=days,
        instances=instances,
        job_slots=job_slots,
        jobs=max(1, instances // job_slots),
        steps=STEPS_FOREVER,
        microbatches=2 * JOB_SLOTS,
        faults=FAULTS[faults],
        pace=Pace(progress_every_s=60.0, slot_step_s=60.0),
        settings=Settings(
            deployment="simulated",
            machines_max=instances,
            control_period_s=60.0,
            listing_period_s=600.0,
            rethink_s=6 * HOUR_S,
        ),
    )


def wild(seed: int) -> Scenario:
    """Return a small deployment with its size, limits and faults drawn from the seed."""
    dice = Random(seed)  # noqa: S311 - replayable by design
    bad = FAULTS["mixed"]
    kept = {
        name: getattr(bad, name) * dice.choice((0.3, 1.0, 2.0))
        for name in bad.__struct_fields__
        if dice.random() < 0.6
    }
    if dice.random() < 0.2:
        kept["script_fails_per_h"] = 0.3
    job_slots, jobs = dice.choice((1, 2, 3, 4, 6)), dice.choice((1, 1, 1, 2, 3))
    sections = dice.choice((0, 1, 2, 4))
    return Scenario(
        seed=seed,
        days=3.0,
        instances=dice.choice((3, 6, 12)),
        job_slots=job_slots,
        jobs=jobs,
        steps=dice.choice((60, 400, 1500)),
        microbatches=dice.choice((1, 4, 16, 64)),
        budget_usd=dice.choice((None, None, None, None, 0.05, 0.5, 5.0)),
        calm_after_s=dice.choice((0.5, 1.5)) * HOUR_S,
        faults=Faults(**kept),
        pace=Pace(progress_every_s=dice.choice((10.0, 30.0))),
        settings=Settings(
            deployment="simulated",
            machines_max=dice.choice((3, 8, 1000)),
            budget_usd=dice.choice((None, None, 0.3, 3.0)),
            usd_per_h_max=dice.choice((None, None, 1.5)),
            on_demand_allowed=dice.random() < 0.8,
            manager_usd_per_h=dice.choice((0.0, 0.02)),
            control_period_s=dice.choice((2.0, 5.0)),
            listing_period_s=dice.choice((2.0, 10.0)),
            rethink_s=dice.choice((5.0, 60.0)),
            penalty_s=dice.choice((20.0, 180.0)),
            billing=dice.choice(("local", "local", "aws_today", "aws_2016")),
            disk_usd_per_h=dice.choice((0.0, 0.0, 0.01)),
            egress_usd_per_gb=dice.choice((0.0, 0.0, 0.1)),
        ),
        sections=sections,
        misjudged=dice.choice((1.0, 1.0, 0.7, 1.5)),
        room=dice.choice((4.0, 4.0, 0.7)) if job_slots > 2 and sections > 1 else 4.0,
    )


def unruly(seed: int) -> Scenario:
    """Return a deployment drawn from the seed whose places misbehave besides.

    Its cloud may start several machines with one call, and take money for traffic between zones.
    """
    scenario = wild(seed)
    dice = Random(seed + 10_000)  # noqa: S311 - replayable by design
    names = ("refused", "throttled", "launch_fails", "leaves_disk", "notice_twice")
    more = {name: getattr(PLACES, name) for name in names if dice.random() < 0.6}
    if dice.random() < 0.6:
        more |= {"silent_every_s": PLACES.silent_every_s, "silent_s": dice.choice((60.0, 600.0))}
    usd_per_gb = dice.choice((0.0, 0.0005, 0.02))
    return msgspec.structs.replace(
        scenario,
        faults=msgspec.structs.replace(scenario.faults, **more),
        traits=Traits(
            billing=scenario.settings.billing,
            launch_max=dice.choice((1, 4, 64)),
            zone_usd_per_gb=usd_per_gb,
            region_usd_per_gb=usd_per_gb,
        ),
        speeds=dice.choice(({}, {"s1": 2.0}, {"s2": 3.0}, {"s1": 0.4, "s2": 0.9})),
    )


def gradient_bytes(scenario: Scenario) -> float:
    """Return the bytes of the simulated model's gradients."""
    return STATE_BYTES / (4 if scenario.sections else 3)


def profile_of(scenario: Scenario) -> Profile:
    """Return the profile of the simulated model: equal sections, at the pace over `misjudged`."""
    each_s = scenario.pace.slot_step_s / scenario.microbatches / scenario.misjudged
    share = 1 / max(scenario.sections, 1)
    section = Section(
        name="section",
        forward_s=(each_s * share / 3,),
        backward_s=(each_s * share * 2 / 3,),
        activation_bytes=1e3,
        stash_bytes=1e3,
        parameter_bytes=STATE_BYTES * share / 4,
        optimizer_bytes=STATE_BYTES * share / 2,
    )
    link = Link(bandwidth_bytes_per_s=1e10)
    return Profile(
        model="simulated",
        instance_type="s1",
        microbatch_sizes=(1,),
        network=Network(intra=link, inter=link, reduce_intra=link, reduce_inter=link),
        memory_bytes=scenario.room * STATE_BYTES,
        overhead_s=scenario.pace.overhead_s / scenario.misjudged,
        sections=(section,) * max(scenario.sections, 1),
    )


def cloud_of(scenario: Scenario) -> SimulatedCloud:
    """Return a cloud of two types in six zones, with room for twice the wanted instances."""
    catalogue = Catalogue(
        cloud="simulated",
        types=(_kind("s1", 1, 0.5), _kind("s2", 2, 0.95)),
        zones=tuple(
            Zone(name=f"zone-{n}", region=f"region-{n % 3}", dialect="azure" if n % 2 else "ec2")
            for n in range(6)
        ),
        pool_machines=max(1, scenario.instances // 6),
    )
    market = SpotMarket(catalogue, seed=scenario.seed, conduct=scenario.conduct)
    return SimulatedCloud(market, scenario.settings.deployment)


def _kind(name: str, slots: int, on_demand_usd_per_h: float) -> InstanceType:
    return InstanceType(
        name=name,
        cloud="simulated",
        slots=slots,
        memory_bytes=GIB,
        on_demand_usd_per_h=on_demand_usd_per_h,
    )


def jobs_of(scenario: Scenario) -> list[JobSpec]:
    return [
        JobSpec(
            job=f"job-{n}",
            script="train.py",
            script_sha="0" * 64,
            slots_min=1,
            slots_max=scenario.job_slots,
            budget_usd=scenario.budget_usd,
        )
        for n in range(scenario.jobs)
    ]
