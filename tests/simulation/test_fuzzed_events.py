"""A hundred thousand events with any values: the manager refuses what it cannot take, and goes on."""

import math
import re
from typing import Any

import pytest

from agent.messages import WorkerReady
from cloud.model import TOKEN, TOKEN_MAX
from orchestrator.brain import leases, ledger
from orchestrator.brain.decide import decide
from orchestrator.client import post
from orchestrator.events import JobResumed, JobSpec, JobSubmitted
from orchestrator.settings import Settings
from orchestrator.simulated.restarts import live
from orchestrator.simulated.scenario import wild
from orchestrator.state import State
from orchestrator.view_builder import view_of
from orchestrator.world import MemoryJournal, decode_state, encode_state
from tests.simulation.fuzzed import KINDS, Fuzzer

EVENTS, SEGMENT, BEGINNINGS = 100_000, 250, 8
WILDNESS = (0.002, 0.02, 0.05, 0.2)


def beginnings(seed: int) -> list[bytes]:
    """States from the middle of a simulated deployment: jobs run, machines come and go."""
    journal, found, state = MemoryJournal(), [], State()
    live(wild(seed), keep=journal)
    every = max(1, len(journal.entries) // (BEGINNINGS + 1))
    for nth, entry in enumerate(journal.entries, start=1):
        state, _ = decide(state, entry.event)
        if nth % every == 0 and state.leases:
            found.append(encode_state(state))
    return found


@pytest.mark.parametrize("block", range(len(WILDNESS)))
def test_decide_refuses_events_with_any_values_without_raising(block: int) -> None:
    """Every type of event meets live jobs and machines; money stays finite, the state can be stored."""
    states = [data for seed in (3 * block, 3 * block + 1) for data in beginnings(seed)]
    seen = dict.fromkeys(KINDS, 0)
    segments = EVENTS // len(WILDNESS) // SEGMENT
    for nth in range(segments):
        state = decode_state(states[nth % len(states)])
        fuzzer = Fuzzer(1000 * block + nth, state.settings, WILDNESS[block])
        for _ in range(SEGMENT):
            event = fuzzer.event(state)
            seen[type(event)] += 1
            state, actions = decide(state, event)
            assert all(action.because for action in actions)
        view_of(state, state.now_s)
        assert math.isfinite(ledger.spent_usd(state.account, state.now_s))
        assert math.isfinite(ledger.committed_usd(state.account, state.now_s))
        assert encode_state(decode_state(encode_state(state))) == encode_state(state)
    assert min(seen.values()) > segments * SEGMENT // len(KINDS) // 2


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"haste": -1e300}, "haste=-1e+300: need 0 <= haste <= 1000"),
        ({"slots_min": -5, "slots_max": -5}, "slots_min=-5 and slots_max=-5: need 1 <= min <= max"),
        ({"depth": 0}, "depth=0: need 1 <= depth <= 100000"),
    ],
)
def test_a_submission_that_no_manager_can_run_fails(wrong: dict[str, Any], said: str) -> None:
    """The reason is an event that people read, resuming it helps nothing, and other jobs go on."""
    state = decode_state(beginnings(1)[0])
    spec = JobSpec(job="poison", script="a.py", script_sha="", **wrong)
    with pytest.raises(ValueError, match=re.escape(said)):
        post(None, JobSubmitted(at_s=state.now_s, spec=spec))  # type: ignore[arg-type]
    for event in (
        JobSubmitted(at_s=state.now_s, spec=spec),
        JobResumed(at_s=state.now_s, job="poison", by="a person"),
    ):
        state, actions = decide(state, event)
        assert said in actions[-1].because
        assert state.jobs["poison"].status == "FAILED"


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"checkpoint_every_s": math.nan}, "checkpoint_every_s is nan"),
        ({"output_files": 10**400}, "output_files is a number of 1329 bits"),
        ({"job": "../other"}, "the job's name is '../other'"),
    ],
)
def test_a_submission_that_cannot_be_stored_is_no_job(wrong: dict[str, Any], said: str) -> None:
    """Only the refusal is kept: with such a value the state could not be read again."""
    state = decode_state(beginnings(1)[0])
    before = list(state.jobs)
    asked: dict[str, Any] = {"job": "poison", "script": "a.py", "script_sha": "", **wrong}
    state, (refusal,) = decide(state, JobSubmitted(at_s=state.now_s, spec=JobSpec(**asked)))
    assert said in refusal.because
    assert list(state.jobs) == before
    assert state.sentences[-1].because == refusal.because


@pytest.mark.parametrize("deployment", ["x" * 300, "Team_A, Zürich", "-", "", "a" * 11 + "-b"])
def test_every_launch_token_can_name_a_virtual_machine(deployment: str) -> None:
    """Whatever the deployment is called and however often it was started; and none comes again."""
    state = State(settings=Settings(deployment=deployment), epoch=1 << 53, serial=10**15)
    tokens = []
    for salt in ("", "x" * 300, "ü"):
        state.salt = salt
        tokens += [leases.new_token(state), leases.new_token(state)]
    assert len(set(tokens)) == len(tokens)
    assert all(TOKEN.fullmatch(token) and len(token) <= TOKEN_MAX for token in tokens)


def test_a_worker_that_counts_no_microbatches_is_not_ready() -> None:
    """No layout can be made for it, so what it says is refused."""
    state = decode_state(beginnings(1)[0])
    job = next(iter(state.jobs.values()))
    ready = WorkerReady(
        at_s=state.now_s,
        job=job.id,
        worker="w1",
        machine_id="",
        microbatches=0,
        steps_total=5,
        state_bytes=1,
    )
    _, (refusal,) = decide(state, ready)
    assert refusal.because.endswith("microbatches is 0")
