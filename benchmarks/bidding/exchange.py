"""Does it pay to exchange machines whose free first hour is over? The whole loop, half a day at a time.

exchange.py [seeds] [slots]

Both managers live on the same simulated market and are billed by today's rule from the cloud's own books; one of
them knows nothing of refunds and exchanges nothing for them.
"""

import sys

import msgspec
import numpy as np
from _bidding import show

from orchestrator import loop
from orchestrator.events import JobSubmitted
from orchestrator.settings import Settings
from orchestrator.simulated.bill import bill_usd
from orchestrator.simulated.runs import DigestJournal
from orchestrator.simulated.scenario import STEPS_FOREVER, Scenario, cloud_of, jobs_of
from orchestrator.simulated.world import SimulatedWorld
from orchestrator.state import State

HOURS = 12.0
TODAY = Settings(
    deployment="simulated",
    billing="aws_today",
    control_period_s=5.0,
    listing_period_s=30.0,
    rethink_s=30.0,
)


def half_day(rule: str, seed: int, slots: int) -> tuple[float, int, int]:
    """Dollars, steps, and machines that were given back."""
    settings = msgspec.structs.replace(TODAY, billing=rule)
    scenario = Scenario(
        seed=seed,
        days=HOURS / 24,
        instances=24,
        job_slots=slots,
        steps=STEPS_FOREVER,
        settings=settings,
    )
    world = SimulatedWorld(cloud_of(scenario), scenario)
    world.start(1, settings)
    for spec in jobs_of(scenario):
        world.say(JobSubmitted(at_s=0.0, spec=spec))
    state = loop.run_now(loop.run(world, DigestJournal(), State()))
    entries = world.cloud.books(world.end_s).entries
    given_back = sum(entry.machine.ended_by == "user" for entry in entries)
    return bill_usd(world.cloud, TODAY, world.end_s), state.jobs["job-0"].progress.step, given_back


def main() -> None:
    seeds = int(sys.argv[1]) if len(sys.argv) > 1 else 24
    slots = int(sys.argv[2]) if len(sys.argv) > 2 else 4
    rows, ratios = [], []
    for seed in range(seeds):
        usd, steps, given_back = half_day("aws_today", seed, slots)
        usd_still, steps_still, given_back_still = half_day("local", seed, slots)
        ratios.append(usd / steps / (usd_still / steps_still))
        rows.append(
            [
                str(seed),
                f"{usd:.3f}",
                f"{usd_still:.3f}",
                f"{steps / steps_still:.3f}",
                f"{given_back - given_back_still}",
                f"{ratios[-1]:.3f}",
            ]
        )
    low, high = np.percentile(ratios, [2.5, 97.5])
    show(
        f"{HOURS:g} h, {slots} slots. Dollars per step over those of a manager that knows no refunds: "
        f"mean {np.mean(ratios):.3f}, from {low:.3f} to {high:.3f} (95 % of the seeds), "
        f"dearer in {sum(r > 1 for r in ratios)} of {seeds}.",
        ["seed", "$", "$ without", "steps, ratio", "given back, more", "$ per step, ratio"],
        rows,
    )


if __name__ == "__main__":
    main()
