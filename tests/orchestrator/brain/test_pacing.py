"""Slow workers, measured profiles and the changes of layout that they bring about."""

from typing import Any

import msgspec
import pytest

from agent.layout import Layout
from agent.messages import JobProfiled, Paced, WorkerReady
from agent.profile import Link, Network, Profile
from orchestrator import preview
from orchestrator.actions import Launch, Note, Regroup, StartWorker
from orchestrator.brain.layouts.forecast import speed_of
from orchestrator.config import Config
from orchestrator.events import JobSpec
from orchestrator.planner.drift import WINDOW, refit_ring
from orchestrator.settings import Settings

DOUBT_S, EASE_S, PROBE_S = Settings().doubt_s, Settings().ease_s, Settings().probe_s


def shares(layout: Layout) -> dict[str, int]:
    return {replica.workers[0]: replica.count for replica in layout.replicas}


def trained(
    hand: Any, stages: int = 1, prices: tuple[float, ...] | None = None, **spec: Any
) -> Any:
    """Has run for long enough for changes to be worth their pauses, and has long to go."""
    h = hand()
    h.prices = prices or h.prices
    h.stages, h.steps_total = stages, 100_000
    h.running(**spec)
    h.train(600.0)
    return h


def weighing(made: Profile, each_bytes: float) -> Profile:
    """The same model, whose sections have so many bytes of parameters each."""
    sections = tuple(
        msgspec.structs.replace(s, parameter_bytes=each_bytes, optimizer_bytes=2 * each_bytes)
        for s in made.sections
    )
    return msgspec.structs.replace(made, sections=sections)


def slow_for(hand: Any, seconds: float, **slow: float) -> list[Any]:
    """Beats say so, and it lasts."""
    return [*hand.paced(**slow), *hand.wait(seconds), *hand.paced(**slow)]


def test_a_slow_worker_gets_fewer_microbatches_once_it_has_lasted(hand):
    """One of four takes three times as long: not at once, but after a while its share is cut, and it is told."""
    h = trained(hand, slots_max=4)
    slow = h.job.layouts.current.workers[1]
    assert not h.only(h.paced(**{slow: 3.0}), Regroup)
    out = slow_for(h, DOUBT_S, **{slow: 3.0})
    (regroup,) = h.only(out, Regroup)
    assert regroup.when == "boundary"
    assert shares(regroup.layout)[slow] == 1
    assert sum(shares(regroup.layout).values()) == 8
    assert f"{slow} takes 3.0 times as long for a microbatch as its peers" in h.words(out)


def test_a_straggler_that_steps_have_shown_first_gets_fewer_all_the_same(hand, profile):
    """Some steps are slow before its beats say who it is: that is not counted twice, and then no other layout pays."""
    h = trained(hand, slots_max=4)
    h.profiled(profile(1))
    h.wait(2.0)
    slow = h.job.layouts.current.workers[1]
    h.train(100.0, step_s=3 * h.job.layouts.plan.step_s)
    (regroup,) = h.only(slow_for(h, DOUBT_S, **{slow: 3.0}), Regroup)
    assert shares(regroup.layout)[slow] == 1


def test_a_moment_of_slowness_and_noise_change_nothing(hand):
    """What does not last, and what is within the noise, is not acted upon."""
    h = trained(hand, slots_max=4)
    slow = h.job.layouts.current.workers[1]
    out = [*h.paced(**{slow: 3.0}), *h.wait(1.0), *h.paced(), *h.train(60.0)]
    for factor in (1.2, 0.85, 1.25):
        out += slow_for(h, 20.0, **{slow: factor})
    assert not h.only(out, Regroup)


