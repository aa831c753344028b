"""An exact job over time: its kind is waited for, looked for again, and given up for another only in the end."""

from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from agent.messages import BackupHeld, JobOrder, SumsKept, WorkerProving, WorkerReady
from orchestrator.actions import Launch, OpenJob, StartWorker, Terminate
from orchestrator.brain.holdings import alike
from orchestrator.events import ManagerStarted
from orchestrator.state import Kind, Lease, Shut
from orchestrator.world import decode_state, encode_state

FAST, SLOW = "torch 2; AVX512; EPYC", "torch 2; AVX2; EPYC"
NEW = "; new driver"


def went_on(h: Any) -> list[str]:
    """What was said of going on with another kind."""
    return [s.because for s in h.state.sentences if "could be had that round as those" in s.because]


def apart(hand: Any, **settings: Any) -> Any:
    h = hand(on_demand_allowed=False, **settings)
    h.keys = {"small": FAST, "large": SLOW}
    h.steps_total = 1_000_000
    return h


def one_of_two(hand: Any) -> tuple[Any, Lease]:
    """A job that needs two small machines has lost one; the keeper has no sums of its newest steps."""
    h = apart(hand)
    h.start()
    h.sells("small")
    h.submit(slots_max=3, slots_min=2)
    h.goes_on(1)
    h.train(60.0)
    h.job.market.told["large"] = {"elsewhere": [SLOW]}
    h.job.market.shut["elsewhere"] = Shut(9, h.at_s)
    h.see(SumsKept(at_s=h.at_s, job="job", kept=False, copies=2, sum_bytes=400 << 20))
    for _ in range(100):
        h.committed(h.job.progress.step + 1, step_s=60.0)
    h.sells("large")
    *lost, left = h.leases
    for lease in lost:
        h.taken(lease.machine_id)
    return h, left


def test_the_newest_steps_are_not_given_up_for_another_kind(hand):
    """Only what is left of its own kind has them: it stays until they are safe, or as old as it takes to redo them."""
    h, left = one_of_two(hand)
    out = h.wait(2 * alike.LACKS_S)
    assert left.token in h.state.leases and not h.only(out, Terminate) and not went_on(h)
    h.see(BackupHeld(at_s=h.at_s, job="job", step=h.job.progress.step, state_bytes=9))
    h.served_after(20.0)
    h.served_after(20.0)
    assert len(went_on(h)) == 1
    h.train(30.0)
    assert h.types_in() == {"large"}


def test_steps_that_are_sooner_done_again_than_waited_for_hold_nothing_up(hand):
    """No backup comes: it goes on when doing them again would have been done."""
    h, left = one_of_two(hand)
    again_s = h.job.progress.step * h.job.progress.step_s
    h.served_after(again_s + 60.0)
    assert left.token not in h.state.leases and len(went_on(h)) == 1


def strange(hand: Any, **settings: Any) -> tuple[Any, Lease]:
    """A job with a machine of its kind, whose pool sells others now: three of them came."""
    h = apart(hand, **settings).running(slots_max=1, haste=1000.0)
    (own,) = h.leases
    for known in h.state.pools.values():
        known.sold = known.pool == own.pool
    h.job.spec = replace(h.job.spec, slots_max=4)
    h.keys = {name: key + NEW for name, key in h.keys.items()}
    h.train(300.0)
    assert [lease.token for lease in h.leases] == [own.token]
    return h, own


def test_machines_of_another_kind_that_came_long_ago_say_nothing_of_today(hand):
    """It had its own kind all the time; when that goes, another zone sells more of it."""
    h, own = strange(hand)
    h.keys = {"small": FAST, "large": SLOW}
    (elsewhere,) = (p for p in h.state.pools if own.type.name in p and p != own.pool.key)
    h.job.market.told[own.type.name][elsewhere] = [own.hardware]
    h.sells("small", "large")
    h.taken(own.machine_id)
    h.served_after(3.0, times=10)
    h.train(30.0)
    assert not went_on(h) and h.types_in() == {own.type.name}


