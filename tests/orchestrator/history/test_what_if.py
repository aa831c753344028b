"""What the manager would do under other terms is its own decision, on a copy."""

import msgspec
import pytest

from orchestrator.simulated.runs import play
from orchestrator.simulated.scenario import month
from orchestrator.state import State
from orchestrator.what_if import Terms, what_if
from orchestrator.world import decode_state, encode_state


@pytest.fixture(scope="module")
def running() -> bytes:
    """A job that holds machines and has steps to go."""
    found: list[bytes] = []

    def watch(state: State) -> None:
        working = sum(lease.state == "working" for lease in state.leases.values())
        timed = working > 1 and state.jobs["job-0"].progress.step_s > 0
        if not found and timed and len(state.leases) == working:
            found.append(encode_state(state))

    play(msgspec.structs.replace(month(0.1, 4, seed=3), steps=10_000), watch=watch)
    return found[0]


def test_as_it_is_nothing_is_asked_for_twice(running):
    """The decision of now is foreseen with its end and its cost, and the state stays as it was."""
    state = decode_state(running)
    found = what_if(state, "job-0", Terms())
    assert encode_state(state) == running
    assert found.machines > 0 and found.usd_per_h > 0
    assert found.final_usd is not None and found.finish_in_s is not None
    left = state.jobs["job-0"].progress.steps_total - state.jobs["job-0"].progress.step
    assert found.steps_per_s == pytest.approx(left / found.finish_in_s, rel=0.2)
    assert found.because


def test_other_regions_and_fewer_slots_change_what_is_held(running):
    now = what_if(decode_state(running), "job-0", Terms())
    fewer = what_if(decode_state(running), "job-0", Terms(slots_max=2))
    assert fewer.machines < now.machines
    assert fewer.gives_back and all(one.because for one in fewer.gives_back)
    assert fewer.finish_in_s > now.finish_in_s
    moved = what_if(decode_state(running), "job-0", Terms(regions=("region-1",), slots_max=9))
    assert all("zone-1" in one.pool or "zone-4" in one.pool for one in moved.buys)


def test_a_budget_that_is_spent_buys_nothing_and_a_near_end_is_seen(running):
    poor = what_if(decode_state(running), "job-0", Terms(budget_usd=0.0, slots_max=9))
    assert not poor.buys
    short = what_if(decode_state(running), "job-0", Terms(budget_usd=1.0))
    assert short.over_budget == (short.final_usd is not None and short.final_usd > 1.0)


def test_a_job_that_has_ended_decides_nothing(running):
    state = decode_state(running)
    state.jobs["job-0"].status = "FAILED"
    assert "has ended: FAILED" in what_if(state, "job-0", Terms()).because
