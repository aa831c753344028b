"""Machines that are exchanged: both sets are paid only while one hands over to the other."""

import re
from typing import Any

import pytest

from orchestrator import buying
from orchestrator.actions import Launch
from orchestrator.events import JobCancelled, JobResumed


def goes_on(h: Any, periods: int, refusing: str = "") -> None:
    """Everything asked for happens at once, but for launches in the zone that refuses; steps are committed."""
    for _ in range(periods):
        h.wait(2.0)
        for action in h.said[h.served :]:
            if isinstance(action, Launch) and action.request.pool.zone == refusing:
                h.refused(action)
        h.serve()
        if h.job.serving and all(w in h.job.workers for w in h.job.layout.workers):
            h.committed(h.job.step + 1)


def running(hand: Any, prices: tuple[float, ...], **spec: Any) -> Any:
    h = hand(on_demand_allowed=False)
    h.steps_total = 100_000
    h.start()
    h.price(*prices)
    h.submit(**spec)
    goes_on(h, 6)
    return h


@pytest.mark.parametrize("least", [1, 2])
def test_all_machines_of_a_job_are_exchanged_and_the_old_ones_go(hand: Any, least: int) -> None:
    """Newcomers start their workers beside those that they replace, though the job may have no more slots."""
    h = running(hand, (0.03, 0.06, 0.9, 0.9), slots_min=least, slots_max=2)
    before = {lease.token for lease in h.leases}
    h.price(0.9, 0.9, 0.02, 0.9)
    goes_on(h, 20)
    assert not before & {lease.token for lease in h.leases}
    assert [lease.state for lease in h.leases] == ["working", "working"]
    assert len(h.job.layout.workers) == 2


def test_a_refused_replacement_leaves_what_was_to_be_replaced_in_place(hand: Any) -> None:
    """What shall leave is thought about again: nobody pays for two sets of machines."""
    h = running(hand, (0.05, 0.9, 0.9, 0.9), slots_min=1, slots_max=4)
    before = {lease.token for lease in h.leases}
    h.price(0.05, 0.9, 0.045, 0.9)
    goes_on(h, 30, refusing="east-b")
    assert {lease.token for lease in h.leases} == before
    assert not any(lease.leaving or lease.doomed for lease in h.leases)


def test_a_job_keeps_all_the_slots_that_cost_the_same(hand: Any) -> None:
    """Spreading over pools is no reason to give half of the only pool back."""
    h = running(hand, (0.03, 0.9, 0.9, 0.9), slots_min=1, slots_max=8)
    goes_on(h, 20)
    assert len([lease for lease in h.leases if lease.state == "working"]) == 8
    assert len(h.only(h.said, Launch)) == 8


def test_machines_on_demand_work_on_while_spot_is_refused(hand: Any) -> None:
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


def test_a_resumed_job_knows_how_fast_it_was(hand: Any) -> None:
    """What is left is counted in steps of the time that they took, not in steps of a second."""
    h = hand()
    h.steps_total = 1000
    h.running(slots_min=1, slots_max=4, deadline_s=h.at_s + 30 * 3600.0)
    h.committed(2, step_s=60.0)
    h.see(JobCancelled(at_s=h.at_s, job="job", by="me"))
    h.wait(30.0)
    h.serve()
    h.wait(2.0)
    h.price(0.5, 0.5, 0.5, 0.5)
    h.see(JobResumed(at_s=h.at_s, job="job", by="me"))
    said = buying.think(h.state, h.job).because
    spare = re.search(r"with (\d+) s to spare", said)
    assert spare is not None, said
    assert int(spare[1]) <= 30 * 3600 - 998 * 60  # nearly 1,000 steps of 60 s are to be done