def test_a_machine_that_will_be_taken_works_until_then(hand):
    """Another kind is bought when it is gone: as long as steps are committed, nothing is lacking."""
    h, own = strange(hand)
    h.sells("large")
    h.notice(own.machine_id, left_s=120.0)
    out = h.train(60.0)
    ended = [action.machine_id for action in h.only(out, Terminate)]
    assert own.machine_id not in ended and not went_on(h)
    h.taken(own.machine_id)
    h.served_after(10.0, times=90)
    h.train(30.0)
    assert len(went_on(h)) == 1


def test_machines_that_never_join_do_not_put_off_the_end_of_the_wait(hand):
    """They are bought of its own kind, again and again; ten minutes, the last of them, and it goes on."""
    h = apart(hand).running(slots_max=2, slots_min=2)
    own = h.leases
    (other,) = h.keys.keys() - h.types_in()
    h.job.market.told[other] = {"elsewhere": [h.keys[other]]}
    h.job.market.shut["elsewhere"] = Shut(1, h.at_s)
    handled = len(h.said)
    for lease in own:
        h.taken(lease.machine_id)
    for _ in range(100):
        h.wait(10.0)
        while handled < len(h.said):
            action = h.said[handled]
            handled += 1
            if isinstance(action, Launch) and action.request.token in h.state.leases:
                h.launched(action)
            elif isinstance(action, Terminate) and action.machine_id in h.machines:
                h.terminated(action.machine_id)
    assert len(went_on(h)) == 1


@pytest.mark.parametrize("slots_min", [1, 2])
def test_whichever_kind_comes_first_is_gone_on_with(hand, slots_min):
    """What a pool told once is no promise: a machine that could train is not given back for yet another one."""
    h = apart(hand)
    h.start()
    h.sells("small")
    h.submit(slots_max=2, slots_min=slots_min)
    h.goes_on(1)
    h.job.market.told["large"] = {"elsewhere": [SLOW]}
    h.job.market.shut["elsewhere"] = Shut(9, h.at_s)
    h.sells("large")
    for lease in h.leases[slots_min - 1 :]:
        h.taken(lease.machine_id)
    h.keys["large"] = SLOW + NEW
    h.wait(alike.LACKS_S + 10.0)
    for _ in range(5):
        h.serve()
        h.wait(5.0)
    h.train(60.0)
    assert len(went_on(h)) == 1 and h.types_in() == {"large"}
    assert h.job.layouts.kind == h.job.layouts.trained == Kind("cpu", SLOW + NEW)
    assert h.job.layouts.unlike_step == 1


def test_a_kind_that_no_step_was_computed_on_costs_no_other_its_machines(hand):
    """Its first machine was taken before a step, and others boot for long: they are what it wants now."""
    h = apart(hand, boot_timeout_s=3600.0)
    small, large = h.kinds
    h.kinds = (replace(small, accelerator="T4"), replace(large, accelerator="a10g"))
    h.start()
    h.sells("small")
    h.submit(slots_max=2, slots_min=2)
    h.wait(2.0)
    launches = h.only(h.said, Launch)
    h.joined(h.launched(launches[0]))
    (start,) = h.only(h.said, StartWorker)
    h.ready(start)
    assert h.job.layouts.kind == Kind("t4", FAST)
    h.sells("large")
    for launch in launches[1:]:
        h.refused(launch)
    h.taken()
    h.wait(5.0)
    (launch,) = (a for a in h.said if isinstance(a, Launch) and a.request.pool.type == "large")
    h.launched(launch)
    h.sells("small", "large")
    out = h.wait(2 * alike.LACKS_S)
    assert not h.only(out, Terminate) and not went_on(h)


def test_a_resumed_job_does_not_remember_what_came_before_its_end(hand):
    """Three unlike machines of last month do not make it give its kind up at once."""
    h = apart(hand).running(slots_max=1)
    (own,) = h.leases
    (other,) = h.keys.keys() - {own.type.name}
    h.taken(own.machine_id)
    h.sells(other)
    h.job.market.told[other] = {"elsewhere": [h.keys[other]]}
    h.job.market.shut["elsewhere"] = Shut(9, h.at_s)
    h.job.market.strangers = alike.STRANGERS_MAX
    h.cancel()
    h.wait(7200.0)
    h.job.spec = replace(h.job.spec, slots_max=2)
    h.resume()
    assert h.bought(h.wait(60.0)) == [] and not went_on(h)


