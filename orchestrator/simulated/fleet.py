"""The simulated machines: agents that join and fall silent, workers that start and die."""

from collections.abc import Callable
from zlib import crc32

from agent.messages import (
    AgentJoined,
    AgentLost,
    LossCause,
    WorkerFailed,
    WorkerLost,
    WorkerReady,
)
from cloud.model import Machine, Pool
from orchestrator.actions import OpenJob, Regroup, StartWorker
from orchestrator.simulated.keeper import SimulatedJob
from orchestrator.simulated.scenario import STATE_BYTES, Scenario
from orchestrator.simulated.timeline import Inbox, Luck, Timeline

AGENT_AWAY_S = 10.0
MIXED_OF = 1000
SPELLS, SPELL_S = (1.2, 1.6, 3.0, 8.0), 300.0
TRACEBACK = "Traceback (most recent call last):\nRuntimeError: seeded failure"


class SimulatedMachine:
    """A machine that has booted."""

    def __init__(self, machine: Machine, slots: int) -> None:
        self.id = machine.id
        self.slots = slots
        self.workers: dict[str, str] = {}  # worker -> job
        self.started: dict[str, float] = {}  # when each worker was started, dead ones too


class Fleet:
    """All machines and all jobs, in place of the agents and the keeper."""

    def __init__(self, scenario: Scenario, timeline: Timeline, luck: Luck, inbox: Inbox) -> None:
        self.machines: dict[str, SimulatedMachine] = {}
        self.jobs: dict[str, SimulatedJob] = {}
        self.pools: dict[str, Pool] = {}  # of every machine that ever booted
        self._scenario = scenario
        self._pace = scenario.pace
        self._timeline = timeline
        self._luck = luck
        self._inbox = inbox

    # --- machines -----------------------------------------------------------------------------

    def boot(self, machine: Machine, slots: int) -> None:
        booted = SimulatedMachine(machine, slots)
        self.machines[machine.id] = booted
        self.pools[machine.id] = machine.pool
        if not self._luck.chance(self._luck.faults.never_joins):
            self._timeline.after(self._pace.join_s, lambda: self._join(booted))
            wait_s = self._luck.wait_s(self._luck.faults.agent_dies_per_h)
            if wait_s is not None:
                self._timeline.after(wait_s, lambda: self._agent_dies(booted))

    def _join(self, machine: SimulatedMachine) -> None:
        if self._is_there(machine):
            joined = AgentJoined(
                at_s=0.0, machine_id=machine.id, address="10.0.0.1", slots=machine.slots
            )
            self._inbox.report(joined, 0.0)

    def _agent_dies(self, machine: SimulatedMachine) -> None:
        """Let the node leave the cluster and come back without its workers."""
        if self._is_there(machine) and self._luck.faults.agent_dies_per_h:
            self._lose_workers(machine)
            lost = AgentLost(at_s=0.0, machine_id=machine.id, why="its node does not answer")
            self._inbox.report(lost, self._pace.agent_detect_s)
            self._timeline.after(AGENT_AWAY_S, lambda: self._join(machine))

    def machine_dies(self, machine_id: str) -> None:
        machine = self.machines.pop(machine_id, None)
        if machine is not None:
            self._lose_workers(machine)
            lost = AgentLost(at_s=0.0, machine_id=machine_id, why="its node is gone")
            self._inbox.report(lost, self._pace.agent_detect_s)

    def _lose_workers(self, machine: SimulatedMachine) -> None:
        for worker in list(machine.workers):
            self._worker_dies(machine, worker, "connection")

    def _is_there(self, machine: SimulatedMachine) -> bool:
        return self.machines.get(machine.id) is machine

    # --- workers ------------------------------------------------------------------------------

    def start_worker(self, order: StartWorker) -> None:
        """Start a worker; a second order for the same worker has no effect."""
        machine = self.machines.get(order.machine_id)
        if machine is None or order.worker in machine.started:
            return
        machine.started[order.worker] = self._timeline.now_s
        machine.workers[order.worker] = order.job
        self._timeline.after(
            self._pace.worker_start_s * self._luck.random.uniform(0.7, 1.5),
            lambda: self._worker_ready(machine, order.worker),
        )

    def _worker_ready(self, machine: SimulatedMachine, worker: str) -> None:
        if not self._is_there(machine) or worker not in machine.workers:
            return
        job = self.jobs[machine.workers[worker]]
        job.present[worker] = machine.id
        ready = WorkerReady(
            at_s=0.0,
            job=job.id,
            worker=worker,
            machine_id=machine.id,
            microbatches=job.microbatches,
            steps_total=job.steps_total,
            state_bytes=STATE_BYTES,
            uncuttable="" if self._scenario.sections > 1 else "it is in one piece",
            stages_max=max(self._scenario.sections, 1),
            hardware=self._key_of(machine),
        )
        self._inbox.report(ready, 0.0)
        faults = self._luck.faults
        self._plan(faults.worker_dies_per_h, lambda: self._worker_exits(machine, worker))
        self._plan(faults.script_fails_per_h, lambda: self._script_fails(machine, worker))
        self._plan(faults.slow_per_h, lambda: self._spell(machine, worker))

    def _key_of(self, machine: SimulatedMachine) -> str:
        """Return a hardware key; the machines of a type have several, as those of a cloud may."""
        kinds = self._scenario.kinds
        own = crc32(machine.id.encode()) % MIXED_OF < self._scenario.mixed * MIXED_OF
        name = f"its {machine.id}" if own else self.pools[machine.id].key
        return f"kind {crc32(name.encode()) % kinds}" if kinds else ""

    def _plan(self, rate_per_h: float, what: Callable[[], None]) -> None:
        wait_s = self._luck.wait_s(rate_per_h)
        if wait_s is not None:
            self._timeline.after(wait_s, what)

    def _spell(self, machine: SimulatedMachine, worker: str) -> None:
        """Slow a worker down for a while, as another tenant of the same host would."""
        if worker in machine.workers and self._luck.faults.slow_per_h:
            job = self.jobs[machine.workers[worker]]
            job.run_at(worker, self._luck.random.choice(SPELLS))
            spell_s = self._luck.random.expovariate(1 / SPELL_S)
            self._timeline.after(spell_s, lambda: job.run_at(worker, 1.0))

    def _worker_exits(self, machine: SimulatedMachine, worker: str) -> None:
        if worker in machine.workers and self._luck.faults.worker_dies_per_h:
            self._worker_dies(machine, worker, "exited")

    def _script_fails(self, machine: SimulatedMachine, worker: str) -> None:
        if worker in machine.workers and self._luck.faults.script_fails_per_h:
            job = self._leave(machine, worker)
            failed = WorkerFailed(
                at_s=0.0, job=job.id, worker=worker, kind="exception", detail=TRACEBACK
            )
            self._inbox.report(failed, self._pace.detect_s)

    def _worker_dies(self, machine: SimulatedMachine, worker: str, cause: LossCause) -> None:
        known = worker in self.jobs[machine.workers[worker]].present
        job = self._leave(machine, worker)
        if known and not job.done:
            lost = WorkerLost(at_s=0.0, job=job.id, worker=worker, cause=cause)
            self._inbox.report(lost, self._pace.detect_s)

    def _crash(self, worker: str) -> None:
        """Let a worker crash: its connection breaks, and then its agent reports why."""
        machine = next((m for m in self.machines.values() if worker in m.workers), None)
        if machine is None:
            return
        job = self.jobs[machine.workers[worker]]
        self._worker_dies(machine, worker, "connection")
        lost = WorkerLost(
            at_s=0.0,
            job=job.id,
            worker=worker,
            machine_id=machine.id,
            cause="exited",
            signal="SIGABRT",
            detail="train.py, line 9 in <module>",
            printed=("about to crash",),
            lived_s=self._timeline.now_s - machine.started[worker],
        )
        self._inbox.report(lost, self._pace.detect_s)

    def stop_worker(self, worker: str, machine_id: str) -> None:
        machine = self.machines.get(machine_id)
        if machine is not None and worker in machine.workers:
            self._leave(machine, worker)

    def _leave(self, machine: SimulatedMachine, worker: str) -> SimulatedJob:
        job = self.jobs[machine.workers.pop(worker)]
        job.leave(worker)
        return job

    # --- jobs ---------------------------------------------------------------------------------

    def close_job(self, job: str) -> None:
        if (opened := self.jobs.get(job)) is not None:
            opened.halt()

    def open_job(self, action: OpenJob) -> None:
        known = self.jobs.get(action.order.job)
        if known is not None:
            known.reopen()
            return
        self.jobs[action.order.job] = SimulatedJob(
            action.order,
            self._scenario,
            (self._timeline, self._inbox),
            self._crash,
            self.pools,
        )

    def regroup(self, action: Regroup) -> None:
        self.jobs[action.job].regroup(action.layout, action.when)
