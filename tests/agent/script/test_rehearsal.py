"""The first microbatches of a job are computed twice: what carries something on without a name is refused, and nothing else is."""

from collections.abc import Callable

import pytest
import torch

from agent import session
from agent.errors import Misuse
from agent.script.rehearsal import Handed

SCRIPT = """
import itertools
import torch
from agent import Session
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = [torch.randn(3, 8)[:, ::2] for _ in range(2)]
{around}
session = Session(model, optimizer, microbatches=2)
for step in session.steps(2):
    {loop}
    optimizer.step()
"""
LOSS = "session.backward(model(x).square().mean())"
CARRIES = {
    "a generator that asks by itself": (
        """
def through(rows):
    n, it = 0, iter(rows)
    while (x := next(it, None)) is not None:
        n += 1
        yield x * n
""",
        f"for x in through(session.share(data)): {LOSS}",
        "another loss",
    ),
    "a generator with a stream of its own": (
        """
def through(rows):
    stream = torch.Generator().manual_seed(1)
    for x in rows:
        yield x + torch.randn(x.shape, generator=stream)
""",
        f"for x in through(session.share(data)): {LOSS}",
        "another loss",
    ),
    "such a generator that has a name": (
        """
def through(rows):
    for n in itertools.count(1):
        try:
            yield next(rows) * n
        except StopIteration:
            return
""",
        f"mine = through(session.share(data))\n    for x in mine: {LOSS}",
        "another loss",
    ),
    "an iterator in a function": (
        "def scaled(x, scales=itertools.count(1)):\n    return x * next(scales)",
        "for x in session.share(data): session.backward(model(scaled(x)).square().mean())",
        "another loss",
    ),
    "a generator that counts further than two": (
        """
def through(rows):
    seen = dict(n=0)
    for x in rows:
        seen["n"] += 1
        yield x if seen["n"] < 4 else x * 2
""",
        f"for x in through(session.share(data)): {LOSS}",
        "another loss",
    ),
    "a count in a hook of a gradient": (
        """
def counting():
    n = 0
    def hook(gradient):
        nonlocal n
        n += 1
        return gradient / n
    return hook
model[0].weight.register_hook(counting())
""",
        f"for x in session.share(data): {LOSS}",
        "another gradient",
    ),
}
RIGHT = {
    "norms, dropout and slices": ("", f"for x in session.share(data): {LOSS}"),
    "what is taken out of a microbatch": (
        "data = [{'x': x, 'y': x.sum(1)} for x in data]",
        "for batch in session.share([dict(each) for each in data]):\n        y = batch.pop('y')\n"
        "        session.backward((model(batch['x'])[:, 0] - y).square().mean())",
    ),
    "what is written into a microbatch": (
        "",
        f"for x in session.share([x.clone() for x in data]):\n        x.mul_(2.0)\n        {LOSS}",
    ),
    "a gradient for a microbatch": (
        "",
        "for x in session.share([x.clone() for x in data]):\n        x.mul_(2.0).requires_grad_(True)\n"
        "        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)\n"
        "        session.backward(slope.square().mean())",
    ),
    "a parameter that is added to a microbatch": (
        "",
        f"for x in session.share([x.clone() for x in data]):\n        x += model[0].bias\n        {LOSS}",
    ),
    "what ends with the microbatches": (
        "",
        f"for x, name in zip(session.share(data), 'ab'): {LOSS}",
    ),
    "what ends with them under a name": (
        "",
        f"mine = session.share(data)\n    for x, name in zip(mine, 'ab'): {LOSS}",
    ),
    "what ends with them in a generator": (
        "def through(rows):\n    for x, name in zip(rows, 'ab'): yield x",
        f"for x in through(session.share(data)): {LOSS}",
    ),
}


@pytest.mark.parametrize("case", CARRIES)
def test_what_goes_on_without_a_name_is_refused(by_hand: Callable[[str], None], case: str) -> None:
    """Nothing in the source tells that it does: the same microbatch has another loss, or another gradient."""
    around, loop, what = CARRIES[case]
    with pytest.raises(Misuse, match=rf"^step 0, microbatch \d: the same microbatch has {what}"):
        by_hand(SCRIPT.format(around=around, loop=loop))


@pytest.mark.parametrize("case", RIGHT)
def test_what_is_begun_anew_is_not(by_hand: Callable[[str], None], case: str) -> None:
    """A microbatch is whole when the loop has it again, whatever was done to it."""
    by_hand(SCRIPT.format(around=RIGHT[case][0], loop=RIGHT[case][1]))


def test_what_the_loop_says_of_a_microbatch_is_said_once(
    by_hand: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    by_hand(SCRIPT.format(around="", loop=f"for x in session.share(data): print(step); {LOSS}"))
    assert capsys.readouterr().out.split() == ["0", "0", "1", "1"]


NUMBERS = "\nprint(session.loss, *(value.sum().item() for value in model.state_dict().values()), torch.rand(1).item())"
WRITES = {
    "nothing": f"for x in session.share([x.clone() for x in data]):\n        x = x * 2.0\n        {LOSS}",
    "into it": f"for x in session.share([x.clone() for x in data]):\n        x.mul_(2.0)\n        {LOSS}",
}


@pytest.mark.parametrize("case", WRITES)
@pytest.mark.parametrize("deterministic", [True, False])
def test_what_is_computed_before_its_turn_leaves_nothing(
    by_hand: Callable[[str], None],
    capsys: pytest.CaptureFixture[str],
    case: str,
    *,
    deterministic: bool,
) -> None:
    """Neither in norms, nor in streams, nor in the microbatch."""
    made = f"microbatches=2, deterministic={deterministic})"
    text = SCRIPT.format(around="", loop=WRITES[case]).replace("microbatches=2)", made) + NUMBERS
    off = "session._rehearsal.ahead = lambda missing: []\nfor step in"
    said = []
    for each in (text, text.replace("for step in", off)):
        session._sessions.clear()
        by_hand(each)
        said.append(capsys.readouterr().out)
    assert said[0] == said[1]


def test_nothing_has_to_be_trained(by_hand: Callable[[str], None]) -> None:
    """A loop may only ask for gradients of its microbatches."""
    frozen = "model.requires_grad_(False)\ndata = [x.clone().requires_grad_() for x in data]"
    by_hand(SCRIPT.format(around=frozen, loop=f"for x in session.share(data): {LOSS}"))


def test_a_state_that_is_collected_in_the_loop_is_no_change(by_hand: Callable[[str], None]) -> None:
    """As for a newcomer or a backup, where it had come from others within the step."""
    loop = f"session._kept = None\n    for x in session.share(data):\n        session.collected()\n        {LOSS}"
    by_hand(SCRIPT.format(around="", loop=loop))


def test_what_was_written_to_is_not_computed_again() -> None:
    """Where others were lost, and the share is another one within the same step."""
    handed, batch = Handed(), {"x": torch.ones(2), "name": "first"}
    handed.hand(0, batch)
    handed.hand(0, batch)
    batch["x"].mul_(2)
    handed.hand(1, batch)
    with pytest.raises(Misuse, match="microbatch 0 has to be computed again"):
        handed.hand(0, batch)
    handed.clear()
    handed.hand(0, batch)
