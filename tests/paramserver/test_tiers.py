"""Additions disturb nothing, evictions cost one blip, and bytes are what the formulas say."""

import pytest

from agent.paramserver.virtual.tiers import (
    MODEL_BYTES,
    Setting,
    clock_s,
    cluster,
    elastic,
    lost_s,
)


def test_an_addition_disturbs_nothing_and_an_eviction_costs_one_blip():
    """Answer 26, small: 4 machines, 12 more after clock 5, taken away after clock 10."""
    setting = Setting(4, 0, 14, blocks=32, partitions=8, reference=4, bytes_per_s=2e10)
    story = elastic(setting, 12, 5, 10)
    before = story.clocks_s[3]
    assert story.clocks_s[:5] == pytest.approx([before] * 5, rel=0.01)
    assert story.clocks_s[9] < 0.5 * before
    assert max(story.clocks_s[10:]) <= 1.13 * before
    assert story.clocks_s[11:] == pytest.approx([before] * 3, rel=0.01)
    assert story.loads_at_eviction == 0
    assert story.rolls == 0
    assert story.stages[-1] == 1
    assert 2 in story.stages


def test_an_unwarned_loss_of_all_that_was_added_loads_nothing_either():
    setting = Setting(4, 0, 12, blocks=32, partitions=8, reference=4, bytes_per_s=2e10)
    story = elastic(setting, 12, 4, 8, warning_s=0.0)
    assert story.loads_at_eviction == 0
    assert story.rolls == 1


def test_lost_s_counts_what_is_beyond_the_pace_after_a_change():
    """Half of a clock of 4 s is done; then one takes 3 s more than the new pace of 1 s."""
    ends_s = [0.0, 4.0, 8.0, 14.0, 15.0, 16.0, 17.0]
    assert lost_s(ends_s, 10.0, 6) == pytest.approx(7.0 - 3.5)
    assert lost_s(ends_s[2:], 14.0, 4) == pytest.approx(0.0)


def test_an_addition_loses_no_more_than_the_rest_of_the_open_clock():
    """A stage that waited would have 12 machines wait for one reliable machine's links."""
    setting = Setting(1, 0, 14, blocks=32, partitions=8, reference=4, bytes_per_s=4e9)
    story = elastic(setting, 12, 4, 10, share=0.5)
    open_s = story.ends_s[5] - story.added_s
    assert lost_s(story.ends_s, story.added_s, 10) < 1.05 * open_s
    assert story.stages[4:9] == [2] * 5


@pytest.mark.parametrize(("reliable", "transient"), [(8, 0), (4, 4), (2, 6)])
def test_bytes_are_what_the_formulas_say(reliable, transient):
    """Answer 16: the busiest server sends (1 - 1/R) + (n - 1)/R models, all 2 (n - 1)."""
    count, counted = reliable + transient, []
    for clocks in (3, 5):
        setting = Setting(reliable, transient, clocks, count, count, stage=1, reference=count)
        virtual, network = cluster(setting)
        virtual.run()
        counted.append((max(network.sent.values()), sum(network.sent.values())))
    busiest, everything = ((b - a) / 2 for a, b in zip(*counted, strict=True))
    assert busiest == ((1 - 1 / reliable) + (count - 1) / reliable) * MODEL_BYTES
    assert everything == 2 * (count - 1) * MODEL_BYTES


def test_stage_1_suffers_with_the_ratio_and_stage_3_costs_the_reliable_machines_work():
    """Answer 27, small: 8 + 8 and 1 + 15 machines."""

    def one(reliable, stage):
        return clock_s(
            Setting(reliable, 16 - reliable, 3, 64, 8, reference=16, bytes_per_s=6e9, stage=stage)
        )

    even = [one(8, stage) for stage in (1, 2, 3)]
    steep = [one(1, stage) for stage in (1, 2, 3)]
    assert max(even[:2]) < even[2]
    assert min(steep[1:]) < steep[0]
    assert even[0] < steep[0]


def test_stages_2_and_3_cross_where_few_rows_are_shared():
    """Answer 27: the pushes of all rows to one reliable machine are in the way of its own work."""

    def one(reliable, stage):
        setting = Setting(reliable, 16 - reliable, 3, 240, 8, reference=16, dense=False)
        return clock_s(setting._replace(stage=stage))

    assert one(8, 2) < one(8, 3)
    assert one(1, 3) < one(1, 2)


def test_partitions_have_one_owner_each_through_any_changes():
    """Answer 17."""
    setting = Setting(4, 0, 10, blocks=32, partitions=8, reference=4, bytes_per_s=2e10)
    virtual, _ = cluster(setting)

    def look():
        brain = virtual.brain
        if brain.begun_s is None:
            return
        assert len(brain.owners) == len(brain.replicas) == 8
        assert all(name in brain.nodes for name in brain.replicas)
        served = [at for host in virtual.hosts.values() for at in host.member.server.parts]
        assert len(served) == len(set(served))

    from agent.paramserver.virtual.cluster import Place

    for at in range(6):
        virtual.at(1.5, lambda n=f"t{at}": virtual.add(Place(n, n, False, "spot")))
    virtual.at(4.0, lambda: virtual.evict([f"t{at}" for at in range(4)], 60))
    virtual.on_event = look
    assert virtual.run() == "10 clocks are done"


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_who_does_what_is_told_as_it_is_in_each_stage(stage):
    """Reliable machines serve in the first, hold copies in the others, and do no work in the third."""
    virtual, _ = cluster(Setting(2, 6, 4, 32, 8, reference=8, stage=stage))
    virtual.run()
    parts = virtual.brain.parts()
    assert virtual.brain.stage == stage
    assert [part.reliable for part in parts] == [True] * 2 + [False] * 6
    reliable, transient = parts[:2], parts[2:]
    assert sum(part.blocks for part in parts) == 32
    assert sum(part.serves for part in reliable) == (8 if stage == 1 else 0)
    assert sum(part.serves for part in transient) == (0 if stage == 1 else 8)
    assert sum(part.copies for part in reliable) == (0 if stage == 1 else 8)
    assert not any(part.copies for part in transient)
    assert any(part.blocks for part in reliable) is (stage < 3)
