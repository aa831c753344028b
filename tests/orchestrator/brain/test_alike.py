"""Machines that round differently are not in one layout of an exact job, and cost it next to nothing."""

from typing import Any

import pytest
from msgspec.structs import replace

from agent.messages import WorkerProving
from cloud.model import Place, Room
from orchestrator.actions import Launch, StartWorker
from orchestrator.brain.holdings import alike
from orchestrator.brain.holdings.alike import against
from orchestrator.state import Kind, Shut
from orchestrator.world import decode_state, encode_state

PLACE = Place("local", "east")
FAST, SLOW = "torch 2; AVX512; EPYC", "torch 2; AVX2; EPYC"


def apart(hand: Any, **settings: Any) -> Any:
    h = hand(**settings)
    h.keys = {"small": FAST, "large": SLOW}
    return h


def mixed(h: Any) -> Any:
    """It trains on a small machine; then only a large one is sold, and it has one."""
    h.steps_total = 1_000_000
    h.running(slots_max=1, haste=1000.0)
    assert h.types_in() == {"small"}
    h.job.spec = replace(h.job.spec, slots_max=3)
    h.sells("large")
    h.wait(5.0)
    h.serve(ready=False)
    return [a for a in h.said if isinstance(a, StartWorker)][1]


def test_a_machine_that_rounds_differently_is_given_back_and_not_bought_again(hand):
    """One sentence names it, the type and what differs; the layout stays, and no money follows."""
    h = apart(hand)
    start = mixed(h)
    before = h.job.layouts.generation
    out = h.ready(start)
    h.serve()
    assert "1 machine (large, AVX2 against AVX512) cannot train with those of job" in h.words(out)
    assert h.job.layouts.generation == before and h.types_in() == {"small"}
    assert {lease.type.name for lease in h.leases} == {"small"}
    assert "large" not in h.bought(h.train(900.0))
    assert sum("cannot train" in said.because for said in h.state.sentences) == 1
    again = decode_state(encode_state(h.state))
    assert again.jobs["job"].layouts.kind == Kind("cpu", FAST)


def test_a_machine_is_known_before_it_has_proven_itself(hand):
    """A proof may take minutes, and its machine costs money meanwhile."""
    h = apart(hand)
    start = mixed(h)
    told = WorkerProving(
        at_s=h.at_s, job="job", worker=start.worker, machine_id=start.machine_id, hardware=SLOW
    )
    assert "cannot train" in h.words(h.see(told))
    assert h.state.leases[next(iter(h.job.leases))].type.name == "small"


def test_with_exact_off_all_train_together_and_that_is_said_once(hand):
    """What is given up stands in one sentence."""
    h = apart(hand)
    h.begun(slots_max=4, exact=False)
    h.wait(2.0)
    h.committed(1)
    h.job.spec = replace(h.job.spec, slots_max=8)
    for known in h.state.pools.values():
        known.sold = known.pool.type not in h.types_in()
    h.served_after(60.0)
    h.train(120.0)
    assert h.types_in() == {"small", "large"}
    said = [s.because for s in h.state.sentences if "rounds differently" in s.because]
    assert len(said) == 1 and "with exact = false they train together" in said[0]


def test_a_script_whose_sums_have_no_order_keeps_to_nothing(hand):
    """`deterministic=False`: its bits depend on the layout anyway."""
    h = apart(hand)
    start = mixed(h)
    assert "cannot train" not in h.words(h.ready(start, exact=False, hardware=SLOW))
    h.train(60.0)
    assert h.types_in() == {"small", "large"}


def test_workers_that_do_not_say_what_they_compute_on_join_as_before(hand):
    """Those of earlier software."""
    h = hand()
    start = mixed(h)
    h.ready(start)
    h.train(60.0)
    assert h.types_in() == {"small", "large"}


def test_a_job_whose_kind_is_gone_goes_on_with_another_and_says_so(hand):
    """No layout has both. It waits for its own kind for a while, and does not starve."""
    h = apart(hand)
    h.running(slots_max=2, slots_min=2)
    (kind,) = h.types_in()
    other = ({"small", "large"} - {kind}).pop()
    for known in h.state.pools.values():
        known.sold = known.pool.type != kind
    h.job.market.told[other] = {"elsewhere": [h.keys[other]]}
    h.taken()
    before = h.bought(h.wait(alike.LACKS_S - 30.0))
    h.serve()
    assert before == []
    h.served_after(60.0)
    h.train(60.0)
    assert h.types_in() == {other}
    assert h.job.status == "RUNNING"
    said = [s.because for s in h.state.sentences if "could be had that round as those" in s.because]
    assert len(said) == 1 and "it goes on with any cpu" in said[0]
    differs = against(h.keys[other], h.keys[kind])
    said = [
        s.because for s in h.state.sentences if "its last bits are those of others" in s.because
    ]
    assert said == [f"from step 1 on its last bits are those of others ({differs})"]
    assert h.job.layouts.unlike_step == 1


