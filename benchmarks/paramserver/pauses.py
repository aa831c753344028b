"""What do an addition, an eviction with a warning and one without it cost a job? Sigma and lambda.

    python benchmarks/paramserver/pauses.py [--stories 1] [--link 10]

A cost is the time beyond what the work takes at the pace that the change leads to: stages that have
yet to change, rows on their way and clocks that are done again all count. On virtual time 32
machines compute a clock in one second, and changes come at two moments of a clock. In processes,
1 reliable and 2 transient ones compute by sleeping, 3 more join, and go with a warning of 30 s; 3
others join, and are killed. The peer is the thesis: nothing for an addition, and 13 % of a clock.
"""

import argparse
import itertools
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

from agent.paramserver.api import Application, Stop
from agent.paramserver.controller import DEAD_S
from agent.paramserver.processes import House, Job
from agent.paramserver.tables import Table
from agent.paramserver.virtual.tiers import MODEL_BYTES, Setting, elastic, lost_s

MOMENTS = (0.1, 0.6)  # of a clock
ROWS, WIDTH = 128, 1024  # 1 MiB of float64s
STEADY = 7  # clocks between two changes in processes
ADD, EVICT, END = 2, 10, 14  # clocks on virtual time


class Busy(Application):
    """All rows are read and changed by all; `grain_s` is the work."""

    grainwise = False
    items = 240

    def __init__(self, clocks):
        self.tables = (Table("model", ROWS, WIDTH, own_writes=False),)
        self.stop = Stop(clocks=clocks)

    def process_range(self, lo, hi, params):
        keys = np.arange(ROWS)
        params.read("model", keys)
        if hi > lo:
            params.update("model", keys, np.ones((ROWS, WIDTH)))


class Costs(NamedTuple):
    """Seconds of each change that was seen."""

    added: list[float]
    warned: list[float]
    killed: list[float]


def virtual(link: float, machines: tuple[int, int, int]) -> Costs:
    """Return the costs on virtual time; machines are reliable, transient and those that change."""
    reliable, transient, changing = machines
    costs = Costs([], [], [])
    setting = Setting(
        reliable,
        transient,
        clocks=END,
        reference=reliable + transient + changing,
        bytes_per_s=link * MODEL_BYTES,
    )
    for share in MOMENTS:
        for warning_s, found in ((120.0, costs.warned), (0.0, costs.killed)):
            story = elastic(setting, changing, ADD, EVICT, warning_s, share=share)
            costs.added.append(lost_s(story.ends_s, story.added_s, EVICT))
            found.append(lost_s(story.ends_s, story.evicted_s, END))
    return costs


def processes() -> Costs:
    """Return the costs of one story in real processes on this machine."""
    with tempfile.TemporaryDirectory() as store:
        job = Job(
            module="pauses",
            kind="Busy",
            folder=str(Path(__file__).resolve().parent),
            arguments={"clocks": 100_000},
            blocks=12,
            grains=20,
            partitions=4,
            expected=3,
            dead_s=60.0,  # machines are busy with other things too; closed connections tell
            grain_s=0.02,
            store=store,
        )
        house = House(job)
        try:
            return told(house)
        finally:
            house.close()


def told(house: House) -> Costs:
    for name in ("r0", "t0", "t1"):
        house.start(name, name == "r0")
    steady(house)
    first, second = ["t2", "t3", "t4"], ["t5", "t6", "t7"]
    added = [joined(house, first)]
    warned = changed(house, lambda: house.evict(first, 30.0))
    added.append(joined(house, second))
    killed = changed(house, lambda: house.kill(second))
    return Costs(added, [warned], [killed])


def joined(house: House, names: list[str]) -> float:
    """Have nodes join together: they wait outside until all of them have started."""
    for name in names:
        house.start(name, False, "second")
    house.wait(lambda brain: any(name in brain.nodes for name in names))
    since_s = time.monotonic()
    house.wait(lambda brain: all(name in brain.nodes for name in names))
    return cost(house, since_s)


def changed(house: House, act) -> float:
    since_s = time.monotonic()
    act()
    return cost(house, since_s)


def cost(house: House, since_s: float) -> float:
    steady(house)
    return lost_s(house.closed_s, since_s, len(house.closed_s) - 1)


def steady(house: House) -> None:
    goal = house.controller.ledger.closed + STEADY
    house.wait(lambda brain: brain.ledger.closed >= goal, 300.0)


def spread(seconds: list[float]) -> str:
    return f"{np.median(seconds):7.2f} ({min(seconds):.2f} to {max(seconds):.2f})"


def measured(stories: int, link: float) -> list[tuple[str, Costs]]:
    """Measure everything, print it, and return it by name."""
    found = [
        (f"virtual, {r} + {t} machines and {c} more", virtual(link, (r, t, c)))
        for r, t, c in ((2, 0, 30), (2, 15, 15))
    ]
    if stories:
        seen = [processes() for _ in range(stories)]
        merged = Costs(*(list(itertools.chain(*each)) for each in zip(*seen, strict=True)))
        found.append((f"processes, 1 + 2 and 3 more, {stories} stories", merged))
    print("seconds lost: median (least to most)")
    print(f"{'':44}{'added':>24}{'warned eviction':>24}{'killed':>24}")
    for name, costs in found:
        cells = "".join(f"{spread(seconds):>24}" for seconds in costs)
        print(f"{name:44}{cells}", flush=True)
    print(f"A machine that falls silent with its connections open is missed {DEAD_S:g} s later.")
    print(
        "Harlap 2019, section 4.5.5: nothing for adding 60 to 4, 13 % of a clock for evicting 60."
    )
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--stories", type=int, default=1, help="in processes")
    parser.add_argument("--link", type=float, default=10.0, help="models a second")
    given = parser.parse_args()
    measured(given.stories, given.link)


if __name__ == "__main__":
    main()
