"""How much of the gap to the clairvoyant bound could any buyer close who does not know the future?

    online.py [starts] [part of a market's name]

A Markov chain of each zone is fitted to the very series that are replayed: what a loss and a return depend on is
the age of the stretch and whether the stretch with capacity before it was short. In that chain a dynamic programme
finds the best policy that there is, for a price of work mu (what a slot-hour saved in time is worth):

    V(t, z, h) = max over h+ of  mu work(h+) - cost(h+) + E_z' [ V(t + 1, z', h') + refund ]

z is the state of every zone, h the zone of our machine and its age up to the free hour. The policy is then run
over the real series beside ours. It was fitted with hindsight, ours was not: what is left between it and the
bound is not in the age of a stretch nor in how the last one went, and nobody can have it from them.
Tables grow with the power of the zones: more than three are too many, and machines that come by the dozen as well.
"""

import sys
from typing import NamedTuple

import msgspec
import numpy as np
from _bidding import real_markets, show
from numpy.typing import NDArray

from bidding.backtests import backtest, clairvoyant
from bidding.backtests.backtest import Work, interval, mean_ratio, world_of
from bidding.backtests.engine import (
    ANY_PRICE,
    BacktestJob,
    BacktestWorld,
    Leases,
    Orders,
    carry_out,
    charge,
    evict,
    granted,
    no_leases,
    work_rate,
)
from bidding.backtests.strategies import STRATEGIES
from bidding.compiled import Floats, Ints, compiled
from bidding.markets.grid import Market

HOUR_TICKS = 12
ON_EDGES = np.array([0, 1, 2, 3, 4, 6, 9, 12, 24, 48, 96, 192])
OFF_EDGES = np.array([0, 1, 2, 4, 8, 16, 48])
ON, OFF = len(ON_EDGES), len(OFF_EDGES)
STATES = 2 * (ON + OFF)  # side and age, after a long stretch and after a short one
NOTHING, RELIABLE, FIRST = 0, 1, 2  # what is held: nothing, on demand, or zone k at an age
AGES = HOUR_TICKS + 1
STOP, STAY_RELIABLE, KEEP, BUY = 0, 1, 2, 3  # what is done; BUY + k is a fresh machine in zone k
AHEAD_TICKS = 288
ZONES_MAX = 3
MUS = (0.4, 0.7)  # what a slot-hour is worth, in on-demand prices
COLUMNS = (
    "price",
    "capacity",
    "hazard_per_h",
    "return_per_h",
    "evicted_in_1h",
    "evicted_in_mood",
    "mood",
)


class Policy(NamedTuple):
    """What is done by [state of all zones, what is held], and the state of all zones at every tick."""

    done: NDArray[np.int8]
    state: Ints


class Prices(NamedTuple):
    """Of a slot-hour in every zone, on demand, and of work; and the hours that a start takes."""

    spot: Floats
    reliable: float
    mu: float
    tick_h: float
    start_h: float


def states_of(on: NDArray[np.bool_]) -> Ints:
    """The state of a zone at every tick."""
    states = np.empty(len(on), dtype=np.int64)
    age, short = 0, 0
    for t in range(len(on)):
        if t > 0 and on[t] != on[t - 1]:
            if on[t - 1]:
                short = int(age + 1 < HOUR_TICKS)
            age = 0
        elif t > 0:
            age += 1
        edges, first = (ON_EDGES, 0) if on[t] else (OFF_EDGES, ON)
        states[t] = 2 * (first + int(np.searchsorted(edges, age, "right")) - 1) + short
    return states


