"""What a script gives to its session is looked at, and what is odd about it is said."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from agent.errors import Misuse, NotFinite

SCRIPT = """
import torch
from agent import Session
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
PARTS = 2
class options:
    parts = 2
session = Session(model, optimizer{microbatches})
for step in session.steps(3):
    for x in session.share([torch.ones(2, 4)] * 2):
        loss = model(x).square().mean()
        {division}
    optimizer.step()
"""
TWO = ", microbatches=2"


GIVEN = "session.backward(loss)"
DIVIDED = [
    "session.backward(loss / 2)",
    "session.backward(loss / PARTS)",
    f"loss = loss / options.parts; {GIVEN}",
    f"loss /= PARTS; {GIVEN}",
]
OTHERS = [
    GIVEN,
    "session.backward(loss / 3)",
    "session.backward(loss * 2)",
    "session.backward(loss / len(x))",
    f"other = loss / 2; {GIVEN}",
]


@pytest.mark.parametrize("division", DIVIDED)
def test_a_loss_that_is_divided_by_the_microbatches_is_said(
    by_hand: Callable[[str], None], capsys: pytest.CaptureFixture[str], division: str
) -> None:
    """Once, since it may be meant: loops that add gradients up divide, and here that is done already."""
    by_hand(SCRIPT.format(microbatches=TWO, division=division))
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert "was divided by 2, the number of microbatches" in said[0]


@pytest.mark.parametrize("name", ["clip_grad_norm_", "clip_grad_value_"])
@pytest.mark.parametrize("indent", [8, 4])
def test_a_microbatch_that_is_clipped_by_itself_is_said(
    by_hand: Callable[[str], None], capsys: pytest.CaptureFixture[str], name: str, indent: int
) -> None:
    """By hand the sum so far would be clipped in the loop; behind it nothing is said."""
    clip = f"torch.nn.utils.{name}(model.parameters(), 1.0)"
    body = f"{GIVEN}\n{' ' * indent}{clip}"
    by_hand(SCRIPT.format(microbatches=TWO, division=body))
    said = f"{name} in the loop over session.share(...) clips the gradient of each microbatch"
    assert (said in capsys.readouterr().err) is (indent == 8)


@pytest.mark.parametrize("division", OTHERS)
def test_other_losses_are_not(
    by_hand: Callable[[str], None], capsys: pytest.CaptureFixture[str], division: str
) -> None:
    by_hand(SCRIPT.format(microbatches=TWO, division=division))
    assert not capsys.readouterr().err


@pytest.mark.parametrize("number", ["nan", "inf"])
def test_a_loss_that_is_no_number_is_said_to_be_none(
    by_hand: Callable[[str], None], number: str
) -> None:
    """And not that something else could not be computed from it."""
    with pytest.raises(NotFinite, match="step 0: the loss is"):
        by_hand(
            SCRIPT.format(microbatches=TWO, division=f"session.backward(loss * float('{number}'))")
        )


@pytest.mark.parametrize("microbatches", ["", ", microbatches=0"])
def test_how_many_microbatches_has_to_be_said(
    by_hand: Callable[[str], None], microbatches: str
) -> None:
    with pytest.raises(
        Misuse, match=r"Session\(model, optimizer, microbatches=M\): say of how many"
    ):
        by_hand(SCRIPT.format(microbatches=microbatches, division=GIVEN))


def test_a_state_that_cannot_be_saved_is_told_without_our_frames(tmp_path: Path) -> None:
    """It shows when the first step begins, and is no failure of ours."""
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\nfrom agent import Session\nmodel = torch.nn.Linear(1, 1, dtype=torch.complex64)\n"
        "session = Session(model, microbatches=2)\nfor step in session.steps(1):\n    pass\n"
    )
    ran = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert "torch.view_as_real(...)" in ran.stderr.splitlines()[-1]
    assert ran.stderr.count("File ") == 1


def test_what_is_given_is_refused_without_our_frames(tmp_path: Path) -> None:
    """The line that makes the session, and the sentence."""
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\nfrom agent import Session\nmodel, extra = torch.nn.Linear(1, 1), torch.nn.Parameter(torch.zeros(2))\n"
        "optimizer = torch.optim.SGD([*model.parameters(), extra], lr=0.1)\nSession(model, optimizer, microbatches=2)\n"
    )
    ran = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert ran.stderr.splitlines()[-1].startswith("agent.errors.Misuse: SGD trains a parameter of")
    assert ran.stderr.count("File ") == 1


def test_a_refusal_is_told_without_our_frames(tmp_path: Path) -> None:
    """`python train.py`, as in a job: the line of the script, and the sentence. What the script raises itself is told as ever."""
    script = tmp_path / "train.py"
    text = (
        "import torch\nfrom agent import Session\nmodel = torch.nn.Linear(1, 1)\n"
        "session = Session(model, microbatches=2)\nfor step in session.steps(1):\n    "
    )
    for line, last in (
        ("session.share(iter([]))", "agent.errors.Misuse: session.share(batches): a list_iterator"),
        ("for x in session.share([1, 2]): session.backward(1 / 0)", "ZeroDivisionError"),
    ):
        script.write_text(text + line + "\n")
        ran = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
        said = ran.stderr.splitlines()
        assert ran.returncode == 1
        assert said[-1].startswith(last)
        assert any(line in one for one in said)
        assert last == "ZeroDivisionError" or "agent/session.py" not in ran.stderr
