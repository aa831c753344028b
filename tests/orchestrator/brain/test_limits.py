"""What may be spent holds on any market: prices that jump, launches that are refused, machines that are taken."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.actions import Launch, Terminate
from orchestrator.brain.holdings.ledger import committed_usd, spent_usd
from orchestrator.events import ManagerStarted

CAP = 0.05
HAPPENS = ("time", "time", "served", "committed", "taken", "refused", "back", "absurd")
moves = st.lists(
    st.one_of(
        st.sampled_from(HAPPENS),
        st.tuples(*[st.sampled_from([0.01, 0.02, 0.031, 0.05, 0.09, 0.2])] * 4),
    ),
    min_size=5,
    max_size=40,
)


def happens(h: Any, move: Any) -> None:
    """One thing that a market, a cloud or a clock can do."""
    match move:
        case tuple():
            h.price(*move)
        case "served":
            h.serve()
        case "committed" if h.job.layouts.current is not None and h.job.active:
            h.committed(h.job.progress.step + 1)
        case "taken" if h.machines:
            machine_id = next(iter(h.machines))
            h.taken(machine_id)
            del h.machines[machine_id]
        case "refused":
            for launch in h.only(h.said[h.served :], Launch):
                if launch.request.token in h.state.leases:
                    h.refused(launch)
            h.served = len(h.said)
        case "back":
            h.at_s -= 500.0
            h.price(0.03, 0.06, 0.04, 0.07)
            h.at_s += 500.0
        case "absurd":
            h.price(-1.0, 0.0, 1e9, float("nan"))
    h.wait(3.0)


def held_usd_per_h(h: Any) -> float:
    """What all machines cost that nobody is giving back."""
    return float(
        sum(lease.usd_per_h for lease in h.leases if lease.state not in ("intended", "ending"))
    )


@settings(max_examples=60)
@given(moves, st.sampled_from([0.05, 0.1, 0.14, 0.3]), st.sampled_from([1, 2, 4]))
def test_whatever_prices_do_the_limit_per_hour_holds(hand, many, most, least):
    """What rises above the limit is given back at once, in the same turn in which its price is learned."""
    h = hand(usd_per_h_max=most, manager_usd_per_h=0.01)
    h.steps_total = 10**6
    h.running(slots_min=least, slots_max=4)
    for move in many:
        happens(h, move)
        assert held_usd_per_h(h) + 0.01 <= most * (1 + 1e-6)


@settings(max_examples=60)
@given(moves, st.sampled_from(["local", "aws_today", "aws_2016"]), st.sampled_from([0.0, 0.02]))
def test_whatever_prices_do_no_budget_is_passed(hand, many, billing, disk):
    """Spent and promised together stay within the cap of the job, under every rule, disks included."""
    h = hand(billing=billing, disk_usd_per_h=disk)
    h.steps_total = 10**6
    h.running(slots_max=4, budget_usd=CAP)
    for move in many:
        happens(h, move)
        promised = spent_usd(h.job.account, h.at_s) + committed_usd(h.job.account, h.at_s)
        assert promised <= CAP * (1 + 1e-6)


def test_what_rises_above_the_limit_per_hour_goes_at_once_and_says_so(hand):
    """Machines fill the limit and get dearer: one of them goes in the same turn. The other stays, though what
    goes is paid until it has gone.
    """
    h = hand(usd_per_h_max=0.125, on_demand_allowed=False)
    h.steps_total = 10**6
    h.running(slots_min=1, slots_max=4)
    h.train(600.0)
    before = len(h.leases)
    out = h.price(0.036, 0.072, 0.04, 0.07)
    (gone,) = h.only(out, Terminate)
    assert "above the limit of $0.1250/h" in gone.because
    assert held_usd_per_h(h) <= 0.125 + 1e-9
    h.wait(60.0)
    assert len([lease for lease in h.leases if lease.stays]) == before - 1 > 0


def test_a_lease_closes_under_the_rule_under_which_it_began(hand):
    """The settings name another billing rule after a restart: what ran before is billed as it was bought."""
    h = hand(billing="aws_today", on_demand_allowed=False).running(slots_max=1)
    (lease,) = h.leases
    later = type(h)(billing="local", on_demand_allowed=False).settings
    h.see(ManagerStarted(at_s=h.at_s, epoch=2, settings=later))
    h.wait(60.0)
    h.taken(lease.machine_id)
    assert lease.cost_usd == pytest.approx(0.0)