def chain_of(states: Ints) -> Floats:
    """Transition matrix of a zone: how often each state was left for the other side, and how ages advance."""
    is_on = states < 2 * ON
    flips = np.zeros(STATES)
    stays = np.zeros(STATES)
    np.add.at(flips, states[:-1], is_on[1:] != is_on[:-1])
    np.add.at(stays, states[:-1], is_on[1:] == is_on[:-1])
    chain = np.zeros((STATES, STATES))
    for edges, first in ((ON_EDGES, 0), (OFF_EDGES, ON)):
        widths = np.append(np.diff(edges), np.inf)
        for i in range(len(edges)):
            for short in (0, 1):
                here = 2 * (first + i) + short
                both = flips[here - short] + flips[here - short + 1]
                seen = both + stays[here - short] + stays[here - short + 1]
                prior = (both + 0.5) / (seen + 1.0)
                flip = (flips[here] + prior) / (flips[here] + stays[here] + 1.0)
                on = first == 0
                then_short = int(ON_EDGES[i] < HOUR_TICKS - 1) if on else short
                chain[here, 2 * (ON if on else 0) + then_short] += flip
                older = here + 2 if i + 1 < len(edges) else here
                chain[here, older] += (1.0 - flip) / widths[i]
                chain[here, here] += (1.0 - flip) * (1.0 - 1.0 / widths[i])
    return chain


def expected(value: Floats, chains: list[Floats]) -> Floats:
    """E over the next state of every zone; the last axis is what is held."""
    for axis, chain in enumerate(chains):
        value = np.moveaxis(np.tensordot(chain, value, axes=(1, axis)), 0, axis)
    return value


def best_policy(chains: list[Floats], prices: Prices) -> NDArray[np.int8]:
    """What to do by [state of zone 1, ..., what is held], far from the end."""
    zones = len(chains)
    shape = (STATES,) * zones
    on = [_along(np.arange(STATES) < 2 * ON, k, zones) for k in range(zones)]
    value = np.zeros((*shape, FIRST + zones * AGES), dtype=np.float32)
    chains = [c.astype(np.float32) for c in chains]
    done = np.zeros(value.shape, dtype=np.int8)
    for t in range(AHEAD_TICKS):
        ahead = expected(_after(value, on, prices), chains)
        value, done = _step(ahead, on, prices, last=t == AHEAD_TICKS - 1)
    return done


def _along(values: NDArray[np.bool_], axis: int, zones: int) -> NDArray[np.bool_]:
    return values.reshape([-1 if i == axis else 1 for i in range(zones)])


def _after(value: Floats, on: list[NDArray[np.bool_]], prices: Prices) -> Floats:
    """What the next tick is worth with this held now: a lost machine pays back its first hour."""
    after = value.copy()
    for k in range(len(on)):
        for age in range(AGES):
            back = prices.spot[k] * prices.tick_h * (age + 1) if age + 1 < HOUR_TICKS else 0.0
            lost = value[..., NOTHING] + np.float32(back)
            older = value[..., FIRST + k * AGES + min(age + 1, HOUR_TICKS)]
            after[..., FIRST + k * AGES + age] = np.where(on[k], older, lost)
    return after


def _step(
    ahead: Floats, on: list[NDArray[np.bool_]], prices: Prices, *, last: bool
) -> tuple[Floats, NDArray[np.int8]]:
    """One tick back: the best of stopping, staying, on demand, and a fresh machine in some zone."""
    dt, mu, start = prices.tick_h, prices.mu, prices.mu * prices.start_h
    stop = ahead[..., NOTHING]
    reliable = ahead[..., RELIABLE] + np.float32((mu - prices.reliable) * dt)
    best = np.maximum(stop, reliable - np.float32(start))
    what = np.where(reliable - np.float32(start) > stop, STAY_RELIABLE, STOP).astype(np.int8)
    for k in range(len(on)):
        fresh = ahead[..., FIRST + k * AGES] + np.float32((mu - prices.spot[k]) * dt - start)
        better = on[k] & (fresh > best)
        best, what = np.where(better, fresh, best), np.where(better, np.int8(BUY + k), what)
    value = np.repeat(best[..., None], ahead.shape[-1], axis=-1)
    done = np.repeat(what[..., None], ahead.shape[-1], axis=-1) if last else np.empty(0, np.int8)
    value[..., RELIABLE] = np.maximum(best, reliable)
    if last:
        done[..., RELIABLE] = np.where(reliable >= best, KEEP, what)
    for k in range(len(on)):
        for age in range(AGES):
            h = FIRST + k * AGES + age
            keep = ahead[..., h] + np.float32((mu - prices.spot[k]) * dt)
            stays = on[k] & (keep >= best)
            value[..., h] = np.where(stays, keep, best)
            if last:
                done[..., h] = np.where(stays, KEEP, what)
    return value, done


