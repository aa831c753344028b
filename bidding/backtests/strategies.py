"""The compared strategies as data: which policy decides, in which pools, with what state."""

from typing import Literal

import msgspec
import numpy as np

from bidding.backtests.baselines import (
    BIDBRAIN,
    GREEDY,
    ONLY_ON_DEMAND,
    OURS,
    SPOT_FIRST,
    STANDARD,
    STUDY,
    UNIFORM,
)
from bidding.backtests.engine import Decision
from bidding.deadline import NO_BOOK
from bidding.markets.grid import Market
from cloud.clock import HOUR_S

Policy = Literal[
    "on_demand", "standard", "greedy", "study", "bidbrain", "ours", "spot_first", "uniform"
]
POLICIES: dict[Policy, int] = {
    "on_demand": ONLY_ON_DEMAND,
    "standard": STANDARD,
    "greedy": GREEDY,
    "study": STUDY,
    "bidbrain": BIDBRAIN,
    "ours": OURS,
    "spot_first": SPOT_FIRST,
    "uniform": UNIFORM,
}


class Strategy(msgspec.Struct, frozen=True, kw_only=True):
    """A policy, with its pools and its way of keeping state.

    `state` is written to disk at intervals, or kept by tiers of reliability. `among` narrows the
    pools to the fastest type (if its machines are the smallest), the smallest machines of one
    cloud, one cloud, or not at all (the pricing study's freedoms, each including the ones before).
    """

    name: str
    policy: Policy
    state: Literal["checkpoint", "tiers"] = "tiers"
    among: Literal["first_type", "single", "one_cloud", "all"] = "all"
    rechoose_h: float = 0.0


STRATEGIES: tuple[Strategy, ...] = (
    Strategy(name="on-demand only", policy="on_demand"),
    Strategy(name="standard + checkpoint", policy="standard", state="checkpoint"),
    Strategy(name="standard + tiers", policy="standard"),
    Strategy(name="greedy cheapest", policy="greedy"),
    Strategy(name="study: one type", policy="study", among="first_type"),
    Strategy(name="study: + types", policy="study", among="single"),
    Strategy(name="study: + sizes", policy="study", among="one_cloud"),
    Strategy(name="study: + clouds", policy="study"),
    Strategy(name="study: + dynamic", policy="study", rechoose_h=24.0),
    Strategy(name="bidbrain + checkpoint", policy="bidbrain", state="checkpoint"),
    Strategy(name="bidbrain as printed", policy="bidbrain"),
    Strategy(name="ours", policy="ours"),
)

WITH_DEADLINE: tuple[Strategy, ...] = (
    Strategy(name="on-demand only", policy="on_demand"),
    Strategy(name="spot, then on-demand", policy="spot_first"),
    Strategy(name="uniform progress", policy="uniform"),
    Strategy(name="ours", policy="ours"),
)


def plan_of(strategy: Strategy, market: Market, checkpoint_s: float, haste: float) -> Decision:
    """Return the strategy on this market; on demand is allowed, but not every policy uses it."""
    dearest = market.types[int(np.argmax(market.speed))].name
    cloud = market.pools[0].cloud
    single = market.slots == market.slots.min()
    allowed = np.ones(len(market.pools), dtype=np.bool_)
    if strategy.among == "first_type":
        allowed = single & np.array([p.type == dearest for p in market.pools])
        allowed = allowed if allowed.any() else single
    elif strategy.among == "single":
        allowed = single & np.array([p.cloud == cloud for p in market.pools])
    elif strategy.among == "one_cloud":
        allowed = np.array([p.cloud == cloud for p in market.pools])
    return Decision(
        policy=POLICIES[strategy.policy],
        allowed=np.append(allowed, True),
        rechoose_ticks=round(strategy.rechoose_h * HOUR_S / market.tick_s),
        checkpoint_h=checkpoint_s / HOUR_S if strategy.state == "checkpoint" else 0.0,
        haste=haste,
        bid_on_demand=market.rule.bid == "required",
        book=NO_BOOK,
        phase=np.zeros(1, dtype=np.int64),
    )
