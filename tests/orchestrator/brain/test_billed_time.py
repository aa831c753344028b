"""From when to when a machine is charged: what the cloud's lists say, and never less than is sure."""

from typing import Any

import pytest
from msgspec.structs import replace

from bidding.markets.billing import HOUR_S
from cloud.model import Place, Sold, Traits
from orchestrator.actions import Launch
from orchestrator.brain import ledger
from orchestrator.events import BootSeen, CatalogueSeen, PartSetAside

EAST = Place("local", "east")


def bought(hand: Any, traits: Traits | None) -> tuple[Any, str]:
    """A machine that is pending, in a cloud with these traits."""
    h = hand(launch_grace_s=30.0)
    h.start()
    sold = Sold(
        types=tuple(h.state.types.values()),
        pools=tuple(known.pool for known in h.state.pools.values()),
    )
    h.see(CatalogueSeen(at_s=h.at_s, place=EAST, sold=sold, traits=traits))
    h.submit(slots_max=1)
    return h, h.launched(h.only(h.wait(2.0), Launch)[0], state="pending")


def settled(h: Any, began_s: float, ended_s: float) -> None:
    """The job and the whole were charged this much time, and nothing is promised any more."""
    (lease,) = h.state.ended_leases
    due_usd = lease.price_usd_per_h * (ended_s - began_s) / HOUR_S
    assert lease.cost_usd == pytest.approx(due_usd, abs=1e-12)
    for account in (h.state.account, h.job.account):
        assert ledger.spent_usd(account, h.at_s) == pytest.approx(due_usd, abs=1e-12)


@pytest.mark.parametrize("free", [True, False])
def test_a_pending_machine_costs_what_its_cloud_says(hand: Any, free: bool) -> None:
    """It is charged from its launch until a list shows it running; then, where that is free, less."""
    h, machine_id = bought(hand, Traits(billing="local", pending_is_free=free))
    launched_s = h.at_s
    h.wait(40.0)
    h.listed()
    pending_s = h.at_s
    spent = ledger.spent_usd(h.state.account, h.at_s)
    assert spent == pytest.approx(h.leases[0].price_usd_per_h * 40 / HOUR_S)  # nobody overspends
    h.wait(4.0)
    h.machines[machine_id] = replace(h.machines[machine_id], state="running")
    h.listed()
    h.wait(100.0)
    h.machines[machine_id] = replace(
        h.machines[machine_id], state="terminated", ended_by="provider", ended_at_s=h.at_s - 3.0
    )
    h.listed()
    settled(h, pending_s if free else launched_s, h.at_s - 3.0)


def test_a_machine_that_joins_before_it_is_listed_again_is_charged_from_then(hand: Any) -> None:
    h, machine_id = bought(hand, Traits(billing="local", pending_is_free=True))
    h.wait(20.0)
    h.listed()
    began_s = h.at_s
    h.wait(1.0)
    h.joined(machine_id)
    lease = h.leases[0]
    assert ledger.cost_so_far_usd(lease, h.at_s) == pytest.approx(lease.price_usd_per_h / HOUR_S)
    h.taken(machine_id)
    settled(h, began_s, h.at_s)


def test_a_machine_whose_first_boot_is_heard_of_is_charged_from_then(hand: Any) -> None:
    """No list shows it running before it ends, but what boots runs."""
    h, machine_id = bought(hand, Traits(billing="local", pending_is_free=True))
    h.wait(20.0)
    h.listed()
    began_s = h.at_s
    h.wait(3.0)
    h.see(BootSeen(at_s=h.at_s, machine_id=machine_id, phase="admitted", took_s=2.0))
    h.wait(2.0)
    h.listed()  # it lags, and shows the machine as pending
    lease = h.leases[0]
    due_usd = lease.price_usd_per_h * (h.at_s - began_s) / HOUR_S
    assert ledger.cost_so_far_usd(lease, h.at_s) == pytest.approx(due_usd)
    h.wait(10.0)
    h.taken(machine_id)
    settled(h, began_s, h.at_s)


def test_a_machine_that_never_ran_costs_nothing_where_pending_is_free(hand: Any) -> None:
    h, machine_id = bought(hand, Traits(billing="local", pending_is_free=True))
    h.wait(15.0)
    h.taken(machine_id)
    settled(h, h.at_s, h.at_s)


