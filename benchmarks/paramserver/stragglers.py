"""How near is work that flows to the ideal? BSP, SSP, BSP with help, FlexRR, on virtual time.

    python benchmarks/paramserver/stragglers.py [--workers 128] [--clocks 40] [--seeds 1] [--growth]

The machines are those that run for real. The peer is the table of the reference simulation.
"""

import argparse
import time

from agent.paramserver.help import Settings
from agent.paramserver.virtual.stragglers import (
    Disrupted,
    PowerLaw,
    SlowWorker,
    Uneven,
    mean,
    simulate,
)

PATTERNS = [
    *(
        (f"slow worker {percent} %", lambda d=percent / 100: SlowWorker(d))
        for percent in (0, 50, 100, 200, 400)
    ),
    ("disrupted 200 %", lambda: Disrupted(2.0)),
    *((f"power law {alpha}", lambda a=alpha: PowerLaw(a)) for alpha in (11, 7, 4)),
    ("uneven 75/25", Uneven),
]
GROWTH = (64, 128, 256, 512, 1024)
WITHOUT = Settings(size=0)
TWICE = Settings(checkpoints=(0.75, 0.9))


def grow(clocks: int, seeds: int) -> None:
    """Show what more workers cost: a slow worker of 100 %, with help, against the ideal."""
    print(f"slow worker 100 %, {clocks} clocks, mean of {seeds} seeds; messages of help each clock")
    print(f"{'workers':>8} {'FlexRR':>7} {'ideal':>6} {'/ideal':>6} {'messages':>8} {'took':>7}")
    for workers in GROWTH:
        begun_s = time.perf_counter()
        found = mean(
            [
                simulate(SlowWorker(1.0), machines=workers // 8, clocks=clocks, seed=seed)
                for seed in range(seeds)
            ]
        )
        print(
            f"{workers:8} {found.clock:7.3f} {found.ideal:6.3f} {found.clock / found.ideal:6.3f} "
            f"{found.messages:8.1f} {time.perf_counter() - begun_s:6.0f}s",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--growth", action="store_true", help="up to 1,024 workers, and no table")
    parser.add_argument("--workers", type=int, default=128)
    parser.add_argument("--clocks", type=int, default=40)
    parser.add_argument("--seeds", type=int, default=1)
    given = parser.parse_args()
    if given.growth:
        grow(given.clocks, given.seeds)
        return
    each = 8 if given.workers >= 16 else 1
    print(
        f"{given.workers} workers, {given.clocks} clocks, mean of {given.seeds} seeds; time of a clock"
    )
    print(
        f"{'pattern':18} {'BSP':>6} {'SSP':>6} {'BSP+help':>8} {'FlexRR':>6} {'2 marks':>7} {'ideal':>6} {'/ideal':>6} {'given':>6}  verdict"
    )

    def run(make, slack, settings):
        return mean(
            [
                simulate(
                    make(),
                    machines=given.workers // each,
                    each=each,
                    clocks=given.clocks,
                    slack=slack,
                    settings=settings,
                    seed=seed,
                )
                for seed in range(given.seeds)
            ]
        )

    for name, make in PATTERNS:
        bsp, ssp = run(make, 0, WITHOUT), run(make, 1, WITHOUT)
        helped, flex, twice = (
            run(make, 0, Settings()),
            run(make, 1, Settings()),
            run(make, 1, TWICE),
        )
        ratio = flex.clock / flex.ideal
        verdict = "met" if ratio <= 1.05 else "MISSED" if bsp.clock >= 2 else "-"
        print(
            f"{name:18} {bsp.clock:6.2f} {ssp.clock:6.2f} {helped.clock:8.2f} {flex.clock:6.3f} {twice.clock:7.3f} "
            f"{flex.ideal:6.3f} {ratio:6.3f} {flex.given:6.1%}  {verdict}",
            flush=True,
        )


if __name__ == "__main__":
    main()
