"""What an epoch goes through is what `session.epochs` counts by."""

from collections.abc import Callable

import pytest

from agent.errors import Misuse

START = """
import torch
from torch.utils.data import TensorDataset
from orchestrator import Session

model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
session = Session(model, optimizer, microbatches=2)


def batches(rows):
    return session.data(TensorDataset(torch.randn(rows, 2)), batch_size=4)


def train(batch):
    session.backward(lambda x: model(x).mean(), batch)
    optimizer.step()
    optimizer.zero_grad()


a, b = batches(16), batches(24)
"""
WRONG = {
    "another data set": (
        "for epoch in session.epochs(2, a):\n    for (x,) in b: train(x)",
        "step 0: the script goes through 6 steps, and an epoch has 4",
    ),
    "a list that is longer": (
        "for epoch in session.epochs(2, range(3)):\n"
        "    for i in session.each(range(5)): train(torch.ones(4, 2))",
        "5 steps, and an epoch has 3",
    ),
    "validation before training": (
        "for epoch in session.epochs(2, a):\n    for (x,) in b: model(x)\n    for (x,) in a: train(x)",
        "validate with a plain DataLoader",
    ),
    "validation as long as training": (
        "c = batches(16)\n"
        "for epoch in session.epochs(2, a):\n    for (x,) in c: model(x)\n    for (x,) in a: train(x)",
        "once per epoch.*validate with a plain DataLoader",
    ),
    "validation after training": (
        "for epoch in session.epochs(2, a):\n    for (x,) in a: train(x)\n    for (x,) in b: model(x)",
        "once per epoch.*validate with a plain DataLoader",
    ),
    "two at once": (
        "c = batches(16)\nfor epoch in session.epochs(2, a):\n    for (x,), (y,) in zip(a, c): train(x)",
        r"step 0: two loops.*data\.at\(session\.step\)",
    ),
    "within steps": (
        "for step in session.steps(8):\n    for (x,) in a: train(x)",
        r"with session\.steps\(n\) use data\.at\(step\)",
    ),
    "a generator": (
        "for epoch in session.epochs(2, (i for i in a)): pass",
        r"session\.epochs\(n, \.\.\.\): a generator has no length.*\[\*",
    ),
    "pairs": (
        "for epoch in session.epochs(2, 4):\n    for i in session.each(zip([1, 2], [3, 4])): train(i)",
        r"session\.each\(\.\.\.\): a zip has no length",
    ),
    "a loader itself": (
        "loader = torch.utils.data.DataLoader(TensorDataset(torch.randn(4, 2)))\n"
        "for epoch in session.epochs(2, loader):\n    for (x,) in session.each(loader): train(x)",
        r"session\.each\(\.\.\.\): a DataLoader has no items by number.*\[\*",
    ),
    "no number": (
        "for epoch in session.epochs(2, 1.5): pass",
        r"session\.epochs\(n, \.\.\.\): a float has no length",
    ),
    "left in the middle": (
        "for epoch in session.epochs(2, a):\n    for (x,) in a:\n        train(x)\n        break",
        r"order=lambda epoch: range\(n\)",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_an_epoch_that_is_gone_through_otherwise_is_refused(
    by_hand: Callable[[str], None], case: str
) -> None:
    body, why = WRONG[case]
    with pytest.raises(Misuse, match=why) as refused:
        by_hand(START + body)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "body",
    [
        "for epoch in session.epochs(2, a):\n"
        "    show = next(iter(a))\n"
        "    for (x,) in a:\n"
        "        assert torch.equal(next(iter(b))[0], b.at(session.step)[0])\n"
        "        train(x)\n"
        "    seen = session.step",
        "for epoch in session.epochs(2, a):\n    for i in session.each([1, 2, 3, 4]): train(torch.ones(4, 2))",
        "for epoch in session.epochs(2, 4):\n    for i in session.each(range(4)): train(torch.ones(4, 2))",
        "for epoch in session.epochs(2, len(a)):\n    for i in session.each(4): train(torch.ones(4, 2))",
        "c = batches(16)\nfor epoch in session.epochs(2, a):\n    for (x,) in (c if epoch else a): train(x)",
        "for step in session.steps(8):\n    assert next(iter(a))[0].shape == (4, 2)\n    train(a.at(step)[0])",
    ],
)
def test_items_taken_beside_an_epoch_do_not_count(
    by_hand: Callable[[str], None], body: str
) -> None:
    by_hand(START + body + "\nassert session.step == 8, session.step")


def test_a_second_session_is_told_how_folds_are_trained(by_hand: Callable[[str], None]) -> None:
    with pytest.raises(Misuse, match="folds of a cross-validation, is a job each") as refused:
        by_hand(START + "Session(model, optimizer)")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "body",
    [
        "for epoch in session.epochs(2, a):\n    if epoch: model.weight.data.zero_()\n    for (x,) in a: train(x)",
        "for step in session.steps(2):\n    if step: model.weight.data.clamp_(0, 0.01)\n    train(a.at(step)[0])",
        "for step in session.steps(2):\n    if step: model.weight.data.zero_()\n    else: train(a.at(step)[0])",
    ],
    ids=["at an epoch's start", "in a step", "in a turn that trains nothing"],
)
def test_a_write_through_data_before_the_gradients_is_refused(
    by_hand: Callable[[str], None], body: str
) -> None:
    """No version of the tensor counts it; others would read the state before or after it, or between."""
    with pytest.raises(Misuse, match=r"changed .*session\.backward"):
        by_hand(START + body)


def test_a_write_through_data_at_an_epochs_end_is_right(by_hand: Callable[[str], None]) -> None:
    by_hand(
        START
        + "for epoch in session.epochs(4, a):\n    for (x,) in a: train(x)\n    model.weight.data.zero_()\n"
    )


@pytest.mark.parametrize(
    "body",
    [
        "seen = [epoch for epoch in session.epochs(range(1, 4), a) for (x,) in a if train(x) is None]\n"
        "assert seen == [1] * 4 + [2] * 4 + [3] * 4, seen",
        "steps = session.steps(range(10, 18, 2))\n"
        "seen = [(i, session.step) for i in steps if train(a.at(session.step)[0]) is None]\n"
        "assert seen == [(10, 0), (12, 1), (14, 2), (16, 3)], seen",
    ],
    ids=["epochs", "steps"],
)
def test_a_loop_over_a_range_counts_as_the_script_did(
    by_hand: Callable[[str], None], body: str
) -> None:
    by_hand(START + body)
