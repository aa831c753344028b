"""What is for sale now: types, prices, quotas and scores of every place that the settings enable."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from cloud.errors import CloudError
from cloud.market import LOCAL, SpotMarket
from cloud.model import Closed, Market, Place, Pool, Quote, Score, Sold, Traits
from cloud.provider import Provider, Scores
from cloud.replay import read_prices
from cloud.simulated import SimulatedCloud
from orchestrator import clouds
from orchestrator.client import Client, House, local_cloud
from orchestrator.config import Config, ConfigError

PLACE_S = 90.0


class PlannedSale(msgspec.Struct, frozen=True, kw_only=True):
    """What providers sell now, and the source of that answer.

    `scores` are the clouds' own. `silent` has a sentence for each place that cannot be asked.
    """

    places: dict[Place, Sold]
    quotes: tuple[Quote, ...]
    source: str
    traits: dict[str, Traits] = {}
    scores: dict[Pool, Score] = {}
    silent: tuple[str, ...] = ()

    def joined(self, other: "PlannedSale") -> "PlannedSale":
        return PlannedSale(
            places=self.places | other.places,
            quotes=self.quotes + other.quotes,
            source=" and ".join(filter(None, (self.source, other.source))),
            traits=self.traits | other.traits,
            scores=self.scores | other.scores,
            silent=self.silent + other.silent,
        )

    def quotes_of(self, place: Place) -> tuple[Quote, ...]:
        return tuple(quote for quote in self.quotes if quote.pool.place == place)

    def score(self, pool: Pool, market: Market) -> Score | None:
        return None if market == "on_demand" else self.scores.get(pool)

    def room(self, pool: Pool, market: Market) -> int | None:
        """Return how many machines the quotas still allow; None where none is known."""
        sold = self.places[pool.place]
        kind = next((kind for kind in sold.types if kind.name == pool.type), None)
        if kind is None or not kind.vcpus:
            return None
        left = [
            max(0, room.vcpus_max - room.vcpus_used) // kind.vcpus
            for room in sold.rooms
            if room.market == market and room.family in ("", kind.family)
        ]
        return min(left, default=None)


class SecondZone(msgspec.Struct, frozen=True, kw_only=True):
    """What it costs when half of a job's slots are in a second zone of the same region."""

    cloud: str
    usd_per_gb: float
    gb_per_step: float | None = None
    usd_per_step: float | None = None
    usd_per_job: float | None = None


def second_zones(
    traits: Mapping[str, Traits], gradient_bytes: float | None, slots: int, steps: int | None
) -> list[SecondZone]:
    """Return the price of a second zone on each cloud that takes one.

    Each ordered pair of N slots exchanges 2 G / N of the gradients' bytes G in a step; two zones
    with half of the slots each have ⌊N/2⌋ ⌈N/2⌉ pairs between them in each direction.
    """
    many = max(2, slots)
    gb = None
    if gradient_bytes is not None:
        gb = 2 * gradient_bytes / many * 2 * (many // 2) * (many - many // 2) / 1e9
    return [
        SecondZone(
            cloud=name,
            usd_per_gb=one.zone_usd_per_gb,
            gb_per_step=gb,
            usd_per_step=None if gb is None else gb * one.zone_usd_per_gb,
            usd_per_job=None if gb is None or steps is None else gb * one.zone_usd_per_gb * steps,
        )
        for name, one in sorted(traits.items())
        if one.zone_usd_per_gb > 0
    ]


def market_now(config: Config, client: Client | None) -> PlannedSale:
    """Return what is sold now by the real clouds, and by the local one if it is enabled.

    Of a local cloud that does not run, it is what a market of its seed would sell.
    """
    real = clouds.real(config)
    running = client is not None and bool(client.house().local_cloud)
    if not (real or running or config.local.enabled):
        raise ConfigError(
            "no cloud is enabled; set local.enabled = true in orchestrator.toml, or: "
            "orchestrator init --cloud aws"
        )
    sale = PlannedSale(places={}, quotes=(), source="")
    if client is not None and running:
        sale = asyncio.run(_of_the_running(client.house()))
    elif config.local.enabled:
        sale = _of_the_seed(config)
    if not real:
        return sale
    sale = sale.joined(asyncio.run(_of_real_clouds(config)))
    if not sale.places:
        raise ConfigError("\n".join(sale.silent) or "no place sells anything")
    return sale


def _of_the_seed(config: Config) -> PlannedSale:
    now_s, prices = time.time(), config.local.prices
    try:
        replay = read_prices(Path(prices), LOCAL) if prices else None
    except (OSError, ValueError) as error:
        raise ConfigError(f"local.prices: {error}") from None
    market = SpotMarket(LOCAL, seed=config.local.seed, start_s=now_s, replay=replay)
    cloud = SimulatedCloud(market, config.manager.deployment)
    places = {place: cloud.sold(place) for place in cloud.places()}
    source = prices or f"the local market of seed {config.local.seed}, as it begins"
    return PlannedSale(places=places, quotes=tuple(cloud.quotes(now_s)), source=source)


async def _of_the_running(house: House) -> PlannedSale:
    async with local_cloud(house) as cloud:
        open_ = [place for place in await cloud.places() if isinstance(place, Place)]
        places = {place: await cloud.sold(place) for place in open_}
        quotes = [quote for place in open_ for quote in await cloud.quotes(place)]
    return PlannedSale(places=places, quotes=tuple(quotes), source="the running local cloud")


async def _of_real_clouds(config: Config) -> PlannedSale:
    async with clouds.opened(config) as opened:
        answers = await asyncio.gather(*(_of_a_cloud(cloud) for cloud in opened))
    sale = PlannedSale(places={}, quotes=(), source="")
    for answer in answers:
        sale = sale.joined(answer)
    return sale


async def _of_a_cloud(cloud: Provider) -> PlannedSale:
    """Return what a cloud sells; one place that does not answer keeps no other from being shown."""
    try:
        listed = await asyncio.wait_for(cloud.places(), PLACE_S)
    except (CloudError, TimeoutError) as error:
        return PlannedSale(places={}, quotes=(), source="", silent=(_why(cloud.name, error),))
    silent = tuple(f"{x.place.key}: {x.because}" for x in listed if isinstance(x, Closed))
    sale = PlannedSale(places={}, quotes=(), source="", silent=silent)
    places = [place for place in listed if isinstance(place, Place)]
    for one in await asyncio.gather(*(_of_a_place(cloud, place) for place in places)):
        sale = sale.joined(one)
    return sale


async def _of_a_place(cloud: Provider, place: Place) -> PlannedSale:
    try:
        return await asyncio.wait_for(_asked(cloud, place), PLACE_S)
    except (CloudError, TimeoutError) as error:
        return PlannedSale(places={}, quotes=(), source="", silent=(_why(place.key, error),))


async def _asked(cloud: Provider, place: Place) -> PlannedSale:
    sold = await cloud.sold(place)
    quotes = await cloud.quotes(place)
    scores: Mapping[Pool, Score] = {}
    silent: Sequence[str] = ()
    if isinstance(cloud, Scores):
        try:
            scores = await cloud.scores(place)
        except CloudError as error:  # they only help a person to choose
            silent = [_why(f"{place.key}: no placement scores", error)]
    return PlannedSale(
        places={place: sold},
        quotes=tuple(quotes),
        source=place.key,
        traits={cloud.name: cloud.traits},
        scores=dict(scores),
        silent=tuple(silent),
    )


def _why(what: str, error: Exception) -> str:
    said = str(error) or f"no answer within {PLACE_S:.0f} s"
    return f"{what}: {said}"
