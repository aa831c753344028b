"""What a stage keeps of a microbatch between its forward and its backward."""

import weakref
from functools import partial

import pytest
import torch
from playing import MODELS, alone, graph_of, rows, same_weights, together
from torch import nn
from torch.autograd.graph import get_gradient_edge

from agent.errors import CannotRecord, Unplayed
from agent.pipeline.stages.cut import SELDOM_BYTES_MAX, build
from agent.pipeline.stages.split_backward import Halves
from agent.pipeline.stages.stage import Stage
from agent.pipeline.tracing.analysis import cut_points


class Force(nn.Module):
    """What comes out of it is a derivative, so its forward goes back through a graph of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.energy = nn.Linear(6, 6), nn.Linear(6, 6)
        self.out = nn.Linear(6, 5)

    def forward(self, x):
        h = self.into(x)
        energy = torch.tanh(self.energy(h)).pow(2).sum()
        (force,) = torch.autograd.grad(energy, h, create_graph=True)
        return self.out(force)


class Shared(nn.Module):
    """Weights of two uses: each in its own way is found out together with others. `order` is that of the weights."""

    def __init__(self, order: str) -> None:
        super().__init__()
        self.into, self.between, self.out = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 5)
        for name in order:
            self.register_parameter(name, nn.Parameter(torch.randn(6)))

    def forward(self, x):
        h = torch.tanh(self.into(x)) + (self.p + self.q) + (self.q + self.r)
        return self.out(torch.tanh(self.between(h * self.s)) + self.s)


class Filled(nn.Module):
    """Puts what it computes into a tensor that had no gradients when it was made, as decoders do word by word."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.out = nn.Linear(6, 3), nn.Linear(6, 3), nn.Linear(6, 5)

    def forward(self, x):
        words = torch.zeros_like(x)
        words[:, :3] = self.left(x)
        words[:, 3:] = self.right(x)
        return self.out(words.tanh() + words)


class Kept:
    """Stands in a graph for a tensor that is saved for the backward. Its own graph would make a circle."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor.detach()


@pytest.mark.parametrize("model", MODELS)
def test_what_will_be_recomputed_keeps_no_activations(model):
    """When a forward ends, nothing that it saved is left, unless it is to be kept."""
    graph, facts, example = graph_of(*MODELS[model])
    places = [point.after for point in cut_points(facts)]
    piece, *_ = build(graph, facts, [places[len(places) // 2]])
    for keep in (False, True):
        stage = Stage(piece, microbatches=1)
        saved: list[weakref.ref[Kept]] = []

        def pack(tensor: torch.Tensor, saved=saved) -> Kept:
            kept = Kept(tensor)
            saved.append(weakref.ref(kept))
            return kept

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept.tensor):
            stage.forward(0, None, example, keep=keep)
        assert any(each() is not None for each in saved) == keep


def test_a_forward_that_differentiates_is_recomputed_too():
    """A forward that needs what it saves, for a derivative of its own, gets it, and the bits are the same."""
    _, facts, _ = graph_of(Force, rows)
    last = max(point.after for point in cut_points(facts))
    losses, expected, own = alone(Force, rows, 3, 2)
    found, states, _ = together(
        Force,
        rows,
        "1f1b",
        2,
        (3,),
        steps=2,
        cuts=[last],
        recompute=(True, False),
        opener=own.seed_for,
    )
    assert found == losses
    assert same_weights(states, expected) == []


def same_at_every_cut(model, schedule, draw=rows):
    losses, expected, own = alone(model, draw, 3, 2)
    _, facts, _ = graph_of(model, draw)
    for point in cut_points(facts):
        found, states, _ = together(
            model, draw, schedule, 2, (3,), steps=2, cuts=[point.after], opener=own.seed_for
        )
        assert found == losses
        assert same_weights(states, expected) == []


def test_what_is_written_into_a_tensor_has_its_gradients():
    """Wherever the model is cut behind that."""
    same_at_every_cut(Filled, "1f1b")


class Largest(nn.Module):
    """Asks for values, so it is kept whole; and writes only where there is a larger one."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("most", torch.full((size,), 10.0))

    def forward(self, x):
        found = float(x.detach().max())
        if found > self.most[0]:
            self.most.fill_(found)
        return x / float(self.most[0])


def seldom(size):
    return nn.Sequential(nn.Linear(6, 6), nn.Sequential(Largest(size)), nn.Linear(6, 5))


def larger_later(generator, count):
    """What is looked at is not as large as what comes in the steps."""
    x, y = rows(generator, count)
    return (x if generator.initial_seed() < 1000 else 100 * x), y


def test_a_buffer_that_is_not_written_to_when_it_is_looked_at():
    """In the steps it is, and no microbatch sees what another one has written."""
    same_at_every_cut(partial(seldom, 3), "1f1b", larger_later)


def test_a_large_buffer_that_is_written_to_when_nobody_expects_it():
    """It is not copied for each microbatch in vain; others that were under way have seen it."""
    opener = alone(*MODELS["repeated"], 3, 1)[2].seed_for
    large = partial(seldom, SELDOM_BYTES_MAX)
    with pytest.raises(CannotRecord, match=r"buffer '1\.0\.most'"):
        together(large, larger_later, "1f1b", 2, (3,), steps=1, opener=opener)


def test_an_error_in_a_forward_comes_up():
    """An error that has nothing to do with what is saved reaches the caller, whoever will recompute; it may be of the graph."""
    graph, facts, (x, y) = graph_of(*MODELS["repeated"])
    piece, *_ = build(graph, facts, [cut_points(facts)[-1].after])
    with pytest.raises(Unplayed, match="shapes cannot be multiplied") as found:
        Stage(piece, microbatches=1).forward(0, None, (x[:, :3], y), keep=False)
    assert isinstance(found.value.__cause__, RuntimeError)


class Pictures(nn.Module):
    """Channels last, as libraries for pictures have them."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.norm = nn.Linear(6, 32), nn.GroupNorm(2, 8)
        self.out = nn.Linear(32, 5)

    def forward(self, x):
        h = self.into(x).view(-1, 8, 2, 2).contiguous(memory_format=torch.channels_last)
        return self.out(self.norm(h).flatten(1))


def test_in_halves_a_group_norm_with_channels_last_is_asked_for_its_input_too():
    """Torch's kernel writes the gradient of the input also where nobody wants it, and there is no memory for it."""
    same_at_every_cut(Pictures, "zero-bubble")


@pytest.mark.parametrize("order", ["pqrs", "srqp"])
def test_in_halves_each_weight_has_the_gradient_of_the_whole(order):
    """Weights with a use in common count once, in whatever order they come, and no half needs what another has
    given back."""
    same_at_every_cut(lambda: Shared(order), "zero-bubble")


def test_weights_that_are_used_once_more_beside_the_inputs_have_that_gradient_too() -> None:
    """As of a discriminator: it is called on what a stage before has made, and on the batch itself."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    weights, arrived = [*layers.parameters()], torch.randn(2, 3, requires_grad=True)
    outs = [layers(x) for x in (arrived, torch.randn(2, 3))]
    grads = [torch.randn(2, 3) for _ in outs]
    wanted = torch.autograd.grad(outs, [arrived, *weights], grads, retain_graph=True)
    edges, halves = [get_gradient_edge(out) for out in outs], Halves(weights)
    (found,), owed = halves.first((edges, grads), [arrived])
    if owed is not None:
        halves.second(owed)
    else:
        torch.autograd.backward(edges, grads, inputs=weights)
    for got, want in zip([found, *(weight.grad for weight in weights)], wanted, strict=True):
        assert torch.equal(got, want)
