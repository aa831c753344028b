"""What is it worth that a job measures how its types of machines compare? The whole loop, two days at a time.

measured_speeds.py [seeds] [slots]

The catalogue says that two types are equally fast for each slot, and one of them is half as fast. Three managers live on
the same simulated market: one measures, one believes the catalogue, and one is told the truth, which is the limit.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import numpy as np
from _bidding import show

from bidding.markets import observations
from cloud.simulated import SimulatedCloud
from orchestrator import loop
from orchestrator.events import JobSubmitted
from orchestrator.settings import Settings
from orchestrator.simulated.bill import bill_usd
from orchestrator.simulated.runs import DigestJournal
from orchestrator.simulated.scenario import STEPS_FOREVER, Scenario, cloud_of, jobs_of
from orchestrator.simulated.world import SimulatedWorld
from orchestrator.state import State

DAYS = 2.0
SETTINGS = Settings(
    deployment="simulated", control_period_s=10.0, listing_period_s=60.0, rethink_s=60.0
)


@contextmanager
def measuring(*, on: bool) -> Iterator[None]:
    """Without it no number of machines makes a type known."""
    kept = observations.ALIKE_MIN
    observations.ALIKE_MIN = kept if on else sys.maxsize
    yield
    observations.ALIKE_MIN = kept


def told(scenario: Scenario) -> SimulatedCloud:
    """The same cloud with a catalogue that is right."""
    market = cloud_of(scenario).market
    types = tuple(
        msgspec.structs.replace(kind, speed=scenario.speeds.get(kind.name, 1.0))
        for kind in market.catalogue.types
    )
    catalogue = msgspec.structs.replace(market.catalogue, types=types)
    made = type(market)(catalogue, seed=scenario.seed, conduct=scenario.conduct)
    return SimulatedCloud(made, scenario.settings.deployment)


def usd_per_step(cloud: SimulatedCloud, scenario: Scenario) -> float:
    world = SimulatedWorld(cloud, scenario)
    world.start(1, scenario.settings)
    for spec in jobs_of(scenario):
        world.say(JobSubmitted(at_s=0.0, spec=spec))
    state = loop.run_now(loop.run(world, DigestJournal(), State()))
    return bill_usd(world.cloud, scenario.settings, world.end_s) / state.jobs["job-0"].progress.step


def main() -> None:
    seeds = int(sys.argv[1]) if len(sys.argv) > 1 else 12
    slots = int(sys.argv[2]) if len(sys.argv) > 2 else 8
    rows, measured, limit = [], [], []
    for slow in ("s1", "s2"):
        for seed in range(seeds):
            scenario = Scenario(
                seed=seed,
                days=DAYS,
                instances=24,
                job_slots=slots,
                steps=STEPS_FOREVER,
                settings=SETTINGS,
                speeds={slow: 0.5},
            )
            with measuring(on=False):
                believed = usd_per_step(cloud_of(scenario), scenario)
                best = usd_per_step(told(scenario), scenario)
            with measuring(on=True):
                found = usd_per_step(cloud_of(scenario), scenario)
            measured.append(found / believed)
            limit.append(best / believed)
            rows.append([slow, str(seed), f"{measured[-1]:.3f}", f"{limit[-1]:.3f}"])
    low, high = np.percentile(measured, [2.5, 97.5])
    show(
        f"{DAYS:g} days, {slots} slots. Dollars per step over those of a manager that believes the catalogue: measured "
        f"{np.mean(measured):.3f} in the mean, from {low:.3f} to {high:.3f} (95 % of the runs); told "
        f"{np.mean(limit):.3f}.",
        ["slow type", "seed", "measured", "told"],
        rows,
    )


if __name__ == "__main__":
    main()