@compiled
def run_policy(
    world: BacktestWorld, job: BacktestJob, policy: Policy, leases: Leases, span: tuple[int, int]
) -> tuple[float, float]:
    """(dollars, hours) of one job under the policy, billed by the engine of the backtest."""
    begin, limit = span
    last = world.price.shape[0] - 1
    leases.machines[:] = 0
    cost, left, stall_h = 0.0, job.work_h, 0.0
    for t in range(begin, limit):
        gone, back_usd, _ = evict(world, leases, t)
        cost -= back_usd
        stall_h += job.recovery_h if gone > 0 else 0.0
        held = NOTHING
        if leases.machines[0] > 0:  # never more than one lease: it is always in the first row
            k, age = leases.pool[0], t - leases.begun[0]
            held = RELIABLE if k == last else FIRST + k * AGES + min(age, HOUR_TICKS)
        action = policy.done[policy.state[t], held]
        if action != KEEP and not (action == STOP and held == NOTHING):
            orders = Orders(
                np.zeros_like(leases.machines),
                np.zeros(last + 1, np.int64),
                np.full(last + 1, ANY_PRICE),
                False,
            )
            if action != STOP:
                orders.buy[last if action == STAY_RELIABLE else action - BUY] = 1
            sold, _ = granted(world, leases, orders, t, False)
            changed = carry_out(leases, orders, sold, t)
            stall_h += job.morph_h if changed > 0 and t > begin else 0.0
        rate, _, _ = work_rate(world, job, leases, t)
        useful = 1.0 - (min(stall_h, world.tick_h) / world.tick_h if rate > 0 else 0.0)
        stall_h = max(0.0, stall_h - world.tick_h)
        work = rate * useful * world.tick_h
        share = 1.0 if work < left else left / work
        cost, left = cost + charge(world, leases, t, share), left - work * share
        if left <= 1e-9:
            return cost, (t - begin) * world.tick_h + share * world.tick_h
    rest_h, rest_usd, _ = backtest.rest_on_demand(world, job, left)
    return cost + rest_usd, (limit - begin) * world.tick_h + rest_h


def policy_of(market: Market, mu: float, work: Work) -> Policy:
    """The best policy of the chain that fits this market, at one price of work."""
    per_zone = [states_of(row > 0) for row in market.capacity]
    prices = Prices(
        spot=market.price.mean(axis=1),
        reliable=float(market.on_demand_usd_per_h.min()),
        mu=mu,
        tick_h=market.tick_s / 3600,
        start_h=(work.start_s + work.morph_s) / 3600,
    )
    done = best_policy([chain_of(s) for s in per_zone], prices)
    state = np.zeros(market.ticks, dtype=np.int64)
    for states in per_zone:
        state = state * STATES + states
    return Policy(np.ascontiguousarray(done.reshape(-1, done.shape[-1])), state)


def measured(market: Market, work: Work, starts: Ints, mu: float) -> tuple[Floats, Floats, Floats]:
    """Dollars, hours and the bound of each start under the policy for this price of work."""
    world, job = world_of(market), backtest.job_of(work)
    ticks = int(work.patience * work.hours * HOUR_TICKS)
    policy = policy_of(market, mu, work)
    spans = [(int(b), int(min(b + ticks, market.ticks))) for b in starts]
    came = np.array([run_policy(world, job, policy, no_leases(), s) for s in spans])
    terms = clairvoyant.terms_of(market, work.start_s)
    ends = starts + np.ceil(came[:, 1] * HOUR_TICKS).astype(np.int64)
    bound = [
        clairvoyant.lower_bound_usd(terms, int(b), int(e), work_slot_h=job.work_h, slots=work.slots)
        for b, e in zip(starts, ends, strict=True)
    ]
    return came[:, 0], came[:, 1], np.array(bound)