def test_between_two_thresholds_it_stays_what_it_was(hand):
    """Hysteresis: what became slow at a factor of 2 is still slow at 1.6, and well again at 1.0."""
    h = trained(hand, slots_max=4)
    slow = h.job.layouts.current.workers[1]
    slow_for(h, 6.0, **{slow: 2.0})
    h.committed(h.job.progress.step + 1)
    reckoned = h.state.workers[slow].slow
    assert reckoned == pytest.approx(1.95, rel=0.01)
    slow_for(h, 6.0, **{slow: 1.6})
    assert h.state.workers[slow].slow == reckoned
    out = slow_for(h, 6.0)
    assert h.state.workers[slow].slow == 1.0
    assert "it gets its share" in h.words(out)
    assert set(shares(h.job.layouts.current).values()) == {2}


def test_it_is_left_out_later_tried_again_and_taken_back(hand):
    """Six times slower: first fewer, then out with the reason, then probed; recovered, it is in for good."""
    h = trained(hand, slots_max=4)
    slow = h.job.layouts.current.workers[2]
    slow_for(h, 6.0, **{slow: 6.0})
    assert shares(h.job.layouts.current)[slow] == 1
    out = h.train(EASE_S, step_s=1.2)
    assert slow not in h.job.layouts.current.workers
    assert f"{slow} is left out, it takes 6.0 times as long" in h.words(out)
    out = h.train(PROBE_S, step_s=0.7)
    assert slow in h.job.layouts.current.workers
    assert f"{slow} is tried again" in h.words(out)
    out = slow_for(h, 2 * DOUBT_S)
    assert f"{slow} is as fast as its peers again" in h.words(out)
    h.train(600.0)
    assert slow in h.job.layouts.current.workers
    assert h.state.workers[slow].eased == 0


def test_a_probe_that_fails_is_repeated_ever_more_seldom(hand):
    """Still slow when it is tried again: out at once, and the next try comes twice as late."""
    h = trained(hand, slots_max=4)
    slow = h.job.layouts.current.workers[2]
    slow_for(h, 6.0, **{slow: 6.0})
    h.train(EASE_S, step_s=1.2)
    h.train(PROBE_S, step_s=0.7)
    h.committed(h.job.progress.step + 1, step_s=2.0)
    out = slow_for(h, 6.0, **{slow: 6.0})
    assert slow not in h.job.layouts.current.workers
    assert f"it is tried again in {2 * PROBE_S:.0f} s" in h.words(out)


def test_a_profile_changes_the_layout_if_that_pays_and_says_why(hand, profile):
    """Of a model that fits only in two pieces, the layout becomes deep; the sentence has the runner-up."""
    h = trained(hand, stages=4, slots_max=4)
    h.profiled(profile(4, memory=0.6 * 4 / 3 * (1 << 20)))
    out = h.wait(2.0)
    out += h.lost(h.job.layouts.current.workers[0])
    regroup = h.only(out, Regroup)[-1]
    assert regroup.layout.depth >= 2
    assert " on 3 workers: " in regroup.because
    assert "pause about" in regroup.because
    h.committed(h.job.progress.step + 1)
    assert "a step; next best" in h.job.because


def test_a_change_that_does_not_win_back_its_pause_waits_and_a_forced_one_does_not(hand, profile):
    """The work is nearly done: a newcomer is not taken in any more. When the other is lost, it is."""
    h = trained(hand, slots_max=2)
    h.profiled(profile(1))
    h.train(20.0)
    gone, alone = h.job.layouts.current.workers
    h.lost(gone)
    h.committed(h.steps_total - 2, step_s=0.7)
    h.served_after(3.0)
    h.wait(3.0)
    assert len(h.job.workers) == 2
    assert h.job.layouts.current.workers == (alone,)
    assert "stays as it is instead of 1x2: " in h.words(h.said)
    (regroup,) = h.only(h.lost(alone), Regroup)
    assert (regroup.when, regroup.layout.width) == ("now", 1)


