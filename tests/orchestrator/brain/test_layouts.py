"""Which layout is chosen, by whom it is held, and the sentence that says why."""

from random import Random
from typing import Any

import msgspec
import pytest

from agent.layout import Layout, data_parallel
from agent.messages import UNRECORDED
from orchestrator.brain.layouts import layout_choice
from orchestrator.brain.layouts.layout_choice import Choice, Question, Seat
from orchestrator.planner import plan_book
from orchestrator.planner.errors import DoesNotFit


def seats(count: int, *, machines: int = 0, **changes: Any) -> tuple[Seat, ...]:
    """Workers w0, w1, ... on so many machines, by turns; each on its own if not said."""
    return tuple(
        Seat(worker=f"w{n}", machine=f"m{n % (machines or count)}", zone="east", **changes)
        for n in range(count)
    )


def question(count: int, microbatches: int = 8, **changes: Any) -> Question:
    fields: dict[str, Any] = {
        "microbatches": microbatches,
        "seats": seats(count),
        "workers_max": count,
        "state_bytes": 1e6,
    }
    return Question(**{**fields, **changes})


def after(asked: Question, choice: Choice) -> Question:
    """The same question, asked while that choice runs; its seats come first, in its order."""
    layout = layout_choice.laid_out(1, asked, choice)
    order = {worker: n for n, worker in enumerate(layout.workers)}
    sorted_seats = sorted(asked.seats, key=lambda seat: order.get(seat.worker, len(order)))
    return msgspec.structs.replace(
        asked, seats=tuple(sorted_seats), before=layout, before_plan=choice.plan
    )


def test_without_a_profile_it_is_data_parallel():
    """Equal workers share the microbatches as evenly as they go, in the order in which they came."""
    asked = question(3)
    found = layout_choice.laid_out(1, asked, layout_choice.choose(asked))
    assert found == data_parallel(1, 8, ("w0", "w1", "w2"))


def test_more_workers_than_microbatches_are_left_out():
    """Nobody is in a layout to do nothing."""
    found = layout_choice.choose(question(5, microbatches=2))
    assert [replica.workers for replica in found.replicas] == [("w0",), ("w1",)]


def test_a_person_can_ask_for_a_depth_before_anything_is_measured():
    """Chains of that depth, cut by the workers themselves; too few workers are a sentence."""
    found = layout_choice.choose(question(5, depth=2, stages_max=4))
    assert [replica.workers for replica in found.replicas] == [("w0", "w1"), ("w2", "w3")]
    with pytest.raises(DoesNotFit, match="depth 2 needs 2 workers, and has 1"):
        layout_choice.choose(question(1, depth=2, stages_max=4))


def test_a_script_that_cannot_be_cut_is_not_cut(profile):
    """The depth that was asked for is refused with the reason, and the job trains all the same."""
    why = "train.py:7: float(loss) looks at a value"
    for measured in (None, profile(4)):
        found = layout_choice.choose(question(4, depth=2, uncuttable=why, profile=measured))
        assert {len(replica.workers) for replica in found.replicas} == {1}
        assert f"depth 2 was asked for, but {why}" in found.because


def test_with_a_profile_the_book_decides_and_names_the_next_best(profile):
    """The answer is the book's own, with what it would take and what the runner-up would."""
    measured = profile(4)
    found = layout_choice.choose(question(6, profile=measured, stages_max=4))
    task = layout_choice.task_of(measured, 8, None, 4, 1)
    assert found.plan == plan_book.book(measured, task, 6).at(6)
    assert found.because.startswith(f"{found.plan.describe()} on 6 workers: ")
    assert ": predicted " in found.because
    assert "ms a step; next best" in found.because


def test_the_depth_that_was_asked_for_beats_the_book(profile):
    """Only plans of that depth are compared."""
    for depth in (1, 2, 4):
        found = layout_choice.choose(question(4, profile=profile(4), stages_max=4, depth=depth))
        assert {len(replica.workers) for replica in found.replicas} == {depth}


def test_what_does_not_fit_is_never_chosen(profile):
    """With little memory only deep chains fit; with less nothing does, and the least that would is said."""
    state = 4 / 3 * (1 << 20)  # weights, gradients and optimizer
    little = profile(4, memory=0.6 * state)
    found = layout_choice.choose(question(4, profile=little, stages_max=4))
    assert min(len(replica.workers) for replica in found.replicas) >= 2
    assert max(found.plan.memory_bytes) <= little.memory_bytes
    with pytest.raises(DoesNotFit, match=r"^on 1 worker: at least 2 are needed"):
        layout_choice.choose(question(1, profile=little, stages_max=4, workers_max=4))
    with pytest.raises(DoesNotFit, match="the least that would do is"):
        layout_choice.choose(question(4, profile=profile(4, memory=1e5), stages_max=4))


