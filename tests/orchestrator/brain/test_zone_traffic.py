"""Traffic between zones in the manager: one zone unless a second one pays, and a line of the bill."""

from typing import Any

import pytest

from agent.messages import JobCompleted, Progress, Regrouped
from bidding.model import Acquire, Purchase
from cloud.clock import HOUR_S
from cloud.model import Traits
from orchestrator import preview
from orchestrator.actions import Launch
from orchestrator.brain.holdings import leases, ledger
from orchestrator.brain.layouts.layout_choice import Question, Seat, choose
from orchestrator.config import Config
from orchestrator.events import JobSpec
from orchestrator.view_builder import view_of
from orchestrator.world import decode_state, encode_state


def zones_of(h: Any) -> set[str]:
    return {lease.pool.zone for lease in h.leases if lease.machine_id}


def split(hand: Any, zone_usd_per_gb: float, rounds: int = 10, **spec: Any) -> Any:
    """A job for two slots where each zone sells one small machine and no more."""
    h = hand(on_demand_allowed=False)
    h.traits = Traits(billing="local", zone_usd_per_gb=zone_usd_per_gb)
    h.start()
    h.submit(slots_max=2, **spec)
    for _ in range(rounds):
        sell(h)
        starts(h)
        if h.job.layouts.current is not None:
            h.committed(h.job.progress.step + 1)
    return h


def sell(h: Any) -> None:
    """Two seconds pass, and of what is asked for each zone sells one small machine."""
    for launch in h.only(h.wait(2.0), Launch):
        pool = launch.request.pool
        if pool.type == "large" or pool.zone in zones_of(h):
            h.refused(launch)
        else:
            h.joined(h.launched(launch))


def starts(h: Any) -> None:
    """Workers that were asked for are ready."""
    for worker in list(h.state.workers.values()):
        if not worker.ready:
            start = next(
                a for a in h.said if getattr(a, "worker", "") == worker.id and hasattr(a, "slot")
            )
            h.ready(start)


def test_a_second_zone_costs_what_its_layout_sends_and_the_ledger_says_it(hand):
    """Two slots, 1 MiB of state: two thirds of a MiB of gradients a step at $0.0002 a GB."""
    h = split(hand, 0.0002)
    assert zones_of(h) == {"east-a", "east-b"}
    step_usd = 2 * (1 << 20) / 3 / 1e9 * 0.0002
    assert h.job.layouts.step_usd == pytest.approx(step_usd)
    assert "its traffic between zones costs $" in h.job.layouts.chosen
    alone = h.job.progress.step
    h.wait(10.0)
    paid_usd = h.job.layouts.sent_usd
    h.committed(alone + 50)
    assert h.job.layouts.sent_usd == pytest.approx(paid_usd + 50 * step_usd)
    for account in (h.state.account, h.job.account):
        assert ledger.traffic_usd(account, h.at_s) == pytest.approx(h.job.layouts.sent_usd)
        assert account.traffic_usd_per_h == pytest.approx(step_usd / 0.5 * HOUR_S)
    view = view_of(h.state, h.at_s)
    machines_usd = sum(m.cost_usd for m in view.machines)
    assert view.jobs[0].traffic_usd == pytest.approx(h.job.layouts.sent_usd)
    assert view.cost.spent_usd == pytest.approx(machines_usd + view.jobs[0].traffic_usd)
    assert encode_state(decode_state(encode_state(h.state))) == encode_state(h.state)
    for lease in h.leases:
        leases.give_back(h.state, [], lease, "the end of the test")
    h.listed()
    h.machines.clear()
    h.at_s += 60.0
    h.listed()
    assert not h.job.leases
    assert h.job.account.usd_per_h == h.job.account.traffic_usd_per_h == 0.0
    assert h.job.account.traffic_usd == pytest.approx(h.job.layouts.sent_usd)


def test_steps_of_each_layout_cost_its_own_traffic(hand):
    """What a layout in two zones has committed is heard of after one in one zone was asked for."""
    h = split(hand, 0.0002, rounds=0)
    while not h.job.layouts.step_usd:
        sell(h)
        starts(h)
        if h.job.layouts.current is not None and not h.job.layouts.step_usd:
            h.committed(h.job.progress.step + 1)
    both, step_usd = h.job.layouts.generation, h.job.layouts.step_usd
    h.taken(next(lease.machine_id for lease in h.leases if lease.pool.zone == "east-b"))
    assert h.job.layouts.generation == both + 1 > both > h.job.layouts.acknowledged
    assert h.job.layouts.step_usd == 0.0

    def committed(generation: int, steps: int) -> None:
        step, told = h.job.progress.step, {"at_s": h.at_s, "job": "job", "generation": generation}
        h.see(Regrouped(**told, step=step + 1, pause_s=0.1))
        h.see(Progress(**told, step=step + steps, steps_total=100, loss=2.0, step_s=0.5))

    committed(both, 10)
    assert h.job.layouts.sent_usd == pytest.approx(10 * step_usd)
    committed(both + 1, 10)
    step = h.job.progress.step
    h.see(
        JobCompleted(
            at_s=h.at_s,
            job="job",
            step=step + 2,
            loss=1.0,
            weights_sha="0" * 64,
            export_uri="",
        )
    )
    assert h.job.layouts.sent_usd == pytest.approx(10 * step_usd)


