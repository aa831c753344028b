"""From when to when a machine is charged: what the cloud's lists say, and never less than is sure."""

from typing import Any

import pytest
from msgspec.structs import replace

from agent.messages import NoticeSeen
from bidding.markets.billing import cost_usd, rule_of
from cloud.clock import HOUR_S
from cloud.model import Notice, Place, Refusal, Traits
from orchestrator.actions import Launch
from orchestrator.brain.holdings import ledger
from orchestrator.events import BootSeen, PartSetAside

EAST = Place("local", "east")


def bought(hand: Any, traits: Traits | None) -> tuple[Any, str]:
    """A machine that is pending, in a cloud with these traits."""
    h = hand(launch_grace_s=30.0)
    h.start()
    h.catalogue(traits=traits)
    h.submit(slots_max=1)
    return h, h.launched(h.only(h.wait(2.0), Launch)[0], state="pending")


def settled(h: Any, began_s: float, ended_s: float, refunded_s: float = 0.0) -> None:
    """The job and the whole were charged this much time, and nothing is promised any more.

    Beside it stands the same time on demand, where none is refunded.
    """
    (lease,) = h.state.ended_leases.values()
    due_usd = lease.price_usd_per_h * (ended_s - began_s) / HOUR_S
    assert lease.cost_usd == pytest.approx(due_usd, abs=1e-12)
    for account in (h.state.account, h.job.account):
        assert ledger.spent_usd(account, h.at_s) == pytest.approx(due_usd, abs=1e-12)
        same_usd = lease.on_demand_usd_per_h * (ended_s - began_s + refunded_s) / HOUR_S
        assert ledger.on_demand_usd(account, h.at_s) == pytest.approx(same_usd, abs=1e-12)


@pytest.mark.parametrize("free", [True, False])
def test_a_pending_machine_costs_what_its_cloud_says(hand, free):
    """It is charged from its launch until a list shows it running; then, where that is free, less."""
    h, machine_id = bought(hand, Traits(billing="local", pending_is_free=free))
    launched_s = h.at_s
    h.wait(40.0)
    h.listed()
    pending_s = h.at_s
    spent = ledger.spent_usd(h.state.account, h.at_s)
    assert spent == pytest.approx(h.leases[0].price_usd_per_h * 40 / HOUR_S)  # nobody overspends
    h.wait(4.0)
    h.becomes(machine_id, state="running")
    h.listed()
    h.wait(100.0)
    h.ends(machine_id, h.at_s - 3.0)
    h.listed()
    settled(h, pending_s if free else launched_s, h.at_s - 3.0)


def test_a_machine_that_joins_before_it_is_listed_again_is_charged_from_then(hand):
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


def test_a_machine_whose_first_boot_is_heard_of_is_charged_from_then(hand):
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


def test_a_machine_that_never_ran_costs_nothing_where_pending_is_free(hand):
    h, machine_id = bought(hand, Traits(billing="local", pending_is_free=True))
    h.wait(15.0)
    h.taken(machine_id)
    settled(h, h.at_s, h.at_s)


def test_a_machine_that_is_not_listed_any_more_ended_at_the_first_list_without_it(hand):
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


@pytest.mark.parametrize("announced", [True, False])
def test_a_machine_that_was_taken_between_two_lists_ended_as_announced_or_heard(hand, announced):
    """Its cloud says neither when nor that it did, so the list alone would charge a period more."""
    h, machine_id = bought(hand, Traits(billing="local"))
    began_s = h.at_s
    h.joined(machine_id)
    h.wait(60.0)
    if announced:
        h.notice(machine_id, 4.0)
    h.listed()
    h.wait(4.0)
    gone_s = h.at_s
    if not announced:
        h.away(machine_id)
    h.machines.pop(machine_id)
    h.wait(6.0)
    h.listed()
    settled(h, began_s, gone_s)


def test_a_machine_that_no_list_ever_had_ended_when_its_agent_was_heard_last(hand):
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


def test_each_place_bills_by_the_rule_of_its_cloud(hand):
    h, _ = bought(hand, Traits(billing="aws_today"))
    assert h.leases[0].billing == "aws_today"
    h, _ = bought(hand, None)
    assert h.leases[0].billing == "local"


