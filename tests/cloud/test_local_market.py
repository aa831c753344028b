"""The market is a function of its seed: what it does, to whom, and how fast."""

import json
import time
from itertools import islice, pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from running_cloud import POOLS, request

from cloud.clock import DAY_S
from cloud.errors import Refused
from cloud.local.books import Page, start_of_market
from cloud.market import LOCAL, Conduct, PriceStep, SpotMarket
from cloud.replay import read_prices
from cloud.simulated import Books, Booted, Evicted, Noticed, PricesMoved, SimulatedCloud

POOL = POOLS["ec2"]
CERTAIN = Conduct(startup_s=45.0, refused_share=0.0, unwarned_share=0.0)


def few(steps, count: int = 50) -> list[PriceStep]:
    return list(islice(steps, count))


@given(st.integers(0, 2**32))
def test_the_same_seed_is_the_same_market(seed: int):
    """Every answer depends on the seed and the question, not on what was asked before."""
    one, other = SpotMarket(seed=seed), SpotMarket(seed=seed)
    few(other.prices(LOCAL.pools[-1]))
    assert few(one.prices(POOL)) == few(other.prices(POOL))
    assert few(one.capacity(POOL)) == few(other.capacity(POOL))
    assert one.startup_s("i-1") == other.startup_s("i-1")


def test_another_seed_is_another_market():
    """Twenty seeds give twenty histories of capacity."""
    found = {tuple(step.at_s for step in few(SpotMarket(seed=n).capacity(POOL))) for n in range(20)}
    assert len(found) == 20


@given(st.integers(0, 1000), st.floats(0.1, 1000))
def test_tempo_moves_the_market_and_nothing_else(seed: int, tempo: float):
    """Twice the tempo is the same market in half the time; start-up keeps its pace."""
    slow, fast = SpotMarket(seed=seed, start_s=5.0), SpotMarket(seed=seed, start_s=5.0, tempo=tempo)
    pairs = zip(few(slow.capacity(POOL)), few(fast.capacity(POOL)), strict=True)
    for one, other in pairs:
        assert other.value == one.value
        assert (other.at_s - 5.0) * tempo == pytest.approx(one.at_s - 5.0)
    assert slow.startup_s("i-1") == fast.startup_s("i-1")


def test_a_tempo_of_zero_stands_still():
    """One price and one room for ever; a negative tempo is refused with its value."""
    still = SpotMarket(seed=3, tempo=0)
    assert len(few(still.prices(POOL))) == len(few(still.capacity(POOL))) == 1
    for tempo in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="tempo"):
            SpotMarket(tempo=tempo)


def test_pools_of_a_zone_lose_machines_together():
    """The drops of a zone hit all its pools at the same moment: losses in bulk, and correlated."""
    market = SpotMarket(seed=5)
    drops = []
    for pool in LOCAL.pools[:2]:
        steps = few(market.capacity(pool), 400)
        drops.append({b.at_s for a, b in pairwise(steps) if b.value < a.value})
    assert LOCAL.pools[0].zone == LOCAL.pools[1].zone
    shared = drops[0] & drops[1]
    assert len(shared) > 10
    far = {step.at_s for step in few(market.capacity(LOCAL.pools[-1]), 400)}
    assert not shared & far


def bought(cloud: SimulatedCloud, count: int, at_s: float) -> list[str]:
    ids = []
    for nth in range(count):
        try:
            ids.append(cloud.launch(request(f"t{at_s:.0f}-{nth}"), at_s).id)
        except Refused:
            break
    return ids


