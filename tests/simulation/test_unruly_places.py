"""Deployments whose places misbehave: nothing is bought twice, nothing foreign is touched, all is swept."""

import os
from itertools import pairwise

import msgspec
import pytest

from cloud.clock import DAY_S, HOUR_S
from cloud.market import Conduct
from cloud.model import Traits
from orchestrator import loop
from orchestrator.brain.holdings import ledger
from orchestrator.events import JobSubmitted
from orchestrator.settings import Settings
from orchestrator.simulated.restarts import MortalJournal, live
from orchestrator.simulated.scenario import PLACES, Faults, Scenario, cloud_of, jobs_of, unruly
from orchestrator.simulated.world import SimulatedWorld
from orchestrator.state import State

SEEDS, BLOCK = int(os.environ.get("SPOT_SEEDS", "40")), 10
PENALTY_S = 180.0


@pytest.mark.parametrize("first", range(0, SEEDS, BLOCK))
def test_deployment_with_unruly_places_keeps_every_invariant(first):
    """On top of all other disturbances, with gangs and with traffic that costs in two thirds of them."""
    failed = [
        f"seed {story.seed}: {story.breach}\n  " + "\n  ".join(story.last_sentences[-8:])
        for story in (live(unruly(seed)) for seed in range(first, first + BLOCK))
        if story.breach
    ]
    assert not failed, "\n".join(failed)


QUIET = Scenario(
    seed=5,
    days=1.0,
    instances=12,
    job_slots=4,
    steps=4000,
    calm_after_s=3 * HOUR_S,
    conduct=Conduct(refused_share=0.0, startup_s=10.0, startup_spread=0.0),
)


def test_silent_region_loses_nothing_and_buys_nothing_again():
    """Of two runs with the same cloud, one has regions that answer nothing for ten minutes, often."""
    calm = live(QUIET)
    silent = Faults(silent_every_s=900.0, silent_s=600.0)
    story = live(msgspec.structs.replace(QUIET, faults=silent))
    assert not calm.breach
    assert not story.breach
    assert story.jobs == calm.jobs == {"job-0": "SUCCEEDED"}
    assert story.evictions <= calm.evictions + 1
    assert story.launches <= calm.launches + 2  # a launch waits where its answer was silence


@pytest.mark.parametrize("kind", ["launch_fails", "leaves_disk", "refused", "throttled"])
def test_job_with_one_kind_of_trouble_still_ends(kind):
    faults = Faults(**{kind: max(0.3, getattr(PLACES, kind))})
    for seed in range(4):
        story = live(msgspec.structs.replace(QUIET, seed=seed, steps=600, faults=faults))
        assert not story.breach, f"{kind}, seed {seed}: {story.breach}"
        assert story.jobs == {"job-0": "SUCCEEDED"}


@pytest.mark.parametrize("launch_max", [4, 64])
def test_a_day_without_capacity_costs_nothing_and_few_calls_and_then_it_trains(launch_max):
    """No capacity anywhere for 24 h: a launch per pool and market in three minutes, half a list a second."""
    scenario = Scenario(
        seed=9,
        days=2.0,
        instances=12,
        job_slots=4,
        steps=200,
        faults=Faults(nothing_sold_s=DAY_S),
        settings=Settings(deployment="simulated", control_period_s=2.0, rethink_s=30.0),
        traits=Traits(billing="local", launch_max=launch_max),
    )
    world = SimulatedWorld(cloud_of(scenario), scenario)
    begun_s, spent = world.timeline.now_s, []

    def look(state: State) -> None:
        if world.timeline.now_s < begun_s + DAY_S:
            spent.append(ledger.spent_usd(state.account, state.now_s))
        elif state.jobs["job-0"].ended:
            world.end_s = world.timeline.now_s

    world.watch = look
    world.start(1, scenario.settings)
    world.say(JobSubmitted(at_s=begun_s, spec=jobs_of(scenario)[0]))
    state = loop.run_now(loop.run(world, MortalJournal(world.await_point), State()))
    assert state.jobs["job-0"].status == "SUCCEEDED"
    assert max(spent) == 0.0
    assert world.timeline.now_s < begun_s + DAY_S + 3 * HOUR_S
    for asked in world.launched_at_s.values():
        dry = [at_s for at_s in asked if at_s < begun_s + DAY_S]
        assert dry
        assert all(b - a >= PENALTY_S - 1e-6 for a, b in pairwise(dry))
    for listed in world.listed_at_s.values():
        dry = [at_s for at_s in listed if at_s < begun_s + DAY_S]
        assert len(dry) <= 0.5 * DAY_S + 1