def test_a_young_machine_that_is_silent_and_listed_no_more_is_lost_at_once(hand):
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
    assert [x.machine_id for x in h.state.ended_leases.values()] == [machine_id]
    assert h.job.market.preemptions == 1


def test_a_young_machine_that_was_given_back_has_ended_when_no_list_has_it(hand):
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
def test_a_job_that_is_set_aside_is_charged_what_was_reserved_for_it(hand, started):
    """Its machines may run for a begun hour, or unseen, and no lease will say so any more."""
    h = hand(launch_grace_s=30.0, billing="aws_2016")
    launch = h.orders()
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


def test_a_price_that_cannot_be_true_is_not_charged_when_its_job_is_set_aside(hand):
    h, _ = bought(hand, Traits(billing="local"))
    h.leases[0].price_usd_per_h = h.leases[0].ceiling_usd_per_h = 1e300
    h.see(PartSetAside(at_s=h.at_s, part="job", name="job", why="a test"))
    assert 0 < ledger.spent_usd(h.state.account, h.at_s) < 1.0


def test_a_refund_that_a_list_tells_of_after_the_end_of_the_job_is_given(hand):
    """We ended it, as far as we knew; its cloud had taken it before, within its first hour."""
    h, machine_id = bought(hand, Traits(billing="aws_today"))
    began_s = h.at_s
    h.wait(600.0)
    h.listed(replace(h.machines[machine_id], state="running"))
    h.cancel()
    taken = replace(h.machines[machine_id], state="terminated", ended_at_s=h.at_s - 1.0)
    h.terminated(machine_id)
    settled(h, began_s, h.at_s)
    h.machines[machine_id] = replace(taken, ended_by="provider")
    assert h.wait(h.settings.listing_period_s + 2.0)  # so its place is asked once more
    h.listed()
    settled(h, began_s, began_s, refunded_s=599.0)
    assert not h.state.owing


def test_nothing_is_refunded_until_the_cloud_says_that_it_took_a_machine(hand):
    """It was ended by others, or taken: what we see is that it is gone."""
    h, machine_id = bought(hand, Traits(billing="aws_today"))
    began_s = h.at_s
    h.joined(machine_id)
    h.wait(50.0)
    h.listed()
    machine = h.machines.pop(machine_id)
    h.wait(30.0)
    h.listed()
    gone_s = h.at_s
    assert h.job.market.preemptions == 1
    settled(h, began_s, gone_s)
    ended_s = gone_s - 20.0
    late = replace(machine, state="terminated", ended_by="user", ended_at_s=ended_s)
    h.listed(late)
    settled(h, began_s, ended_s)
    h.listed(replace(late, ended_by="provider"))  # what has a date is final
    settled(h, began_s, ended_s)


INTERNAL = Refusal(scope="pool", code="Server.InternalError", said="an internal error")


@pytest.mark.parametrize("missed", [False, True])
def test_a_machine_that_worked_and_is_listed_as_failed_has_cost(hand, missed):
    """Its cloud says that it failed at its launch, and dates its end there: hours of work were free."""
    h = hand(on_demand_allowed=False)
    h.traits = Traits(billing="aws_today")
    h.running(slots_max=1)
    (lease,) = h.leases
    h.train(2 * HOUR_S)
    machine = h.machines[lease.machine_id]
    h.ends(machine.id, machine.launched_at_s)
    h.becomes(machine.id, refusal=INTERNAL, state="failed")
    if missed:  # lists have not had it for a while
        failed = h.machines.pop(machine.id)
        h.listed()
        h.wait(60.0)
        h.listed()
        h.machines[machine.id] = failed
    for _ in range(2):
        h.listed()
        assert lease.ended_at_s is not None
        due_usd = lease.price_usd_per_h * (lease.gone_at_s - machine.launched_at_s) / HOUR_S
        assert due_usd > lease.price_usd_per_h * 2
        assert lease.cost_usd == pytest.approx(due_usd)
        assert h.state.account.spent_usd == pytest.approx(due_usd)


