"""A whole deployment in virtual time: the simulated cloud, and what runs on its machines.

The manager's own loop drives it, so that the code which buys a thousand machines is the code that a
test takes through a month in seconds. Instances, workers and the keeper are modelled by what the
manager can see of them: when they join, commit, fall silent, and what of that gets lost on the way.
"""

import hashlib
import time
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from pathlib import Path
from random import Random
from typing import assert_never

import msgspec

from agent.layout import Layout
from agent.messages import (
    AgentJoined,
    AgentLost,
    AnyReport,
    BackupHeld,
    CheckpointWritten,
    JobCompleted,
    LossCause,
    NoticeSeen,
    Progress,
    Regrouped,
    WorkerFailed,
    WorkerLost,
    WorkerReady,
)
from cloud.errors import CloudError, NoCapacity, ProviderUnreachable
from cloud.local.market import GIB, Catalogue, Conduct, SpotMarket, Zone
from cloud.model import InstanceType, LaunchRequest, Machine, Notice
from cloud.simulated import Booted, Change, Evicted, Noticed, PricesMoved, SimulatedCloud
from orchestrator import ledger, loop
from orchestrator.actions import (
    AnyAction,
    CloseJob,
    Launch,
    ListMachines,
    Note,
    OpenJob,
    Regroup,
    StartWorker,
    Stop,
    StopWorker,
    Terminate,
    WriteCheckpoint,
)
from orchestrator.events import (
    AnyEvent,
    CatalogueSeen,
    JobSpec,
    JobSubmitted,
    Launched,
    LaunchFailed,
    Listed,
    ListFailed,
    ManagerStarted,
    QuotesSeen,
    Terminated,
    Tick,
)
from orchestrator.settings import Settings
from orchestrator.state import State
from orchestrator.world import Entry

HOUR_S, DAY_S = 3600.0, 86_400.0
JOB_SLOTS = 50


class Killed(Exception):  # noqa: N818 - it names what happened
    """The manager was killed at an await point."""


class Faults(msgspec.Struct, frozen=True, kw_only=True):
    """What goes wrong, as probabilities of a single case, and how long the bad times are."""

    report_lost: float = 0.0
    report_twice: float = 0.0
    report_late: float = 0.0
    unreachable: float = 0.0
    killed: float = 0.0
    notice_withdrawn: float = 0.0
    worker_dies_per_h: float = 0.0
    script_fails_per_h: float = 0.0
    bulk_loss_every_s: float = 0.0
    drought_every_s: float = 0.0
    drought_s: float = 0.0
    listing_lag_s: float = 0.0
    clock_jump_every_s: float = 0.0
    spike_every_s: float = 0.0


FAULTS = {
    "none": Faults(),
    "mixed": Faults(
        report_lost=0.02,
        report_twice=0.05,
        report_late=0.05,
        unreachable=0.05,
        killed=0.002,
        notice_withdrawn=0.5,
        worker_dies_per_h=0.2,
        bulk_loss_every_s=2400.0,
        drought_every_s=3600.0,
        drought_s=600.0,
        listing_lag_s=10.0,
        clock_jump_every_s=3600.0,
    ),
}


