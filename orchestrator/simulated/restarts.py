"""Many lives of one manager, which may be killed at any await point and has its journal."""

from collections.abc import Callable, Sequence
from random import Random

import msgspec

from cloud.model import DEPLOYMENT_TAG, LaunchRequest
from orchestrator import loop
from orchestrator.actions import AnyAction
from orchestrator.brain.holdings import ledger
from orchestrator.events import (
    AnyEvent,
    JobCancelled,
    JobResumed,
    JobSubmitted,
    ShutdownAsked,
)
from orchestrator.simulated.bill import bill_usd
from orchestrator.simulated.invariants import Breach, Watcher
from orchestrator.simulated.scenario import Scenario, cloud_of, jobs_of
from orchestrator.simulated.world import Killed, SimulatedWorld
from orchestrator.state import State
from orchestrator.world import Entry, MemoryJournal

LIVES_MAX = 500
STRANGERS = 2
BILL_SLACK_USD = 0.003
TRAFFIC_SLACK = 0.4  # the model's size is guessed until it is measured


class MortalJournal:
    """A journal that keeps every entry; a manager may be killed just before or after a write."""

    def __init__(
        self,
        await_point: Callable[[str], None],
        watcher: Watcher | None = None,
        kept: MemoryJournal | None = None,
    ) -> None:
        self.kept = MemoryJournal() if kept is None else kept
        self._await_point = await_point
        self._watcher = watcher

    async def append(self, event: AnyEvent, actions: Sequence[AnyAction]) -> None:
        self._await_point("append")
        await self.kept.append(event, actions)
        if self._watcher is not None:
            self._watcher.journaled(event, actions)
        self._await_point("appended")

    async def snapshot(self, state: State) -> None:
        self._await_point("snapshot")
        await self.kept.snapshot(state)

    async def load(self) -> tuple[State | None, Sequence[Entry]]:
        return await self.kept.load()


