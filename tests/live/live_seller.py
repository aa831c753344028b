"""A real account, or its fake for a dry run, as the contract suite wants a seller."""

import asyncio
import logging
import os
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from live_guard import SCENES_TAG, Guard
from sellers import AwsSeller, AzureSeller, Seller

from cloud.model import DEPLOYMENT_TAG, LaunchRequest, Machine, Place, Pool
from cloud.provider import Provider, all_machines
from orchestrator.config import load

LOOK_S = 5.0
SWEEP_S = 600.0
FAKES: dict[str, Callable[[], Seller]] = {"aws": AwsSeller, "azure": AzureSeller}
WORDS = {"aws": {"bid": "Spot request price"}, "azure": {"bid": "USD/h"}}


class Order:
    """What SPOT_LIVE, SPOT_LIVE_USD and SPOT_LIVE_CONFIG say."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self.cloud, _, dry = env["SPOT_LIVE"].partition("-")
        self.dry = dry == "dry"
        self.cap_usd = float(env.get("SPOT_LIVE_USD", "0"))
        self.config = Path(env.get("SPOT_LIVE_CONFIG", "orchestrator.toml"))
        if self.cloud not in WORDS or dry not in ("", "dry"):
            raise ValueError("SPOT_LIVE is aws, azure, aws-dry or azure-dry")
        if self.cap_usd <= 0:
            raise ValueError("SPOT_LIVE_USD is the most that this run may cost, for example 2.00")


class GuardedSeller:
    """A seller whose every call is said, counted against the cap, and swept up after."""

    def __init__(
        self,
        new: Callable[[], Seller],
        deployment: str,
        cap_usd: float,
        say: Callable[[str], None] = print,
    ) -> None:
        self._new, self._deployment, self._say = new, deployment, say
        self._inner = inner = new()
        self.pools, self.words, self.remembers = inner.pools, inner.words, inner.remembers
        self.patience_s = inner.patience_s
        self.left_usd = cap_usd

    def request(self, token: str, where: str = "near", deployment: str = "ours") -> LaunchRequest:
        request = self._inner.request(token, where, deployment)
        assert request.tags[DEPLOYMENT_TAG] == SCENES_TAG
        return request

    def play(self, scene: Callable[[Provider], Awaitable[None]]) -> None:
        """Play a scene under tokens that no other has used."""
        self._inner, run = self._new(), f"live{secrets.token_hex(4)}"

        async def guarded(provider: Provider) -> None:
            guard = Guard(provider, run, self._deployment, self.left_usd, self._say)
            try:
                await scene(guard)
            finally:
                await guard.swept(SWEEP_S, lambda: asyncio.to_thread(self._inner.pass_time))
                self.left_usd = guard.left_usd

        self._inner.play(guarded)

    def pass_time(self) -> None:
        self._inner.pass_time()

    async def take_all(self, provider: Provider) -> None:
        """Evict by the cloud's own rehearsal, and wait until they are gone."""
        assert isinstance(provider, Guard)
        running = await _running(provider)
        await provider.rehearse([machine.ref for machine in running])
        until_s = time.monotonic() + self.patience_s
        while await _running(provider):
            assert time.monotonic() < until_s, "the rehearsal took nothing"
            await asyncio.to_thread(self.pass_time)


async def _running(provider: Provider) -> list[Machine]:
    machines = await all_machines(provider)
    return [machine for machine in machines if machine.state == "running"]


class Account:
    """The account of a person's settings: its cheapest pools, and time that really passes."""

    patience_s = 600.0

    def __init__(self, cloud: str, config_path: Path, deployment: str) -> None:
        from orchestrator import clouds

        config = load(config_path, os.environ, {"manager.deployment": deployment})
        self._new: Callable[[], Provider] = lambda: clouds.provider(config, cloud)
        self.words, self.remembers = WORDS[cloud], cloud == "aws"
        self.pools = asyncio.run(self._cheapest(cloud))

    def request(self, token: str, where: str = "near", deployment: str = "ours") -> LaunchRequest:
        tags = {DEPLOYMENT_TAG: deployment, "orchestrator-generation": "3"}
        return LaunchRequest(
            token=token, pool=self.pools[where], market="spot", bid_usd_per_h=None, tags=tags
        )

    def play(self, scene: Callable[[Provider], Awaitable[None]]) -> None:
        async def played() -> None:
            provider = self._new()
            try:
                await scene(provider)
            finally:
                await provider.close()

        asyncio.run(played())

    def pass_time(self) -> None:
        time.sleep(LOOK_S)

    async def take_all(self, provider: Provider) -> None:
        raise NotImplementedError("the guard does this")

    async def _cheapest(self, cloud: str) -> dict[str, Pool]:
        """Return the cheapest spot pool, and one of another type or zone."""
        provider = self._new()
        try:
            places = [place for place in await provider.places() if isinstance(place, Place)]
            quotes = [quote for place in places for quote in await provider.quotes(place)]
        finally:
            await provider.close()
        spot = sorted(
            (x for x in quotes if x.market == "spot"), key=lambda x: (x.price_usd_per_h, x.pool)
        )
        assert len(spot) > 1, "the settings have to name two pools at least"
        nowhere = Pool(cloud=cloud, region="r", zone="z", type="huge")
        return {"near": spot[0].pool, "large": spot[1].pool, "nowhere": nowhere}


class _Calls(logging.Handler):
    """Says each request that a provider sends."""

    def __init__(self, say: Callable[[str], None]) -> None:
        super().__init__()
        self._say = say

    def emit(self, record: logging.LogRecord) -> None:
        self._say(f"    {record.getMessage()}")


def _say_calls(say: Callable[[str], None]) -> None:
    for name in FAKES:
        log = logging.getLogger(f"cloud.{name}")
        log.setLevel(logging.DEBUG)
        log.handlers = [_Calls(say)]


def seller_of(order: Order, say: Callable[[str], None] = print) -> Any:
    """Return the seller that a run is about."""
    _say_calls(say)
    if order.dry:
        return GuardedSeller(FAKES[order.cloud], SCENES_TAG, order.cap_usd, say)
    deployment = f"live-{secrets.token_hex(4)}"
    say(f"everything of this run has the tag {DEPLOYMENT_TAG}={deployment}")
    account = Account(order.cloud, order.config, deployment)
    return GuardedSeller(lambda: account, deployment, order.cap_usd, say)
