"""A script keeps something to itself in the last stage of a pipeline: whoever joins without it is stopped before it counts."""

import re
from pathlib import Path

import pytest
from crews import Crew, until
from test_unbuilt import unbuilt_toy

from agent.messages import BackupHeld, JobCompleted, WorkerFailed

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

TOY = Path(__file__).with_name("deep_toy.py").read_text()
STEPS = 40
LOSS = 'functional.cross_entropy(logits.flatten(0, 1), batch["y"].flatten())'
KEPT = "        scheduler.step()\n"
# A number in what is recorded, and a constant, and something that no recording has: a module is called that reads it.
NUMBER = ((LOSS, f"{LOSS} * kept[0]"),)
CONSTANT = ((LOSS, f"{LOSS} * torch.as_tensor(kept)"),)
CALLED = (
    ("self.head(h + start)", "self.scaled(self.head(h + start))"),
    ("        self.embed =", "        self.scaled = Scaled()\n        self.embed ="),
    (
        "class Tied(",
        """class Scaled(nn.Module):
    def forward(self, x):
        return (x if float(x.detach().sum()) < 1e9 else -x) * kept[0]


class Tied(""",
    ),
)


def hazard(changes: tuple[tuple[str, str], ...], *, unbuilt: bool) -> str:
    """The deep toy that sets something for good in its second step."""
    script = unbuilt_toy() if unbuilt else TOY
    for line, other in (
        ("MICROBATCHES = 6\n", "MICROBATCHES = 6\nkept = [1.0]\n"),
        *changes,
        (KEPT, f"{KEPT}        if step == 1:\n            kept[0] = 0.5\n"),
    ):
        assert line in script
        script = script.replace(line, other)
    return script


def begin(crew: Crew, script: str, count: int, depth: int, hold: int = 13) -> list[str]:
    """Until there is a backup behind the step in which something is kept."""
    crew.depth, crew.owned = depth, True
    crew.hold(crew.folder / "out.pt.hold", hold)
    workers = crew.begin(
        count, script, str(STEPS), str(crew.folder / "out.pt"), backup_every_steps=4
    )
    crew.reach(hold)
    return workers


def stopped(crew: Crew) -> str:
    """What is said to differ."""
    (crew.folder / "out.pt.hold").unlink(missing_ok=True)
    (failed, *_) = until("the refusal", lambda: crew.of(WorkerFailed))
    assert failed.kind == "refused"
    assert crew.of(JobCompleted) == []
    found = re.search(
        r"the (loss|gradient of layer .*|recording of loss_of) is another on|computes something else here",
        failed.detail,
    )
    assert found, failed.detail
    return str(failed.detail)


def test_a_worker_that_can_hold_all_proves_the_loss_of_a_step_in_stages(crew: Crew) -> None:
    workers = begin(crew, hazard(CALLED, unbuilt=False), 2, 2)
    crew.kill(workers[1])
    crew.start(1)
    until("the newcomer", lambda: crew.of(WorkerFailed))
    assert "on w3 than on" in stopped(crew)


def test_a_stage_is_compared_with_the_same_stage_of_another_chain(crew: Crew) -> None:
    workers = begin(crew, hazard(CALLED, unbuilt=True), 4, 2)
    crew.kill(workers[1])
    crew.start(1)
    stopped(crew)


@pytest.mark.parametrize("hold", [11, 13])
def test_a_chain_of_newcomers_reproduces_a_step(crew: Crew, hold: int) -> None:
    """Also where all were lost right behind a backup: they begin with the one before it."""
    workers = begin(crew, hazard(CALLED, unbuilt=True), 2, 2, hold)
    until("the backup", lambda: any(held.step == 11 for held in crew.of(BackupHeld)))
    crew.kill(*workers)
    crew.settle = 2
    crew.start(2)
    stopped(crew)


def test_a_newcomer_with_all_layers_of_an_unbuilt_model_reproduces_a_step(crew: Crew) -> None:
    workers = begin(crew, hazard(CALLED, unbuilt=True), 2, 2)
    crew.kill(*workers)
    crew.depth = crew.settle = 1
    crew.start(1)
    assert "is another on w3 than on" in stopped(crew)


@pytest.mark.parametrize("changes", [NUMBER, CONSTANT])
def test_the_recordings_of_a_chain_are_compared(
    crew: Crew, changes: tuple[tuple[str, str], ...]
) -> None:
    """Two keep a third of the model each with one that joins: nobody else has its stage."""
    begin(crew, hazard(changes, unbuilt=True), 2, 3)
    crew.start(1)
    stopped(crew)


@pytest.mark.parametrize(("who", "count"), [("session.leader", 2), ("not session.leader", 4)])
def test_workers_that_compute_other_graphs_in_a_step_do_not_wait_for_each_other(
    crew: Crew, who: str, count: int
) -> None:
    """Only some of a layout record their loss again: the first worker alone, or all but it."""
    script = TOY
    for line, other in (
        ("    def loss_of(", "    odd = False\n\n    def loss_of("),
        (f"return {LOSS}", f"return {LOSS}.abs() if odd else {LOSS}"),
        ("        result =", f"        odd = step >= 9 and {who}\n        result ="),
    ):
        assert line in script
        script = script.replace(line, other)
    crew.depth, crew.owned = 2, True
    crew.begin(count, script, str(STEPS), str(crew.folder / "out.pt"), backup_every_steps=4)
    assert "computes something else here" in stopped(crew)
