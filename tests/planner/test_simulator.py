"""The simulator: wires, jitter, deviation, replicas, refusals."""

import itertools

import numpy as np
import pytest
from blocks import simulate, uniform

from agent.schedule import Action, Kind, Schedule
from orchestrator.planner.errors import ScheduleError
from orchestrator.planner.simulation import kernel, schedules, simulator


def wires(stages: int, occupancy_s: float, latency_s: float, jitter_s: float = 0.0) -> np.ndarray:
    wire = np.zeros((2, stages, 3))
    wire[:] = occupancy_s, latency_s, jitter_s
    return wire


def test_a_message_takes_occupancy_and_latency():
    """Two stages, one microbatch: the step is longer by two occupancies and two latencies."""
    schedule = schedules.make("1f1b", 2, 1)
    seconds = uniform(2, 1.0, 2.0)
    plain = simulate(schedule, simulator.costs(seconds)).step_s
    wired = simulator.costs(seconds, wire=wires(2, 0.25, 0.5))
    assert simulate(schedule, wired).step_s == plain + 2 * (0.25 + 0.5)


def test_a_slow_link_becomes_the_bottleneck():
    """When a message occupies its link longer than a stage computes, the link sets the pace."""
    schedule = schedules.make("gpipe", 2, 100)
    wired = simulator.costs(uniform(2, 1.0, 2.0), wire=wires(2, 5.0, 0.0))
    assert simulate(schedule, wired).step_s >= 2 * 100 * 5.0


def test_jitter_follows_from_its_seed():
    """The same seed gives the same step, another seed another one, and no jitter the shortest."""
    schedule = schedules.make("1f1b", 4, 16)
    seconds = uniform(4, 1.0, 2.0)

    def step_s(seed: int, jitter_s: float = 0.5) -> float:
        wire = wires(4, 0.0, 0.1, jitter_s)
        return simulate(schedule, simulator.costs(seconds, wire=wire, seed=seed)).step_s

    assert step_s(1) == step_s(1) != step_s(2)
    assert step_s(1, 0.0) < min(step_s(seed) for seed in range(5))


def test_jitter_has_the_mean_that_it_was_given():
    """One message a step, many seeds: the mean delay is the jitter."""
    schedule = schedules.make("gpipe", 2, 1)
    seconds = uniform(2, 1.0, 2.0)
    wire = wires(2, 0.0, 0.0, 0.2)
    wire[1] = 0
    steps = [
        simulate(schedule, simulator.costs(seconds, wire=wire, seed=seed)).step_s
        for seed in range(4000)
    ]
    assert np.mean(steps) - 6.0 == pytest.approx(0.2, rel=0.06)


def test_a_slow_replica_holds_the_stage_back():
    """The reduction of a stage begins when its slowest replica is ready."""
    programs = schedules.pack("1f1b", 2, 4)
    seconds = uniform(2, 1.0, 2.0)
    fast = simulator.run(programs, simulator.costs(seconds))
    slow = simulator.run(programs, simulator.costs(seconds, slowness=np.array([1.0, 1.5])))
    together = simulator.finish([fast, slow], np.array([3.0, 1.0]), 0.5)
    assert together.step_s == max(slow.stage_done + np.array([3.0, 1.0])) + 0.5
    assert together.step_s > simulator.finish([fast], np.array([3.0, 1.0]), 0.5).step_s


def test_the_timeline_is_the_step():
    """Bars of a worker do not overlap, and the last of them ends with the step."""
    schedule = schedules.make("interleaved", 3, 6)
    costs = simulator.costs(uniform(6, 1.0, 2.0), slowness=np.ones(3))
    bars = simulator.timeline(schedule, costs)
    assert max(bar.end_s for bar in bars) == simulate(schedule, costs).step_s
    for worker in range(3):
        mine = [bar for bar in bars if bar.worker == worker]
        assert all(a.end_s <= b.start_s + 1e-9 for a, b in itertools.pairwise(mine))


def test_a_schedule_that_blocks_itself_is_refused():
    """A backward before its forward waits for ever: the error names the action."""
    codes = [Action(Kind.BACKWARD, 0, 0).pack(), Action(Kind.FORWARD, 0, 0).pack()]
    schedule = Schedule(
        name="mirror",
        hosts=((0,),),
        microbatches=1,
        offsets=(0, 2),
        codes=np.array(codes, np.int64).tobytes(),
        update_every=1,
    )
    with pytest.raises(ScheduleError, match="mirror: BACKWARD of microbatch 0 at stage 0 waits"):
        simulate(schedule, simulator.costs(uniform(1, 1.0, 1.0)))


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (Action(Kind.FORWARD, 1, 0).pack(), "it names stage 1, but there are costs for 1"),
        (
            Action(Kind.FORWARD, 0, 7).pack(),
            "microbatch 7 at stage 0, but there are 1 microbatches",
        ),
        (Action(Kind.RECOMPUTE, 9, 0).pack(), "it names stage 9, but there are costs for 1"),
        (
            Action(Kind.REDUCE, 0, 0).pack(),
            "it names an action of kind 9, which no worker computes",
        ),
    ],
)
def test_an_action_that_cannot_be_is_refused(code, said):
    """A stage or a microbatch that is not there, a kind that is not computed: never looked up, and said."""
    programs = kernel.Programs(np.array([code]), np.array([0, 1]), 1)
    with pytest.raises(ScheduleError, match=said):
        simulator.run(programs, simulator.costs(uniform(1, 1.0, 1.0)), "odd")


def test_costs_of_another_shape_are_refused():
    """Costs for too few stages never reach the compiled code."""
    schedule = schedules.make("1f1b", 4, 4)
    with pytest.raises(ScheduleError, match="4 workers and 3 stages"):
        simulate(schedule, simulator.costs(uniform(3, 1.0, 1.0)))