class Biography(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a simulation. `breach` is empty if every invariant held to the last event."""

    seed: int
    events: int
    lives: int
    launches: int
    evictions: int
    jobs: dict[str, str]
    because: dict[str, str]
    spent_usd: float
    bill_usd: float
    ended_at_s: float
    breach: str = ""
    last_sentences: tuple[str, ...] = ()


def live(
    scenario: Scenario,
    kill: Callable[[str], bool] | None = None,
    keep: MemoryJournal | None = None,
    watch: Callable[[State], None] | None = None,
) -> Biography:
    """Run life after life until everything is given back, the days are over, or a check fails.

    `watch` is called with every state, before the checks.
    """
    world = SimulatedWorld(cloud_of(scenario), scenario, kill)
    watcher = Watcher(world, scenario)
    people = _People(world, scenario, watcher)

    def look(state: State) -> None:
        if watch is not None:
            watch(state)
        people.look(state)

    world.watch = look
    journal = MortalJournal(world.await_point, watcher, keep)
    state, lives, breach = State(), 0, ""
    try:
        people.begin()
        while not state.stopped:
            lives += 1
            _stop_after(LIVES_MAX, lives)
            state = loop.run_now(loop.resume(journal))
            world.start(lives, scenario.settings)
            try:
                state = loop.run_now(loop.run(world, journal, state))
            except Killed:
                world.restart()
                continue
            people.end(state)
    except Exception as error:  # a seed that fails must say so, however it fails
        breach = f"{type(error).__name__}: {error}"
        state = watcher.last_state or state
    return _biography(world, journal, state, (lives, breach))


def _stop_after(most: int, lives: int) -> None:
    if lives > most:
        raise Breach(f"the manager did not come to an end in {most} lives")


class _People:
    """The people: they submit, cancel and resume jobs, and in the end shut everything down."""

    def __init__(self, world: SimulatedWorld, scenario: Scenario, watcher: Watcher) -> None:
        self._world = world
        self._scenario = scenario
        self._watcher = watcher
        self._dice = Random(scenario.seed + 1)  # noqa: S311 - replayable by design
        self._said_goodbye = False
        self._strangers: list[str] = []

    def begin(self) -> None:
        """Plan the submissions, with some cancels and resumes, and launch machines of others."""
        timeline, start_s = self._world.timeline, self._world.timeline.now_s
        calm_s = self._scenario.calm_after_s or 0.0
        for nth, spec in enumerate(jobs_of(self._scenario)):
            at_s = start_s + (self._dice.uniform(0.0, calm_s / 2) if nth else 0.0)
            event = JobSubmitted(at_s=at_s, spec=spec)
            self._say_at(at_s, event)
            if calm_s and self._dice.random() < 0.2:
                off_s = at_s + self._dice.uniform(0.0, calm_s / 2)
                on_s = off_s + self._dice.uniform(1.0, 600.0)
                self._say_at(off_s, JobCancelled(at_s=off_s, job=spec.job, by="somebody"))
                self._say_at(on_s, JobResumed(at_s=on_s, job=spec.job, by="somebody"))
        timeline.at(start_s + calm_s, self._world.bad_days.calm_down)
        for nth in range(STRANGERS):
            pool = self._world.cloud.catalogue()[1][nth]
            request = LaunchRequest(
                token=f"not-ours-{nth}",
                pool=pool,
                market="on_demand",
                bid_usd_per_h=None,
                tags={DEPLOYMENT_TAG: "somebody-else"},
            )
            self._strangers.append(self._world.cloud.launch(request, start_s).id)

    def _say_at(self, at_s: float, event: AnyEvent) -> None:
        self._world.timeline.at(at_s, lambda: self._world.say(event))

    def look(self, state: State) -> None:
        """Check the state after an event, and ask for the shutdown when all jobs have ended."""
        self._watcher.check(state)
        submitted = len(state.jobs) == self._scenario.jobs
        if self._said_goodbye or state.live_jobs or not submitted or not self._world.bad_days.calm:
            return
        self._said_goodbye = True
        self._world.say(ShutdownAsked(at_s=self._world.timeline.now_s, by="the last to leave"))

    def end(self, state: State) -> None:
        """Check what must be true when the simulation is over."""
        world = self._world
        if not state.stopped:
            jobs = {
                j.id: f"{j.status}: {j.because}; {j.market.waiting}" for j in state.jobs.values()
            }
            raise Breach(f"it did not end, although capacity returned: {jobs}")
        if world.alive:
            raise Breach(f"the manager has stopped and {sorted(world.alive)} still run")
        for stranger in self._strangers:
            if world.cloud.machine(stranger).state not in ("pending", "running"):
                raise Breach(f"{stranger} is not ours and has been touched")
        self._the_bill_is_as_expected(state)
        scenario, budget = self._scenario, self._scenario.settings.budget_usd
        for job in state.jobs.values():
            poor = "budget" in job.because and (job.spec.budget_usd or budget) is not None
            faulty = "exception" in job.because and scenario.faults.script_fails_per_h > 0
            faulty |= "crashed" in job.because and scenario.crashes_at_step is not None
            if job.status == "FAILED" and not poor and not faulty:
                raise Breach(f"{job.id} failed without need: {job.because}")
            if job.status == "SUCCEEDED" and job.progress.step != scenario.steps:
                raise Breach(f"{job.id} succeeded at step {job.progress.step} of {scenario.steps}")

    def _the_bill_is_as_expected(self, state: State) -> None:
        """Check the cloud's bill: within the cap, and as we counted it if our clock was right."""
        bill_usd = _bill_usd(self._world, state)
        account, faults = state.account, self._scenario.faults
        spent_usd = account.spent_usd - account.manager_usd
        if account.cap_usd is not None and bill_usd > account.cap_usd:
            raise Breach(f"the bill of ${bill_usd:.4f} is over the cap ${account.cap_usd:.4f}")
        right = not (faults.killed or faults.clock_set_back or faults.clock_jump_every_s)
        slack_usd = BILL_SLACK_USD + TRAFFIC_SLACK * _traffic_usd(self._world)
        if right and not bill_usd - slack_usd <= spent_usd <= bill_usd * 1.1 + slack_usd:
            raise Breach(f"the bill is ${bill_usd:.4f}, the manager thinks ${spent_usd:.4f}")


def _bill_usd(world: SimulatedWorld, state: State) -> float:
    """Return what the machines cost by the cloud's books, and what moving states to them cost."""
    held = (*state.ended_leases.values(), *state.leases.values())
    egress = sum(lease.egress_usd for lease in held if lease.prices)
    traffic = _traffic_usd(world)
    return bill_usd(world.cloud, state.settings, world.timeline.now_s) + egress + traffic


def _traffic_usd(world: SimulatedWorld) -> float:
    """Return what all steps have sent between zones, as the workers count it."""
    return sum(job.sent_usd for job in world.fleet.jobs.values())


def _biography(
    world: SimulatedWorld, journal: MortalJournal, state: State, end: tuple[int, str]
) -> Biography:
    now_s = world.timeline.now_s
    account = state.account
    spent = ledger.spent_usd(account, state.now_s) - ledger.manager_usd(account, state.now_s)
    return Biography(
        seed=world.seed,
        events=len(journal.kept.entries),
        lives=end[0],
        launches=world.launches,
        evictions=world.evictions,
        jobs={job.id: job.status for job in state.jobs.values()},
        because={job.id: job.because for job in state.jobs.values()},
        spent_usd=spent,
        bill_usd=_bill_usd(world, state),
        ended_at_s=now_s,
        breach=end[1],
        last_sentences=tuple(
            f"{said.at_s:.1f} {said.who}: {said.what}: {said.because}"
            for said in state.sentences[-30:]
        ),
    )
