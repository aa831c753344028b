"""What is drawn beside the numbers of the steps is refused in the first step: a newcomer would draw it from its beginning."""

from collections.abc import Callable

import pytest

from agent.errors import Misuse

SCRIPT = """
import itertools
import torch
from agent import Session
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = torch.utils.data.DataLoader(torch.randn(64, 4), batch_size=4, shuffle=True)
rows = zip(range(3), "abc")
def endless():
    while True:
        yield from loader
class Bar:
    def __init__(self, inner):
        self.inner = inner
    def __iter__(self):
        for one in self.inner:
            yield one
session = Session(model, optimizer, microbatches=2)
{before}
for {target} in {steps}:
    for x in session.share([torch.ones(2, 4)] * 2):
        session.backward(model(x).square().mean())
    optimizer.step()
    optimizer.zero_grad()
"""
REFUSED = {
    "zip(session.steps(4), endless())": "zip",
    "zip(endless(), session.steps(4))": "zip",
    "Bar(zip(session.steps(4), endless()))": "zip",
    "zip(Bar(session.steps(4)), loader)": "zip",
    "itertools.zip_longest(session.steps(4), range(2))": "zip_longest",
    "map(max, session.steps(4), itertools.count())": "map",
    "enumerate(session.steps(4))": "enumerate",
    "itertools.islice(session.steps(9), 4)": "islice",
}
ALLOWED = [
    "session.steps(4)",
    "Bar(session.steps(4))",
    "iter(session.steps(4))",
    "map(int, session.steps(4))",
]


def script(steps: str, before: str = "") -> str:
    target = "_, _" if "zip" in steps or "enumerate" in steps else "_"
    return SCRIPT.format(steps=steps, target=target, before=before)


@pytest.mark.parametrize("steps", REFUSED)
def test_what_is_drawn_beside_the_steps_is_refused(
    by_hand: Callable[[str], None], steps: str
) -> None:
    """In the first step, also alone, with what it is and what to write."""
    with pytest.raises(Misuse, match=rf"^{REFUSED[steps]}\(session.steps\(...\)\) ") as error:
        by_hand(script(steps))
    assert "session.steps(...)" in str(error.value).partition(": ")[2]


@pytest.mark.parametrize("steps", ALLOWED)
def test_what_only_hands_steps_on_is_not(by_hand: Callable[[str], None], steps: str) -> None:
    by_hand(script(steps))


def test_what_goes_through_a_list_that_has_the_steps_in_it_is_not(
    by_hand: Callable[[str], None],
) -> None:
    by_hand(script("held[0]", "held = [session.steps(4)]; rows = enumerate(held); next(rows)"))