def test_a_job_that_waits_for_a_worker_is_charged_no_traffic(hand):
    """Its two slots are too few without the lost machine, and no pool sells it one for long."""
    h = split(hand, 0.0002, slots_min=2)
    assert h.job.status == "RUNNING"
    rate = h.job.account.traffic_usd_per_h
    assert rate > 0
    h.taken(next(lease.machine_id for lease in h.leases if lease.pool.zone == "east-b"))
    assert h.job.status == "RECOVERING"
    for account in (h.state.account, h.job.account):
        assert account.traffic_usd_per_h == pytest.approx(0.0, abs=1e-15)
    lost_usd = ledger.traffic_usd(h.job.account, h.at_s)
    h.wait(600.0)
    assert ledger.traffic_usd(h.job.account, h.at_s) == pytest.approx(lost_usd, rel=1e-9)


def test_a_dear_second_zone_is_not_used(hand):
    """It trains with one machine while no zone sells two."""
    h = split(hand, 1e3)
    assert len(h.job.layouts.current.workers) == 1
    assert h.job.layouts.step_usd == 0.0


def test_a_plan_prices_its_layout_by_zones_as_the_manager_does(hand, profile):
    """Of machines in two zones it uses one, or says what the second one sends."""
    h = hand()
    h.start()
    pools = tuple(known.pool for known in h.state.pools.values())
    small = {pool.zone: pool for pool in pools if pool.type == "small"}
    parts = tuple(
        Acquire(pool=pool, market="spot", bid_usd_per_h=None, count=1, because="a test")
        for pool in small.values()
    )
    wanted = Purchase(acquire=parts, release=(), because="", runner_up="", cost_usd_per_work=None)
    for usd_per_gb, workers in ((0.0, 2), (1e-4, 2), (1e3, 1)):
        traits = {"local": Traits(billing="local", zone_usd_per_gb=usd_per_gb)}
        sold, model = h.planned(profile(4, memory=64e9), traits=traits)
        spec = JobSpec(job="job", script="train.py", script_sha="0" * 64, slots_max=2)
        state, job = preview.ask_the_brain(Config(), sold, spec, preview.PlannedWork(), model)
        choice = choose(preview._question(state, job, wanted))
        assert sum(len(replica.workers) for replica in choice.replicas) == workers
        assert (choice.traffic_usd > 0) == (usd_per_gb == 1e-4)


def test_a_plan_prices_a_slot_hour_alike_whether_a_step_was_timed_or_not(hand, profile):
    """The profile alone tells how long a step takes; it was shown as if each took a second."""
    h = hand()
    h.start()
    sold, model = h.planned(profile(4))
    spec = JobSpec(job="job", script="train.py", script_sha="0" * 64, slots_max=2)
    shown = []
    untimed = preview.PlannedWork()
    state, job = preview.ask_the_brain(Config(), sold, spec, untimed, model)
    took_s = preview._slot_s(job)
    timed = preview.PlannedWork(steps=1000, step_s=took_s, steps_from="x", step_s_from="x")
    for work in (untimed, timed):
        state, job = preview.ask_the_brain(Config(), sold, spec, work, model)
        rows = preview.considered(state, job, work, preview.think(state, job), sold)
        shown.append([(row.pool, row.expected_usd_per_slot_h) for row in rows])
    for (pool, one), (_, other) in zip(*map(sorted, shown), strict=True):
        assert one == pytest.approx(other, rel=0.12), pool  # 1 / took_s is more


def test_where_traffic_is_free_nothing_is_said_of_zones(hand):
    h = split(hand, 0.0)
    assert zones_of(h) == {"east-a", "east-b"}
    assert h.job.layouts.step_usd == 0.0
    assert "zone" not in h.job.layouts.chosen
    assert "zone" not in " ".join(lease.why_bought.partition(": ")[2] for lease in h.leases)


def seats(zones: str, usd_per_gb: float = 0.02) -> tuple[Seat, ...]:
    return tuple(
        Seat(
            worker=f"w{n}",
            machine=f"m{n}",
            zone=zone,
            region="r",
            usd_per_h=0.5,
            zone_usd_per_gb=usd_per_gb,
            region_usd_per_gb=usd_per_gb,
        )
        for n, zone in enumerate(zones)
    )


@pytest.mark.parametrize(
    ("zones", "gradient_bytes", "inside"),
    [
        ("aaab", 4e9, "aaa"),  # dear: the one that is apart waits
        ("aaab", 4e3, "aaab"),  # cheap: all compute
        ("abbb", 4e9, "bbb"),  # the larger part computes, whoever was first
        ("aabb", 4e9, "aa"),
    ],
)
def test_a_layout_uses_the_seats_whose_work_pays(zones, gradient_bytes, inside):
    asked = Question(
        microbatches=12,
        seats=seats(zones),
        workers_max=4,
        gradient_bytes=gradient_bytes,
        slot_step_s=4.0,
    )
    choice = choose(asked)
    by_name = {seat.worker: seat.zone for seat in asked.seats}
    assert "".join(by_name[w] for r in choice.replicas for w in r.workers) == inside
    assert (choice.traffic_usd > 0) == (len(set(inside)) > 1)
