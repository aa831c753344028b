"""Ray as the engine: finds the machines' nodes, starts an agent on each, and sends orders.

It runs in the manager's process, which is a Ray actor and so already connected. Orders are
submitted at once and in order. Their arrival is awaited beside the loop, because the call to a
dying machine may take seconds to fail.
"""

import asyncio
from collections.abc import Awaitable
from typing import Any, assert_never

import msgspec

from agent.machine.actor import AgentActor
from agent.messages import WorkerOrder
from cloud import private
from orchestrator.actions import (
    CloseJob,
    OpenJob,
    Regroup,
    StartWorker,
    StopWorker,
    WriteCheckpoint,
)
from orchestrator.live.order import NAMESPACE
from orchestrator.live.world import EngineAction, EngineError, NoAgent
from orchestrator.paths import Places

MACHINE = "machine:"
ANSWER_S_MAX = 30.0
PING_S = 1.0


class RayEngine:
    """One keeper, and one agent per machine."""

    def __init__(self, keeper: Any, keeper_address: str, secret: str) -> None:
        self._keeper = keeper
        self._keeper_address = keeper_address
        self._secret = secret
        self._agents: dict[str, Any] = {}
        self._pings: dict[str, asyncio.Future[Any]] = {}
        self._dead: set[str] = set()

    @classmethod
    async def connect(cls, places: Places) -> "RayEngine":
        import ray

        keeper = ray.get_actor("keeper", namespace=NAMESPACE)
        address = await asyncio.wait_for(keeper.address.remote(), ANSWER_S_MAX)
        return cls(keeper, address, private.secret(places.secret("mesh")))

    async def machines(self) -> set[str]:
        """Return the machines whose node is up and whose agent has not died."""
        up = await asyncio.to_thread(_machines_up)
        for machine in up - self._agents.keys() - self._dead:
            self._agents[machine] = self._agent(machine)
        for machine in self._agents.keys() - up:
            del self._agents[machine]
            self._pings.pop(machine, None)
        for machine in list(self._agents):
            self._feel(machine)
        self._dead &= up
        return set(self._agents)

    def _agent(self, machine: str) -> Any:
        """Return the machine's agent; one from an earlier life of the manager is used again."""
        import ray

        return (
            ray.remote(AgentActor)
            .options(
                name=f"agent:{machine}",
                namespace=NAMESPACE,
                lifetime="detached",
                get_if_exists=True,
                num_cpus=0,
                resources={f"{MACHINE}{machine}": 1},
                max_restarts=0,
            )
            .remote(machine_id=machine, keeper_address=self._keeper_address, secret=self._secret)
        )

    def _feel(self, machine: str) -> None:
        """Ping an agent, one ping at a time, and count it as dead if a ping fails."""
        ping = self._pings.get(machine)
        if ping is None:
            self._pings[machine] = asyncio.ensure_future(_ping(self._agents[machine]))
        elif ping.done():
            del self._pings[machine]
            if ping.exception() is not None:
                self._dead.add(machine)
                del self._agents[machine]

    async def do(self, action: EngineAction) -> Awaitable[None]:
        if isinstance(action, StartWorker | StopWorker):
            if action.machine_id not in self._agents:
                await self.machines()  # in the first moment of a manager nobody was looked for yet
            agent = self._agents.get(action.machine_id)
            if agent is None:
                return _refuse(NoAgent("it is no node of this cluster"))
            return _taken(self._to_agent(agent, action), action.machine_id)
        return _taken(self._to_keeper(action), "the keeper")

    def _to_keeper(self, action: OpenJob | CloseJob | Regroup | WriteCheckpoint) -> Any:
        match action:
            case OpenJob():
                return self._keeper.open_job.remote(msgspec.json.encode(action.order))
            case CloseJob():
                return self._keeper.close_job.remote(action.job)
            case Regroup():
                layout = msgspec.json.encode(action.layout)
                return self._keeper.regroup.remote(action.job, layout, action.when)
            case WriteCheckpoint():
                return self._keeper.write_checkpoint.remote(action.job)
            case _:
                assert_never(action)

    def _to_agent(self, agent: Any, action: StartWorker | StopWorker) -> Any:
        if isinstance(action, StopWorker):
            return agent.stop_worker.remote(action.worker)
        order = WorkerOrder(
            job=action.job,
            worker=action.worker,
            machine_id=action.machine_id,
            slot=action.slot,
            keeper_address=self._keeper_address,
            secret=self._secret,
        )
        return agent.start_worker.remote(msgspec.json.encode(order))


def _machines_up() -> set[str]:
    import ray

    return {
        name.removeprefix(MACHINE)
        for node in ray.nodes()
        if node["Alive"]
        for name in node["Resources"]
        if name.startswith(MACHINE)
    }


async def _ping(agent: Any) -> None:
    """Ping an agent, and pause after its answer; raise if it is dead."""
    await agent.ping.remote()
    await asyncio.sleep(PING_S)


async def _taken(ref: Any, who: str) -> None:
    import ray

    try:
        await asyncio.wait_for(ref, ANSWER_S_MAX)
    except (ray.exceptions.RayError, TimeoutError) as error:
        raise EngineError(f"{who} did not take the order: {type(error).__name__}") from error


async def _refuse(error: EngineError) -> None:
    raise error