def test_a_machine_that_was_given_back_before_it_ran_and_is_listed_as_failed_costs_nothing(hand):
    h, machine_id = bought(hand, Traits(billing="local", pending_is_free=True))
    launched_s = h.at_s
    h.wait(10.0)
    h.listed()
    h.cancel()
    h.wait(30.0)
    h.ends(machine_id, launched_s)
    h.becomes(machine_id, refusal=INTERNAL, state="failed")
    h.listed()
    settled(h, launched_s, launched_s)


def test_a_price_is_charged_since_its_own_date(hand):
    """It is heard of later, from a running machine and from one that has ended meanwhile."""
    h, machine_id = bought(hand, Traits(billing="local"))
    pool = h.leases[0].pool
    before = h.leases[0].price_usd_per_h

    def quoted(usd: float, at_s: float) -> None:
        h.quoted(pool, usd, at_s)

    h.wait(300.0)
    quoted(0.05, h.at_s - 200.0)
    due_usd = (100 * before + 200 * 0.05) / HOUR_S
    assert ledger.spent_usd(h.state.account, h.at_s) == pytest.approx(due_usd)
    h.wait(100.0)
    h.taken(machine_id)
    h.wait(100.0)
    quoted(0.09, h.at_s - 150.0)
    due_usd = (100 * before + 250 * 0.05 + 50 * 0.09) / HOUR_S
    for account in (h.state.account, h.job.account):
        assert ledger.spent_usd(account, h.at_s) == pytest.approx(due_usd)


def test_a_machine_of_a_launch_that_was_given_up_is_charged_until_it_is_gone(hand):
    """No lease claims it any more, and its cloud bills it all the same."""
    h, machine_id = bought(hand, Traits(billing="local"))
    h.cancel()
    h.terminated(machine_id)
    spent_usd = ledger.spent_usd(h.state.account, h.at_s)
    h.submit("other", slots_max=1)
    (launch,) = h.only(h.wait(2.0), Launch)
    h.wait(31.0)
    h.listed()
    assert launch.request.token in h.state.dropped
    stray = replace(
        h.stray("test", launch.request.token), pool=launch.request.pool, launched_at_s=h.at_s - 20.0
    )
    h.listed(stray)
    h.wait(10.0)
    h.listed(stray)
    h.wait(5.0)
    h.listed()
    usd = h.state.ended_leases[launch.request.token].price_usd_per_h * 35 / HOUR_S
    assert ledger.spent_usd(h.state.account, h.at_s) == pytest.approx(spent_usd + usd)
    assert ledger.spent_usd(h.state.jobs["other"].account, h.at_s) == pytest.approx(usd)


def test_on_demand_a_machine_of_aws_costs_a_minute_at_least():
    rule = rule_of("aws_today", "aws", "on_demand")
    assert cost_usd(rule, 0.0, 5.0, [(0.0, 60.0)], "provider") == pytest.approx(1.0)
    assert rule_of(None, "aws", "on_demand") == rule


def test_a_machine_that_outlived_no_manager_is_not_charged_for_the_time_without_one(hand):
    """It ended itself, so a job whose budget would not pay for a weekend goes on after it."""
    h = hand(silent_after_s=600.0).running(slots_max=1, budget_usd=1.0, max_preemptions=0)
    h.listed()
    price, began_s = h.leases[0].price_usd_per_h, h.leases[0].prices[0][0]
    h.wait(10.0)
    h.listed()
    left_s = h.at_s
    h.machines.clear()
    h.at_s += 60 * HOUR_S
    h.start(epoch=2)
    h.wait(1.0)
    h.listed()
    held_s = left_s - began_s + 600.0
    for account in (h.job.account, h.state.account):
        spent = ledger.spent_usd(account, h.at_s)
        assert price * held_s / HOUR_S <= spent <= price * (held_s + 60.0) / HOUR_S
    assert h.job.active
    assert h.job.market.preemptions == 0
    assert h.only(h.wait(2.0), Launch)