def test_nothing_fits_and_the_job_waits_and_says_what_would_do(hand, profile):
    """Before its first step no layout fits what is there: no order is given, and the status names the memory."""
    h = hand()
    h.begun(slots_max=2)
    h.profiled(profile(1, memory=1e5))
    h.wait(0.0)
    h.lost(h.job.layouts.current.workers[0])
    out = h.wait(200.0)
    assert not h.only(out, Regroup)
    assert "the least that would do is" in h.job.layouts.unfit
    assert sum("the least that would do" in note.because for note in h.only(out, Note)) <= 1


def test_what_has_run_fits_whatever_a_profile_says(hand, profile):
    """A profile that nothing fits neither releases the machines of a job that runs nor keeps it from going on."""
    h = trained(hand, slots_max=2)
    h.profiled(profile(1, memory=1e5))
    h.train(60.0)
    assert len(h.job.workers) == 2
    (regroup,) = h.only(h.lost(h.job.layouts.current.workers[0]), Regroup)
    assert regroup.layout.describe() == "1x1"


def test_a_drifted_profile_is_refitted_and_the_layout_stays(hand, profile):
    """Steps take twice what was predicted: times are scaled, and the prediction is what is measured."""
    h = trained(hand, slots_max=2)
    h.profiled(profile(1))
    h.wait(2.0)
    predicted = h.job.layouts.plan.step_s
    h.train(10.0 * (WINDOW + 1), step_s=2 * predicted)
    assert "steps take 2.00 times what was predicted" in h.words(h.said)
    assert h.job.layouts.plan.step_s == pytest.approx(2 * predicted, rel=0.1)
    assert not h.only(h.wait(10.0), Regroup)


def test_a_step_that_waits_for_something_else_is_not_taken_for_slow_computing(hand, profile):
    """Microbatches take what was predicted, steps twice that: more workers are not expected to shorten the rest."""
    h = trained(hand, slots_max=2)
    h.profiled(profile(1))
    h.wait(2.0)
    before, each = h.job.layouts.plan, 0.1
    compute_s = h.job.layouts.profile.sections[0].forward_s
    h.see(
        Paced(
            at_s=h.at_s,
            job="job",
            generation=h.job.layouts.generation,
            microbatch_s=dict.fromkeys(h.job.layouts.current.workers, each),
        )
    )
    h.train(10.0 * (WINDOW + 1), step_s=2 * before.step_s)
    assert "and microbatches 1.00 times: computing is scaled by that" in h.words(h.said)
    assert h.job.layouts.profile.sections[0].forward_s == pytest.approx(compute_s, rel=1e-3)
    assert h.job.layouts.profile.overhead_s == pytest.approx(before.step_s, rel=0.05)
    assert h.job.layouts.plan.step_s == pytest.approx(2 * before.step_s, rel=0.05)


def test_the_first_step_of_a_layout_says_nothing_of_how_long_one_takes(hand, profile):
    """All that came before it is in it. Until a whole one was seen, what was predicted is reckoned with."""
    h = trained(hand, slots_max=2)
    h.profiled(profile(1))
    h.wait(2.0)
    h.train(5.0, step_s=h.job.layouts.plan.step_s)
    seen, watch = h.job.progress.slot_step_s, h.job.layouts.watch
    h.committed(h.job.progress.step + 1, step_s=0.0)
    assert (h.job.progress.step_s, h.job.progress.slot_step_s) == (h.job.layouts.plan.step_s, seen)
    assert h.job.layouts.watch == watch


