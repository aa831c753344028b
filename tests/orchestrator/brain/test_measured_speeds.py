"""What a job learns of how its types of machines compare, and what rests on it."""

from collections import Counter
from typing import Any

import msgspec
import pytest

from agent.messages import Paced
from orchestrator.brain.layouts.speeds import kind_for, types_for
from orchestrator.brain.purchases.situation import situation_of
from orchestrator.settings import Settings
from orchestrator.state import Tables

SMALL_CHEAP, LARGE_CHEAP = (0.03, 0.08, 0.03, 0.09), (0.10, 0.06, 0.10, 0.07)
LARGE_DEARER = (0.03, 0.10, 0.03, 0.10)  # 1.7 times as dear for each slot


def held(h: Any) -> list[str]:
    return sorted(lease.type.name for lease in h.leases)


def paced(h: Any, **part_s: float) -> list[Any]:
    """What a microbatch takes on workers of these types; the layout has settled long ago."""
    kinds = {w: h.state.leases[h.state.workers[w].token].type.name for w in h.job.workers}
    each = {w: part_s[name] for w, name in kinds.items() if name in part_s}
    generation = h.job.layouts.generation
    out = h.see(Paced(at_s=h.at_s, job="job", generation=generation, microbatch_s=each))
    return [*out, *h.committed(h.job.progress.step + 1)]


def moved_to_large(hand: Any, slots: int, **part_s: float) -> Any:
    """It has trained on small machines first, then on large ones."""
    h = hand(on_demand_allowed=False)
    h.steps_total, h.prices = 100_000, SMALL_CHEAP
    h.running(slots_max=slots)
    h.train(600.0)
    assert set(held(h)) == {"small"}
    paced(h, **part_s)
    h.price(*LARGE_CHEAP)
    h.train(600.0)
    assert set(held(h)) == {"large"}
    return h


@pytest.mark.parametrize(("large_s", "kept"), [(1.0, "small"), (0.4, "large")])
def test_measured_speed_decides_which_machines_are_worth_their_price(hand, large_s, kept):
    """The catalogue says that both types are equally fast. What a job has measured outlives its machines."""
    h = moved_to_large(hand, 4, small=1.0, large=large_s)
    out = paced(h, small=1.0, large=large_s)
    assert ("compare" in h.words(out)) == (large_s < 1.0)
    h.price(*LARGE_DEARER)
    h.train(900.0)
    assert set(held(h)) == {kept}


def test_measured_speed_is_in_offers_holdings_and_throughput_alike(hand):
    h = moved_to_large(hand, 4, small=1.0)
    paced(h, large=0.4)
    asked = situation_of(h.state, h.job)
    speeds = {kind.name: kind.speed for kind in (offer.type for offer in asked.offers)}
    assert speeds["large"] / speeds["small"] == pytest.approx(2.5)
    assert speeds["large"] * speeds["small"] == pytest.approx(1.0)
    assert {machine.type.speed for machine in asked.holdings} == {speeds["large"]}
    rates = [asked.speed.work_per_s({"large": 1}), asked.speed.work_per_s({"small": 2})]
    assert rates[0] / rates[1] == pytest.approx(2.5)
    assert types_for(h.state, h.job)["large"] == kind_for(h.state, h.job, h.state.types["large"])
    assert h.state.types["large"].speed == 1.0


def test_one_machine_of_a_type_is_no_measure_of_it(hand):
    """It may be a straggler, and counts as one: it gets fewer microbatches, its type is as good as before."""
    h = moved_to_large(hand, 2, small=1.0)
    assert held(h) == ["large"]
    assert "compare" not in h.words(paced(h, large=3.0))
    assert kind_for(h.state, h.job, h.state.types["large"]).speed == 1.0


def test_first_steps_of_a_layout_are_no_measure(hand):
    """A kernel may be compiled in them: nothing is learned before the layout has settled."""
    h = moved_to_large(hand, 4, small=1.0)
    h.job.layouts.acknowledged_step = h.job.progress.step
    assert "compare" not in h.words(paced(h, large=60.0))
    paced(h, large=0.4)
    h.train(120.0)
    assert kind_for(h.state, h.job, h.state.types["large"]).speed > 1.0


def test_workers_of_a_slower_type_are_no_stragglers_once_it_is_known(hand):
    """A worker that was judged by the catalogue is judged again, and its slowness does not count twice."""
    h = moved_to_large(hand, 4, small=1.0)
    for worker in h.job.workers:
        h.state.workers[worker].slow = 2.5
    paced(h, large=2.5)
    assert {h.state.workers[worker].slow for worker in h.job.workers} == {1.0}
    h.train(600.0)
    paced(h, large=2.5)
    assert {h.state.workers[worker].slow for worker in h.job.workers} == {1.0}


def test_a_job_of_served_tables_learns_and_takes_no_worker_for_a_straggler(hand):
    """Its workers take work off each other by themselves, so no layout has to."""
    h = moved_to_large(hand, 4, small=1.0)
    h.job.layouts.tables = Tables(stage=2, partitions=4, nodes=())
    slow = h.job.layouts.current.workers[0]
    for _ in range(3):
        out = [*paced(h, large=0.4), *h.paced(**{slow: 5.0}), *h.wait(Settings().doubt_s)]
        assert "takes" not in h.words(out)
    assert h.state.workers[slow].slow == 1.0
    assert kind_for(h.state, h.job, h.state.types["large"]).speed > 1.0


def test_the_same_script_begins_with_what_it_has_measured_and_another_learns_for_itself(hand):
    """A model that is bound by something else finds the same machines otherwise."""
    h = moved_to_large(hand, 4, small=1.0)
    paced(h, large=0.4)
    h.submit("again", slots_max=2)
    h.submit("other", slots_max=2, argv=("--layers", "9"))
    again, other = (types_for(h.state, h.state.jobs[name]) for name in ("again", "other"))
    assert again == types_for(h.state, h.job) != h.state.types
    assert other == h.state.types


def test_what_steps_took_is_foretold_of_the_machines_that_took_it(hand):
    """The catalogue says 4: a step is not foretold four times as fast as it was seen to be."""
    h = hand()
    h.kinds = tuple(msgspec.structs.replace(kind, speed=4.0) for kind in h.kinds)
    h.steps_total = 100_000
    h.running(slots_max=4)
    h.train(100.0, step_s=0.5)
    counts = Counter(held(h))
    assert situation_of(h.state, h.job).speed.work_per_s(counts) == pytest.approx(1 / 0.5)
    assert h.job.progress.slot_step_s == pytest.approx(0.5 * 4 * 4.0)


def test_processors_beside_cards_are_not_taken_for_cards(hand):
    """The catalogue compares cards with cards, and processors with each other. Where tables are served, a card idles."""
    h = hand()
    small, large = h.kinds
    card = msgspec.structs.replace(large, accelerator="a10g", accelerators=2, speed=2.0)
    h.kinds = (small, card)
    h.steps_total, h.prices = 100_000, (0.03, 0.4, 0.03, 0.5)  # a card at seven times the price
    h.running(slots_max=2)
    assert set(held(h)) == {"large"}
    speeds = {name: kind.speed for name, kind in types_for(h.state, h.job).items()}
    assert speeds["large"] / speeds["small"] >= 20
    h.job.layouts.tables = Tables(stage=2, partitions=4, nodes=())
    speeds = {name: kind.speed for name, kind in types_for(h.state, h.job).items()}
    assert speeds["large"] == speeds["small"]
