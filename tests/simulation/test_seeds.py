"""A hundred deployments drawn at random: whatever goes wrong, what must hold holds.

`SPOT_SEEDS=5000` draws five thousand, here, in `test_unruly_places.py` and in `test_damaged_reports.py`.
"""

import os

import pytest

from orchestrator.simulated.restarts import live
from orchestrator.simulated.scenario import wild

SEEDS, BLOCK = int(os.environ.get("SPOT_SEEDS", "100")), 10


@pytest.mark.parametrize("first", range(0, SEEDS, BLOCK))
def test_drawn_deployment_after_every_event_keeps_every_invariant(first):
    """No machine without an owner, no step back, no cap passed, no silent change; and it all ends."""
    stories = [live(wild(seed)) for seed in range(first, first + BLOCK)]
    failed = [
        f"seed {story.seed}: {story.breach}\n"
        f"  replay it: python -m orchestrator.simulated {story.seed}\n  "
        + "\n  ".join(story.last_sentences[-8:])
        for story in stories
        if story.breach
    ]
    assert not failed, "\n".join(failed)


def test_drawn_deployments_are_as_wild_as_they_say():
    """Among a dozen seeds managers die, machines are lost, and jobs still reach their last step."""
    stories = [live(wild(seed)) for seed in range(12)]
    assert sum(story.lives - 1 for story in stories) > 5
    assert sum(story.evictions for story in stories) > 5
    assert sum("SUCCEEDED" in story.jobs.values() for story in stories) > 6