def test_a_measured_network_takes_the_place_of_the_assumed_and_times_stay_refitted(hand, profile):
    """The same profile again with other links: what steps have shown of its times is kept; without news nothing is said."""
    h = trained(hand, slots_max=2)
    measured = profile(1, key="model")
    h.profiled(measured)
    h.wait(2.0)
    h.train(10.0 * (WINDOW + 1), step_s=2 * h.job.layouts.plan.step_s)
    refitted = h.job.layouts.profile.sections
    assert refitted != measured.sections
    slow = msgspec.structs.replace(
        measured.network.inter, bandwidth_bytes_per_s=2e8, latency_s=1e-4
    )
    network = msgspec.structs.replace(measured.network, inter=slow, reduce_inter=slow)
    again = msgspec.structs.replace(measured, network=network, network_from="between")
    out = h.profiled(again)
    assert h.job.layouts.profile.network == network
    assert h.job.layouts.profile.sections == refitted
    assert "the network was measured by w0, 0.2 GB/s after 100 us between" in h.words(out)
    assert h.profiled(again) == []
    within = msgspec.structs.replace(network, intra=slow)
    both = msgspec.structs.replace(measured, network=within, network_from="measured")
    words = h.words(h.profiled(both))
    assert "the network was measured by w0, 0.2 GB/s after 100 us within one" in words
    assert "between machines" not in words  # that was told before


def test_a_ring_that_is_slower_than_measured_is_told_from_machines_that_are(hand, profile):
    """Alone steps take what was predicted, two take longer: what was seen alone still counts, and the ring is scaled."""
    h = trained(hand, slots_max=2)
    h.profiled(profile(1))
    h.wait(2.0)
    h.lost(h.job.layouts.current.workers[0])
    h.committed(h.job.progress.step + 1, step_s=h.job.layouts.plan.step_s)
    h.state.settings = msgspec.structs.replace(h.state.settings, settle_s=1e6)  # nobody comes in
    assert h.job.layouts.current.width == 1
    compute_s, ring = (
        h.job.layouts.profile.sections[0].forward_s,
        h.job.layouts.profile.network.reduce_inter,
    )
    for _ in range(2 * WINDOW):
        h.at_s += 1.0
        h.committed(h.job.progress.step + 1, step_s=h.job.layouts.plan.step_s)
    assert h.job.layouts.profile.sections[0].forward_s == compute_s
    h.state.settings = msgspec.structs.replace(h.state.settings, settle_s=1.0)
    h.served_after(10.0)
    h.wait(20.0)
    h.committed(h.job.progress.step + 1, step_s=h.job.layouts.plan.step_s)
    assert h.job.layouts.current.width == 2
    predicted = h.job.layouts.plan.step_s
    for _ in range(WINDOW + 1):
        h.at_s += 5.0
        h.committed(h.job.progress.step + 1, step_s=1.5 * predicted)
    assert "with a reduction: the ring is scaled" in h.words(h.said)
    assert h.job.layouts.profile.sections[0].forward_s == compute_s
    slower = h.job.layouts.profile.network.reduce_inter
    assert slower.bandwidth_bytes_per_s < ring.bandwidth_bytes_per_s / 2


def test_a_plan_believes_of_a_machines_room_what_the_manager_believes(hand, profile):
    """The whole model fits into what was measured, but not into what is sold: the plan cuts it as the job will be."""
    h = hand()
    h.start()
    made = profile(4, memory=64e9, instance_type="")
    for each_bytes, room in ((6e7, h.kinds[0].memory_bytes), (2e9, 64e9)):
        sold, model = h.planned(weighing(made, each_bytes))
        spec = JobSpec(job="job", script="train.py", script_sha="0" * 64)
        _, job = preview.ask_the_brain(Config(), sold, spec, preview.PlannedWork(), model)
        assert job.layouts.profile.memory_bytes == room


def test_a_profile_that_is_looked_up_again_leaves_the_network_as_it_was_seen(hand, profile):
    """A newcomer tells what is stored already: the ring stays scaled to real steps. What is new, counts."""
    h = trained(hand, slots_max=4)
    measured = profile(4, key="key", network_from="measured")
    h.profiled(measured)
    h.train(30.0)
    h.job.layouts.profile = scaled = refit_ring(h.job.layouts.profile, h.job.layouts.plan, 1.5)
    assert not h.profiled(measured)
    assert h.job.layouts.profile == scaled
    link = Link(bandwidth_bytes_per_s=1e9)
    network = Network(intra=link, inter=link, reduce_intra=link, reduce_inter=link)
    out = h.profiled(msgspec.structs.replace(measured, network=network))
    assert "the network was measured" in h.words(out)
    assert h.job.layouts.profile.network == network