def test_workers_keep_the_whole_state_unless_it_does_not_fit(profile):
    """Deep with room: all keep all, and the plan says so in bytes. Without: each its own, and the sentence says it."""
    state = 4 / 3 * (1 << 20)
    asked = question(4, profile=profile(4), stages_max=4, depth=2)
    roomy = layout_choice.choose(asked)
    assert not layout_choice.laid_out(1, asked, roomy).owned
    assert min(roomy.plan.memory_bytes) >= state
    for paces in ((1.0,) * 4, (1.0, 1.0, 1.5, 1.5)):
        some = tuple(
            msgspec.structs.replace(s, pace=p) for s, p in zip(seats(4), paces, strict=True)
        )
        asked = question(4, profile=profile(4, memory=0.7 * state), stages_max=4, seats=some)
        tight = layout_choice.choose(asked)
        assert layout_choice.laid_out(1, asked, tight).owned
        assert max(tight.plan.memory_bytes) <= 0.7 * state
        assert "each keeps its own stages only" in tight.because
        assert layout_choice.choose(after(asked, tight)).moved_bytes == 0


def test_a_newcomer_to_owned_stages_brings_what_its_stage_needs(profile):
    """Of 2x2 one is lost: only half of the state has to move; into a layout where all have all, nothing."""
    state = 4 / 3 * (1 << 20)
    asked = question(4, profile=profile(4, memory=0.7 * state), stages_max=4, depth=2)
    running = layout_choice.choose(asked)
    rest = [s for s in after(asked, running).seats if s.worker != running.replicas[1].workers[0]]
    new = Seat(worker="new", machine="m9", zone="east")
    again = msgspec.structs.replace(after(asked, running), seats=(*rest, new))
    assert layout_choice.choose(again).moved_bytes == pytest.approx((1 << 20) / 2)
    whole = msgspec.structs.replace(after(asked, running).before, owned=False)
    before = msgspec.structs.replace(after(asked, running), before=whole)
    assert layout_choice.choose(before).moved_bytes == 0


def test_unlike_workers_get_unlike_shares(profile):
    """Whoever takes twice as long gets about half as much, with a profile and without."""
    fast, slow = seats(2), seats(4, pace=2.0)[2:]
    for measured in (None, profile(1)):
        found = layout_choice.choose(
            question(4, microbatches=12, seats=(*fast, *slow), profile=measured)
        )
        counts = {replica.workers[0]: replica.count for replica in found.replicas}
        assert counts == {"w0": 4, "w1": 4, "w2": 2, "w3": 2}


def test_a_slow_worker_is_left_out_only_when_its_share_was_cut_before(profile):
    """First it gets fewer; once it had fewer it goes, if the others are faster alone and enough."""
    for measured in (None, profile(1)):
        for eased, left_out in ((False, ()), (True, ("w3",))):
            some = (*seats(3), Seat(worker="w3", machine="m3", zone="", pace=8.0, eased=eased))
            asked = question(4, seats=some, profile=measured)
            found = layout_choice.choose(asked)
            inside = {worker for replica in found.replicas for worker in replica.workers}
            assert found.left_out == left_out
            assert ("w3" in inside) is not eased
    kept = layout_choice.choose(msgspec.structs.replace(asked, profile=None, seats_min=4))
    assert kept.left_out == ()


def test_stages_of_a_chain_are_neighbours(profile):
    """Six workers on three machines in a muddle: every chain of two is on one machine."""
    muddled = list(seats(6, machines=3))
    Random(3).shuffle(muddled)
    found = layout_choice.choose(
        question(6, seats=tuple(muddled), profile=profile(4), stages_max=4, depth=2)
    )
    where = {seat.worker: seat.machine for seat in muddled}
    for replica in found.replicas:
        assert len({where[worker] for worker in replica.workers}) == 1


@pytest.mark.parametrize("seed", range(40))
def test_the_same_question_again_changes_nothing(profile, seed):
    """Whatever was chosen is chosen again while it runs: nobody is moved for nothing."""
    dice = Random(seed)
    some = tuple(
        Seat(
            worker=f"w{n}",
            machine=f"m{dice.randrange(4)}",
            zone=dice.choice("ab"),
            pace=dice.choice((1.0, 1.0, 1.25, 2.0)),
            eased=dice.random() < 0.3,
        )
        for n in range(dice.randrange(1, 9))
    )
    measured = dice.choice((None, profile(4), profile(6)))
    stages = 1 if measured is None else len(measured.sections)
    asked = question(len(some), seats=some, profile=measured, stages_max=stages)
    once = layout_choice.choose(asked)
    again = after(asked, once)
    assert layout_choice.choose(again).replicas == once.replicas
    assert layout_choice.choose(again).moved_bytes == 0


