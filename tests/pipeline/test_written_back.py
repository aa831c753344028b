"""What a backward writes to a buffer: stages would lose it, so such a loss is not cut."""

from functools import partial

import pytest
import torch
from playing import MODELS, alone, rows, together
from torch import nn

from agent.errors import CannotRecord
from agent.pipeline.tracing.loss import record_loss

HOW = ("a hook of a module", "a hook of torch's module", "a hook, through .data", "a function")


class Noted(torch.autograd.Function):
    """Notes how large gradients are, as emulations of 8-bit formats do for their scales."""

    @staticmethod
    def forward(ctx, x, seen):
        ctx.seen = seen
        return x.clone()

    @staticmethod
    def backward(ctx, arriving):
        ctx.seen.copy_(arriving.abs().amax(0))
        return arriving, None


class Noting(nn.Module):
    """A layer whose backward is noted in a buffer, in one of these ways or not at all."""

    def __init__(self, how: str, *, least: float = 0.0) -> None:
        super().__init__()
        self.mix, self.how, self.least = nn.Linear(6, 6), how, least
        self.register_buffer("seen", torch.zeros(6))
        if how != "a function":
            layer = self.mix if "torch's" in how else self
            layer.register_full_backward_hook(self._note)

    def _note(self, _layer, _into, out):
        size = out[0].abs().mean(0)
        if self.how in HOW and self.largest > self.least:
            seen = self.seen.data if ".data" in self.how else self.seen
            seen.add_(size)

    def forward(self, x):
        self.largest = float(x.detach().abs().max()) if self.least else 1.0
        return self.mix(Noted.apply(x, self.seen) if self.how == "a function" else x)


def noting(how: str, least: float = 0.0) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), Noting(how, least=least), nn.Linear(6, 5))


def record(model: nn.Module) -> object:
    x, y = rows(torch.Generator().manual_seed(0), 4)
    loss_of = lambda batch: nn.functional.cross_entropy(model(batch[0]), batch[1])  # noqa: E731
    return record_loss(model, loss_of, [(x, y)])


@pytest.mark.parametrize("how", HOW)
def test_a_backward_that_writes_to_a_buffer_is_not_cut(how: str) -> None:
    with pytest.raises(CannotRecord, match=r"a backward writes to the buffer '1\.seen'"):
        record(noting(how))


def test_a_backward_in_the_loss_that_is_switched_to_write_is_not_cut() -> None:
    """As K-FAC does: a graph that is run later would find the switch as the loss has left it."""
    model = noting("a hook that reads")
    x, y = rows(torch.Generator().manual_seed(0), 4)

    def loss_of(batch):
        found = model(batch[0])
        model[1].how = HOW[0]
        torch.autograd.grad(found.square().sum(), [*model.parameters()], retain_graph=True)
        model[1].how = ""
        return nn.functional.cross_entropy(found, batch[1])

    with pytest.raises(CannotRecord, match=r"writes something else to the buffer '1\.seen'"):
        record_loss(model, loss_of, [(x, y)])
    assert model[1].seen.eq(0).all()


def test_a_hook_that_only_reads_is_cut_and_leaves_gradients_alone() -> None:
    model = noting("a hook that reads")
    kept = [torch.ones_like(param) for param in model.parameters()]
    for param, gradient in zip(model.parameters(), kept, strict=True):
        param.grad = gradient
    record(model)
    for param, gradient in zip(model.parameters(), kept, strict=True):
        assert param.grad is gradient
        assert gradient.eq(1).all()
        assert not param._post_accumulate_grad_hooks


def test_a_hook_that_writes_only_later_ends_the_cut_in_that_step() -> None:
    """Nothing has shown it when the loss was recorded; no copy of the buffer hides it."""

    def larger_later(generator, count):
        x, y = rows(generator, count)
        return (x if generator.initial_seed() < 1000 else 100 * x), y

    opener = alone(*MODELS["repeated"], 3, 1)[2].seed_for
    later = partial(noting, HOW[0], 50.0)
    with pytest.raises(CannotRecord, match=r"buffer '1\.seen'"):
        together(later, larger_later, "1f1b", 2, (3,), steps=1, opener=opener)
