"""Layouts of any depth, changed at any moment: the losses and the weights are those of one process."""

import subprocess
import sys
from pathlib import Path

import pytest
from crews import Crew

from agent.messages import Rewound, WorkerReady

pytestmark = pytest.mark.processes

TOY = Path(__file__).with_name("deep_toy.py")
STEPS = 40


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], bytes]:
    """What the script prints and saves alone, without any manager."""
    out = tmp_path_factory.mktemp("alone") / "out.pt"
    done = subprocess.run(
        [sys.executable, str(TOY), str(STEPS), str(out)],
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines(), out.read_bytes()


def begin(crew: Crew, count: int, depth: int, **options: object) -> list[str]:
    crew.depth = depth
    return crew.begin(count, TOY.read_text(), str(STEPS), str(crew.folder / "out.pt"), **options)


def ends_alike(crew: Crew, alone: tuple[list[str], bytes]) -> None:
    lines, weights = alone
    assert crew.completed().step == STEPS
    printed = crew.printed()
    assert set(printed) <= set(lines)
    assert len(printed) == len(set(printed))
    assert (crew.folder / "out.pt").read_bytes() == weights
    assert crew.of(Rewound) == []


@pytest.mark.parametrize(("count", "depth"), [(2, 2), (4, 2), (3, 3)])
def test_a_deep_layout_is_one_process(
    crew: Crew, alone: tuple[list[str], bytes], count: int, depth: int
) -> None:
    """P x D workers play the script's own loop body as a pipeline, and end with the bits of one process."""
    begin(crew, count, depth)
    ends_alike(crew, alone)
    told = [ready for ready in crew.of(WorkerReady) if ready.stages_max > 1]
    assert [ready.uncuttable for ready in told] == [""]


def test_every_shape_and_back(crew: Crew, alone: tuple[list[str], bytes]) -> None:
    """1 x 4, 2 x 2, 4 x 1, 1 x 4 again, at boundaries and in the middle of steps."""
    begin(crew, 4, 1)
    for number, depth in enumerate((2, 4, 1, 2, 3, 4, 2, 1), start=1):
        crew.reach(4 * number)
        crew.shape(depth, "now" if number % 2 else "boundary")
    ends_alike(crew, alone)
