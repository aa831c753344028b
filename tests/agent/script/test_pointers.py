"""A queue that a forward fills goes round on one device; microbatches that see the step's start would all write to one place."""

from collections.abc import Callable

import pytest

from agent.errors import Misuse

SCRIPT = """
import torch
from agent import Session
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 3)
        self.register_buffer("queue", torch.zeros(3, 8))
        self.register_buffer("ptr", torch.zeros(1, dtype=torch.long))
        self.register_buffer("seen", torch.zeros(3, dtype=torch.long))
    def forward(self, x):
        out = self.layer(x)
        {called}
        return out.square().mean()
    @torch.no_grad()
    def put(self, keys):
        {put}
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
session = Session(model, optimizer, microbatches={microbatches})
for step in session.steps(3):
    for x in session.share([torch.ones(2, 4)] * {microbatches}):
        session.backward(model(x))
    optimizer.step()
    {behind}
"""
RING = "ptr = int(self.ptr); end = ptr + len(keys); self.queue[:, ptr:end] = keys.T; self.ptr[0] = end % 8"
COPIED = (
    "at = (self.ptr + torch.arange(len(keys))) % 8; self.queue.index_copy_(1, at, keys.T); "
    "self.ptr.add_(len(keys)).remainder_(8)"
)
COUNTED = (
    "kind = keys.argmax(1); self.seen.index_add_(0, kind, torch.ones_like(kind)); self.ptr += 1"
)


def filled(put: str, called: str, microbatches: int, behind: str = "") -> str:
    return SCRIPT.format(
        put=put, called=called or "pass", microbatches=microbatches, behind=behind or "pass"
    )


@pytest.mark.parametrize("put", [RING, COPIED])
def test_a_place_that_goes_round_is_refused(by_hand: Callable[[str], None], put: str) -> None:
    """Before anything is computed, with what to do."""
    with pytest.raises(Misuse, match=r"^the buffer 'ptr' says where .*microbatches=1") as error:
        by_hand(filled(put, "self.put(out)", 2))
    assert "behind the loop over session.share(...)" in str(error.value)


@pytest.mark.parametrize(
    ("put", "called", "microbatches", "behind"),
    [
        (RING, "self.put(out)", 1, ""),
        (RING, "", 2, "model.put(model.layer(torch.ones(4, 4)))"),
        (COUNTED, "self.put(out)", 2, ""),
    ],
    ids=["of one microbatch", "behind the loop", "a count"],
)
def test_what_comes_out_as_on_one_device_is_not(
    by_hand: Callable[[str], None], put: str, called: str, microbatches: int, behind: str
) -> None:
    by_hand(filled(put, called, microbatches, behind))