def without_its_kind(hand: Any) -> tuple[Any, str]:
    """A job that has lost all its machines, while only others are sold; the keys of all are known."""
    h = apart(hand)
    h.running(slots_max=2)
    (kind,) = h.types_in()
    h.job.market.told = {name: {"elsewhere": [key]} for name, key in h.keys.items()}
    h.job.market.shut["elsewhere"] = Shut(9, h.at_s)
    for known in h.state.pools.values():
        known.sold = known.pool.type != kind
    h.taken()
    return h, kind


def test_a_job_waits_no_longer_for_its_kind_than_it_has_to(hand):
    """Its own kind comes back after some minutes: it goes on with that, and its bits stay."""
    h, kind = without_its_kind(hand)
    h.wait(300.0)
    for known in h.state.pools.values():
        known.sold = True
    h.served_after(10.0)
    h.train(30.0)
    assert h.types_in() == {kind}
    assert not [s for s in h.state.sentences if "could be had that round as" in s.because]


@pytest.mark.parametrize(("exact", "accelerators"), [(True, 1), (False, 2)])
def test_unlike_accelerators_are_not_bought_together(hand, exact, accelerators):
    """Quotas leave two machines of each: an exact job takes those of one kind, and the manager says no more."""
    h = hand(on_demand_allowed=False)
    small, large = h.kinds
    h.kinds = (
        replace(small, accelerator="T4", family="n", vcpus=1),
        replace(large, accelerator="a10g", family="g", vcpus=1),
    )
    h.start()
    rooms = tuple(
        Room(place=PLACE, market="spot", family=family, vcpus_max=2, vcpus_used=0)
        for family in ("n", "g")
    )
    h.catalogue(types=h.kinds, rooms=rooms)
    h.submit(slots_max=6, haste=1000.0, exact=exact)
    h.served_after(30.0)
    h.wait(30.0)
    assert len({lease.type.accelerator for lease in h.leases}) == accelerators


@pytest.mark.parametrize(
    ("one", "other", "said"),
    [
        (FAST, SLOW, "AVX512 against AVX2"),
        ("Tesla T4; driver 550", "NVIDIA A10G; driver 550", "Tesla T4 against NVIDIA A10G"),
        ("a; b", "a; b; c", "a, b against a, b, c"),
    ],
)
def test_the_sentence_names_what_differs(one, other, said):
    """Not the whole keys, where their parts correspond."""
    assert against(one, other) == said


@pytest.mark.parametrize(
    ("here", "there", "may"),
    [
        ([], [], True),
        ([], [SLOW], False),  # nothing is known of this pool: what its type is elsewhere
        ([], [SLOW, FAST], True),
        ([SLOW], [FAST], False),
        ([FAST, SLOW, SLOW], [SLOW], True),
        ([SLOW, SLOW, SLOW], [FAST], False),
    ],
)
def test_a_pool_is_bought_from_until_its_newest_machines_are_all_of_another_kind(
    hand, here, there, may
):
    """A cloud's type may have processors of several makes, and more of one make in one zone."""
    h = apart(hand).running(slots_max=1)
    pool, elsewhere = (known.pool for known in h.state.pools.values() if known.pool.type == "small")
    h.job.market.told["small"] = {pool.key: here, elsewhere.key: there}
    h.job.market.shut = {each.key: Shut(1, h.at_s) for each in (pool, elsewhere)}
    assert alike.may_buy(h.state, h.job, h.job.layouts.kind, h.state.types["small"], pool) == may


def test_a_resumed_job_looks_for_its_own_kind_first(hand):
    """The hours that it lay ended are none in which nothing could be had."""
    h, _ = without_its_kind(hand)
    h.wait(60.0)
    h.cancel()
    h.wait(7200.0)
    h.resume()
    assert h.bought(h.wait(60.0)) == []
    assert not [s for s in h.state.sentences if "could be had that round as" in s.because]


