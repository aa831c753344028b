"""A market of spot machines: prices, capacity and conduct, as pure functions of a seed.

Nothing here is recorded from a cloud. Every number is drawn by hashing its key, so an answer
depends on the seed and the question, never on earlier questions. The draws are calibrated to these
statistics of public series (computed, not copied):

Prices (64 pools of AWS p2 and p3 machines, December 2019 to March 2020, three regions)
    A third of the pools stand at 0.30 of the on-demand price all the time, 8 % stand close to the
    on-demand price itself, the others move. A moving price changes every 6.1 h by 0.25 % (medians;
    0.75 % at the ninth decile), never below 0.30 of on demand; its mean over three months has the
    quartiles 0.306, 0.315, 0.337, and it spends 0.7 % of its time above 0.50. Changes trend: their
    correlation is 0.47 from one to the next and 0.29 over four, so the logarithm of a price spreads
    by 0.056 although its single steps are small, with a memory of 0.996 from one quote to the next.

Capacity (probes of AWS V100 pools, February and August 2023)
    A pool has capacity for 0.54 h (median; mean 3.2 h) and then has less for 0.49 h (median; mean
    1.9 h). Of the drops seen by 16 machines together, 56 % lose at least half, 36 % lose all.
    Losses in bulk are the normal case, so zones share a process of drops with all their pools.

`docs/market.md` sets the statistics of the drawn market beside these; a test holds it to them.

Not in the series, and therefore assumptions: how long machines take to start, how often a launch is
refused although there is capacity, how many evictions come without a notice.
"""

import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from statistics import NormalDist
from typing import Literal

import msgspec

from cloud.clock import HOUR_S
from cloud.model import InstanceType, Pool

Dialect = Literal["ec2", "azure"]

GIB = 1 << 30

FLOOR_RATIO = 0.30
CALM_SHARE = 0.33
SCARCE_SHARE = 0.08
LEVEL_EXCESS = 0.12
LEVEL_SHIFT = 0.08
QUOTE_EVERY_S = 6.1 * HOUR_S
QUOTE_SPREAD = 0.15
PRICE_STEP = 0.0020
PRICE_MEMORY = 0.995
TREND_STEP = 0.0012
TREND_MEMORY = 0.87

PLENTY_S = 0.54 * HOUR_S
PLENTY_SPREAD = 1.89
SHORT_S = 0.49 * HOUR_S
SHORT_SPREAD = 1.63
DROPS_TO_ZERO = 0.36
DROPS_BY_HALF = 0.56
ZONE_CALMER = 4.0

_NORMAL = NormalDist()


class Zone(msgspec.Struct, frozen=True, kw_only=True):
    """A place of pools. `dialect` is the metadata service in which machines read evictions."""

    name: str
    region: str
    dialect: Dialect


class Catalogue(msgspec.Struct, frozen=True, kw_only=True):
    """What is sold: every type in every zone, with `pool_machines` machines in each pool."""

    cloud: str
    types: tuple[InstanceType, ...]
    zones: tuple[Zone, ...]
    pool_machines: int
    quota_slots: int | None = None

    @property
    def pools(self) -> tuple[Pool, ...]:
        return tuple(
            Pool(cloud=self.cloud, region=zone.region, zone=zone.name, type=kind.name)
            for zone in self.zones
            for kind in self.types
        )


class Conduct(msgspec.Struct, frozen=True, kw_only=True):
    """How the cloud treats its customers. Shares are probabilities per case."""

    startup_s: float = 45.0
    startup_spread: float = 0.35
    refused_share: float = 0.02
    unwarned_share: float = 0.05
    ec2_warning_s: float = 120.0
    azure_warning_s: float = 30.0


class PriceStep(msgspec.Struct, frozen=True):
    """A value that holds from a moment on."""

    at_s: float
    value: float


def local_type(name: str, slots: int, on_demand_usd_per_h: float) -> InstanceType:
    return InstanceType(
        name=name,
        cloud="local",
        slots=slots,
        memory_bytes=2 * GIB * slots,
        on_demand_usd_per_h=on_demand_usd_per_h,
    )


LOCAL = Catalogue(
    cloud="local",
    types=(local_type("local.small", 1, 0.10), local_type("local.large", 2, 0.19)),
    zones=(
        Zone(name="local-east-a", region="local-east", dialect="ec2"),
        Zone(name="local-east-b", region="local-east", dialect="ec2"),
        Zone(name="local-west-1", region="local-west", dialect="azure"),
    ),
    pool_machines=8,
)


