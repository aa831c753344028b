"""What-if on the page is the manager's own decision, and the state that it is made on stays as it was."""

import asyncio

import msgspec
import pytest

from orchestrator.dashboard.foresight import Other, foresee
from orchestrator.simulated.runs import play
from orchestrator.simulated.scenario import month
from orchestrator.state import State
from orchestrator.what_if import Terms, what_if
from orchestrator.world import decode_state, encode_state


@pytest.fixture(scope="module")
def running() -> bytes:
    """A job that holds several machines and has steps to go."""
    found: list[bytes] = []

    def watch(state: State) -> None:
        working = sum(lease.state == "working" for lease in state.leases.values())
        if not found and working > 1 and state.jobs["job-0"].progress.step_s > 0:
            found.append(encode_state(state))

    play(msgspec.structs.replace(month(0.1, 4, seed=3), steps=10_000), watch=watch)
    return found[0]


def test_the_page_foresees_what_the_manager_would_decide(running):
    """As things are and under other terms, with a sentence for each machine that would be bought or given back."""
    found = asyncio.run(foresee(running, "job-0", Other(slots_max=1)))
    now, then = (
        what_if(decode_state(running), "job-0", terms) for terms in (Terms(), Terms(slots_max=1))
    )
    assert (found.now.machines, found.now.final_usd) == (now.machines, now.final_usd)
    assert (found.then.machines, found.then.finish_in_s) == (then.machines, then.finish_in_s)
    assert found.then.machines < found.now.machines
    gives = [said for said in found.then.sentences if said.startswith("Give back ")]
    assert len(gives) == len(then.gives_back) > 0
    assert asyncio.run(foresee(running, "nobody", Other())) is None
