"""The agent of a machine, and its workers, as Ray actors.

One agent per machine, one worker per slot. A worker process runs one script and is then replaced, so that
the next one starts in a clean process; the replacement has imported torch before it is needed. The agent
says to the keeper, which has the durable door to the manager, what becomes of its machine and workers.
"""

import asyncio
import os
import shutil
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import msgspec

from agent.messages import AgentJoined, AnyReport, NoticeSeen, WorkerLost, WorkerOrder
from agent.notices import Watcher
from cloud.model import Notice

NAMESPACE = "orchestrator"
SLOTS_VARIABLE = "SPOT_SLOTS"
WORKERS_REMEMBERED = 1000


class WorkerActor:
    """A process for one script. Made early, so that it is warm when it is needed."""

    def __init__(self, host: str, folder: str) -> None:
        import agent.worker  # noqa: F401 - torch and ours are loaded while there is time

        self._host, self._folder = host, Path(folder)

    def run(self, order: bytes) -> str:
        """Run the script of a job, in this process's main thread."""
        from agent.worker import run_order

        folder = self._folder / f"{os.getpid()}"
        folder.mkdir(parents=True, exist_ok=True)
        decoded = msgspec.json.decode(order, type=WorkerOrder)
        return run_order(decoded, self._host, folder, _end)


def _end(why: str) -> None:  # noqa: ARG001 - the keeper has said it to the manager already
    """Nobody wants this worker any more: whatever its script is doing ends with the process."""
    os._exit(0)


class _Slot:
    """A place for one worker, and the warm process that waits in it."""

    def __init__(self) -> None:
        self.actor: Any = None
        self.worker = ""


class AgentActor:
    """Lives on the machine as long as its node does."""

    def __init__(self, machine_id: str, keeper_address: str, secret: str) -> None:
        import ray

        self._machine_id = machine_id
        self._keeper_address, self._secret = keeper_address, secret
        self._host = ray.util.get_node_ip_address()
        self._folder = Path(tempfile.mkdtemp(prefix="agent-"))
        self._slots = [_Slot() for _ in range(int(os.environ.get(SLOTS_VARIABLE, "1")))]
        self._known: dict[str, _Slot | None] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._stop = threading.Event()
        self._keeper = ray.get_actor("keeper", namespace=NAMESPACE)
        for slot in self._slots:
            slot.actor = self._spare()
        self._tell(
            AgentJoined(
                at_s=time.time(),
                machine_id=machine_id,
                address=self._host,
                slots=len(self._slots),
            )
        )
        threading.Thread(
            target=Watcher.of_this_machine().watch,
            args=(self._notice, self._stop),
            name="notices",
            daemon=True,
        ).start()

    async def ping(self) -> int:
        return os.getpid()

    async def start_worker(self, data: bytes) -> None:
        """Give the order to the process that waits in the slot. Twice is once."""
        order = msgspec.json.decode(data, type=WorkerOrder)
        if order.worker in self._known:
            return
        slot = self._slots[order.slot]
        if slot.worker:
            await self.stop_worker(slot.worker)
        self._remember(order.worker, slot)
        slot.worker = order.worker
        task = asyncio.create_task(self._attend(order, slot, slot.actor.run.remote(data)))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def stop_worker(self, worker: str) -> None:
        slot = self._known.get(worker)
        self._known[worker] = None
        if slot is not None and slot.worker == worker:
            self._renew(slot)

    async def _attend(self, order: WorkerOrder, slot: _Slot, ref: Any) -> None:
        """Until the worker's script has ended, or its process has."""
        import ray

        lost = ""
        try:
            await ref
        except ray.exceptions.RayActorError as error:
            lost = f"its process ended: {_first_line(error)}"
        except ray.exceptions.RayError as error:
            lost = f"it could not join its job: {_first_line(error)}"
        if self._known.get(order.worker) is not slot:
            return  # it was stopped
        if lost:
            self._tell(
                WorkerLost(
                    at_s=time.time(),
                    job=order.job,
                    worker=order.worker,
                    cause="exited",
                    detail=lost,
                )
            )
        self._known[order.worker] = None
        if slot.worker == order.worker:
            self._renew(slot)

    def _renew(self, slot: _Slot) -> None:
        import ray

        ray.kill(slot.actor, no_restart=True)
        slot.worker, slot.actor = "", self._spare()

    def _spare(self) -> Any:
        import ray

        return (
            ray.remote(WorkerActor)
            .options(num_cpus=1, resources={f"machine:{self._machine_id}": 1}, max_restarts=0)
            .remote(self._host, str(self._folder))
        )

    def _remember(self, worker: str, slot: _Slot) -> None:
        self._known[worker] = slot
        for old in list(self._known)[: max(0, len(self._known) - WORKERS_REMEMBERED)]:
            if self._known[old] is None:
                del self._known[old]

    def _notice(self, notice: Notice) -> None:
        self._tell(NoticeSeen(at_s=time.time(), notice=notice))

    def _tell(self, report: AnyReport) -> None:
        """Ray repeats the call until the keeper, which may be restarting, has taken it."""
        self._keeper.report.remote(msgspec.json.encode(report))

    def __del__(self) -> None:
        self._stop.set()
        shutil.rmtree(self._folder, ignore_errors=True)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:300] if str(error).strip() else type(error).__name__
