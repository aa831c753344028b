"""Every seller of machines that there is, set up alike: three machines a pool, five slots in all."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Protocol

from msgspec.structs import replace
from running_cloud import RunningCloud

from cloud.clock import VirtualClock
from cloud.market import LOCAL, Conduct, SpotMarket
from cloud.provider import Provider, all_machines
from cloud.simulated import SimulatedCloud, SimulatedProvider

POOL_MACHINES = 3
QUOTA_SLOTS = 5
LIMITS = ("--pool-machines", str(POOL_MACHINES), "--quota-slots", str(QUOTA_SLOTS))


class Seller(Protocol):
    """A cloud under test, and the two things that a test does to it behind the provider's back."""

    def play(self, scene: Callable[[Provider], Awaitable[None]]) -> None: ...

    def pass_time(self) -> None:
        """Let what is under way come about."""
        ...

    async def take_all(self, provider: Provider) -> None:
        """Evict every spot machine, without a warning."""
        ...


class SimulatedSeller:
    def __init__(self) -> None:
        catalogue = replace(LOCAL, pool_machines=POOL_MACHINES, quota_slots=QUOTA_SLOTS)
        market = SpotMarket(catalogue, tempo=0, conduct=Conduct(startup_s=0.02, refused_share=0))
        self.clock = VirtualClock(1.0)
        self.cloud = SimulatedCloud(market, deployment="ours")

    def play(self, scene: Callable[[Provider], Awaitable[None]]) -> None:
        asyncio.run(scene(SimulatedProvider(self.cloud, self.clock)))

    def pass_time(self) -> None:
        self.clock.advance_to(self.clock.now_s() + 1.0)
        self.cloud.advance(self.clock.now_s())

    async def take_all(self, provider: Provider) -> None:
        ids = [machine.id for machine in await all_machines(provider)]
        self.cloud.revoke(ids, self.clock.now_s(), 0.0)


class LocalSeller:
    def __init__(self, directory: Path) -> None:
        self.running = RunningCloud(directory).start(*LIMITS)

    def play(self, scene: Callable[[Provider], Awaitable[None]]) -> None:
        async def played() -> None:
            provider = self.running.provider()
            try:
                await scene(provider)
            finally:
                await provider.close()

        asyncio.run(played())

    def pass_time(self) -> None:
        """Time passes by itself here."""

    async def take_all(self, provider: Provider) -> None:
        other = self.running.provider()
        await other.drill(warning_s=0, nodes="all")
        await other.close()
