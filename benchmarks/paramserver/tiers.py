"""Which stage is best at which ratio, and what do an addition and an eviction cost? On virtual time.

    python benchmarks/paramserver/tiers.py [--link 10] [--sparse]
    python benchmarks/paramserver/tiers.py --processes

The model is dense: every worker reads and writes all of it in a clock. `--link` is how many models
a link carries in the second in which 64 machines compute a clock. The peer is a traditional server:
64 machines that never go. `--processes` plays only the story of an addition and an eviction, in 2
reliable and 6 transient processes that compute by sleeping.
"""

import argparse
import itertools
import statistics
import tempfile
from pathlib import Path

from pauses import Busy

from agent.paramserver.processes import House, Job
from agent.paramserver.virtual.tiers import MODEL_BYTES, Setting, clock_s, cluster, elastic

ADD, EVICT, END = 11, 35, 45  # clocks
TRANSIENT = [f"t{at}" for at in range(6)]


class Loading(Busy):
    """Notes each block that is loaded from storage."""

    def __init__(self, clocks, loads):
        super().__init__(clocks)
        self.loads = Path(loads)

    def load(self, lo, hi):
        with self.loads.open("a") as notes:
            notes.write(f"{lo} {hi}\n")


def traffic() -> None:
    """Compare the bytes of a clock with the formulas, to the byte."""
    print(
        "\nbytes of a regular clock, in models, of the busiest server out / of all: counted, formula"
    )
    for reliable, transient in ((8, 0), (4, 4), (2, 6)):
        count = reliable + transient
        counted = []
        for clocks in (4, 6):
            setting = Setting(reliable, transient, clocks, count, count, stage=1, reference=count)
            virtual, network = cluster(setting)
            virtual.run()
            counted.append((max(network.sent.values()), sum(network.sent.values())))
        busiest, everything = ((b - a) / 2 / MODEL_BYTES for a, b in zip(*counted, strict=True))
        own = (1 - 1 / reliable) + (count - 1) / reliable
        print(
            f"{reliable}+{transient}: {busiest:.6f} {own:.6f} / {everything:.6f} {2 * (count - 1):.6f}"
        )


def drawn(clocks_s: list[float], stages: list[int], whole_s: float) -> None:
    for at, (time_s, stage) in enumerate(zip(clocks_s, stages, strict=True), 1):
        print(f"{at:3} stage {stage} {time_s:7.3f} s {'#' * round(time_s / whole_s * 40)}")


def processes() -> None:
    """Play the story in processes on this machine."""
    with tempfile.TemporaryDirectory() as folder:
        loads = Path(folder) / "loads"
        job = Job(
            module="tiers",
            kind="Loading",
            folder=str(Path(__file__).resolve().parent),
            arguments={"clocks": END, "loads": str(loads)},
            blocks=24,
            grains=10,
            expected=2,
            dead_s=60.0,  # this machine has fewer cores than processes
            grain_s=0.02,
            store=folder,
        )
        house = House(job)
        try:
            told(house, loads)
        finally:
            house.close()


def told(house: House, loads: Path) -> None:
    stages = [1]

    def reached(clock: int) -> None:
        def look(brain) -> bool:
            stages.extend([brain.stages.stage] * (brain.ledger.closed + 2 - len(stages)))
            return brain.ledger.closed + 1 >= clock or brain.ended

        house.wait(look, 300.0)

    for name in ("r0", "r1"):
        house.start(name, True)
    reached(ADD)
    for at, name in enumerate(TRANSIENT):
        house.start(name, False, f"spot{at % 2}")
    house.wait(lambda brain: all(name in brain.nodes for name in TRANSIENT), 300.0)
    joined = house.controller.ledger.closed + 1
    reached(EVICT)
    before = len(loads.read_text().splitlines())
    house.evict(TRANSIENT, 120.0)
    evicted = house.controller.ledger.closed + 1
    reached(END)
    clocks_s = [after - was for was, after in itertools.pairwise(house.closed_s)][:END]
    alone_s = statistics.median(clocks_s[1:ADD])
    more = statistics.median(clocks_s[joined + 1 : evicted])
    blip = max(clocks_s[evicted:]) / alone_s - 1
    adding = max(clocks_s[ADD : joined + 1]) / alone_s - 1
    print(
        f"2 + 6 processes: a clock of {alone_s:.3f} s, and of {more:.3f} s with all; started at clock {ADD}, in at {joined}, "
        f"the longest clock meanwhile {adding:+.1%}; evicted at {evicted}: one blip of {blip:+.1%} (asked: at most 13 %);"
    )
    late = len(loads.read_text().splitlines()) - before
    print(f"{late} blocks loaded at the eviction, {house.controller.rolls} roll-backs")
    drawn(clocks_s, stages[: len(clocks_s)], alone_s)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--link", type=float, default=6.0)
    parser.add_argument(
        "--sparse", action="store_true", help="rows of its own for each block, and few for all"
    )
    parser.add_argument("--processes", action="store_true", help="2 + 6 of them, and no table")
    given = parser.parse_args()
    if given.processes:
        processes()
        return
    speed = given.link * MODEL_BYTES

    def one(reliable: int, transient: int, stage: int) -> float:
        parts = 64 if not transient else 32
        setting = Setting(reliable, transient, 4, 1024, parts, bytes_per_s=speed, stage=stage)
        return clock_s(setting._replace(dense=not given.sparse))

    base = one(64, 0, 1)
    print(
        f"a traditional clock of 64 machines: {base:.3f} s; the stages at each ratio, relative to it:"
    )
    print(f"{'ratio':>7} {'stage 1':>8} {'stage 2':>8} {'stage 3':>8}")
    for reliable in (32, 8, 4, 1):
        times = [one(reliable, 64 - reliable, stage) / base for stage in (1, 2, 3)]
        cells = " ".join(f"{time:8.3f}" for time in times)
        print(f"{(64 - reliable) // reliable:5}:1 {cells}", flush=True)
    traffic()
    setting = Setting(4, 0, clocks=END, blocks=256, reference=4, clock_s=16, bytes_per_s=speed)
    story = elastic(setting, 60, ADD, EVICT)
    before = story.clocks_s[5]
    blip = max(story.clocks_s[EVICT:]) / before - 1
    print(
        f"\n4 + 60, added at clock {ADD}, evicted at {EVICT}: one blip of {blip:.1%} (met: at most 13 %);"
    )
    print(f"{story.loads_at_eviction} blocks loaded at the eviction, {story.rolls} roll-backs")
    drawn(story.clocks_s, story.stages, before)


if __name__ == "__main__":
    main()