def test_a_machine_that_is_not_listed_any_more_ended_at_the_first_list_without_it(
    hand: Any,
) -> None:
    """A list may lag for a young machine, so it counts as lost only later, but it costs no more."""
    h, machine_id = bought(hand, Traits(billing="local"))
    began_s = h.at_s
    h.wait(10.0)
    h.listed()
    machine = h.machines.pop(machine_id)
    h.wait(2.0)
    h.listed()
    missed_s = h.at_s
    h.wait(10.0)
    h.listed(machine)  # the list of a moment ago was wrong
    assert h.leases[0].missed_at_s is None
    h.wait(2.0)
    h.listed()
    missed_s, _ = h.at_s, missed_s
    h.wait(30.0)
    h.listed()
    settled(h, began_s, missed_s)


def test_a_machine_that_no_list_ever_had_ended_when_its_agent_was_heard_last(hand: Any) -> None:
    """It is waited for as long as a list may lag, but its cost ends with its last sign of life."""
    h, machine_id = bought(hand, Traits(billing="local"))
    began_s = h.at_s
    h.wait(3.0)
    h.joined(machine_id)
    h.wait(4.0)
    h.machines.pop(machine_id)
    h.away(machine_id)
    silent_s = h.at_s
    h.wait(2.0)
    h.listed()
    assert h.leases[0].machine_id == machine_id  # the list may lag
    h.wait(30.0)
    h.listed()
    settled(h, began_s, silent_s)


def test_each_place_bills_by_the_rule_of_its_cloud(hand: Any) -> None:
    h, _ = bought(hand, Traits(billing="aws_today"))
    assert h.leases[0].billing == "aws_today"
    h, _ = bought(hand, None)
    assert h.leases[0].billing == "local"


def test_a_young_machine_that_is_silent_and_listed_no_more_is_lost_at_once(hand: Any) -> None:
    """Its agent is gone, and a list that had it has it no more: nothing is waited for."""
    h, machine_id = bought(hand, Traits(billing="local"))
    h.wait(2.0)
    h.listed()
    h.joined(machine_id)
    h.wait(2.0)
    h.machines.pop(machine_id)
    h.listed()
    assert h.leases[0].machine_id == machine_id  # the list may lag
    h.away(machine_id)
    h.wait(2.0)
    h.listed()
    assert [x.machine_id for x in h.state.ended_leases] == [machine_id]
    assert h.job.market.preemptions == 1


def test_a_young_machine_that_was_given_back_has_ended_when_no_list_has_it(hand: Any) -> None:
    """A list that had it has it no more, and we asked for that."""
    h, machine_id = bought(hand, Traits(billing="local"))
    began_s = h.at_s
    h.wait(2.0)
    h.listed()
    h.cancel()
    assert h.leases[0].state == "ending"
    h.wait(2.0)
    h.listed()
    assert h.leases
    h.machines.pop(machine_id)
    h.wait(2.0)
    h.listed()
    settled(h, began_s, h.at_s)


@pytest.mark.parametrize("started", [True, False])
def test_a_job_that_is_set_aside_is_charged_what_was_reserved_for_it(
    hand: Any, started: bool
) -> None:
    """Its machines may run for a begun hour, or unseen, and no lease will say so any more."""
    h = hand(launch_grace_s=30.0, billing="aws_2016")
    h.start()
    h.submit(slots_max=1)
    (launch,) = h.only(h.wait(2.0), Launch)
    if started:
        h.launched(launch)
    h.wait(3.0)
    (lease,) = h.leases
    spent_usd = ledger.spent_usd(h.state.account, h.at_s)
    h.see(PartSetAside(at_s=h.at_s, part="job", name="job", why="a test"))
    assert not h.leases
    unseen_s = 0.0 if started else 30.0
    owed_s = HOUR_S + h.settings.reserve_s + unseen_s
    assert h.settings.reserve_s > 0
    for account in (h.state.account, h.job.account):
        charged_usd = ledger.spent_usd(account, h.at_s) - spent_usd
        assert charged_usd >= lease.ceiling_usd_per_h * owed_s / HOUR_S
        assert charged_usd <= lease.ceiling_usd_per_h * (owed_s + 60.0) / HOUR_S
        assert account.committed_usd == 0.0


def test_a_price_that_cannot_be_true_is_not_charged_when_its_job_is_set_aside(hand: Any) -> None:
    h, _ = bought(hand, Traits(billing="local"))
    h.leases[0].price_usd_per_h = h.leases[0].ceiling_usd_per_h = 1e300
    h.see(PartSetAside(at_s=h.at_s, part="job", name="job", why="a test"))
    assert 0 < ledger.spent_usd(h.state.account, h.at_s) < 1.0