def test_a_job_keeps_to_the_kind_of_a_machine_that_will_be_taken(hand):
    """It begins on it all the same: whoever comes then and rounds differently is not trained with."""
    h = apart(hand)
    h.start()
    h.sells("small")
    h.submit(slots_max=1)
    h.wait(2.0)
    h.serve(ready=False)
    (own,) = h.leases
    h.sells("large")
    h.job.spec = replace(h.job.spec, slots_max=2)
    h.notice(own.machine_id, left_s=120.0)
    (start,) = h.only(h.said, StartWorker)
    h.ready(start)
    h.wait(2.0)
    h.committed(1)
    assert h.job.layouts.kind == Kind("cpu", FAST)
    h.serve()
    h.train(30.0)
    assert h.types_in() == {"small"}
    assert any("cannot train with those" in s.because for s in h.state.sentences)


def test_machines_of_another_kind_in_one_zone_are_no_reason_while_another_sells_its_own(hand):
    """One zone got a new image, and is the cheapest: the other one is asked before the kind is given up."""
    h = apart(hand).running(slots_max=2, slots_min=2)
    mine = h.leases
    (kind,) = h.types_in()
    here, there = (key for key, known in h.state.pools.items() if known.pool.type == kind)
    h.job.market.told[kind] = {here: [h.keys[kind] + NEW] * 3, there: [h.keys[kind]]}
    (other,) = h.keys.keys() - {kind}
    h.job.market.told[other] = {"elsewhere": [h.keys[other]]}
    h.job.market.shut = {here: Shut(1, h.at_s), "elsewhere": Shut(9, h.at_s)}
    h.sells()
    for lease in mine:
        h.taken(lease.machine_id)
    h.job.market.strangers = alike.STRANGERS_MAX
    for known in h.state.pools.values():
        known.sold = known.pool.type != kind or known.pool.key == there
    h.served_after(10.0)
    h.wait(5.0)
    h.train(10.0)
    assert not went_on(h) and h.types_in() == {kind}


@pytest.mark.parametrize("alike_too", [True, False])
def test_a_job_that_has_met_another_kind_tries_a_new_type_with_one_machine(hand, alike_too):
    """Forty that are given back would cost forty starts; if it is of the kind the others follow."""
    h, own = strange(hand)
    (other,) = h.keys.keys() - {own.type.name}
    h.keys = {own.type.name: own.hardware, other: own.hardware if alike_too else SLOW + NEW}
    h.sells(other)
    for known in h.state.pools.values():
        known.sold = known.pool.type == other and known.pool.zone == "east-a"
    h.job.spec = replace(h.job.spec, slots_max=7)
    first = h.bought(h.wait(30.0))
    h.serve()
    assert first == [other]
    assert len(h.bought(h.wait(30.0))) == (2 if alike_too else 0)


@pytest.mark.parametrize(("fewest", "machines"), [(1, 1), (2, 1), (3, 2), (4, 2)])
def test_a_job_tries_a_new_type_with_as_many_machines_as_it_can_train_on(hand, fewest, machines):
    """Three workers do not fit into one machine of two slots, and a trial that cannot train is not bought."""
    h, own = strange(hand)
    h.job.spec = replace(h.job.spec, slots_min=fewest)
    kind, pools = alike.kind_of(h.state, h.job), h.state.pools.values()
    other = next(known for known in pools if known.pool.type != own.type.name)
    assert other.kind.slots == 2
    assert alike.most(h.state, h.job, kind, other) == machines


def test_what_was_given_back_when_the_kind_was_chosen_is_not_bought_again_at_once(hand):
    """Both told their keys while they proved themselves; the first that was ready chose."""
    h = apart(hand)
    h.at_s = 1e6
    h.start()
    h.sells("small")
    h.submit(slots_max=1)
    h.wait(2.0)
    h.sells("large")
    h.job.spec = replace(h.job.spec, slots_max=3)
    h.wait(5.0)
    h.serve(ready=False)
    starts = h.only(h.said, StartWorker)
    for start in starts:
        key = h.keys[h.machines[start.machine_id].pool.type]
        proving = WorkerProving(
            at_s=h.at_s,
            job="job",
            worker=start.worker,
            machine_id=start.machine_id,
            hardware=key,
        )
        h.see(proving)
    out = h.ready(starts[0])
    assert "1 machine (large, AVX2 against AVX512) cannot train" in h.words(out)
    assert h.bought(out) == [] and h.bought(h.train(300.0)) == []


