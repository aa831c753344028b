"""Moving from layout to layout, and when it pays."""

import itertools

import numpy as np
import pytest
from blocks import make_profile

from orchestrator.planner import plan_book, transition
from orchestrator.planner.errors import DoesNotFit
from orchestrator.planner.plans import Cost, LayoutPlan, Way
from orchestrator.planner.search import Task
from orchestrator.planner.transition import BACKUP, Pace, Situation

PACE = Pace(1e9, 5e8, 0.1)


def layout(firsts: tuple[int, ...], width: int, sections: int = 6, chunks: int = 1) -> LayoutPlan:
    depth = len(firsts) // chunks
    return LayoutPlan(
        way=Way(schedule="1f1b", depth=depth, microbatch_size=1, chunks=chunks),
        firsts=firsts,
        sections=sections,
        shares=(4,) * width,
        workers=depth * width,
        samples=4 * width,
        cost=Cost(step_s=1, busy_s=1, bubble_s=0, reduce_s=0),
        memory_bytes=(0.0,) * len(firsts),
    )


def names(count: int) -> list[str]:
    return [f"w{i}" for i in range(count)]


def test_the_same_layout_moves_nothing():
    """All workers stay, in whatever order they are listed: not a byte moves."""
    plan = layout((0, 3), 2)
    chains = (("w0", "w1"), ("w2", "w3"))
    held = transition.held_by(plan, chains)
    found = transition.transition(held, names(4)[::-1], plan, [1e6] * 6, PACE)
    assert (found.moved_bytes, found.moves, found.pause_s) == (0.0, (), 0.1)


@pytest.mark.parametrize("seed", range(60))
def test_whatever_is_held_nothing_moves_in_vain(seed):
    """Any sections held by anybody, several chunks a worker, places that are barred: against every permutation."""
    rng = np.random.default_rng(seed)
    chunks, depth, width = int(rng.integers(1, 3)), int(rng.integers(1, 3)), int(rng.integers(1, 3))
    inner = rng.choice(np.arange(1, 6), depth * chunks - 1, replace=False)
    plan = layout((0, *sorted(inner.tolist())), width, chunks=chunks)
    sizes = rng.uniform(1, 9, 6).tolist()
    workers = names(depth * width + int(rng.integers(0, 2)))
    held = {
        worker: frozenset(np.flatnonzero(rng.random(6) < 0.4).tolist())
        for worker in workers
        if rng.random() < 0.8
    }
    barred = rng.random((len(workers), depth * width)) < 0.15
    orders = [
        order
        for order in itertools.permutations(range(len(workers)), depth * width)
        if not any(barred[worker, slot] for slot, worker in enumerate(order))
    ]
    if not orders:
        return
    found = transition.transition(held, workers, plan, sizes, PACE, barred)
    needs = [
        {k for i, (a, b) in enumerate(plan.stages) if i % depth == stage for k in range(a, b)}
        for stage in range(depth)
    ]

    def moved(order) -> float:
        lacking = (
            needs[slot % depth] - held.get(workers[worker], frozenset())
            for slot, worker in enumerate(order)
        )
        return sum(sizes[k] for lacks in lacking for k in lacks)

    assert found.moved_bytes == pytest.approx(min(map(moved, orders)), abs=1e-6)
    whole = sum(sizes[k] for stage in needs for k in stage) * width
    assert found.kept_bytes + found.moved_bytes == pytest.approx(whole)
    here = set().union(*held.values()) if held else set()
    into, out = dict.fromkeys(workers, 0.0), dict.fromkeys([*workers, BACKUP], 0.0)
    for move in found.moves:
        assert move.section not in held.get(move.target, ())
        assert (move.source == BACKUP) == (move.section not in here)
        assert move.source == BACKUP or move.section in held[move.source]
        into[move.target] += move.size_bytes
        out[move.source] += move.size_bytes
    assert found.backup_bytes == pytest.approx(out[BACKUP])
    backup_s = out.pop(BACKUP) / PACE.backup_bytes_per_s
    busiest = max(*into.values(), *out.values()) / PACE.bandwidth_bytes_per_s
    assert found.pause_s == pytest.approx(PACE.fixed_s + max(busiest, backup_s))


