"""Which stage is best at which ratio, and what do an addition and an eviction cost? On virtual time.

    python benchmarks/paramserver/tiers.py [--link 10]

The model is dense: every worker reads and writes all of it in a clock. `--link` is how many models
a link carries in the second in which 64 machines compute a clock. The peer is a traditional server:
64 machines that never go.
"""

import argparse

from agent.paramserver.virtual.tiers import MODEL_BYTES, Setting, clock_s, cluster, elastic


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


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--link", type=float, default=6.0)
    parser.add_argument(
        "--sparse", action="store_true", help="rows of its own for each block, and few for all"
    )
    given = parser.parse_args()
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
    setting = Setting(4, 0, clocks=45, blocks=256, reference=4, clock_s=16, bytes_per_s=speed)
    story = elastic(setting, 60, 11, 35)
    before = story.clocks_s[5]
    blip = max(story.clocks_s[35:]) / before - 1
    print(
        f"\n4 + 60, added at clock 11, evicted at 35: one blip of {blip:.1%} (met: at most 13 %);"
    )
    print(f"{story.loads_at_eviction} blocks loaded at the eviction, {story.rolls} roll-backs")
    for at, (time, stage) in enumerate(zip(story.clocks_s, story.stages, strict=True), 1):
        print(f"{at:3} stage {stage} {time:7.3f} s {'#' * round(time / before * 40)}")


if __name__ == "__main__":
    main()