def test_a_newcomer_takes_the_place_of_the_lost(profile):
    """Of 2x2 one is lost: those who stay keep their stages, and only the newcomer needs state."""
    asked = question(4, profile=profile(4), stages_max=4, depth=2)
    running = layout_choice.choose(asked)
    gone = running.replicas[1].workers[0]
    stage = {w: i for replica in running.replicas for i, w in enumerate(replica.workers)}
    rest = [seat for seat in after(asked, running).seats if seat.worker != gone]
    new = Seat(worker="new", machine="m9", zone="east")
    found = layout_choice.choose(msgspec.structs.replace(after(asked, running), seats=(*rest, new)))
    now = {w: i for replica in found.replicas for i, w in enumerate(replica.workers)}
    assert now == {w: i for w, i in stage.items() if w != gone} | {"new": stage[gone]}
    assert found.moved_bytes == 1e6
    assert found.moving == "1 MB move, pause about 0 ms"


def test_workers_are_told_where_to_cut_and_what_to_play(profile):
    """The cuts are the profile's nodes; every replica finds a program for its own share."""
    asked = question(4, microbatches=9, profile=profile(4), stages_max=4, depth=2)
    choice = layout_choice.choose(asked)
    layout = layout_choice.laid_out(1, asked, choice)
    assert layout.cuts == tuple(10 * first for first in choice.plan.firsts[1:])
    for replica in layout.replicas:
        schedule = layout.schedule_of(replica)
        assert schedule.microbatches == replica.count
        assert schedule.name == layout.schedule
    whole = msgspec.json.decode(msgspec.json.encode(layout), type=Layout)
    assert whole == layout


def test_a_model_that_nobody_has_built_gets_a_chain_that_has_room_for_it():
    """By its size alone, before anything is measured: as deep as it takes, each with its own stages; no deeper."""
    large: dict[str, Any] = {"training_bytes": 1e10, "uncuttable": UNRECORDED}
    asked = question(6, room_bytes=5e9, **large)
    found = layout_choice.laid_out(1, asked, layout_choice.choose(asked))
    assert (found.depth, found.width, found.owned) == (3, 2, True)
    assert "each builds and keeps its own stages only" in layout_choice.choose(asked).because
    asked = question(6, room_bytes=2e10, **large)
    found = layout_choice.laid_out(1, asked, layout_choice.choose(asked))
    assert (found.depth, found.owned) == (1, False)


def test_a_model_that_nobody_has_room_for_is_a_sentence():
    """Too few workers, too few places to cut it at, or none: what it takes, and what is there."""
    large: dict[str, Any] = {"training_bytes": 1e10, "room_bytes": 5e9}
    with pytest.raises(
        DoesNotFit,
        match=r"takes 10.0 GB to train.*room for 5.0 GB.*chain of 3 workers, and there are 2",
    ):
        layout_choice.choose(question(2, uncuttable=UNRECORDED, **large))
    with pytest.raises(DoesNotFit, match="but it can be cut into 2 stages at most"):
        layout_choice.choose(question(4, stages_max=2, **large))
    with pytest.raises(DoesNotFit, match=r"but train.py:7: float\(loss\)"):
        layout_choice.choose(question(4, uncuttable="train.py:7: float(loss)", **large))


def test_what_is_likely_is_thought_of_before_it_is_asked(profile):
    """Of unlike workers any machine can go, or come, or a zone: when it does, nothing is searched any more."""
    slow = Seat(worker="w9", machine="m9", zone="west", pace=2.0)
    here = (*seats(3), slow)
    asked = question(5, seats=here, profile=profile(4, key="likely"), stages_max=4, workers_max=5)
    layout_choice.foresee(asked)
    more = Seat(worker="w10", machine="m10", zone="west", pace=2.0)
    before = layout_choice._mix_of.cache_info().misses, layout_choice.book_of.cache_info().misses
    for next_ in (here, here[1:], here[:3], (slow,), (*here, more), (*here, *seats(9)[8:])):
        layout_choice.choose(msgspec.structs.replace(asked, seats=next_))
    found = layout_choice._mix_of.cache_info().misses, layout_choice.book_of.cache_info().misses
    assert found == before


def test_what_is_likely_is_bounded():
    """A thousand machines of one kind are one kind; and nobody asks for fewer than the least."""
    asked = question(1000, microbatches=1000, seats_min=1000)
    assert [len(one.seats) for one in layout_choice.likely(asked)] == [1000]
    fewer = layout_choice.likely(msgspec.structs.replace(asked, seats_min=1, workers_max=2000))
    assert [len(one.seats) for one in fewer] == [1000, 999, 1001]
