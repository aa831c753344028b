"""How fast is a simulated month, and does an event cost more when there are more machines?

Every size is simulated several times, sizes interleaved, each run for the same number of events; the
table shows the median and the spread of the events per second, and what of the time is the decision
and what is writing the journal.

    python benchmarks/simulation.py [--repeats 5] [--events 60000]
"""

import argparse
import hashlib
import statistics
import time
from typing import NamedTuple

import msgspec
from rich.console import Console
from rich.table import Table

from orchestrator import loop
from orchestrator.brain import decide
from orchestrator.events import JobSubmitted
from orchestrator.simulated.scenario import Scenario, cloud_of, jobs_of, month
from orchestrator.simulated.world import SimulatedWorld
from orchestrator.state import State
from orchestrator.world import Entry, MemoryJournal

SIZES = (10, 100, 1_000, 10_000)
WARM_EVENTS = 20_000


class Rates(NamedTuple):
    """Events per second: of everything, of the decisions alone, of encoding the journal alone."""

    whole: float
    decide: float
    journal: float


class Enough(Exception):  # noqa: N818 - it says what happened
    """The wanted number of events has been simulated."""


class CountingJournal(MemoryJournal):
    """Keeps the entries of a run, encodes each as a real journal does, and stops at a number."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most
        self._encoder = msgspec.json.Encoder()
        self._digest = hashlib.sha256()

    async def append(self, event, actions) -> None:
        entry = Entry(event=event, actions=tuple(actions))
        self.entries.append(entry)
        self._digest.update(self._encoder.encode(entry))
        if len(self.entries) >= self._most:
            raise Enough

    async def snapshot(self, state) -> None:
        """A simulation keeps none."""


def simulated(scenario: Scenario, events: int) -> tuple[float, list[Entry]]:
    """Seconds for so many events after the fleet is bought, and the journal of it all."""
    warm = WARM_EVENTS + 3 * scenario.instances
    journal = CountingJournal(warm)
    world = SimulatedWorld(cloud_of(scenario), scenario)
    world.start(1, scenario.settings)
    for spec in jobs_of(scenario):
        world.say(JobSubmitted(at_s=world.timeline.now_s, spec=spec))
    state = State()
    _until_enough(world, journal, state)
    journal._most = warm + events
    began_s = time.perf_counter()
    _until_enough(world, journal, state)
    return time.perf_counter() - began_s, journal.entries


def _until_enough(world: SimulatedWorld, journal: CountingJournal, state: State) -> None:
    try:
        loop.run_now(loop.run(world, journal, state))
    except Enough:
        return


def parts(entries: list[Entry], measured: int) -> tuple[float, float]:
    """Seconds of the decisions alone and of the journal alone, over the last `measured` entries."""
    state, encode = State(), msgspec.json.Encoder().encode
    for entry in entries[:-measured]:
        decide(state, entry.event)
    began_s = time.perf_counter()
    for entry in entries[-measured:]:
        decide(state, entry.event)
    decided_s = time.perf_counter()
    digest = hashlib.sha256()
    for entry in entries[-measured:]:
        digest.update(encode(entry))
    return decided_s - began_s, time.perf_counter() - decided_s


def measure(instances: int, seed: int, events: int) -> Rates:
    seconds, entries = simulated(month(3650.0, instances, seed), events)
    decide_s, journal_s = parts(entries, events)
    return Rates(events / seconds, events / decide_s, events / journal_s)


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    words.add_argument("--repeats", type=int, default=5)
    words.add_argument("--events", type=int, default=60_000)
    given = words.parse_args()
    rates: dict[int, list[Rates]] = {size: [] for size in SIZES}
    for seed in range(given.repeats):
        for size in SIZES:
            rates[size].append(measure(size, seed, given.events))
    table = Table(title=f"Simulated events per second, median of {given.repeats} (min to max)")
    for column in ("instances", "events/s", "per event, against 10", "decide/s", "journal/s"):
        table.add_column(column, justify="right")
    base = statistics.median(rate.whole for rate in rates[SIZES[0]])
    for size, found in rates.items():
        whole = [rate.whole for rate in found]
        middle = statistics.median(whole)
        table.add_row(
            f"{size:,}",
            f"{middle:,.0f} ({min(whole):,.0f} to {max(whole):,.0f})",
            f"x {base / middle:.2f}",
            f"{statistics.median(rate.decide for rate in found):,.0f}",
            f"{statistics.median(rate.journal for rate in found):,.0f}",
        )
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
