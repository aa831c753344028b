"""No change is lost or counts twice, whatever dies, moves, rolls back or helps at the time."""

import os

import counters
import pytest

from agent.paramserver.messages import CONTROLLER, Fresh, Passed, Push, Saved
from agent.paramserver.virtual.network import Delays

SEEDS = int(os.environ.get("SPOT_PARAMSERVER_SEEDS", "40"))


@pytest.mark.parametrize("part", range(4))
def test_counts_are_whole_after_any_mishaps(part):
    """Deaths, evictions, additions and restarts happen at messages of every kind."""
    for seed in range(part, SEEDS, 4):
        wrong, story = counters.judged(seed, 4)
        assert wrong == [], story


def test_counts_are_whole_where_copies_are_apart_from_all_that_serve():
    """As under the manager: nobody who computes or serves is reliable, and all of them may be gone."""
    for seed in range(SEEDS):
        wrong, story = counters.judged(seed, 4, apart=True)
        assert wrong == [], story


@pytest.mark.parametrize("network", [counters.Twice, counters.Narrow])
def test_counts_are_whole_where_messages_come_twice_or_late(network):
    for seed in range(SEEDS):
        wrong, story = counters.judged(seed, 4, apart=seed % 2 == 1, network=network)
        assert wrong == [], story


def test_a_block_is_not_granted_before_its_last_clock_was_heard_of():
    """A controller that was started again hears late what a worker said to the one before it."""
    wrong, story = counters.judged(2178, 4, network=counters.Twice)
    assert wrong == [], story


def test_a_block_that_leaves_goes_also_where_an_older_clock_comes_between():
    """Its present clock is given up for that of a block that is granted, and nobody waits for it."""
    wrong, story = counters.judged(684, 4, network=counters.Twice)
    assert wrong == [], story


def lost_with_its_node(is_lost):
    """Return a network that loses some of what one node says, which is then to leave."""

    class Lossy(Delays):
        gone = ""

        def send(self, source, target, message, deliver):
            is_one = source not in {target, CONTROLLER} and is_lost(message, source)
            if is_one and self.gone in {"", source}:
                self.gone, virtual = source, self._cluster
                virtual.at(virtual.now_s + 0.01, lambda: virtual.evict([source], 120))
            else:
                super().send(source, target, message, deliver)

    return Lossy


@pytest.mark.parametrize(
    "is_lost",
    [
        lambda one, by: isinstance(one, Fresh) and one.age == 2 and by.startswith("t"),
        lambda one, by: isinstance(one, Passed) and one.finished.clock == 2 and one.worker != by,
        lambda one, by: isinstance(one, Push) and one.clock == 2 and by.startswith("t"),
        lambda one, _: isinstance(one, Saved) and one.clock == 2,
    ],
)
def test_what_a_node_could_not_send_before_it_left_is_had_from_others(is_lost):
    """Its partition has gone on to somebody else, so nobody goes back for it."""
    virtual = counters.small(lost_with_its_node(is_lost), reliable=2)
    assert virtual.run(limit_s=100) == "6 clocks are done"
    assert virtual.brain.rolls == 0
    assert virtual.network.gone not in virtual.hosts
    assert counters.violations(virtual) == []


def test_a_change_that_counts_twice_is_seen():
    """The counter model is worth something: it sees a batch that a clock lists and has twice."""
    virtual = counters.cluster(3, bound=0)
    assert virtual.run() == "6 clocks are done"
    assert counters.violations(virtual) == []
    section = virtual.disk.read(0, virtual.brain.saved)[0]
    section.values[0] += 1
    assert counters.violations(virtual) != []
