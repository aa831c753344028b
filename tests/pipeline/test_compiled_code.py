"""Code that torch.compile compiles: no part of a recording, compiled all the same, alike on all workers."""

from collections.abc import Callable, Iterator

import pytest
import torch
from compiler import needs_compiler
from torch import nn
from torch._dynamo import config as settings
from torch.nn import functional as F  # noqa: N812

from agent.pipeline.tracing.loss import record_loss
from agent.pipeline.tracing.recording.compiled import (
    SHAPES_MAX,
    CallsCompiled,
    compile_each_shape,
)

# Torch warns of its own code where it compiles.
pytestmark = pytest.mark.filterwarnings("ignore")
Net = Callable[[torch.Tensor], torch.Tensor]


class Mean(nn.Module):
    """Rounds otherwise where it is compiled for any length of its sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(50, 33), nn.LayerNorm(33), nn.Linear(33, 7)

    def forward(self, ids):
        h = self.norm(self.embed(ids))
        h = h * torch.softmax(h.mean(-1), -1).unsqueeze(-1)
        return self.head(h.mean(1))


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    """Leave nothing compiled and no setting behind."""
    torch._dynamo.reset()
    with settings.patch({}):
        yield
    torch._dynamo.reset()


def whole(model: nn.Module) -> tuple[nn.Module, Net]:
    compiled = torch.compile(model)
    return compiled, compiled


def beside(model: nn.Module) -> tuple[nn.Module, Net]:
    return model, torch.compile(model)


def in_place(model: nn.Module) -> tuple[nn.Module, Net]:
    model.compile()
    return model, model


def within(model: nn.Module) -> tuple[nn.Module, Net]:
    outer = nn.Sequential(torch.compile(model))
    return outer, outer


def after(model: nn.Module) -> tuple[nn.Module, Net]:
    act = torch.compile(lambda x: F.relu(x).square())
    return model, lambda ids: act(model(ids))


def caught(model: nn.Module) -> tuple[nn.Module, Net]:
    act = torch.compile(lambda x: F.relu(x).square())

    def either(ids: torch.Tensor) -> torch.Tensor:
        out = model(ids)
        try:
            return act(out)
        except Exception:
            return F.relu(out).square()

    return model, either


def batch(rows: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(
        0, 50, (rows, length), generator=torch.Generator().manual_seed(rows * 100 + length)
    )
    return ids, ids.sum(1) % 7


def bits(net: Net, model: nn.Module, rows: int, length: int) -> list[bytes]:
    ids, tags = batch(rows, length)
    model.zero_grad()
    F.cross_entropy(net(ids), tags).backward()
    return [param.grad.numpy().tobytes() for param in model.parameters()]


@needs_compiler
@pytest.mark.parametrize("earlier", [False, True], ids=["new", "compiled_before"])
@pytest.mark.parametrize("way", [whole, beside, in_place, within, after, caught])
def test_a_recording_that_calls_compiled_code_ends_and_leaves_it_compiled(way, earlier):
    model, net = way(Mean())

    def loss_of(given):
        return F.cross_entropy(net(given[0]), given[1])

    if earlier:
        loss_of(batch(8, 16)).backward()
    for _ in range(2):
        with pytest.raises(
            CallsCompiled, match=r"test_compiled_code.py:\d+: .*leave torch.compile out"
        ):
            record_loss(model, loss_of, [batch(8, 16), batch(8, 16)])
    assert "CompiledFunction" in str(graph_of(loss_of(batch(8, 16))))


def graph_of(loss: torch.Tensor) -> list[str]:
    """The names of all nodes behind a loss."""
    found, left = [], [loss.grad_fn]
    while left:
        node = left.pop()
        if node is not None:
            found.append(type(node).__name__)
            left += [each for each, _ in node.next_functions]
    return found


@needs_compiler
def test_compiled_code_of_one_shape_has_the_same_bits_after_any_other_shapes():
    compile_each_shape()
    model = Mean()
    net = torch.compile(model)
    alone = bits(net, model, 8, 16)
    for rows, length in ((5, 11), (9, 37)):
        bits(net, model, rows, length)
    assert bits(net, model, 8, 16) == alone
    torch._dynamo.reset()
    for rows, length in ((9, 37), (5, 11)):
        bits(net, model, rows, length)
    assert bits(net, model, 8, 16) == alone


def test_compiled_code_with_too_many_shapes_is_named():
    compile_each_shape()
    double = torch.compile(lambda x: x * 2, backend="eager")
    with pytest.raises(Exception, match="recompile_limit"):
        for length in range(2, SHAPES_MAX + 4):
            double(torch.ones(length))