def test_the_bidder_is_told_the_books_speed_scaled_by_what_is_measured(hand, profile):
    """Steps per second of every footprint as planned, of unlike types between two counts; the book says
    nothing about a job that has run though no layout of the book fits."""
    h = trained(hand, slots_max=4)
    assert speed_of(h.state, h.job) is None
    h.profiled(profile(1))
    h.wait(2.0)
    h.committed(h.job.progress.step + 1, step_s=2 * h.job.layouts.plan.step_s)
    speed = speed_of(h.state, h.job)
    assert {lease.type.name for lease in h.leases} == {"large"}
    assert speed.work_per_s({"large": 2}) == pytest.approx(1 / (2 * h.job.layouts.plan.step_s))
    assert speed.work_per_s({"small": 4}) > speed.work_per_s({"large": 2})  # a link for each worker
    assert speed.work_per_s({"small": 9}) == speed.work_per_s({"small": 4})
    assert speed.work_per_s({"small": 2}) == speed.work_per_s({"large": 1})
    assert speed.work_per_s({}) == 0.0
    h.profiled(profile(1, memory=1e5))
    assert speed_of(h.state, h.job) is None


def test_a_job_that_has_run_goes_on_after_a_loss_though_no_layout_fits_its_profile(hand, profile):
    """Its machines stay, the lost worker is replaced; after a cancel it can be resumed as well."""
    h = trained(hand, slots_min=1, slots_max=4)
    h.profiled(profile(4, memory=1e5))
    held = {lease.token for lease in h.leases}
    h.train(60.0)
    h.lost(h.job.layouts.current.workers[0])
    h.train(60.0)
    assert {lease.token for lease in h.leases} == held
    assert (h.job.status, len(h.job.layouts.current.workers)) == ("RUNNING", 4)
    h.cancel()
    h.served_after(60.0)
    h.resume()
    h.train(60.0)
    assert (h.job.status, len(h.job.layouts.current.workers)) == ("RUNNING", 4)


def test_what_was_measured_counts_where_a_machine_holds_more_than_it_is_sold_as(hand, profile):
    """Sold with 1 GiB a slot, it runs a model of 3 GiB: the room is what was measured. A smaller model keeps
    to what is sold."""
    for each_bytes, room in ((2e8, 64e9), (1e6, 1 << 30)):
        h = trained(hand, prices=(0.03, 0.9, 0.9, 0.9), slots_min=1, slots_max=4)
        made = weighing(profile(4, memory=64e9), each_bytes)
        worker = h.job.layouts.current.workers[0]
        assert h.state.leases[h.state.workers[worker].token].type.slots == 1
        h.see(JobProfiled(at_s=h.at_s, job="job", worker=worker, profile=made))
        assert h.job.layouts.profile.memory_bytes == room
        h.train(60.0)
        assert h.job.layouts.plan is not None


def test_a_change_during_a_change_ends_in_the_newest_layout(hand):
    """A loss while a slower change is on its way: the newest generation is without the lost, and works."""
    h = trained(hand, slots_max=4)
    first, slow = h.job.layouts.current.workers[:2]
    slow_for(h, 6.0, **{slow: 3.0})
    assert h.job.layouts.acknowledged < h.job.layouts.generation
    (regroup,) = h.only(h.lost(first), Regroup)
    assert (regroup.when, regroup.layout.generation) == ("now", h.job.layouts.generation)
    assert first not in regroup.layout.workers
    h.committed(h.job.progress.step + 1)
    assert h.job.layouts.acknowledged == h.job.layouts.generation


