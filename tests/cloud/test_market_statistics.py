"""The drawn market has the statistics that it says it is calibrated to, and so have the real series."""

from itertools import takewhile
from pathlib import Path

import market_statistics
import pytest
from market_statistics import Steps

from cloud.market import Catalogue, SpotMarket, Zone, local_type

END_S = 90 * 86_400.0
MACHINES = 16
REAL = Path(__file__).parents[3] / "shared" / "data"

STATED = {
    "calm_share": 0.33,
    "scarce_share": 0.08,
    "quoted_every_h": 6.1,
    "change": 0.0025,
    "change_ninth_decile": 0.0075,
    "least": 0.30,
    "spread": 0.056,
    "memory": 0.996,
}
QUARTILES = (0.306, 0.315, 0.337)
CAPACITY = {"plenty_h": 0.54, "plenty_mean_h": 3.2, "short_h": 0.49, "short_mean_h": 1.9}
DROPS = {"by_half_share": 0.56, "to_zero_share": 0.36}


def market(seed: int, types: int) -> SpotMarket:
    catalogue = Catalogue(
        cloud="local",
        types=tuple(local_type(f"type-{nth}", 1, 1.0) for nth in range(types)),
        zones=tuple(Zone(name=f"zone-{nth}", region="region", dialect="ec2") for nth in range(4)),
        pool_machines=MACHINES,
    )
    return SpotMarket(catalogue, seed=seed)


def drawn(seed: int, types: int, what: str) -> list[Steps]:
    source = market(seed, types)
    ask = getattr(source, what)
    series = (
        takewhile(lambda step: step.at_s < END_S, ask(pool)) for pool in source.catalogue.pools
    )
    return [market_statistics.changes((step.at_s, step.value) for step in it) for it in series]


def real(part: str) -> Path:
    if not REAL.exists():
        pytest.skip(f"{REAL} is missing: the real series are not part of the repository")
    return REAL / part


def test_drawn_prices_have_the_stated_statistics():
    """Shares of pools within 0.07; levels within 5 %; what moves, how often and how far within 15 %."""
    found = market_statistics.prices(drawn(1, 60, "prices"), END_S)
    for share in ("calm_share", "scarce_share"):
        assert getattr(found, share) == pytest.approx(STATED[share], abs=0.07)
    assert found.level_quartiles == pytest.approx(QUARTILES, rel=0.05)
    for name in ("quoted_every_h", "change", "change_ninth_decile", "spread"):
        assert getattr(found, name) == pytest.approx(STATED[name], rel=0.15), name
    assert found.memory == pytest.approx(STATED["memory"], abs=0.002)
    assert found.least == pytest.approx(0.30)
    assert found.share_of_time_above_half < 0.03


def test_drawn_capacity_has_the_stated_statistics():
    """How long there is room and how long there is less, within 30 %; how deep drops are, within 0.08."""
    series = drawn(1, 10, "capacity")
    found = market_statistics.capacity(series, MACHINES)
    for name, value in CAPACITY.items():
        assert getattr(found, name) == pytest.approx(value, rel=0.30), name
    fell = market_statistics.drops(series)
    for name, value in DROPS.items():
        assert getattr(fell, name) == pytest.approx(value, abs=0.08), name


def test_the_real_prices_have_the_stated_statistics():
    """What the market says of the real prices is so: computed anew from the rows."""
    pools, end_s = market_statistics.aws_prices(real("prices/aws-2020"))
    found = market_statistics.prices(pools, end_s)
    assert found.pools == 64
    for name, value in STATED.items():
        assert getattr(found, name) == pytest.approx(value, rel=0.03), name
    assert found.level_quartiles == pytest.approx(QUARTILES, rel=0.01)
    assert found.share_of_time_above_half == pytest.approx(0.007, abs=0.001)


def test_the_real_probes_have_the_stated_statistics():
    """The same for the capacity: ten pools, one of them probed for sixteen machines."""
    pools = market_statistics.probes(
        real("availability/spot-traces/availability"), "*2023/*v100_*.json"
    )
    found = market_statistics.capacity(pools, 1)
    for name, value in CAPACITY.items():
        assert getattr(found, name) == pytest.approx(value, rel=0.03), name
    many = [steps for steps in pools if max(value for _, value in steps) > 1]
    fell = market_statistics.drops(many)
    for name, value in DROPS.items():
        assert getattr(fell, name) == pytest.approx(value, abs=0.01), name