def test_a_pool_of_another_kind_is_tried_again_with_one_machine_ever_more_seldom(hand):
    """A cloud sells several processors under one name: what it sold is no proof of what it sells."""
    h, own = strange(hand, control_period_s=60.0, rethink_s=60.0, stall_s=3600.0)
    tries = [0] * 8
    for hour in range(len(tries)):
        for _ in range(180):
            tries[hour] += len(h.bought(h.wait(20.0)))
            h.serve()
            h.committed(h.job.progress.step + 1)
    assert tries == [1, 0, 1, 0, 0, 0, 1, 0]
    assert [lease.token for lease in h.leases] == [own.token]
    h.keys = {"small": FAST, "large": SLOW}
    while len(h.leases) < 4 and h.at_s < own.intended_at_s + 16 * 3600.0:
        h.served_after(20.0)
        h.committed(h.job.progress.step + 1)
    assert len(h.leases) == 4
    assert {lease.hardware for lease in h.leases} == {own.hardware}


@pytest.mark.parametrize("accelerators", [("cpu", "cpu"), ("t4", "a10g")])
def test_a_job_that_has_long_trained_on_several_kinds_keeps_its_machines(hand, accelerators):
    """A journal of before kinds were known: nothing is given back, nothing is bought twice, and one sentence says it."""
    h = apart(hand)
    small, large = h.kinds
    h.kinds = tuple(
        replace(kind, accelerator=name)
        for kind, name in zip((small, large), accelerators, strict=True)
    )
    keys, h.keys = h.keys, {}
    h.begun(slots_max=2, exact=False, haste=1000.0)
    h.wait(2.0)
    h.committed(1)
    (first,) = {lease.type.name for lease in h.leases}
    h.job.spec = replace(h.job.spec, slots_max=6)
    h.sells(*(keys.keys() - {first}))
    h.train(120.0)
    h.sells("small", "large")
    before = h.types_in(), sorted(h.state.leases)
    assert before[0] == {"small", "large"}
    old = msgspec.json.decode(encode_state(h.state))
    del old["jobs"]["job"]["spec"]["exact"]
    h.state = decode_state(msgspec.json.encode(old, order=None))
    assert h.job.exact
    h.served = len(h.said)
    out = h.see(ManagerStarted(at_s=h.at_s, epoch=2, settings=h.settings))
    h.served = len(h.said)  # its workers are there
    (order,) = h.only(out, OpenJob)
    assert isinstance(order.order, JobOrder)
    out = h.train(300.0)
    for worker in list(h.job.workers):
        lease = h.state.leases[h.state.workers[worker].token]
        out += h.see(
            WorkerReady(
                at_s=h.at_s,
                job="job",
                worker=worker,
                machine_id=lease.machine_id,
                microbatches=8,
                steps_total=h.steps_total,
                state_bytes=1 << 20,
                hardware=keys[lease.type.name],
            )
        )
    out += h.train(300.0)
    h.keys = keys
    out += h.lost(h.job.layouts.current.workers[-1])
    out += h.train(300.0)
    assert not h.only(out, Terminate) and not h.bought(out)
    assert (h.types_in(), sorted(h.state.leases)) == before
    said = [s for s in h.state.sentences if "as it did before that was known" in s.because]
    assert len(said) == 1


def test_of_a_machine_with_unlike_cards_one_kind_trains(hand):
    """The other has nothing to do, and a sentence names the slot; the layout has one key."""
    h = apart(hand)
    h.start()
    h.sells("large")
    h.submit(slots_max=2)
    h.wait(2.0)
    h.serve(ready=False)
    keys = {}
    for start in h.only(h.said, StartWorker):
        keys[start.worker] = (FAST, SLOW)[start.slot]
        for _ in range(2):
            h.ready(start, hardware=keys[start.worker])
    h.wait(2.0)
    h.committed(1)
    h.train(60.0)
    assert [keys[worker] for worker in h.job.layouts.current.workers] == [FAST]
    said = [s.because for s in h.state.sentences if "has nothing to do" in s.because]
    assert len(said) == 1 and said[0].startswith("slot 1 of ")
