"""How fast is a simulated month, and does an event cost more when there are more machines?

Fleets of every size run the same jobs of ten slots each, more of them. Every run first lives
through half an hour, in which the fleet is bought; then so many events are measured. A storm of
evictions costs more per event than a calm hour, and the same number of events is minutes of a large fleet
and days of a small one: too few events compare weather, not size. Sizes are interleaved, each
repeat has its own seed; the table shows the median and the range of the events per second of one core
(processor time, so that a busy machine does not show), and what decisions and journal alone can do.

    python benchmarks/simulation.py [--repeats 3] [--events 100000]
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
from orchestrator.brain.decide import decide
from orchestrator.events import JobSubmitted
from orchestrator.simulated.scenario import Scenario, cloud_of, jobs_of, month
from orchestrator.simulated.world import SimulatedWorld
from orchestrator.state import State
from orchestrator.world import Entry, decode_state, encode_state

SIZES = (10, 100, 1_000, 10_000)
JOB_SLOTS = 10
WARM_S = 1800.0


class Rates(NamedTuple):
    """Events per second: of everything, of the decisions alone, of encoding the journal alone."""

    whole: float
    decide: float
    journal: float


class Enough(Exception):  # noqa: N818 - it says what happened
    """The wanted number of events has been simulated."""


class TimedJournal:
    """Writes lines as a real journal does, and stops at a virtual time or at a number of entries."""

    def __init__(self) -> None:
        self.lines: list[bytes] = []
        self.until_s = WARM_S
        self.most = 10**9
        self._encoder = msgspec.json.Encoder()
        self._digest = hashlib.sha256()

    async def append(self, event, actions) -> None:
        line = self._encoder.encode(Entry(event=event, actions=tuple(actions)))
        self._digest.update(line)
        self.lines.append(line)
        if event.at_s >= self.until_s or len(self.lines) >= self.most:
            raise Enough

    async def snapshot(self, state) -> None:
        """A simulation keeps none."""


def fleet(instances: int, seed: int) -> Scenario:
    """The month of `orchestrator tools simulate`, with jobs of the same size whatever the fleet."""
    return msgspec.structs.replace(
        month(3650.0, instances, seed),
        job_slots=JOB_SLOTS,
        jobs=instances // JOB_SLOTS,
        microbatches=2 * JOB_SLOTS,
    )


def _until_enough(world: SimulatedWorld, journal: TimedJournal, state: State) -> None:
    try:
        loop.run_now(loop.run(world, journal, state))
    except Enough:
        return


def measure(instances: int, seed: int, events: int) -> Rates:
    scenario, journal, state = fleet(instances, seed), TimedJournal(), State()
    world = SimulatedWorld(cloud_of(scenario), scenario)
    world.start(1, scenario.settings)
    for spec in jobs_of(scenario):
        world.say(JobSubmitted(at_s=world.timeline.now_s, spec=spec))
    _until_enough(world, journal, state)
    before = encode_state(state)
    journal.lines.clear()
    journal.until_s, journal.most = float("inf"), events
    began_s = time.process_time()
    _until_enough(world, journal, state)
    whole_s = time.process_time() - began_s
    decide_s, journal_s = parts(decode_state(before), journal.lines)
    return Rates(events / whole_s, events / decide_s, events / journal_s)


def parts(state: State, lines: list[bytes]) -> tuple[float, float]:
    """Seconds of the decisions alone, and of encoding and hashing the journal alone."""
    entries = msgspec.json.Decoder(list[Entry]).decode(b"[" + b",".join(lines) + b"]")
    encode, digest = msgspec.json.Encoder().encode, hashlib.sha256()
    began_s = time.process_time()
    for entry in entries:
        decide(state, entry.event)
    decided_s = time.process_time()
    for entry in entries:
        digest.update(encode(entry))
    return decided_s - began_s, time.process_time() - decided_s


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    words.add_argument("--repeats", type=int, default=3)
    words.add_argument("--events", type=int, default=100_000)
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
