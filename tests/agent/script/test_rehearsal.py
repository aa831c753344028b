"""A microbatch has one loss, wherever it comes in the loop. What keeps something for the next one is refused in the first
step, also where nobody finds it in the source."""

from collections.abc import Callable

import pytest
import torch

from agent import session
from agent.errors import Misuse
from agent.script.rehearsal import Handed

SCRIPT = """
import copy
import torch
from agent import Session
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
session = Session(model, optimizer, microbatches={microbatches}, deterministic={deterministic})
stream = torch.Generator().manual_seed(5)
class Data:
    def __init__(self, step):
        self.parts = [torch.full((2, 4), step + part + 1.0) for part in range({microbatches})]
    def __len__(self):
        return len(self.parts)
    def __getitem__(self, index):
        return self.parts[index]
def counting(rows):
    seen = []
    for x in rows:
        seen.append(1)
        yield x * len(seen)
def drawing(rows):
    while True:
        try:
            x = next(rows)
        except StopIteration:
            return
        yield x + torch.rand(x.shape, generator=stream)
def late(rows):
    seen = dict(n=0)
    for x in rows:
        seen["n"] += 1
        yield x if seen["n"] < 4 else x * 2
def plain(rows):
    for x in rows:
        yield x * 2 + torch.rand(x.shape)
def cut(rows, names):
    yield from (x for x, _ in zip(rows, names))
for step in session.steps(2):
    mine = {mine}
    for x in mine:
        {body}
        session.backward(model(x).square().mean())
    optimizer.step()
    print(session.loss)
"""
REFUSED = {
    "it counts in a list": ("counting(session.share(Data(step)))", "was computed twice"),
    "it has a stream of its own": (
        "drawing(iter(session.share(Data(step))))",
        "`stream` is drawn from",
    ),
    "it counts further than two": ("late(session.share(Data(step)))", "was computed twice"),
}


def script(
    mine: str, body: str = "pass", *, microbatches: int = 4, deterministic: bool = True
) -> str:
    return SCRIPT.format(
        mine=mine, body=body, microbatches=microbatches, deterministic=deterministic
    )


@pytest.mark.parametrize("microbatches", [1, 2, 4, 8])
@pytest.mark.parametrize("what", REFUSED)
def test_what_goes_on_from_one_to_the_next_is_refused(
    by_hand: Callable[[str], None], what: str, microbatches: int
) -> None:
    if (what, microbatches) == ("it counts further than two", 1):
        return  # one microbatch is never the fourth
    mine, words = REFUSED[what]
    with pytest.raises(Misuse, match=words):
        by_hand(script(mine, microbatches=microbatches))


@pytest.mark.parametrize("deterministic", [True, False])
def test_who_writes_to_the_microbatch_is_right(
    by_hand: Callable[[str], None], capsys: pytest.CaptureFixture[str], deterministic: bool
) -> None:
    """What is computed before its turn is a copy, and leaves nothing in the model."""
    said = []
    for body in ("x = x * 2", "x.mul_(2)", "model.begin = x; x.mul_(2)"):
        text = script("session.share(Data(step))", body, deterministic=deterministic)
        session._sessions.clear()
        by_hand(text + "print(model.weight)")
        said.append(capsys.readouterr().out)
    assert said[0] == said[1] == said[2]


@pytest.mark.parametrize("mine", ["plain(session.share(Data(step)))", "session.share(Data(step))"])
def test_a_norm_and_what_is_drawn_are_those_of_one_time(
    by_hand: Callable[[str], None], capsys: pytest.CaptureFixture[str], mine: str
) -> None:
    """Compared with the same in plain torch."""
    norm = "model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.Dropout(), torch.nn.Linear(3, 1))"
    text = script(mine).replace("model = torch.nn.Linear(4, 1)", norm)
    once = text.replace(
        "for step in session.steps(2)",
        "session._rehearsal._over = True\nfor step in session.steps(2)",
    )
    said = []
    for each in (text, once):
        session._sessions.clear()
        by_hand(each + "print(model[0].weight, model[1].running_var, torch.rand(1))")
        said.append(capsys.readouterr().out)
    assert said[0] == said[1]


def test_what_is_drawn_along_may_end(by_hand: Callable[[str], None]) -> None:
    along = script("session.share(Data(step))").replace(
        "for x in mine", "for x, _ in zip(mine, 'abcd')"
    )
    by_hand(along)
    session._sessions.clear()
    with pytest.raises(Misuse, match="in step 0 up to 4 microbatches come twice"):
        by_hand(script("cut(session.share(Data(step)), 'abcd')"))


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
