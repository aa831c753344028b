"""Machines that are exchanged: both sets are paid only while one hands over to the other."""

import re
from typing import Any

import pytest

from orchestrator.actions import Launch, Terminate
from orchestrator.brain.purchases import buying


def goes_on(h: Any, periods: int, refusing: str = "") -> None:
    """Everything asked for happens at once, but for launches in the zone that refuses; steps are committed."""
    for _ in range(periods):
        h.wait(2.0)
        for action in h.said[h.served :]:
            if isinstance(action, Launch) and action.request.pool.zone == refusing:
                h.refused(action)
        h.serve()
        if h.job.layouts.serving and all(w in h.job.workers for w in h.job.layouts.current.workers):
            h.committed(h.job.progress.step + 1)


def running(hand: Any, prices: tuple[float, ...], **spec: Any) -> Any:
    h = hand(on_demand_allowed=False)
    h.steps_total = 100_000
    h.start()
    h.price(*prices)
    h.submit(**spec)
    goes_on(h, 6)
    return h


@pytest.mark.parametrize("least", [1, 2])
def test_all_machines_of_a_job_are_exchanged_and_the_old_ones_go(hand, least):
    """Newcomers start their workers beside those that they replace, though the job may have no more slots."""
    h = running(hand, (0.03, 0.06, 0.9, 0.9), slots_min=least, slots_max=2)
    before = {lease.token for lease in h.leases}
    h.price(0.9, 0.9, 0.02, 0.9)
    goes_on(h, 20)
    assert not before & {lease.token for lease in h.leases}
    assert [lease.state for lease in h.leases] == ["working", "working"]
    assert len(h.job.layouts.current.workers) == 2


def test_a_refused_replacement_leaves_what_was_to_be_replaced_in_place(hand):
    """What shall leave is thought about again: nobody pays for two sets of machines."""
    h = running(hand, (0.05, 0.9, 0.9, 0.9), slots_min=1, slots_max=4)
    before = {lease.token for lease in h.leases}
    h.price(0.05, 0.9, 0.045, 0.9)
    goes_on(h, 30, refusing="east-b")
    assert {lease.token for lease in h.leases} == before
    assert not any(lease.released for lease in h.leases)


@pytest.mark.parametrize("answer", ["refused", "launched"])
def test_a_machine_that_starts_stays_until_its_replacement_is_a_machine(hand, answer):
    """A pool that had no capacity is asked again all the while: each time, a start that was paid for was lost."""
    h = hand(on_demand_allowed=False)
    h.start()
    h.submit(slots_max=1)
    (launch,) = h.only(h.said, Launch)
    machine = h.launched(launch)
    h.wait(1.0)
    h.price(0.03, 0.9, 0.01, 0.9)
    (cheaper,) = h.only(h.wait(4.0), Launch)
    assert h.state.leases[launch.request.token].state in ("pending", "booting")
    getattr(h, answer)(cheaper)
    ended = [action.ref.id for action in h.only(h.wait(4.0), Terminate)]
    assert ended == ([] if answer == "refused" else [machine])
    kept = launch if answer == "refused" else cheaper
    (lease,) = [lease for lease in h.leases if lease.state != "ending"]
    assert (lease.token, lease.released) == (kept.request.token, "")


def test_machines_that_make_way_stay_if_who_replaces_them_is_lost(hand):
    """The newcomer dies before the layout with it works, and nothing else is sold: what was there works on."""
    h = running(hand, (0.03, 0.06, 0.9, 0.9), slots_min=4, slots_max=4)
    h.train(4000.0)
    before = {lease.token for lease in h.leases}
    h.price(0.034, 0.067, 0.02, 0.035)
    while not any(lease.state == "leaving" for lease in h.leases):
        h.served_after(1.0)
    for lease in [e for e in h.leases if e.token not in before and e.machine_id]:
        h.taken(lease.machine_id)
        del h.machines[lease.machine_id]
    assert set(h.job.layouts.current.workers) == {w for e in h.leases for w in e.workers.values()}
    goes_on(h, 30, refusing="east-b")
    assert before == {lease.token for lease in h.leases}
    assert h.job.status == "RUNNING"


@pytest.mark.parametrize(("most", "least"), [(0.125, 4), (0.14, 2), (0.16, 1), (0.2, 4)])
def test_all_that_is_held_during_an_exchange_is_within_the_limit_per_hour(hand, most, least):
    """Nothing is bought above it, though the old machines are paid until the new ones can work; and no more than
    a part ever stands still.
    """
    h = hand(on_demand_allowed=False, usd_per_h_max=most)
    h.steps_total = 10**6
    h.running(slots_min=least, slots_max=4)
    h.train(4000.0)
    h.price(0.031, 0.062, 0.02, 0.035)
    for n in range(200):
        launches = h.only(h.wait(1.0), Launch)
        account = h.state.account
        if launches:
            assert account.usd_per_h + account.intended_usd_per_h <= most * (1 + 1e-9)
        if n % 20 == 19:
            h.serve()
            h.committed(h.job.progress.step + 1)
        assert len(h.job.layouts.current.workers) >= 2
    dear = [lease for lease in h.leases if lease.pool.zone == "east-a"]
    assert not dear or least == 4
    assert h.job.status == "RUNNING"


def test_a_job_keeps_all_the_slots_that_cost_the_same(hand):
    """Spreading over pools is no reason to give half of the only pool back."""
    h = running(hand, (0.03, 0.9, 0.9, 0.9), slots_min=1, slots_max=8)
    goes_on(h, 20)
    assert len([lease for lease in h.leases if lease.state == "working"]) == 8
    assert len(h.only(h.said, Launch)) == 8


def test_machines_on_demand_work_on_while_spot_is_refused(hand):
    """Waiting for something cheaper does not mean to stop what works."""
    h = hand()
    h.steps_total = 100_000
    h.start()
    h.price(0.9, 0.9, 0.9, 0.9)
    h.submit(slots_min=1, slots_max=2)
    goes_on(h, 6)
    held = {lease.token for lease in h.leases if lease.request.market == "on_demand"}
    assert held
    for zone in ("east-a", "east-b"):
        h.price(*((0.02, 0.9, 0.9, 0.9) if zone == "east-a" else (0.9, 0.9, 0.02, 0.9)))
        goes_on(h, 20, refusing=zone)
    assert held <= {lease.token for lease in h.leases}
    assert h.job.status == "RUNNING"


def test_a_resumed_job_knows_how_fast_it_was(hand):
    """What is left is counted in steps of the time that they took, not in steps of a second."""
    h = hand()
    h.steps_total = 1000
    h.running(slots_min=1, slots_max=4, deadline_s=h.at_s + 30 * 3600.0)
    h.committed(2, step_s=60.0)
    h.cancel()
    h.served_after(30.0)
    h.wait(2.0)
    h.price(0.5, 0.5, 0.5, 0.5)
    h.resume()
    said = buying.think(h.state, h.job).because
    spare = re.search(r"with (\d+) s to spare", said)
    assert spare is not None, said
    assert int(spare[1]) <= 30 * 3600 - 998 * 60  # nearly 1,000 steps of 60 s are to be done