class Pace(msgspec.Struct, frozen=True, kw_only=True):
    """How fast the modelled parts are."""

    join_s: float = 4.0
    worker_start_s: float = 6.0
    detect_s: float = 0.1
    agent_detect_s: float = 3.0
    notice_poll_s: float = 1.0
    answer_s: float = 1.0
    morph_s: float = 0.3
    restart_s: float = 5.0
    progress_every_s: float = 60.0
    slot_step_s: float = 4.0  # one slot computes a step this long; n slots share it


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """One simulated deployment, whole: the same scenario gives the same journal, byte for byte."""

    seed: int = 0
    days: float = 1.0
    instances: int = 8
    job_slots: int = 4
    steps: int = 1000
    microbatches: int = 64
    budget_usd: float | None = None
    faults: Faults = Faults()
    pace: Pace = Pace()
    conduct: Conduct = Conduct()
    settings: Settings = Settings(deployment="simulated")


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What came of it. `journal_sha256` is over the journal as JSON lines; `wall_s` is real time."""

    seed: int
    days: float
    instances: int
    events: int
    actions: int
    jobs: dict[str, str]
    steps: int
    steps_lost: int
    evictions: int
    manager_restarts: int
    spent_usd: float
    on_demand_usd: float
    bill_usd: float
    journal_sha256: str
    journal_bytes: int
    wall_s: float

    @property
    def events_per_s(self) -> float:
        return self.events / self.wall_s if self.wall_s > 0 else 0.0


class DigestJournal:
    """Remembers a journal of any length by its digest; with a path, the lines are written too."""

    def __init__(self, path: Path | None = None) -> None:
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

    async def snapshot(self, state: State) -> None:
        """The digest covers every entry; nothing is ever loaded from here."""

    async def load(self) -> tuple[State | None, Sequence[Entry]]:
        return None, ()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


class _Job:
    """A job as the keeper has it: commits go on at a pace as long as the whole layout is there."""

    def __init__(self, order_job: str, steps_total: int, microbatches: int) -> None:
        self.id = order_job
        self.steps_total = steps_total
        self.microbatches = microbatches
        self.step = 0
        self.generation = 0
        self.layout: Layout | None = None
        self.next: Layout | None = None
        self.began_s: float | None = None  # when the running step began; None while it stands still
        self.step_s = 0.0
        self.version = 0  # what was scheduled for an earlier version never happens
        self.present: dict[str, str] = {}  # worker -> machine
        self.done = False

    def advance(self, at_s: float) -> None:
        """Commit the steps that were finished until now."""
        if self.began_s is None or at_s <= self.began_s:
            return
        steps = min(int((at_s - self.began_s) / self.step_s), self.steps_total - self.step)
        self.step += steps
        self.began_s += steps * self.step_s


class _Machine:
    def __init__(self, machine: Machine, slots: int) -> None:
        self.id = machine.id
        self.slots = slots
        self.workers: dict[str, str] = {}  # worker -> job
        self.started: dict[str, None] = {}


class SimulatedWorld:
    """Virtual time, one seeded cloud, and everything that the manager talks to."""

    def __init__(
        self,
        cloud: SimulatedCloud,
        scenario: Scenario,
        kill: Callable[[str], bool] | None = None,
    ) -> None:
        self.cloud = cloud
        self.now_s = cloud.market.start_s
        self.end_s = self.now_s + scenario.days * DAY_S
        self.faults = scenario.faults
        self.pace = scenario.pace
        self.jobs: dict[str, _Job] = {}
        self.machines: dict[str, _Machine] = {}
        self.commits: dict[str, int] = {}
        self.evictions = 0
        self.restarts = 0
        self.dry_until_s = -1.0
        self._steps_total = scenario.steps
        self._microbatches = scenario.microbatches
        self._random = Random(scenario.seed)  # noqa: S311 - replayable by design
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._nth = 0
        self._ready: list[AnyEvent] = []
        self._answers: list[AnyEvent] = []
        self._taken: AnyEvent | None = None
        self._life = 0
        self._kill = kill or (lambda _: self._chance(self.faults.killed))
        self._slots = {kind.name: kind.slots for kind in cloud.catalogue()[0]}
        self._plan_bad_days()

    # --- the seam -------------------------------------------------------------------------------

    async def next_event(self, by_s: float) -> AnyEvent | None:
        """Move virtual time to whatever comes first."""
        self._taken = None
        while not (self._answers or self._ready):
            change_s = self.cloud.next_change_s()
            queued_s = self._queue[0][0] if self._queue else float("inf")
            first_s = min(queued_s, float("inf") if change_s is None else change_s)
            if min(first_s, by_s) > self.end_s:
                return None
            if by_s <= first_s:
                self.now_s = max(self.now_s, by_s)
                return Tick(at_s=self.now_s)
            self.now_s = max(self.now_s, first_s)
            if change_s is not None and change_s <= queued_s:
                for change in self.cloud.advance(self.now_s):
                    self._cloud_changed(change)
            else:
                heappop(self._queue)[2]()
        if self._answers:
            return self._answers.pop(0)
        self._taken = self._ready.pop(0)
        return self._taken

    async def perform(self, action: AnyAction) -> None:
        self.await_point("perform")
        match action:
            case Launch():
                self._launch(action.request)
            case Terminate():
                self._terminate(action.machine_id)
            case ListMachines():
                self._list(action.provider)
            case OpenJob():
                if action.order.job not in self.jobs:
                    job = _Job(action.order.job, self._steps_total, self._microbatches)
                    self.jobs[job.id] = job
                self.jobs[action.order.job].done = False
            case StartWorker():
                self._start_worker(action)
            case StopWorker():
                self._stop_worker(action.worker, action.machine_id)
            case Regroup():
                self._regroup(self.jobs[action.job], action)
            case WriteCheckpoint():
                self._checkpoint(action.job)
            case CloseJob():
                self._halt(self.jobs[action.job])
            case Note() | Stop():
                pass
            case _:
                assert_never(action)

    async def show(self, state: State) -> None:
        """Nobody watches a simulation while it runs."""

    # --- deaths of the manager ------------------------------------------------------------------

    def await_point(self, where: str) -> None:
        """The manager may be killed wherever it waits."""
        if self._kill(where):
            raise Killed(where)

    def restart(self) -> None:
        """A new manager starts: answers to the old one are lost, the durable inbox is not."""
        self._answers.clear()
        self._life += 1
        self.restarts += 1
        if self._taken is not None:
            self._ready.insert(0, self._taken)
            self._taken = None
        self.now_s += self.pace.restart_s * self._random.uniform(0.2, 2.0)

    def start(self, epoch: int, settings: Settings) -> None:
        """What a manager hears first: that it has started, and what is sold at which prices."""
        types, pools = self.cloud.catalogue()
        provider = self.cloud.market.catalogue.cloud
        quotes = tuple(self.cloud.quotes(self.now_s))
        self._answers += [
            ManagerStarted(at_s=self.now_s, epoch=epoch, settings=settings),
            CatalogueSeen(at_s=self.now_s, provider=provider, types=types, pools=pools),
            QuotesSeen(at_s=self.now_s, provider=provider, quotes=quotes),
        ]

    def say(self, event: AnyEvent) -> None:
        """Something that a person said; it goes through the durable inbox."""
        self._ready.append(event)

    def at(self, at_s: float, what: Callable[[], None]) -> None:
        self._nth += 1
        heappush(self._queue, (at_s, self._nth, what))

    # --- calls to the cloud ---------------------------------------------------------------------

    def _answer(self, event: AnyEvent, delay_s: float | None = None) -> None:
        """An answer reaches only the manager that asked."""
        life = self._life
        wait_s = self.pace.answer_s if delay_s is None else delay_s

        def arrive() -> None:
            if life == self._life:
                self._answers.append(msgspec.structs.replace(event, at_s=self.now_s))

        self.at(self.now_s + wait_s, arrive)

    def _launch(self, request: LaunchRequest) -> None:
        lost = self._chance(self.faults.unreachable)
        try:
            if lost and self._chance(0.5):
                raise ProviderUnreachable("the request was lost")
            if self.now_s < self.dry_until_s:
                raise NoCapacity(f"{request.pool.key} has run dry")
            machine = self.cloud.launch(request, self.now_s)
            self.await_point("launched")
            if lost:
                raise ProviderUnreachable("the answer was lost")
        except CloudError as error:
            self._answer(
                LaunchFailed(at_s=0.0, token=request.token, code=error.code, error=str(error))
            )
            return
        self._answer(Launched(at_s=0.0, token=request.token, machine=machine))

    def _terminate(self, machine_id: str) -> None:
        if self._chance(self.faults.unreachable):
            return
        self.cloud.terminate([machine_id], self.now_s)
        self.await_point("terminated")
        self._machine_dies(machine_id)
        self._answer(Terminated(at_s=0.0, machine_id=machine_id))

    def _list(self, provider: str) -> None:
        if self._chance(self.faults.unreachable):
            self._answer(ListFailed(at_s=0.0, provider=provider, error="no answer"))
            return
        lag_s = self.faults.listing_lag_s
        machines = tuple(
            m for m in self.cloud.machines() if not lag_s or m.launched_at_s + lag_s <= self.now_s
        )
        asked_at_s = self.now_s
        self._answer(Listed(at_s=0.0, provider=provider, asked_at_s=asked_at_s, machines=machines))

    # --- what the cloud does --------------------------------------------------------------------

    def _cloud_changed(self, change: Change) -> None:
        match change:
            case Booted():
                machine = _Machine(change.machine, self._slots[change.machine.pool.type])
                self.machines[machine.id] = machine
                self.at(self.now_s + self.pace.join_s, lambda: self._join(machine))
            case Noticed():
                self._report(NoticeSeen(at_s=0.0, notice=change.notice), self.pace.notice_poll_s)
            case Evicted():
                self.evictions += 1
                self._machine_dies(change.machine_id)
            case PricesMoved():
                provider = self.cloud.market.catalogue.cloud
                event = QuotesSeen(at_s=self.now_s, provider=provider, quotes=change.quotes)
                self._answers.append(event)
            case _:
                assert_never(change)

    def _join(self, machine: _Machine) -> None:
        if machine.id in self.machines:
            self._report(
                AgentJoined(
                    at_s=0.0, machine_id=machine.id, address="10.0.0.1", slots=machine.slots
                ),
                0.0,
            )

    def _machine_dies(self, machine_id: str) -> None:
        machine = self.machines.pop(machine_id, None)
        if machine is None:
            return
        for worker, job_id in list(machine.workers.items()):
            self._worker_dies(machine, worker, self.jobs[job_id], "connection")
        self._report(
            AgentLost(at_s=0.0, machine_id=machine_id, why="the node is gone"),
            self.pace.agent_detect_s,
        )

    # --- workers and the keeper -----------------------------------------------------------------

    def _start_worker(self, order: StartWorker) -> None:
        machine = self.machines.get(order.machine_id)
        if machine is None or order.worker in machine.started:
            return
        machine.started[order.worker] = None
        machine.workers[order.worker] = order.job
        self.at(
            self.now_s + self.pace.worker_start_s * self._random.uniform(0.7, 1.5),
            lambda: self._worker_ready(machine, order.worker),
        )

    def _worker_ready(self, machine: _Machine, worker: str) -> None:
        if self.machines.get(machine.id) is not machine or worker not in machine.workers:
            return
        job = self.jobs[machine.workers[worker]]
        job.present[worker] = machine.id
        self._report(
            WorkerReady(
                at_s=0.0,
                job=job.id,
                worker=worker,
                machine_id=machine.id,
                microbatches=job.microbatches,
                steps_total=job.steps_total,
                state_bytes=GIB // 8,
            ),
            0.0,
        )
        self._plan_worker_death(machine, worker, job)

    def _plan_worker_death(self, machine: _Machine, worker: str, job: _Job) -> None:
        for rate_per_h, failing in (
            (self.faults.worker_dies_per_h, False),
            (self.faults.script_fails_per_h, True),
        ):
            if rate_per_h > 0:
                after_s = self._random.expovariate(rate_per_h) * HOUR_S
                self.at(
                    self.now_s + after_s,
                    lambda failing=failing: self._worker_falls(machine, worker, job, failing),  # type: ignore[misc]
                )

    def _worker_falls(self, machine: _Machine, worker: str, job: _Job, failing: bool) -> None:
        if worker not in machine.workers or self.machines.get(machine.id) is not machine:
            return
        if failing:
            self._leave(machine, worker, job)
            trace = "Traceback (most recent call last):\nRuntimeError: seeded failure"
            event = WorkerFailed(
                at_s=0.0, job=job.id, worker=worker, kind="exception", detail=trace
            )
            self._report(event, self.pace.detect_s)
        else:
            self._worker_dies(machine, worker, job, "exited")

    def _worker_dies(self, machine: _Machine, worker: str, job: _Job, cause: LossCause) -> None:
        known = worker in job.present
        self._leave(machine, worker, job)
        if known and not job.done:
            self._report(
                WorkerLost(at_s=0.0, job=job.id, worker=worker, cause=cause), self.pace.detect_s
            )

    def _leave(self, machine: _Machine, worker: str, job: _Job) -> None:
        """Whoever is in the layout and leaves stops the running step; what is committed stays."""
        machine.workers.pop(worker, None)
        if job.present.pop(worker, None) is None:
            return
        if job.layout is not None and worker in job.layout.workers and job.began_s is not None:
            job.advance(self.now_s)
            job.began_s = None
            job.version += 1

    def _stop_worker(self, worker: str, machine_id: str) -> None:
        machine = self.machines.get(machine_id)
        if machine is not None and worker in machine.workers:
            self._leave(machine, worker, self.jobs[machine.workers[worker]])

    def _regroup(self, job: _Job, action: Regroup) -> None:
        if action.layout.generation <= job.generation or job.done:
            return
        job.generation = action.layout.generation
        absent = [w for w in action.layout.workers if w not in job.present]
        for worker in absent:
            self._report(
                WorkerLost(at_s=0.0, job=job.id, worker=worker, cause="connection"),
                self.pace.detect_s,
            )
        if action.when == "now" or job.began_s is None:
            job.advance(self.now_s)
            self._apply(job, action.layout, self.now_s)
            return
        job.advance(self.now_s)
        boundary_s = job.began_s + job.step_s
        layout = action.layout

        def at_boundary() -> None:
            if job.generation == layout.generation and not job.done:
                job.advance(self.now_s)
                self._apply(job, layout, self.now_s)

        self.at(boundary_s, at_boundary)

    def _apply(self, job: _Job, layout: Layout, at_s: float) -> None:
        job.version += 1
        job.layout = layout
        if any(w not in job.present for w in layout.workers):
            job.began_s = None
            return
        job.step_s = self.pace.slot_step_s / len(layout.workers) + 0.02
        job.began_s = at_s + self.pace.morph_s
        version, generation = job.version, layout.generation
        pause_s = self.pace.morph_s + job.step_s

        def first_commit() -> None:
            if job.version == version:
                job.advance(self.now_s)
                self._report(
                    Regrouped(
                        at_s=0.0,
                        job=job.id,
                        generation=generation,
                        step=job.step,
                        pause_s=pause_s,
                    ),
                    0.0,
                    may_be_lost=False,
                )
                self._progress(job, version)

        def last_commit() -> None:
            if job.version == version:
                job.advance(self.now_s + 1e-6)
                job.step = job.steps_total
                self._complete(job)

        self.at(job.began_s + job.step_s * 1.001, first_commit)
        self.at(job.began_s + (job.steps_total - job.step) * job.step_s + 1e-3, last_commit)

    def _progress(self, job: _Job, version: int) -> None:
        if job.version != version or job.done:
            return
        job.advance(self.now_s)
        self._commit(job)
        event = Progress(
            at_s=0.0,
            job=job.id,
            generation=job.generation if job.layout is None else job.layout.generation,
            step=job.step,
            steps_total=job.steps_total,
            loss=1.0 / (1 + job.step),
            step_s=job.step_s,
        )
        self._report(event, 0.0, may_be_lost=False)
        backup = BackupHeld(at_s=0.0, job=job.id, step=job.step, state_bytes=GIB // 8)
        self._report(backup, 0.0, may_be_lost=False)
        self.at(self.now_s + self.pace.progress_every_s, lambda: self._progress(job, version))

    def _commit(self, job: _Job) -> None:
        """What is committed never goes back, whatever the manager does."""
        before = self.commits.get(job.id, 0)
        if job.step < before:
            raise AssertionError(f"job {job.id}: commit {before} went back to {job.step}")
        self.commits[job.id] = job.step

    def _complete(self, job: _Job) -> None:
        self._commit(job)
        self._halt(job)
        event = JobCompleted(
            at_s=0.0,
            job=job.id,
            step=job.step,
            loss=1.0 / (1 + job.step),
            weights_sha="",
            export_uri=f"memory:{job.id}",
        )
        self._report(event, self.pace.detect_s, may_be_lost=False)

    def _checkpoint(self, job_id: str) -> None:
        job = self.jobs[job_id]
        job.advance(self.now_s)
        event = CheckpointWritten(
            at_s=0.0, job=job_id, step=job.step, state_bytes=GIB // 8, uri=f"memory:{job_id}"
        )
        self._report(event, self.pace.answer_s, may_be_lost=False)

    def _halt(self, job: _Job) -> None:
        job.advance(self.now_s)
        self._commit(job)
        job.done, job.began_s, job.layout = True, None, None
        job.version += 1

    # --- what goes wrong ------------------------------------------------------------------------

    def _chance(self, probability: float) -> bool:
        return probability > 0 and self._random.random() < probability

    def _report(self, event: AnyReport, delay_s: float, *, may_be_lost: bool = True) -> None:
        """Into the durable inbox: at least once as a rule, late or not at all on a bad day."""
        faults = self.faults
        if may_be_lost and self._chance(faults.report_lost):
            return
        copies = 2 if self._chance(faults.report_twice) else 1
        seen_s = self.now_s
        for _ in range(copies):
            late_s = self._random.uniform(0, 60) if self._chance(faults.report_late) else 0.0
            stamped: AnyReport = msgspec.structs.replace(event, at_s=seen_s + delay_s)
            self.at(
                self.now_s + delay_s + late_s,
                lambda stamped=stamped: self._ready.append(stamped),  # type: ignore[misc]
            )

    def _plan_bad_days(self) -> None:
        faults = self.faults
        for every_s, what in (
            (faults.bulk_loss_every_s, self._bulk_loss),
            (faults.drought_every_s, self._drought),
            (faults.clock_jump_every_s, self._clock_jump),
            (faults.notice_withdrawn and HOUR_S / faults.notice_withdrawn, self._false_notice),
        ):
            if every_s > 0:
                self._repeat(every_s, what)

    def _repeat(self, every_s: float, what: Callable[[], None]) -> None:
        def again() -> None:
            what()
            self._repeat(every_s, what)

        self.at(self.now_s + self._random.expovariate(1 / every_s), again)

    def _bulk_loss(self) -> None:
        alive = sorted(self.machines)
        share = self._random.choice((0.3, 0.6, 1.0))
        victims = [m for m in alive if self._random.random() < share]
        self.cloud.revoke(victims, self.now_s, self._random.choice((0.0, 0.0, 30.0, 120.0)))

    def _drought(self) -> None:
        self.dry_until_s = self.now_s + self.faults.drought_s

    def _clock_jump(self) -> None:
        self.now_s += self._random.uniform(10, 100)

    def _false_notice(self) -> None:
        """A notice that nobody comes for: withdrawn."""
        alive = sorted(self.machines)
        if alive:
            deadline_s = self.now_s + self._random.choice((-5.0, 30.0, 120.0))
            notice = Notice(
                machine_id=self._random.choice(alive), kind="terminate", deadline_s=deadline_s
            )
            self._report(NoticeSeen(at_s=0.0, notice=notice), 0.0)


# --- whole simulations ---------------------------------------------------------------------------


def simulate(
    days: float = 30.0,
    instances: int = 1000,
    seed: int = 7,
    faults: str = "none",
    journal: Path | None = None,
) -> Outcome:
    """A deployment of so many instances for so many days. `journal` is written as JSON lines."""
    return play(month(days, instances, seed, faults), journal)


def month(days: float, instances: int, seed: int, faults: str = "none") -> Scenario:
    """Jobs of up to 50 slots on a fleet of so many instances, each long enough for the whole time."""
    if days <= 0 or instances < 1:
        raise ValueError(f"simulate: days={days} and instances={instances} must be positive")
    return Scenario(
        seed=seed,
        days=days,
        instances=instances,
        job_slots=min(JOB_SLOTS, instances),
        steps=10**9,
        microbatches=2 * JOB_SLOTS,
        faults=FAULTS[faults],
        pace=Pace(progress_every_s=60.0, slot_step_s=60.0),
        settings=Settings(
            deployment="simulated",
            machines_max=instances,
            control_period_s=60.0,
            listing_period_s=600.0,
            rethink_s=6 * HOUR_S,
        ),
    )


def play(scenario: Scenario, path: Path | None = None) -> Outcome:
    """Run it to the end of its days, without deaths of the manager."""
    journal = DigestJournal(path)
    cloud = cloud_of(scenario)
    world = SimulatedWorld(cloud, scenario)
    began_s = time.perf_counter()
    try:
        world.start(1, scenario.settings)
        for spec in jobs_of(scenario):
            world.say(JobSubmitted(at_s=world.now_s, spec=spec))
        state = loop.run_now(loop.run(world, journal, State()))
    finally:
        journal.close()
    return outcome(scenario, world, state, journal, time.perf_counter() - began_s)


def outcome(
    scenario: Scenario, world: SimulatedWorld, state: State, journal: DigestJournal, wall_s: float
) -> Outcome:
    return Outcome(
        seed=scenario.seed,
        days=scenario.days,
        instances=scenario.instances,
        events=journal.events,
        actions=journal.actions,
        jobs={job.id: job.status for job in state.jobs.values()},
        steps=sum(job.step for job in state.jobs.values()),
        steps_lost=sum(job.steps_lost for job in state.jobs.values()),
        evictions=world.evictions,
        manager_restarts=world.restarts,
        spent_usd=ledger.spent_usd(state.account, state.now_s),
        on_demand_usd=state.account.on_demand_usd,
        bill_usd=sum(world.cloud.bill(world.now_s).values()),
        journal_sha256=journal.digest.hexdigest(),
        journal_bytes=journal.bytes,
        wall_s=wall_s,
    )


def cloud_of(scenario: Scenario) -> SimulatedCloud:
    """Two types in six zones, with room for twice the instances that are wanted."""
    catalogue = Catalogue(
        cloud="simulated",
        types=(
            InstanceType(
                name="s1", cloud="simulated", slots=1, memory_bytes=GIB, on_demand_usd_per_h=0.5
            ),
            InstanceType(
                name="s2", cloud="simulated", slots=2, memory_bytes=GIB, on_demand_usd_per_h=0.95
            ),
        ),
        zones=tuple(
            Zone(name=f"zone-{n}", region=f"region-{n % 3}", dialect="azure" if n % 2 else "ec2")
            for n in range(6)
        ),
        pool_machines=max(1, scenario.instances // 6),
    )
    market = SpotMarket(catalogue, seed=scenario.seed, conduct=scenario.conduct)
    return SimulatedCloud(market, scenario.settings.deployment)


def jobs_of(scenario: Scenario) -> list[JobSpec]:
    return [
        JobSpec(
            job=f"job-{n}",
            script="train.py",
            script_sha="0" * 64,
            slots_min=1,
            slots_max=scenario.job_slots,
            budget_usd=scenario.budget_usd,
        )
        for n in range(max(1, scenario.instances // scenario.job_slots))
    ]