def test_a_budget_waits_only_a_moment_for_the_first_list_after_a_time_without_a_manager(hand):
    h = hand(silent_after_s=600.0).running(slots_max=1, budget_usd=1.0)
    h.at_s += 60 * HOUR_S
    h.start(epoch=2)
    assert h.job.active
    h.wait(20.0)
    assert h.job.status == "DRAINING"


@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize("ahead_s", [600.0, 60.0, -60.0, -600.0])
def test_a_clock_that_is_wrong_changes_no_bill_and_no_notice(hand, ahead_s, corrected):
    """A cloud's dates are by its clock; ours, once it was ahead, goes on from where it was."""
    h = hand(launch_grace_s=30.0, on_demand_allowed=False)
    true_s = h.at_s
    h.at_s += ahead_s
    h.start()
    if corrected:
        h.wait(10.0)
        h.at_s = true_s + 10.0
        h.start(epoch=2)
    h.submit(slots_max=1)
    (launch,) = h.only(h.wait(2.0), Launch)
    off_s = 0.0 if corrected else ahead_s
    began_s = h.at_s
    machine_id = h.launched(launch, at_s=began_s - off_s)
    h.joined(machine_id)
    h.listed()
    h.wait(400.0)
    notice = Notice(machine_id=machine_id, kind="terminate", deadline_s=h.at_s + 120.0 - off_s)
    h.see(NoticeSeen(at_s=h.at_s, notice=notice))
    assert h.leases[0].goes_at_s == pytest.approx(h.state.now_s + 120.0, abs=4.0)
    h.wait(60.0)
    assert h.leases[0].state in ("noticed", "leaving")
    h.wait(59.0)
    ended_s = h.at_s
    h.ends(machine_id, ended_s - off_s)
    h.wait(3.0)
    h.listed()
    (lease,) = h.state.ended_leases.values()
    due_usd = lease.price_usd_per_h * (ended_s - began_s) / HOUR_S
    assert lease.cost_usd == pytest.approx(due_usd, rel=1e-6)
    assert ledger.spent_usd(h.job.account, h.state.now_s) >= due_usd * (1 - 1e-6)


def left_to_the_next(h, trained_s):
    """A machine that the first of two jobs has left to the second one, and what they have paid."""
    h.steps_total = 10_000
    h.running(slots_max=1)
    (lease,) = h.leases
    h.train(trained_s)
    h.submit("next", slots_max=1, budget_usd=0.02)
    h.completed(h.steps_total)
    h.wait(20.0)
    assert lease.job == "next"
    return lease, [h.state.jobs[name].account for name in ("job", "next")]


def taken_for_nothing(h, lease, paid):
    """Its cloud takes the machine within its first hour, and all is given back."""
    for other in [e for e in h.leases if e is not lease]:
        h.refused(h.only(h.said, Launch)[-1])
        assert other.token not in h.state.leases
    h.taken(lease.machine_id)
    assert lease.cost_usd == 0.0
    assert [account.spent_usd for account in paid] == pytest.approx([0.0, 0.0])


def test_a_refund_goes_to_the_jobs_that_have_paid(hand):
    """A machine that a job has left to the next one was free: the next one has no more to spend for that."""
    h = hand(on_demand_allowed=False)
    h.traits = Traits(billing="aws_today")
    lease, paid = left_to_the_next(h, 3000.0)
    assert all(ledger.spent_usd(account, h.at_s) > 0 for account in paid)
    taken_for_nothing(h, lease, paid)
    assert h.state.account.spent_usd == pytest.approx(0.0)


def test_a_later_beginning_is_to_the_good_of_the_jobs_that_have_paid(hand):
    """It is heard of when the machine is the next job's, which had spent less than nothing."""
    h = hand(on_demand_allowed=False)
    h.traits = Traits(billing="aws_today", pending_is_free=True)
    lease, paid = left_to_the_next(h, 300.0)
    h.becomes(lease.machine_id, began_at_s=h.machines[lease.machine_id].launched_at_s + 200.0)
    h.listed()
    each = [ledger.spent_usd(account, h.at_s) for account in paid]
    assert min(each) > -1e-12
    assert sum(each) == pytest.approx(ledger.cost_so_far_usd(lease, h.at_s))
    h.wait(100.0)
    taken_for_nothing(h, lease, paid)
