"""A minute of a parameter server: three reliable processes, transient ones, a straggler, losses.

python examples/paramserver/demo.py    (or: orchestrator demo --tables)
"""

import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

from agent.paramserver.processes import House, Job

HERE = Path(__file__).parent
CLOCKS = 40
WIDE = 30  # of a bar


def show(house, since_s, text):
    print(
        f"{time.monotonic() - since_s:6.1f} s  clock {house.controller.ledger.closed + 1:3}  {text}"
    )


def plot(house, items):
    """Show what each clock took, and the squared error of a rating before it."""
    brain = house.controller
    measures, ends_s = brain.ledger.measures, house.closed_s
    took_s = [end_s - start_s for start_s, end_s in pairwise([brain.begun_s, *ends_s])]
    print(f"{'clock':>5} {'seconds':>8} {'':{WIDE}}  {'error':>8}")
    for clock, (took, error) in enumerate(zip(took_s, measures, strict=False), 1):
        time_bar = "=" * round(WIDE * took / max(took_s))
        error_bar = "#" * round(WIDE * error / max(measures))
        print(f"{clock:5} {took:8.2f} {time_bar:{WIDE}}  {error / items:8.4f} {error_bar}")


def main():
    arguments = {"users": 200, "items": 120, "ratings": 12_000, "clocks": CLOCKS, "rate": 0.02}
    with tempfile.TemporaryDirectory() as store:
        job = Job(
            module="factorisation",
            kind="Counted",
            folder=str(HERE),
            arguments=arguments,
            blocks=28,
            grains=8,
            partitions=4,
            expected=7,
            slack=1,
            help_size=3,
            store=store,
            grain_s=0.004,
        )
        house, since_s = House(job), time.monotonic()
        try:
            run(house, since_s)
            tables = house.result()
            brain = house.controller
            application = job.application()
            plot(house, application.items)
            lost = application.lost(tables["seen"][:, 0], len(brain.ledger.measures))
            show(house, since_s, f"{brain.ended}; ratings lost or counted twice: {lost}")
            for note in brain.notes:
                print(f"          {note}")
            return 1 if lost else 0
        finally:
            house.close()


def run(house, since_s):
    for at in range(3):
        house.start(f"r{at}", True)
    for at in range(4):
        house.start(f"t{at}", False, slow=5.0 if at == 3 else 1.0)
    house.wait(lambda brain: brain.ledger.closed >= 0)
    show(house, since_s, "3 reliable and 4 transient processes work; t3 is five times as slow")
    house.wait(lambda brain: brain.ledger.closed >= 9)
    house.kill(["t0", "t1", "t2", "t3"])
    show(house, since_s, "all four transient ones are killed at once, without a warning")
    house.wait(lambda brain: brain.ledger.closed >= 14 and len(brain.nodes) == 3)
    for at in range(4, 7):
        house.start(f"t{at}", False, "second")
    house.wait(lambda brain: len(brain.nodes) == 6)
    show(house, since_s, "three others came, while work went on")
    house.wait(lambda brain: brain.ledger.closed >= 24)
    house.evict(["t4", "t5", "t6"], 30)
    show(house, since_s, "an eviction of all three is announced, 30 s ahead")
    house.wait(lambda brain: len(brain.nodes) == 3)
    show(house, since_s, "they have left; nothing was loaded, nothing done twice")


if __name__ == "__main__":
    sys.exit(main())
