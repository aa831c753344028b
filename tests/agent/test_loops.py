"""Loops of a script that come one after the other."""

from collections.abc import Callable
from pathlib import Path

import pytest

from agent.errors import Misuse

START = """
import torch
from torch.utils.data import TensorDataset
from orchestrator import Session

model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
session = Session(model, optimizer, microbatches=2, steps={steps})
a, b = (session.data(TensorDataset(torch.randn(n, 2)), batch_size=4) for n in (16, 8))
seen = []


def train(batch):
    seen.append(session.step)
    session.backward(lambda x: model(x).mean(), batch)
    optimizer.step()
    optimizer.zero_grad()
"""


def test_loops_of_all_kinds_go_through_the_steps_of_the_session(
    by_hand: Callable[[str], None],
) -> None:
    by_hand(
        START.format(steps=15)
        + """
at = []
for step in session.steps(3):
    at.append(step)
    train(a.at(step)[0])
model.weight.data.zero_()
for epoch in session.epochs(2, a):
    for (x,) in a:
        train(x)
    at.append(epoch)
model.bias.data.zero_()
for epoch in session.epochs(1, range(2)):
    for item in session.each(["one", "two"]):
        at.append(item)
        train(torch.ones(4, 2))
model.bias.data.zero_()
for step in session.steps(range(1, 3)):
    at.append(step)
    train(torch.ones(4, 2))
assert at == [0, 1, 2, 0, 1, "one", "two", 1, 2], at
assert seen == [*range(15)], seen
"""
    )


@pytest.mark.parametrize(
    ("steps", "body", "why"),
    [
        (
            0,
            "for step in session.steps(3): train(a.at(step)[0])\n"
            "for step in session.steps(4): train(a.at(step)[0])",
            r"7 steps, and the job has 3.*steps=7\)",
        ),
        (
            6,
            "for step in session.steps(3): train(a.at(step)[0])\n"
            "for step in session.steps(4): train(a.at(step)[0])",
            r"7 steps, and the job has 6",
        ),
        (
            7,
            "for step in session.steps(3):\n    train(a.at(step)[0])\n    break\n"
            "for step in session.steps(4): train(a.at(step)[0])",
            "step 0: the script left its loop here, 3 steps before its end",
        ),
        (
            6,
            "for epoch in session.epochs(1, a):\n    for (x,) in a: train(x)\n"
            "for (x,) in b: train(x)",
            "is gone through inside `for epoch in session.epochs",
        ),
    ],
    ids=["not announced", "too many", "left", "without epochs"],
)
def test_a_further_loop_that_cannot_be_joined_is_refused(
    by_hand: Callable[[str], None], steps: int, body: str, why: str
) -> None:
    with pytest.raises(Misuse, match=why) as refused:
        by_hand(START.format(steps=steps) + body)
    assert "\n" not in str(refused.value)


