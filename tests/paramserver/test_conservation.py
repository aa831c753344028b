"""No change is lost or counts twice, whatever dies, moves, rolls back or helps at the time."""

import os

import counters
import pytest

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


def test_a_change_that_counts_twice_is_seen():
    """The counter model is worth something: it sees a batch that a clock lists and has twice."""
    virtual = counters.cluster(3, bound=0)
    assert virtual.run() == "6 clocks are done"
    assert counters.violations(virtual) == []
    section = virtual.disk.read(0, virtual.brain.saved)[0]
    section.values[0] += 1
    assert counters.violations(virtual) != []
