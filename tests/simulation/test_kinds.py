"""Deployments drawn at random whose machines round differently: no exact job mixes them, and none starves."""

import pytest
from msgspec.structs import replace

from orchestrator.simulated.restarts import live
from orchestrator.simulated.scenario import wild

BLOCK = 5


@pytest.mark.parametrize("first", range(0, 4 * BLOCK, BLOCK))
@pytest.mark.parametrize(("kinds", "mixed"), [(2, 0.0), (5, 0.0), (3, 0.5)])
def test_drawn_deployment_of_several_kinds_keeps_every_invariant(first, kinds, mixed):
    """Every pool has a kind of its own, or several: what is bought does not say which. Machines go, managers die, and it all ends."""
    stories = [
        live(replace(wild(seed), kinds=kinds, mixed=mixed)) for seed in range(first, first + BLOCK)
    ]
    assert [f"{story.seed}: {story.breach}" for story in stories if story.breach] == []