def test_a_job_that_stops_in_its_first_loop_has_no_step_of_the_second(
    by_hand: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a rehearsal does."""
    monkeypatch.setattr("agent.world.Alone.stop_at", 2)
    by_hand(
        START.format(steps=7)
        + "for step in session.steps(3): train(a.at(step)[0])\n"
        + "for epoch in session.epochs(1, a):\n    for (x,) in a: train(x)\n"
        + "assert seen == [0, 1], seen\n"
    )


def test_an_epoch_that_a_rehearsal_cuts_short_ends_as_the_script_ends_it(
    by_hand: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Most scripts log, save and validate there; here the job ends after a step of the third epoch."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("agent.world.Alone.stop_at", 9)
    by_hand(
        START.format(steps=12)
        + "ends = []\n"
        + "for epoch in session.epochs(3, a):\n"
        + "    for (x,) in a: train(x)\n"
        + "    session.log(epoch=epoch)\n"
        + "    session.state['best'] = 1.0\n"
        + "    session.save('best.pt')\n"
        + "    ends.append(len(seen))\n"
        + "session.log(final=1.0)\n"
        + "assert ends == [4, 8, 9], ends\n"
    )
    assert (tmp_path / "output" / "best.pt").exists()


def test_a_rehearsal_comes_to_the_end_of_an_epoch(
    by_hand: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a script does there is what goes wrong most often after a worker has joined."""
    monkeypatch.setattr("agent.world.Alone.stop_at", 4)
    by_hand(
        START.format(steps=12)
        + "ends = []\n"
        + "for epoch in session.epochs(3, a):\n"
        + "    for (x,) in a: train(x)\n"
        + "    ends.append((epoch, len(seen)))\n"
        + "assert len(a) == 4\n"
        + "assert ends == [(0, 2), (1, 4)], ends\n"
    )


def test_what_a_loop_fetched_ahead_with_ends_with_it(by_hand: Callable[[str], None]) -> None:
    """Else as many processes would stay as all loops have."""
    by_hand(
        START.format(steps=8).replace("batch_size=4", "batch_size=4, num_workers=1")
        + """
import multiprocessing
for data in (a, b, b):
    for epoch in session.epochs(1, data):
        for (x,) in data: train(x)
        assert len(multiprocessing.active_children()) == 1
assert not multiprocessing.active_children()
"""
    )


RANGE_TEST = """
def found(backward):
    kept = model.weight.detach().clone()
    for each in range(3):
        optimizer.param_groups[0]["lr"] = 0.1 * 2**each
        backward(torch.ones(4, 2))
        optimizer.step()
        optimizer.zero_grad()
    model.weight.data.copy_(kept)
"""
OWN, SESSIONS = (
    "found(lambda x: model(x).mean().backward())\n",
    "found(lambda x: session.backward(model, x))\n",
)
LOOP = "for (x,) in a: train(x)\n"


def test_a_range_test_before_the_loop_stays_as_it_is(by_hand: Callable[[str], None]) -> None:
    by_hand(
        f"{START.format(steps=0)}{RANGE_TEST}{OWN}for epoch in session.epochs(2, a):\n    {LOOP}"
    )


@pytest.mark.parametrize(
    "body",
    [f"for epoch in session.epochs(2, a):\n    {OWN}    {LOOP}", SESSIONS],
    ids=["within an epoch", "by the session"],
)
def test_a_range_test_elsewhere_is_told_where_it_belongs(
    by_hand: Callable[[str], None], body: str
) -> None:
    with pytest.raises(Misuse, match="a range test of the learning rate") as refused:
        by_hand(START.format(steps=0) + RANGE_TEST + body)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("session", "loop"),
    [("microbatches=2.0", "3"), ("microbatches=2, steps=3.5", "3"), ("microbatches=2", "3e0")],
)
def test_a_number_of_steps_that_is_not_whole_is_refused(
    by_hand: Callable[[str], None], session: str, loop: str
) -> None:
    """Other workers cannot be told of it, so a job would never begin."""
    body = f"for step in session.steps({loop}): train(torch.ones(4, 2))"
    start = START.format(steps=0).replace("microbatches=2, steps=0", session)
    with pytest.raises(Misuse, match=r"\(.*\): [23]\.[05] is no number of them; give a whole one"):
        by_hand(start + body)


def test_numbers_of_numpy_are_steps_as_plain_ones_are(by_hand: Callable[[str], None]) -> None:
    by_hand(
        START.format(steps="np.int64(5)").replace(
            "import torch\n", "import numpy as np, torch\n", 1
        )
        + """
for step in session.steps(np.int32(3)): train(torch.ones(4, 2))
for epoch in session.epochs(np.uint8(1), range(2)):
    for item in session.each([1, 2]): train(torch.ones(4, 2))
facts = session._loop.facts
assert [type(n) for n in (facts.steps_total, facts.microbatches)] == [int, int], facts
"""
    )
