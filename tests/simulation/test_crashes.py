"""The manager is killed at every single point at which it waits, one at a time."""

import msgspec
import pytest

from cloud.market import Conduct
from orchestrator.actions import AnyAction, Regroup
from orchestrator.settings import Settings
from orchestrator.simulated.restarts import Biography, live
from orchestrator.simulated.scenario import Pace, Scenario
from orchestrator.simulated.world import SimulatedWorld

SCENARIO = Scenario(
    seed=3,
    days=0.1,
    instances=12,
    job_slots=5,
    steps=10,
    microbatches=8,
    calm_after_s=1.0,
    conduct=Conduct(refused_share=0.0, startup_s=10.0, startup_spread=0.0),
    pace=Pace(progress_every_s=5.0),
    # Short enough starts and changes for a machine that was not started to be worth another try.
    settings=Settings(deployment="simulated", start_s=10.0, morph_s=0.3),
)
PARTS = 8


class Killer:
    """Counts the points at which the manager waits and kills it at the chosen ones."""

    def __init__(self, *chosen: int) -> None:
        self.points: list[str] = []
        self._chosen = chosen

    def __call__(self, where: str) -> bool:
        self.points.append(where)
        return len(self.points) in self._chosen


def undisturbed() -> tuple[Biography, list[str]]:
    killer = Killer()
    return live(SCENARIO, killer), killer.points


def test_the_points_are_those_that_matter():
    """A life has waits before and after each append, before each action, and inside cloud calls."""
    story, points = undisturbed()
    assert not story.breach
    assert {"append", "appended", "perform", "launched", "terminated"} <= set(points)
    assert 150 < len(points) < 1000


@pytest.mark.parametrize("part", range(PARTS))
def test_killed_anywhere_nothing_is_bought_twice_and_nothing_is_left_over(part):
    """For every point: as many machines as without the crash, none unowned past a period and the grace."""
    calm, points = undisturbed()
    for nth in range(1 + part, len(points) + 1, PARTS):
        story = live(SCENARIO, Killer(nth))
        where = f"killed at point {nth}, {points[nth - 1]}"
        assert not story.breach, f"{where}: {story.breach}\n" + "\n".join(story.last_sentences)
        assert story.launches == calm.launches, where
        assert story.jobs == {"job-0": "SUCCEEDED"}, where


def test_killed_in_a_change_of_depth_or_width_the_job_goes_on(monkeypatch: pytest.MonkeyPatch):
    """Workers are lost all the time, and the model needs two of them: killed before, in and after each new layout."""
    faults = msgspec.structs.replace(
        SCENARIO.faults, worker_dies_per_h=20.0, bulk_loss_every_s=150.0, listing_lag_s=10.0
    )
    deep = msgspec.structs.replace(
        SCENARIO,
        seed=1,
        days=0.5,
        steps=60,
        sections=4,
        room=0.7,
        faults=faults,
        calm_after_s=400.0,
    )
    killer, changes, perform = Killer(), dict[int, str](), SimulatedWorld.perform

    async def note(world: SimulatedWorld, action: AnyAction) -> None:
        if isinstance(action, Regroup):
            changes[len(killer.points) + 1] = action.layout.describe()
        await perform(world, action)

    monkeypatch.setattr(SimulatedWorld, "perform", note)
    calm = live(deep, killer)
    monkeypatch.undo()
    assert len({shape[0] for shape in changes.values()}) > 1, changes
    assert len({shape[-1] for shape in changes.values()}) > 1, changes
    for nth in [*changes][:12]:
        for point in range(nth - 2, nth + 2):
            story = live(deep, Killer(point))
            assert not story.breach, f"killed at point {point}: {story.breach}"
            assert story.jobs == calm.jobs == {"job-0": "SUCCEEDED"}


def test_killed_again_while_it_recovers():
    """A second crash soon after the first changes nothing about that."""
    calm, points = undisturbed()
    launch = points.index("launched") + 1
    for later in range(1, 40):
        story = live(SCENARIO, Killer(launch, launch + later))
        assert not story.breach, f"{launch} and {later} later: {story.breach}"
        assert story.launches == calm.launches


def test_killed_without_end_while_the_cloud_does_not_answer():
    """With lost requests and lost answers on top, invariants hold and the job ends all the same.

    On some seeds a person cancels it, and all machines are given back before it is resumed.
    """
    faults = msgspec.structs.replace(SCENARIO.faults, unreachable=0.3, killed=0.05)
    cancelled = []
    for seed in range(20):
        scenario = msgspec.structs.replace(
            SCENARIO, seed=seed, faults=faults, calm_after_s=300.0, days=1.0
        )
        story = live(scenario)
        assert not story.breach, f"seed {seed}: {story.breach}"
        is_cancelled = "cancelled by somebody" in story.because["job-0"]
        assert story.jobs == {"job-0": "CANCELLED" if is_cancelled else "SUCCEEDED"}
        cancelled.append(is_cancelled)
    assert sum(cancelled) <= len(cancelled) // 5
