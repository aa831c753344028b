"""A hundred thousand events with any values: what no decision can take is refused at the door.

`SPOT_FUZZ=1000000` makes a million.
"""

import math
import os
import re
from typing import Any

import msgspec
import pytest

from cloud.model import TOKEN, TOKEN_MAX
from orchestrator.brain.decide import decide
from orchestrator.brain.holdings import leases, ledger
from orchestrator.client import post
from orchestrator.events import AnyEvent, JobSpec, JobSubmitted
from orchestrator.settings import Settings
from orchestrator.simulated.restarts import live
from orchestrator.simulated.scenario import wild
from orchestrator.state import State
from orchestrator.validity import flaw_of
from orchestrator.view_builder import view_of
from orchestrator.world import MemoryJournal, decode_state, encode_state
from tests.simulation.fuzzed import KINDS, Fuzzer

EVENTS = int(os.environ.get("SPOT_FUZZ", "100000"))
SEGMENT, BEGINNINGS, REPLAYED_EVERY = 250, 8, 10
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
def test_events_with_any_values_are_refused_at_the_door_or_decided_about(block):
    """Every type of event meets live jobs and machines; money stays finite, the state can be stored."""
    states = [data for seed in (3 * block, 3 * block + 1) for data in beginnings(seed)]
    seen = dict.fromkeys(KINDS, 0)
    segments = EVENTS // len(WILDNESS) // SEGMENT
    for nth in range(segments):
        state = decode_state(states[nth % len(states)])
        fuzzer = Fuzzer(1000 * block + nth, state.settings, WILDNESS[block])
        taken: list[AnyEvent] = []
        for _ in range(SEGMENT):
            event = fuzzer.event(state)
            seen[type(event)] += 1
            if flaw := flaw_of(event):
                assert "\n" not in flaw and len(flaw) < 500
                continue
            taken.append(event)
            state, actions = decide(state, event)
            assert all(action.because for action in actions)
        view_of(state, state.now_s)
        assert math.isfinite(ledger.spent_usd(state.account, state.now_s))
        assert math.isfinite(ledger.committed_usd(state.account, state.now_s))
        assert encode_state(decode_state(encode_state(state))) == encode_state(state)
        if nth % REPLAYED_EVERY == 0:
            again = decode_state(states[nth % len(states)])
            for event in taken:
                again, _ = decide(
                    again, msgspec.json.decode(msgspec.json.encode(event), type=AnyEvent)
                )
            assert encode_state(again) == encode_state(state)
    assert min(seen.values()) > segments * SEGMENT // len(KINDS) // 2


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"haste": -1e300}, "spec.haste is -1e+300: expected `float` >= 0"),
        ({"slots_max": 1 << 62}, "spec.slots_max is 4611686018427387904: expected `int` <= 100000"),
        ({"slots_min": 5}, "slots_min=5 and slots_max=4: slots_min must not be above slots_max"),
        ({"depth": 0}, "spec.depth is 0: expected `int` >= 1"),
        ({"checkpoint_every_s": math.nan}, "spec.checkpoint_every_s is nan: expected `float` >= "),
        ({"output_files": 10**400}, "spec.output_files is a number of 1329 bits: it cannot be"),
        ({"job": "../other"}, "spec.job is '../other': expected `str` matching regex"),
        ({"job": "name\n"}, "spec.job is 'name\\n': expected `str` matching regex"),
    ],
)
def test_a_submission_that_no_manager_can_run_is_not_posted(wrong, said):
    """The person hears of it at once, in one line."""
    asked: dict[str, Any] = {"job": "poison", "script": "a.py", "script_sha": "", **wrong}
    with pytest.raises(ValueError, match=re.escape(said)):
        post(None, JobSubmitted(at_s=1.0, spec=JobSpec(**asked)))  # type: ignore[arg-type]


@pytest.mark.parametrize("deployment", ["x" * 300, "Team_A, Zürich", "-", "", "a" * 11 + "-b"])
def test_every_launch_token_can_name_a_virtual_machine(deployment):
    """Whatever the deployment is called and however often it was started; and none comes again."""
    state = State(settings=Settings(deployment=deployment), epoch=1 << 53, serial=10**15)
    tokens = []
    for salt in ("", "x" * 300, "ü"):
        state.salt = salt
        tokens += [leases.new_token(state), leases.new_token(state)]
    assert len(set(tokens)) == len(tokens)
    assert all(TOKEN.fullmatch(token) and len(token) <= TOKEN_MAX for token in tokens)
