"""How much of a plain loop is left to a factorisation on a parameter server, for each core?

    python benchmarks/paramserver/ratings.py [--ratings 10000000] [--clocks 8] [--rounds 3]

Two processes, each of which computes half of the ratings and serves half of the rows (BSP), beside
one process that goes over all ratings with the same compiled loop and no server at all.
"""

import argparse
import multiprocessing
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from processor_time import busy_s

EXAMPLES = str(Path(__file__).parents[2] / "examples" / "paramserver")
sys.path.insert(0, EXAMPLES)

import factorisation  # noqa: E402 - it lies there

from agent.paramserver.processes import House, Job  # noqa: E402

CORES = 2
WARM = 2  # clocks that are not counted
LEAST = 0.8


def shape(ratings):
    """Return as many ratings for each row as the Netflix data have, within a half."""
    return {
        "users": ratings // 200,
        "items": ratings // 2000,
        "ratings": ratings,
        "rank": 16,
        "by_user": True,
    }


def loop(pipe, ratings, clocks):
    """Send the seconds of each pass over all ratings."""
    made = factorisation.Factorisation(**shape(ratings), rate=0.005)
    users, items = (table.rows_at_first(np.arange(table.keys)) for table in made.tables)
    at_user, at_item = made.users.astype(np.int32), made.columns.astype(np.int32)
    took_s = []
    for _ in range(clocks):
        begun_s, worked_s = time.perf_counter(), time.process_time()
        factorisation.descend(users, items, at_user, at_item, made.values, made.rate)
        took_s.append((time.perf_counter() - begun_s, time.process_time() - worked_s))
    pipe.send(took_s)


def alone(ratings, clocks):
    ours, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    child = context.Process(target=loop, args=(theirs, ratings, clocks))
    child.start()
    took_s = ours.recv()
    child.join()
    return tuple(statistics.median(each) for each in zip(*took_s[WARM:], strict=True))


def served(ratings, clocks):
    with tempfile.TemporaryDirectory() as store:
        job = Job(
            module="factorisation",
            kind="Factorisation",
            folder=EXAMPLES,
            arguments={**shape(ratings), "clocks": clocks, "rate": 0.005},
            blocks=CORES,
            grains=1,
            partitions=CORES,
            expected=CORES,
            save_every=1 << 20,
            dead_s=300.0,
            store=store,
        )
        house = House(job)
        try:
            for at in range(CORES):
                house.start(f"r{at}", reliable=True)
            house.wait(lambda brain: brain.ledger.closed >= WARM, 600.0)
            first, begun_s = house.controller.ledger.closed, busy_s(house)
            house.wait(lambda brain: brain.ledger.closed >= clocks - 2, 600.0)
            worked_s = (busy_s(house) - begun_s) / (house.controller.ledger.closed - first)
            house.wait(lambda brain: brain.ended, 600.0)
            return statistics.median(np.diff(house.closed_s)[WARM:]), worked_s
        finally:
            house.close()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--ratings", type=int, default=10_000_000)
    parser.add_argument("--clocks", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3, help="the median of so many is shown")
    given = parser.parse_args()
    rounds = [
        (alone(given.ratings, given.clocks), served(given.ratings, given.clocks))
        for _ in range(given.rounds)
    ]
    for name, at, cores in (("by the clock", 0, CORES), ("by processor time", 1, 1)):
        one, ours = (
            given.ratings / statistics.median(each[at] for each in times) / 1e6
            for times in zip(*rounds, strict=True)
        )
        print(f"{name}: million ratings/s, a loop on one core, and served for each core")
        share = ours / cores / one
        met = "met" if share >= LEAST else "MISSED"
        print(f"{one:.2f} {ours / cores:.2f}, a share of {share:.2f} ({met}: {LEAST})", flush=True)


if __name__ == "__main__":
    main()