def test_interleaved_workers_hold_all_their_chunks():
    """A worker of two chunks keeps both, and gets the section that it lacks."""
    plan = layout((0, 1, 2, 4), 1, chunks=2)
    held = transition.held_by(plan, (("w0", "w1"),))
    assert held == {"w0": {0, 2, 3}, "w1": {1, 4, 5}}
    held["w0"] = frozenset({0, 2})
    found = transition.transition(held, ["w0", "w1"], plan, [1.0] * 6, PACE)
    assert [(move.section, move.target) for move in found.moves] == [(3, "w0")]


def test_senders_share_the_load():
    """With many holders no worker sends twice what another does."""
    old, new = layout((0,), 4), layout((0,), 8)
    held = transition.held_by(old, [(name,) for name in names(4)])
    found = transition.transition(held, names(8), new, [1e6] * 6, PACE)
    sent = {name: sum(m.size_bytes for m in found.moves if m.source == name) for name in names(4)}
    assert set(sent.values()) == {6e6}


def test_a_plan_for_a_thousand_workers():
    """From the book's layout for 1000 to that for 999: every section is somewhere, all slots are filled."""
    profile = make_profile(16)
    made = plan_book.book(profile, Task(global_batch=4096, microbatch_sizes=(2,)), 200)
    old, new = made.at(200), made.at(199)
    workers = names(200)
    depth = old.way.depth
    chains = [workers[r * depth : (r + 1) * depth] for r in range(old.width)]
    held = transition.held_by(old, chains)
    sizes = transition.section_bytes(profile)
    found = transition.transition(held, workers[1:], new, sizes, PACE)
    used = [worker for chain in found.chains for worker in chain]
    assert len(set(used)) == len(used) == new.way.depth * new.width
    needed = sum(sizes) * new.width
    assert found.kept_bytes + found.moved_bytes == pytest.approx(needed)
    assert found.backup_bytes == 0


def test_too_few_workers_are_refused():
    """A layout for four is not laid over three."""
    with pytest.raises(DoesNotFit, match="2x2 needs 4 workers, and has 3"):
        transition.transition({}, names(3), layout((0, 3), 2), [1.0] * 6, PACE)


def situation(**changes) -> Situation:
    fields = {
        "steps_per_s": 100.0,
        "steps_per_s_after": 120.0,
        "pause_s": 78.0,
        "calm_s": 3600.0,
        "trained_s": 36_000.0,
        "morphs": 0,
    }
    return Situation(**{**fields, **changes})


@pytest.mark.parametrize(("trained_s", "go"), [(2599.0, False), (2601.0, True)])
def test_the_gate_opens_at_2600_seconds(trained_s, go):
    """With a pause of 78 s the first voluntary morph needs more than 2600 s of training."""
    verdict = transition.worthwhile(situation(trained_s=trained_s))
    assert verdict.go is go
    if not go:
        assert verdict.because == (
            "a pause of 78.0 s would be more than 3% of the 43 min 19 s that it has trained; "
            "it may change once it has trained 43 min 20 s"
        )
    young = transition.worthwhile(situation(trained_s=0.08764, pause_s=1.0, morphs=2)).because
    assert young == (
        "3 pauses, this one counted, of 1.0 s would be more than 3% of the 88 ms that it has trained; "
        "it may change once it has trained 1 min 40 s"
    )


def test_a_gain_must_pay_for_its_pause():
    """A short calm does not win the pause back; a forced morph asks nobody."""
    verdict = transition.worthwhile(situation(calm_s=100.0))
    assert not verdict.go
    assert "would not be won back" in verdict.because
    slower = transition.worthwhile(situation(steps_per_s_after=situation().steps_per_s))
    assert not slower.go
    assert "no faster" in slower.because
    forced = transition.worthwhile(situation(steps_per_s=0.0, trained_s=0.0, calm_s=1.0))
    assert forced.go
    assert not transition.worthwhile(situation(morphs=13)).go