@pytest.mark.parametrize("exact", [True, False])
def test_a_machine_is_passed_on_only_to_a_job_that_can_train_on_it(hand, exact):
    """What it has told to the job that has ended counts for the next one."""
    h = apart(hand)
    h.steps_total = 1_000_000
    h.running(slots_max=1, exact=exact)
    h.sells("large")
    h.submit(job="two", slots_max=2)
    h.goes_on(1, "two")
    h.job.spec = replace(h.job.spec, slots_max=3)
    h.completed(9, "two")
    assert h.state.jobs["two"].ended
    passed = [s for s in h.state.sentences if s.because == "works for job now"]
    assert len(passed) == (0 if exact else 1)


def test_a_job_whose_machines_all_come_with_other_libraries_does_not_try_them_all(hand):
    """An image with another driver: three machines show it, then the job goes on with what there is, at once."""
    h = apart(hand)
    h.running(slots_max=1)
    h.keys = {name: f"{key}; new driver" for name, key in h.keys.items()}
    (lease,) = h.leases
    h.taken(lease.machine_id)
    bought_so_far = len([a for a in h.said if isinstance(a, Launch)])
    h.served_after(3.0, times=20)
    h.train(10.0)
    assert h.job.status == "RUNNING"
    assert (
        len([a for a in h.said if isinstance(a, Launch)]) - bought_so_far <= alike.STRANGERS_MAX + 2
    )
    said = [s.because for s in h.state.sentences if "could be had that round as those" in s.because]
    assert len(said) == 1 and "the newest 3 in a row round differently" in said[0]


def test_machines_of_new_types_are_no_reason_to_give_up_the_own_kind(hand):
    """Cheaper ones are tried first, and round differently: then its own type is bought."""
    h = apart(hand)
    h.running(slots_max=1)
    (kind,) = h.types_in()
    (other,) = h.keys.keys() - {kind}
    h.price(*(0.001 if known.pool.type == other else 0.09 for known in h.state.pools.values()))
    (lease,) = h.leases
    h.taken(lease.machine_id)
    h.served_after(3.0, times=20)
    assert h.types_in() == {kind}
    assert h.job.market.strangers == 0


def test_a_job_comes_back_to_the_very_kind_that_it_trained_on(hand):
    """If it could not go on with another accelerator; else any that is sold will do."""
    h = hand()
    small, large = h.kinds
    h.kinds = (replace(small, accelerator="T4"), replace(large, accelerator="a10g"))
    h.start()
    h.submit(slots_max=1)
    t4, a10g = Kind("t4"), Kind("a10g")
    own = h.job.layouts.trained = Kind("t4", FAST)
    assert alike.other_kinds(h.state, h.job, own) == [a10g, t4]
    assert alike.other_kinds(h.state, h.job, a10g) == [own, t4]


def test_a_job_without_a_step_is_not_held_to_machines_that_are_gone(hand):
    """Its first machine was taken before anything was committed: whichever comes next trains, and none is given back."""
    h = apart(hand)
    h.begun(slots_max=2)
    h.wait(2.0)
    (kind,) = h.types_in()
    (other,) = h.keys.keys() - {kind}
    h.sells(other)
    h.taken()
    h.served_after(3.0, times=5)
    h.committed(1)
    assert h.types_in() == {other}
    assert h.job.layouts.kind == Kind("cpu", h.keys[other])
    assert not [s for s in h.state.sentences if "cannot train" in s.because]


def test_a_machine_that_tells_its_key_again_is_not_a_newer_machine(hand):
    """A worker that starts anew says nothing of what its pool sells now: no more strangers are bought."""
    h = apart(hand, on_demand_allowed=False)
    h.steps_total = 1_000_000
    h.running(slots_max=1, haste=1000.0)
    (own,) = h.leases
    for known in h.state.pools.values():
        known.sold = known.pool == own.pool
    h.job.spec = replace(h.job.spec, slots_max=4)
    h.keys = {own.type.name: f"{h.keys[own.type.name]}; new driver"}
    h.train(300.0)
    assert [lease.token for lease in h.leases] == [own.token]
    (start,) = [a for a in h.said if isinstance(a, StartWorker) and a.machine_id == own.machine_id]
    for _ in range(3):
        h.ready(start, hardware=own.hardware)
        assert h.bought(h.train(300.0)) == []
