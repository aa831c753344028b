"""A snapshot is copied while the next step computes: nobody changes the state before that is done."""

import pytest
import torch

from agent import session
from agent.pipeline.deferred.initial_values import Unborn
from agent.session import Session
from agent.sharded.holdings import Holdings
from agent.store.encoding.format import REST
from agent.store.layers import share_of
from agent.store.memory import Again, Copying
from agent.tensors.absent import is_away
from agent.world import Alone


class Slow(Alone):
    """Begins a copy of the state at every boundary, which nobody else works at."""

    def __init__(self) -> None:
        super().__init__()
        self.begun: list[tuple[list[bytes], Copying]] = []

    def boundary(self, replica, facts):
        super().boundary(replica, facts)
        state = replica.collected()
        _, pieces = share_of(state.finish(), 1, 0)
        now = [bytes(piece) for piece in pieces]
        self.begun.append((now, Copying(lambda: share_of(state.finish(), 1, 0)[1], Again())))

    def settle(self):
        for _, copying in self.begun:
            copying.finish()


@pytest.fixture
def slow():
    session._sessions.clear()
    world = Slow()
    session.join(world)
    yield world
    session._sessions.clear()
    session._unborn.clear()
    session._world = None


def train(leave_at: int) -> torch.nn.Module:
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    session = Session(model, optimizer, microbatches=2)
    for step in session.steps(4):
        if step == leave_at:
            break
        session.backward(lambda x: model(x).square().mean(), torch.randn(2, 6, 4).unbind())
        optimizer.step()
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    return model


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize("leave_at", [2, 9])
def test_the_script_gets_its_gradients_when_the_copy_is_done(leave_at: int) -> None:
    """Neither the optimizer nor a script that has left its loop can reach into a snapshot that has begun."""
    train(leave_at)
    slow = session._world
    assert isinstance(slow, Slow)
    slow.settle()
    begun = (
        slow.begun[:-1] if leave_at == 9 else slow.begun
    )  # the last is of the end, when the loop is over
    assert len(begun) >= 3
    for pieces, copying in begun:
        assert bytes(copying.whole) == b"".join(pieces)


def test_layers_that_go_are_in_the_copy_all_the_same(slow: Slow) -> None:
    """In the middle of a first step others may be wanted than those that a snapshot has begun with."""
    unborn = Unborn(lambda: torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1)))
    session._unborn.append(unborn)
    own = Session(unborn.model, microbatches=2)
    replica = own.replica
    replica.bear(replica.holdings.all)
    for _ in own.steps(1):
        replica.bear(frozenset({"0"}))
        assert replica.holdings.here - {REST} == {"0"}
        break
    (pieces, copying), *_ = slow.begun
    assert b"".join(pieces).strip(b"\0")
    assert bytes(copying.whole) == b"".join(pieces)


def test_layers_that_come_back_lie_as_they_did() -> None:
    """A convolution is computed by another kernel where its channels lie last."""
    model = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    held = Holdings({"model": model})
    held.keep(frozenset())
    assert is_away(model.weight)
    held.make_room(held.all)
    assert model.weight.stride() == (27, 1, 9, 3)


def test_a_number_that_is_not_here_is_none() -> None:
    """A parameter of one number would be that of an earlier step, and look as if it were the model's."""
    model = torch.nn.Linear(1, 1)
    held = Holdings({"model": model})
    held.keep(frozenset())
    assert all(param.isnan().all() for param in model.parameters())
