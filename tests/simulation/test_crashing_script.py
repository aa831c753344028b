"""A script that takes its process down in one and the same step ends its job, and harms nothing else."""

import pytest

from orchestrator.actions import Launch, Note
from orchestrator.settings import Settings
from orchestrator.simulated.restarts import live
from orchestrator.simulated.scenario import Pace, Scenario
from orchestrator.world import MemoryJournal

CONFIRMED = "SIGABRT near step 30 on 2 machines at train.py, line 9 in <module>"


@pytest.mark.parametrize("slots", [1, 2, 4])
@pytest.mark.parametrize("step", [0, 30])
def test_script_that_crashes_in_one_step_fails_its_job(slots, step):
    """It is tried on a second machine, its failures are counted, and no pool is left alone for it."""
    scenario = Scenario(
        seed=slots,
        job_slots=slots,
        steps=100,
        microbatches=8,
        crashes_at_step=step,
        pace=Pace(progress_every_s=0.5),
        calm_after_s=1.0,
        settings=Settings(deployment="simulated"),
    )
    journal = MemoryJournal()
    story = live(scenario, keep=journal)
    assert not story.breach, "\n".join(story.last_sentences)
    assert story.jobs == {"job-0": "FAILED"}
    why = story.because["job-0"]
    assert CONFIRMED.replace("30", str(step)) in why
    assert "it printed last: about to crash" in why
    assert ("max_failures allows 3" if step else "it would only repeat") in why
    actions = [action for entry in journal.entries for action in entry.actions]
    assert sum(isinstance(action, Launch) for action in actions) <= slots + 2
    said = [action.because for action in actions if isinstance(action, Note)]
    assert not any("left alone" in line and "dying" in line for line in said)
