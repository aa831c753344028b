"""Sums in whatever order they come (`deterministic=False`): the losses are those of one process but for rounding."""

from pathlib import Path

import pytest
from crews import Crew, played_alone

from agent import messages

pytestmark = pytest.mark.processes

STEPS = 24
TOY = Path(__file__).with_name("deep_toy.py").read_text()
# Where a gradient is nothing but rounding, Adam would make that as large as any.
SCRIPT = TOY.replace("=MICROBATCHES)", "=MICROBATCHES, deterministic=False)").replace(
    "AdamW(model.parameters(), lr=1e-2)", "SGD(model.parameters(), lr=0.1, momentum=0.9)"
)


def _losses(lines: list[str]) -> dict[int, float]:
    words = [line.split() for line in lines]
    return {int(word[1]): float(word[3]) for word in words}


def test_losses_are_those_of_one_process(crew: Crew, tmp_path: Path) -> None:
    """Kills, newcomers and changes of shape, at boundaries and within steps; all are killed at once, too."""
    assert "deterministic=False" in SCRIPT
    assert "SGD" in SCRIPT
    (tmp_path / "train.py").write_text(SCRIPT)
    lines, _ = played_alone(tmp_path / "train.py", tmp_path / "out.pt", str(STEPS))
    crew.depth, crew.owned = 1, True
    workers = crew.begin(3, SCRIPT, str(STEPS), str(crew.folder / "out.pt"), backup_every_steps=4)
    crew.reach(3)
    crew.settle = 1
    crew.kill(workers[1])
    crew.start(2)
    crew.reach(6)
    crew.shape(2, "now")
    crew.reach(10)
    crew.kill(workers[0])
    crew.reach(13)
    crew.shape(1, "boundary")
    crew.reach(16)
    crew.kill(*crew.ready)
    crew.depth = 2
    crew.start(2)
    assert crew.completed().step == STEPS
    found, wanted = _losses(crew.printed()), _losses(lines)
    assert len(found) > STEPS // 2
    assert found == pytest.approx({step: wanted[step] for step in found}, rel=1e-6)
    assert crew.of(messages.Rewound) == []