@pytest.mark.parametrize("seed", range(10))
def test_a_month_of_holding_all_there_is(seed: int):
    """Held never exceeds what a pool has, every eviction was told of before, and losses come in bulk."""
    market = SpotMarket(replace(LOCAL, pool_machines=16), seed=seed, conduct=CERTAIN)
    cloud = SimulatedCloud(market, deployment="ours")
    warned: dict[str, float] = {}
    bulk = 0
    for hour in range(24 * 30):
        at_s = hour * 3600.0
        evicted = 0
        for change in cloud.advance(at_s):
            match change:
                case Noticed():
                    warned[change.notice.machine_id] = change.notice.deadline_s
                case Evicted():
                    assert warned[change.machine_id] == pytest.approx(change.at_s)
                    evicted += 1
                case Booted() | PricesMoved():
                    pass
        bulk = max(bulk, evicted)
        bought(cloud, 16, at_s)
        alive = [held for held in cloud.machines() if held.state != "terminated"]
        unwarned = [held for held in alive if cloud.notice(held.id) is None]
        assert len(unwarned) <= 16
    assert bulk >= 8


def test_warnings_are_those_of_the_two_clouds():
    """Two minutes on EC2, thirty seconds on Azure, and now and then none at all."""
    market = SpotMarket(seed=1)
    found = {
        name: [market.warning_s(pool, f"i-{n}") for n in range(4000)]
        for name, pool in POOLS.items()
    }
    assert set(found["ec2"]) == {0.0, 120.0}
    assert set(found["azure"]) == {0.0, 30.0}
    for warnings in found.values():
        assert warnings.count(0.0) / 4000 == pytest.approx(0.05, abs=0.02)


def test_machines_take_their_time_to_start():
    """The median is the stated one, and no two machines are alike."""
    market = SpotMarket(seed=1, conduct=CERTAIN)
    delays = sorted(market.startup_s(f"i-{n}") for n in range(1001))
    assert delays[500] == pytest.approx(45.0, rel=0.05)
    assert 15 < delays[0] < delays[-1] < 160
    cloud = SimulatedCloud(market, deployment="ours")
    machine = cloud.launch(request("t"), 0.0)
    assert machine.state == "pending"
    cloud.advance(market.startup_s(machine.id) - 1)
    assert cloud.machine(machine.id).state == "pending"
    (booted,) = [c for c in cloud.advance(market.startup_s(machine.id)) if isinstance(c, Booted)]
    assert booted.machine.state == "running"


def test_a_share_of_launches_is_refused_without_need():
    """As on a real cloud: the pool has room and says no; the same token may be lucky later."""
    market = SpotMarket(
        replace(LOCAL, pool_machines=5000), tempo=0, conduct=Conduct(refused_share=0.2)
    )
    cloud = SimulatedCloud(market, deployment="ours")
    refused = []
    for nth in range(1000):
        try:
            cloud.launch(request(f"t-{nth}"), 1.0)
        except Refused:
            refused.append(f"t-{nth}")
    assert len(refused) / 1000 == pytest.approx(0.2, abs=0.05)
    later = [at_s for at_s in range(2, 60) if not market.refuses(refused[0], float(at_s))]
    assert cloud.launch(request(refused[0]), float(later[0])).token == refused[0]


def history(rows: list[tuple[str, str, str, object]]) -> str:
    names = ("AvailabilityZone", "InstanceType", "Timestamp", "SpotPrice")
    return json.dumps({"SpotPriceHistory": [dict(zip(names, row, strict=True)) for row in rows]})


def test_recorded_prices_are_replayed(tmp_path: Path):
    """Newest first, twice, with absurd rows: what is left is the price as it was, from the first row on."""
    zone, kind = POOL.zone, POOL.type
    path = tmp_path / "prices.json"
    path.write_text(
        history(
            [
                (zone, kind, "2026-01-01T02:00:00.000Z", "0.05"),
                (zone, kind, "2026-01-01T01:00:00.000Z", "0.04"),
                (zone, kind, "2026-01-01T01:00:00.000Z", "0.04"),
                (zone, kind, "2026-01-01T00:30:00.000Z", "0.03"),
                (zone, kind, "2026-01-01T00:00:00.000Z", "0.03"),
                (zone, kind, "2026-01-01T00:10:00.000Z", "-1"),
                (zone, kind, "2026-01-01T00:20:00.000Z", "nan"),
                (zone, kind, "2026-01-01T00:25:00.000Z", "9999"),
                (zone, kind, "yesterday", "0.03"),
                ("elsewhere", kind, "2026-01-01T00:00:00.000Z", "0.01"),
            ]
        )
    )
    market = SpotMarket(start_s=100.0, tempo=10.0, replay=read_prices(path, LOCAL))
    assert few(market.prices(POOL)) == [
        PriceStep(100.0, 0.03),
        PriceStep(100.0 + 360.0, 0.04),
        PriceStep(100.0 + 720.0, 0.05),
    ]