def test_a_chain_that_cannot_play_the_step_in_flight_is_ended_at_once(hand):
    """Such a step ends in no layout of this depth, so no boundary is waited for; and it is cut no more."""
    h = trained(hand, 4, slots_max=4, depth=2)
    assert h.job.layouts.current.depth == 2
    why = "a microbatch of [[3]], and the loop could be recorded for [[4]] only"
    worker = h.state.workers[h.job.layouts.current.workers[1]]
    taken_back = WorkerReady(
        at_s=h.at_s,
        job="job",
        worker=worker.id,
        machine_id=h.state.leases[worker.token].machine_id,
        microbatches=8,
        steps_total=h.steps_total,
        state_bytes=1 << 20,
        uncuttable=why,
        stages_max=1,
    )
    (regroup,) = h.only(h.see(taken_back), Regroup)
    assert (regroup.when, regroup.layout.depth, regroup.layout.width) == ("now", 1, 4)
    assert why in regroup.because
    assert h.job.status == "RECOVERING"
    h.committed(h.job.progress.step + 1)
    assert h.job.status == "RUNNING"
    h.see(msgspec.structs.replace(taken_back, uncuttable="", stages_max=4))  # a newcomer's word
    h.wait(600.0)
    assert h.job.layouts.current.depth == 1
    assert h.job.layouts.uncuttable == why


def alone(hand: Any, steps: int, profile: Profile) -> tuple[Any, StartWorker]:
    """One worker has begun alone and measured the model; the others are ready a moment later.

    Each has a machine to itself, because small machines are cheaper.
    """
    h = hand(on_demand_allowed=False)
    h.steps_total = steps
    h.prices = (0.03, 0.07, 0.04, 0.09)
    h.start()
    h.submit(slots_max=4)
    for launch in h.only(h.wait(2.0), Launch):
        h.joined(h.launched(launch))
    first, *others = h.only(h.said, StartWorker)
    h.ready(first)
    h.committed(1, step_s=0.8)
    for start in others:
        h.ready(start)
    h.profiled(profile)
    h.served = len(h.said)
    h.wait(1.0)
    return h, first


def test_what_is_measured_says_what_a_machine_is_worth_though_its_layout_has_to_wait(hand, profile):
    """Two workers would be a little faster than one, which is not worth the machine; and the gate is still shut."""
    link = Link(bandwidth_bytes_per_s=1e10, latency_s=1e-6)
    slow = msgspec.structs.replace(link, latency_s=0.125)
    network = Network(intra=link, inter=link, reduce_intra=slow, reduce_inter=slow)
    h, first = alone(hand, 1000, profile(1, network=network))
    assert "stays as it is instead of 1x2: a pause of 1.0 s would be more than 3%" in h.words(
        h.said
    )
    h.served_after(4.0)
    assert "adds no work that is worth its price" in h.words(h.said)
    (lease,) = h.leases
    assert first.worker in lease.workers.values()


@pytest.mark.parametrize(("steps", "kept"), [(35, False), (1000, True)])
def test_machines_are_kept_for_a_change_of_layout_only_if_it_may_come_before_the_end(
    hand, profile, *, steps, kept
):
    """One worker began alone, and the gate lets the others in after half a minute. A job that ends before gives
    their machines back and buys none; a longer one says that it keeps them, and takes them in.
    """
    h, first = alone(hand, steps, profile(1))
    bought = len(h.leases)
    assert f"; {bought - 1} machines have nothing to do until then" in h.words(h.said)
    for step in range(2, 30):
        h.served_after(0.8)
        h.committed(step, step_s=0.8)
    held = [lease.token for lease in h.leases]
    assert (len(held), len(h.only(h.said, Launch))) == (bought if kept else 1, bought)
    assert h.job.layouts.current.workers == (first.worker,)
    assert ("the job ends before its layout may change" in h.words(h.said)) is not kept
    for step in range(30, 60 if kept else 30):
        h.served_after(0.8)
        h.committed(step, step_s=0.8)
    assert len(h.job.layouts.current.workers) == (4 if kept else 1)
