"""A crew whose layouts are the manager's own decisions; only the cloud is played."""

import contextlib
import os
import signal
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

import msgspec
from crews import SECRET, Crew, Nursery, RedisProcess

from agent.messages import AgentJoined, AnyReport, Regrouped, WorkerOrder
from agent.net.handshake import job_secret
from cloud.model import InstanceType, Listing, Machine, Pool, Quote, Sold
from orchestrator.actions import (
    AnyAction,
    Launch,
    ListMachines,
    OpenJob,
    Regroup,
    StartWorker,
    StopWorker,
    Terminate,
)
from orchestrator.brain.decide import decide
from orchestrator.events import (
    AnyEvent,
    CatalogueSeen,
    JobSpec,
    JobSubmitted,
    Launched,
    Listed,
    ManagerStarted,
    QuotesSeen,
    Terminated,
    Tick,
)
from orchestrator.settings import Settings
from orchestrator.state import Job, State

KIND = InstanceType(
    name="small", cloud="local", slots=1, memory_bytes=1 << 30, on_demand_usd_per_h=0.1
)
POOL = Pool(cloud="local", region="here", zone="here-a", type="small")
TICK_S = 0.05


class Managed(Crew):
    """`settings` are the manager's."""

    def __init__(
        self, redis_process: RedisProcess, nursery: Nursery, folder: Path, **settings: Any
    ) -> None:
        self.state, self._settings = State(), Settings(**settings)
        self.kind = KIND
        self.layouts: list[Regroup] = []
        self.sentences: list[str] = []
        self._machines: dict[str, Machine] = {}
        self._script = b""
        super().__init__(redis_process, nursery, folder)
        threading.Thread(target=self._tick, daemon=True).start()

    def submit(self, script: str, *argv: str, **spec: Any) -> None:
        self._script = script.encode()
        now_s = time.time()
        made = JobSpec(job=self.job, script="train.py", script_sha="", argv=argv, **spec)
        quote = Quote(pool=POOL, at_s=now_s, price_usd_per_h=0.03)
        with self._lock:
            for event in (
                ManagerStarted(at_s=now_s, epoch=1, settings=self._settings),
                CatalogueSeen(
                    at_s=now_s, place=POOL.place, sold=Sold(types=(self.kind,), pools=(POOL,))
                ),
                QuotesSeen(at_s=now_s, place=POOL.place, quotes=(quote,)),
                JobSubmitted(at_s=now_s, spec=made),
            ):
                self._see(event)

    def what_happened(self) -> str:
        return "\n".join(["the manager has said:", *self.sentences[-40:], super().what_happened()])

    @property
    def managed_job(self) -> Job:
        return self.state.jobs[self.job]

    def _tick(self) -> None:
        while not self._closed.wait(TICK_S):
            with self._lock:
                if self.state.jobs and self.state.wake_at_s <= time.time():
                    self._see(Tick(at_s=time.time()))

    def _decide(self, report: AnyReport) -> None:
        if isinstance(report, Regrouped):
            # Where all wait for a core it lasts for seconds, and the next change would have to wait for minutes.
            report = msgspec.structs.replace(report, pause_s=0.0)
        self._see(report)

    def _see(self, event: AnyEvent) -> None:
        events = deque([event])
        while events:
            self.state, actions = decide(self.state, events.popleft())
            for action in actions:
                self.sentences.append(action.because)
                events.extend(self._do(action))

    def _do(self, action: AnyAction) -> list[AnyEvent]:
        now_s = time.time()
        match action:
            case OpenJob():
                self.keeper.open_job(action.order, self._script)
            case StartWorker():
                self._start(action)
            case StopWorker() if action.worker in self.pids:
                with contextlib.suppress(ProcessLookupError):  # it has ended by itself
                    os.kill(self.pids[action.worker], signal.SIGKILL)
            case Regroup():
                self.layouts.append(action)
                self.keeper.regroup(self.job, action.layout, action.when)
            case Launch():
                return self._launch(action, now_s)
            case Terminate():
                self._machines.pop(action.machine_id, None)
                return [Terminated(at_s=now_s, ref=action.ref)]
            case ListMachines():
                machines = tuple(self._machines.values())
                listing = Listing(place=action.place, machines=machines)
                return [Listed(at_s=now_s, asked_at_s=now_s, listing=listing)]
            case _:
                pass
        return []

    def _launch(self, action: Launch, now_s: float) -> list[AnyEvent]:
        token = action.request.token
        machine = Machine(
            id=f"i-{token}",
            token=token,
            pool=action.request.pool,
            market=action.request.market,
            state="running",
            launched_at_s=now_s,
            tags=action.request.tags,
        )
        self._machines[machine.id] = machine
        joined = AgentJoined(at_s=now_s, machine_id=machine.id, address="127.0.0.1", slots=1)
        return [Launched(at_s=now_s, token=token, machine=machine), joined]

    def _start(self, action: StartWorker) -> None:
        order = WorkerOrder(
            job=self.job,
            worker=action.worker,
            machine_id=action.machine_id,
            slot=action.slot,
            keeper_address=self.keeper.address,
            secret=job_secret(SECRET, self.job),
        )
        self.pids[action.worker] = self.nursery.start(order)