def told(market: Market) -> Market:
    """The market with the chain's own hazards over the next hour, as the decision of the manager would read them."""
    hazards = []
    for row in market.capacity:
        states = states_of(row > 0)
        chain = chain_of(states)
        on = np.arange(STATES) < 2 * ON
        alive = on.astype(np.float64)
        for _ in range(HOUR_TICKS):
            alive = np.where(on, chain @ alive, 0.0)
        per_h = -np.log(np.clip(alive, 1e-3, 1.0))
        hazards.append(np.where(on, per_h, 0.0)[states])
    return msgspec.structs.replace(market, hazard_per_h=np.stack(hazards))


def ratio(cost: Floats, bound: Floats) -> list[str]:
    over = cost / np.maximum(bound, cost / backtest.RATIO_MAX)
    return [f"{np.median(over):.2f}", f"{np.percentile(over, 95):.2f}"]


def of_one_kind(market: Market) -> Market:
    """The zones of the fastest type: what nobody would buy only makes the table larger."""
    few = market.speed == market.speed.max()
    return msgspec.structs.replace(
        market,
        pools=tuple(p for p, f in zip(market.pools, few, strict=True) if f),
        types=tuple(k for k, f in zip(market.types, few, strict=True) if f),
        **{name: getattr(market, name)[few] for name in COLUMNS},
    )


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    part = sys.argv[2] if len(sys.argv) > 2 else ""
    rows = []
    for name, whole, slots in real_markets():
        if "1-node" not in name or part not in name:
            continue
        market = of_one_kind(whole)
        if len(market.pools) > ZONES_MAX:
            continue
        work = Work(hours=20.0, slots=slots)
        starts = backtest.draw_starts(market, work, count, seed=0)
        ours = backtest.run(market, work, STRATEGIES[-1:], starts=starts)[0]
        rows.append(
            [
                f"{name}: ours",
                f"{ours['cost_usd'].mean():.2f}",
                "1",
                f"{ours['runtime_h'].mean():.1f}",
                *ratio(ours["cost_usd"], ours.bound_usd),
            ]
        )
        print("  ".join(rows[-1]), file=sys.stderr)
        knows = backtest.run(told(market), work, STRATEGIES[-1:], starts=starts)[0]
        share = interval(np.stack([knows["cost_usd"], ours["cost_usd"]]), mean_ratio)
        rows.append(
            [
                "  ours, with the hazards of the chain",
                f"{knows['cost_usd'].mean():.2f}",
                f"{share.value:.3f} ({share.low:.3f} to {share.high:.3f})",
                f"{knows['runtime_h'].mean():.1f}",
                *ratio(knows["cost_usd"], knows.bound_usd),
            ]
        )
        print("  ".join(rows[-1]), file=sys.stderr)
        for factor in MUS:
            mu = factor * float(market.on_demand_usd_per_h.min())
            cost, hours, bound = measured(market, work, starts, mu)
            share = interval(np.stack([cost, ours["cost_usd"]]), mean_ratio)
            rows.append(
                [
                    f"  best of the chain, a slot-hour is worth ${mu:.2f}",
                    f"{cost.mean():.2f}",
                    f"{share.value:.3f} ({share.low:.3f} to {share.high:.3f})",
                    f"{hours.mean():.1f}",
                    *ratio(cost, bound),
                ]
            )
            print("  ".join(rows[-1]), file=sys.stderr)
    show(
        f"A job of 20 h, {count} starts, today's rules. The chain is fitted to the series that is replayed.",
        ["market and policy", "$", "of ours (95 %)", "hours", "/bound, median", "95th"],
        rows,
    )


if __name__ == "__main__":
    main()