class SpotMarket:
    """Everything that happens on the market, independent of purchases.

    `tempo` makes its changes that many times faster; at zero the market stands still. Start-up,
    warnings and refusals keep their pace, because they are the cloud's conduct, not the market's.
    """

    def __init__(
        self,
        catalogue: Catalogue = LOCAL,
        *,
        seed: int = 0,
        start_s: float = 0.0,
        tempo: float = 1.0,
        conduct: Conduct | None = None,
        replay: Mapping[Pool, Sequence[PriceStep]] | None = None,
    ) -> None:
        if not (math.isfinite(tempo) and tempo >= 0):
            raise ValueError(f"the market's tempo must be zero or positive, not {tempo}")
        self.catalogue = catalogue
        self.seed = seed
        self.start_s = start_s
        self.tempo = tempo
        self.conduct = conduct or Conduct()
        self._replay = dict(replay or {})
        self._on_demand = {kind.name: kind.on_demand_usd_per_h for kind in catalogue.types}
        self._dialect = {zone.name: zone.dialect for zone in catalogue.zones}

    def prices(self, pool: Pool) -> Iterator[PriceStep]:
        """Yield the spot price in US dollars per hour; the first step is at the start."""
        market_time = (
            iter(self._replay[pool]) if pool in self._replay else self._synthetic_prices(pool)
        )
        return self._at_tempo(market_time)

    def capacity(self, pool: Pool) -> Iterator[PriceStep]:
        """Yield how many spot machines the pool has room for."""
        sources = [self._plenty("zone", pool.zone, ZONE_CALMER), self._plenty("pool", pool.key, 1)]
        return self._at_tempo(self._smallest(sources))

    def startup_s(self, machine_id: str) -> float:
        """Return the time from the launch to the first-boot script."""
        return self._log_normal(
            self.conduct.startup_s, self.conduct.startup_spread, "startup", machine_id
        )

    def refuses(self, token: str, at_s: float) -> bool:
        """Return whether this launch is refused although the pool has room."""
        return self._draw("refuses", token, at_s) < self.conduct.refused_share

    def warning_s(self, pool: Pool, machine_id: str) -> float:
        """Return how long before its eviction this machine is warned; zero is no warning."""
        if self._draw("unwarned", machine_id) < self.conduct.unwarned_share:
            return 0.0
        ec2 = self._dialect[pool.zone] == "ec2"
        return self.conduct.ec2_warning_s if ec2 else self.conduct.azure_warning_s

    def victim(self, pool: Pool, at_s: float, nth: int, held: int) -> int:
        """Return which of the pool's `held` machines goes as the nth of a drop."""
        return int(self._draw("victim", pool.key, at_s, nth) * held)

    def dialect(self, zone: str) -> Dialect:
        return self._dialect[zone]

    def _at_tempo(self, market_time: Iterator[PriceStep]) -> Iterator[PriceStep]:
        for nth, step in enumerate(market_time):
            if nth == 0:
                yield PriceStep(self.start_s, step.value)
            elif self.tempo == 0:
                return
            else:
                yield PriceStep(self.start_s + step.at_s / self.tempo, step.value)

    def _synthetic_prices(self, pool: Pool) -> Iterator[PriceStep]:
        """Yield prices; x is the log price, l its level, v its trend, f the floor.

        a and b are Laplace draws:

        v' = r v + a,    x' = max(f, l + m (x - l) + v' + b)
        """
        on_demand = self._on_demand[pool.type]
        kind = self._draw("kind", pool.key)
        if kind < CALM_SHARE + SCARCE_SHARE:
            yield PriceStep(0.0, on_demand * (FLOOR_RATIO if kind < CALM_SHARE else 1.0))
            return
        floor = math.log(FLOOR_RATIO)
        excess = -LEVEL_EXCESS * math.log(1 - self._draw("level", pool.key))
        level = floor + excess - LEVEL_SHIFT
        x, trend, at_s, nth = max(floor, level), 0.0, 0.0, 0
        while True:
            yield PriceStep(at_s, round(on_demand * min(1.0, math.exp(x)), 6))
            at_s += self._log_normal(QUOTE_EVERY_S, QUOTE_SPREAD, "quote", pool.key, nth)
            trend = TREND_MEMORY * trend + self._laplace(TREND_STEP, "trend", pool.key, nth)
            x = level + PRICE_MEMORY * (x - level) + trend
            x += self._laplace(PRICE_STEP, "step", pool.key, nth)
            if x < floor:
                x, trend = floor, max(0.0, trend)
            nth += 1

    def _plenty(self, scope: str, name: str, calmer: float) -> Iterator[PriceStep]:
        """Yield the share of full capacity: all of it for a while, then less for a while."""
        at_s, nth = 0.0, 0
        while True:
            yield PriceStep(at_s, 1.0)
            at_s += self._log_normal(PLENTY_S * calmer, PLENTY_SPREAD, "up", scope, name, nth)
            yield PriceStep(at_s, self._left_after_drop(scope, name, nth))
            at_s += self._log_normal(SHORT_S, SHORT_SPREAD, "down", scope, name, nth)
            nth += 1

    def _left_after_drop(self, scope: str, name: str, nth: int) -> float:
        u = self._draw("depth", scope, name, nth)
        if u < DROPS_TO_ZERO:
            return 0.0
        if u < DROPS_BY_HALF:
            return 0.5 * (u - DROPS_TO_ZERO) / (DROPS_BY_HALF - DROPS_TO_ZERO)
        return 0.5 + 0.5 * (u - DROPS_BY_HALF) / (1 - DROPS_BY_HALF)

    def _smallest(self, sources: Sequence[Iterator[PriceStep]]) -> Iterator[PriceStep]:
        """Yield the room in machines that the smallest of several shares leaves."""
        shares = [next(source).value for source in sources]
        room = math.floor(self.catalogue.pool_machines * min(shares))
        yield PriceStep(0.0, room)
        named = [((step.at_s, nth, step.value) for step in it) for nth, it in enumerate(sources)]
        for at_s, nth, share in heapq.merge(*named):
            shares[nth] = share
            if (now := math.floor(self.catalogue.pool_machines * min(shares))) != room:
                room = now
                yield PriceStep(at_s, room)

    def _log_normal(self, median: float, spread: float, *key: str | int) -> float:
        u = min(1 - 1e-9, max(1e-9, self._draw(*key)))
        return median * math.exp(spread * _NORMAL.inv_cdf(u))

    def _laplace(self, scale: float, *key: str | int) -> float:
        u = self._draw(*key) - 0.5
        return -scale * math.copysign(math.log(max(1e-12, 1 - 2 * abs(u))), u)

    def _draw(self, *key: str | float) -> float:
        """Return a uniform number in [0, 1), a function of the seed and the key only."""
        digest = blake2b(repr((self.seed, *key)).encode(), digest_size=7).digest()
        return int.from_bytes(digest) / (1 << 56)