def test_other_systems_are_left_out_and_times_without_a_zone_are_utc(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dump without a filter holds Windows as well; where clocks are put forward an hour is one all the same."""
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    named = {"AvailabilityZone": POOL.zone, "InstanceType": POOL.type}
    rows = [
        {
            **named,
            "Timestamp": "2026-03-29T01:30:00",
            "SpotPrice": "0.03",
            "ProductDescription": "Linux/UNIX",
        },
        {
            **named,
            "Timestamp": "2026-03-29T03:30:00",
            "SpotPrice": "0.04",
            "ProductDescription": "Linux/UNIX",
        },
        {
            **named,
            "Timestamp": "2026-03-29T03:30:00",
            "SpotPrice": "0.09",
            "ProductDescription": "Windows",
        },
    ]
    path = tmp_path / "prices.json"
    path.write_text(json.dumps({"SpotPriceHistory": rows}))
    try:
        assert read_prices(path, LOCAL)[POOL] == [PriceStep(0.0, 0.03), PriceStep(7200.0, 0.04)]
    finally:
        monkeypatch.undo()
        time.tzset()


def test_a_market_goes_on_unless_it_is_another_one_or_long_gone():
    """A restart finds its market by name; after three months of market time it starts anew."""
    page = Page(market="a", start_s=1000.0, books=Books(at_s=2000.0))
    assert start_of_market(page, "a", 1.0, 5000.0) == 1000.0
    assert start_of_market(page, "b", 1.0, 5000.0) == 5000.0
    assert start_of_market(page, "a", 1.0, 500.0) == 500.0
    assert start_of_market(page, "a", 1.0, 1001.0 + 90 * DAY_S) == 1001.0 + 90 * DAY_S
    assert start_of_market(page, "a", 1000.0, 1000.0 + DAY_S) == 1000.0 + DAY_S
    assert start_of_market(None, "a", 1.0, 5000.0) == 5000.0


def test_a_clock_that_jumps_ahead_finds_everything_in_order():
    """A day at once is the same day as minute by minute: what happened, when, and what it cost."""
    once, often = (
        SimulatedCloud(SpotMarket(seed=11, conduct=CERTAIN), deployment="ours") for _ in range(2)
    )
    for cloud in (once, often):
        assert len(bought(cloud, 8, 0.0)) > 2
    told = [change for minute in range(24 * 60) for change in often.advance(minute * 60.0)]
    told += often.advance(DAY_S)
    at_once = once.advance(DAY_S)
    assert at_once == told
    assert [change.at_s for change in at_once] == sorted(change.at_s for change in at_once)
    assert once.bill(DAY_S) == pytest.approx(often.bill(DAY_S))


def test_books_bring_back_what_was_sold():
    """A cloud made from the books of another lists the same machines, all ended, at the same cost."""
    market = SpotMarket(seed=11, conduct=CERTAIN)
    before = SimulatedCloud(market, deployment="ours")
    ids = bought(before, 4, 0.0)
    before.terminate(ids[:1], 100.0)
    books = before.books(200.0)
    after = SimulatedCloud(market, deployment="ours")
    after.restore(books)
    assert after.bill(300.0) == before.bill(200.0)
    assert {held.id: held.ended_at_s for held in after.machines()} == {
        ids[0]: 100.0,
        **dict.fromkeys(ids[1:], 200.0),
    }
    assert after.books(200.0).launches == 4
    after.advance(2 * 3600.0)
    assert after.machines() == []
    after.advance(3 * DAY_S)
    assert after.books(3 * DAY_S).entries == ()
