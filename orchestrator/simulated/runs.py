"""Whole simulations: from a scenario to a report, with the journal written along the way."""

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from cloud.clock import DAY_S
from orchestrator import loop
from orchestrator.actions import AnyAction
from orchestrator.brain.holdings import ledger
from orchestrator.events import AnyEvent, JobSubmitted
from orchestrator.simulated.scenario import Scenario, cloud_of, jobs_of, month
from orchestrator.simulated.world import SimulatedWorld
from orchestrator.state import State
from orchestrator.world import Entry


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a simulation.

    `journal_sha256` is over the journal as JSON lines; the same seed gives the same digest.
    """

    seed: int
    days: float
    instances: int
    events: int
    actions: int
    launches: int
    evictions: int
    jobs: dict[str, str]
    steps: int
    steps_lost: int
    spent_usd: float
    on_demand_usd: float
    journal_bytes: int
    journal_sha256: str


class DigestJournal:
    """A journal of any length, kept as a digest; with a path, the lines are written there too."""

    def __init__(self, path: Path | None = None, day: Callable[[int], None] | None = None) -> None:
        """Begin a journal; `day` is called with the number of each simulated day that begins."""
        self._day, self._days, self._began_s = day, 0, 0.0
        self.digest = hashlib.sha256()
        self.events = self.actions = self.bytes = 0
        self._encoder = msgspec.json.Encoder()
        self._file = None if path is None else path.open("wb")

    async def append(self, event: AnyEvent, actions: Sequence[AnyAction]) -> None:
        line = self._encoder.encode(Entry(event=event, actions=tuple(actions))) + b"\n"
        self.digest.update(line)
        self.events += 1
        self.actions += len(actions)
        self.bytes += len(line)
        if self._file is not None:
            self._file.write(line)
        if self._day is not None:
            self._count(event.at_s, self._day)

    def _count(self, at_s: float, day: Callable[[int], None]) -> None:
        self._began_s = self._began_s or at_s
        while not self._days or at_s > self._began_s + self._days * DAY_S:
            self._days += 1
            day(self._days)

    async def snapshot(self, state: State) -> None:
        """Do nothing: the digest covers every entry, and nothing is ever loaded from here."""

    async def load(self) -> tuple[State | None, Sequence[Entry]]:
        return None, ()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def simulate(
    days: float = 30.0,
    instances: int = 1000,
    seed: int = 7,
    journal_path: Path | None = None,
    faults: str = "none",
    day: Callable[[int], None] | None = None,
) -> Report:
    """Simulate so many instances for so many days; write the journal as JSON lines.

    Raises ValueError with one line for a scenario that makes no sense, and OSError for the path.
    """
    return play(month(days, instances, seed, faults), journal_path, day)


def play(
    scenario: Scenario,
    journal_path: Path | None = None,
    day: Callable[[int], None] | None = None,
    watch: Callable[[State], None] = lambda _: None,
) -> Report:
    """Run a scenario to the end of its days in one life of the manager, and watch every state."""
    scenario = msgspec.structs.replace(
        scenario, faults=msgspec.structs.replace(scenario.faults, killed=0.0)
    )
    journal = DigestJournal(journal_path, day)
    world = SimulatedWorld(cloud_of(scenario), scenario)
    world.watch = watch
    try:
        world.start(1, scenario.settings)
        for spec in jobs_of(scenario):
            world.say(JobSubmitted(at_s=world.timeline.now_s, spec=spec))
        state = loop.run_now(loop.run(world, journal, State()))
    finally:
        journal.close()
    return _report(scenario, world, state, journal)


def _report(
    scenario: Scenario, world: SimulatedWorld, state: State, journal: DigestJournal
) -> Report:
    return Report(
        seed=scenario.seed,
        days=scenario.days,
        instances=scenario.instances,
        events=journal.events,
        actions=journal.actions,
        launches=world.launches,
        evictions=world.evictions,
        jobs={job.id: job.status for job in state.jobs.values()},
        steps=sum(job.progress.step for job in state.jobs.values()),
        steps_lost=sum(job.progress.steps_lost for job in state.jobs.values()),
        spent_usd=ledger.spent_usd(state.account, state.now_s),
        on_demand_usd=ledger.on_demand_usd(state.account, state.now_s),
        journal_bytes=journal.bytes,
        journal_sha256=journal.digest.hexdigest(),
    )
