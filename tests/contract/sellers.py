"""Every seller of machines that there is, set up alike: three machines a pool, five slots in all."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import ClassVar, Protocol

from aws_house import BIG, FAR, GPU, AwsHouse
from azure_account import D4, T4
from azure_account import play as play_azure
from cloudfake.arm import ArmDoor
from cloudfake.arm import Dials as ArmDials
from cloudfake.ec2_account import Dials
from msgspec.structs import replace
from running_cloud import POOLS, RunningCloud, request

from cloud.clock import VirtualClock
from cloud.market import LOCAL, Conduct, SpotMarket
from cloud.model import LaunchRequest, Pool
from cloud.provider import Provider, all_machines
from cloud.simulated import SimulatedCloud, SimulatedProvider

POOL_MACHINES = 3
QUOTA_SLOTS = 5
LIMITS = ("--pool-machines", str(POOL_MACHINES), "--quota-slots", str(QUOTA_SLOTS))


class Seller(Protocol):
    """A cloud under test: its pools, its words, and what a test does to it beside the provider."""

    pools: ClassVar[Mapping[str, Pool]]
    words: ClassVar[Mapping[str, str]]
    remembers: ClassVar[bool]
    """Whether an end is over when it was asked for, and ended machines are listed for a while."""
    patience_s: ClassVar[float]
    """How long a state is waited for."""

    def request(self, token: str, where: str = "near", deployment: str = "ours") -> LaunchRequest:
        """Return a request for one spot machine in one of the pools."""
        ...

    def play(self, scene: Callable[[Provider], Awaitable[None]]) -> None: ...

    def pass_time(self) -> None:
        """Let what is under way come about."""
        ...

    async def take_all(self, provider: Provider) -> None:
        """Evict every spot machine, without a warning."""
        ...


class _SellsLocal:
    patience_s: ClassVar[float] = 20.0
    remembers: ClassVar[bool] = True
    pools: ClassVar[Mapping[str, Pool]] = {
        "near": POOLS["ec2"],
        "far": POOLS["azure"],
        "large": replace(POOLS["ec2"], type="local.large"),
        "nowhere": Pool(cloud="local", region="r", zone="z", type="huge"),
    }
    words: ClassVar[Mapping[str, str]] = {
        "no capacity": "NoCapacity",
        "quota": "QuotaExceeded",
        "limit": str(QUOTA_SLOTS),
        "bid": "USD/h",
    }

    def request(self, token: str, where: str = "near", deployment: str = "ours") -> LaunchRequest:
        return request(token, self.pools[where], deployment)


class SimulatedSeller(_SellsLocal):
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


class LocalSeller(_SellsLocal):
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


class AwsSeller:
    """The fake EC2, with boto3 in between."""

    patience_s: ClassVar[float] = 20.0
    remembers: ClassVar[bool] = True
    pools: ClassVar[Mapping[str, Pool]] = {
        "near": GPU,
        "far": FAR,
        "large": BIG,
        "nowhere": Pool(cloud="aws", region="r", zone="z", type="huge"),
    }
    words: ClassVar[Mapping[str, str]] = {
        "no capacity": "InsufficientInstanceCapacity",
        "quota": "VcpuLimitExceeded",
        "limit": "vCPU limit of 100",
        "bid": "Spot request price",
    }

    def __init__(self) -> None:
        self.house = AwsHouse(Dials(startup_s=0.02), room=POOL_MACHINES)
        self.house.account.quota["g", "on-demand"] = 100

    def request(self, token: str, where: str = "near", deployment: str = "ours") -> LaunchRequest:
        return request(token, self.pools[where], deployment)

    def play(self, scene: Callable[[Provider], Awaitable[None]]) -> None:
        self.house.play(scene)

    def pass_time(self) -> None:
        self.house.wait(1.0)

    async def take_all(self, provider: Provider) -> None:
        for machine in list(self.house.account.alive()):
            self.house.account.interrupt(machine.id, self.house.clock.now_s(), 0.0)


class AzureSeller:
    """The fake Azure, with its SDK in between."""

    patience_s: ClassVar[float] = 20.0
    remembers: ClassVar[bool] = False
    pools: ClassVar[Mapping[str, Pool]] = {
        "near": T4,
        "far": replace(T4, region="northcentralus", zone="northcentralus"),
        "large": D4,
        "nowhere": Pool(cloud="azure", region="r", zone="z", type="huge"),
    }
    words: ClassVar[Mapping[str, str]] = {
        "no capacity": "SkuNotAvailable",
        "quota": "OperationNotAllowed",
        "limit": "Current Limit: 16",
        "bid": "USD/h",
    }

    def __init__(self) -> None:
        soon = (0.02, 0.02)
        quotas = {"standardDSv5Family": 16}  # two machines of others and two of ours
        dials = ArmDials(create_s=soon, delete_s=soon, capacity=POOL_MACHINES, quotas=quotas)
        self.door = ArmDoor(dials=dials)

    def request(self, token: str, where: str = "near", deployment: str = "ours") -> LaunchRequest:
        return request(token, self.pools[where], deployment)

    def play(self, scene: Callable[[Provider], Awaitable[None]]) -> None:
        play_azure(self.door, scene)

    def pass_time(self) -> None:
        self.door.pass_s(1.0)

    async def take_all(self, provider: Provider) -> None:
        for name in [vm.name for vm in self.door.vms.values() if vm.spot]:
            self.door.evict(name)
