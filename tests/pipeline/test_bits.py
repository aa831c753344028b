"""The layout is not part of the maths: bit-equal losses and weights, whatever the cut."""

from functools import partial

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from playing import MODELS, ResNet, alone, graph_of, pictures, rows, same_weights, together
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from agent.pipeline.tracing.analysis import cut_points
from orchestrator.planner.simulation.schedules import MODULO

STEPS = 2


def check(model: str, name: str, depth: int, counts, *, exchange="float32", **options):
    factory, draw = MODELS[model]
    losses, expected, own = alone(factory, draw, sum(counts), STEPS, exchange=exchange)
    options |= {"steps": STEPS, "opener": own.seed_for, "exchange": exchange}
    found, states, _ = together(factory, draw, name, depth, counts, **options)
    assert found == losses
    assert same_weights(states, expected) == []


@pytest.mark.parametrize(
    ("model", "name"),
    [
        *(("tied", "gpipe"), ("resnet", "1f1b"), ("unet", "varuna"), ("seq2seq", "eager")),
        *(("lstm", "gpipe"), ("repeated", "varuna"), ("codes", "eager"), ("twins", "1f1b")),
    ],
)
def test_rounded_sums_of_two_stages_under_any_schedule_are_those_of_one_process(model, name):
    """Where a stage's gradients are added while its backward runs, each would miss its own rounding. Which schedule it is
    matters to no model; any pair may be drawn below."""
    check(model, name, 2, (3, 2), exchange="bfloat16")


@pytest.mark.parametrize("model", MODELS)
def test_three_stages_two_replicas(model):
    """Every kind of model, cut by its measured times, trains to the bits of one process: the microbatches shared out
    unevenly, and its backward in two halves."""
    check(model, "zero-bubble", 3, (4, 1))


@pytest.mark.parametrize(
    ("model", "name", "counts"),
    [(m, *((("1f1b", (4, 1)), ("zero-bubble", (3,)))[i % 2])) for i, m in enumerate(MODELS)],
)
def test_sums_in_any_order_differ_by_rounding(model, name, counts):
    """With `deterministic=False` gradients take the memory of one, and losses are those of one process to 1e-6. (Weights
    are farther apart where a gradient is nothing but rounding, which Adam makes as large as any.)"""
    factory, draw = MODELS[model]
    losses, _, own = alone(factory, draw, sum(counts), 4)
    found, _, _ = together(
        factory, draw, name, 2, counts, steps=4, opener=own.seed_for, deterministic=False
    )
    assert found == pytest.approx(losses, rel=1e-6)


@pytest.mark.parametrize(
    ("model", "name"),
    [(m, MODULO[i % len(MODULO)]) for i, m in enumerate(["tied", "resnet", "lstm", "seq2seq"])],
)
def test_modulo_placement(model, name):
    """Two chunks on each worker change nothing either, though a worker then hands over to itself."""
    check(model, name, 2, (2, 4))


def test_a_cut_behind_a_convolution():
    """Workers compute with the threads that the session fixed: a convolution shared among more rounds otherwise."""
    check("unet", "gpipe", 2, (1,), cuts=[2])


@pytest.mark.parametrize(
    ("model", "name"), [("tied", "gpipe"), ("resnet", "1f1b"), ("seq2seq", "varuna")]
)
def test_recompute_replays_dropout(model, name):
    """A stage that forgets its activations draws the same dropout and buffers when it computes again."""
    check(model, name, 3, (5,), recompute=(True,) * 3)


def test_recompute_takes_the_same_kernels():
    """An LSTM has another kernel where no gradients are wanted; a forward to be recomputed does not take it."""
    check("lstm", "varuna", 2, (3,), recompute=(True,) * 2)


@st.composite
def layouts(draw):
    """A model, places to cut it anywhere, a schedule and replicas of any size."""
    model = draw(st.sampled_from(sorted(MODELS)))
    name = draw(st.sampled_from(["gpipe", "1f1b", "varuna", "zero-bubble", "eager", *MODULO]))
    depth = draw(st.integers(1, 4 if name not in MODULO else 2))
    counts = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    if name in MODULO:
        counts = [count * depth for count in counts]
    stages = depth * (2 if name in MODULO else 1)
    again = st.just(()) | st.tuples(*[st.booleans()] * depth)
    places = draw(st.lists(st.integers(0, 10_000), min_size=stages - 1, max_size=stages - 1))
    return (
        model,
        name,
        depth,
        tuple(counts),
        places,
        draw(again),
        draw(st.sampled_from([1, 8])),
        draw(st.sampled_from(["float32", "bfloat16"])),
    )


@settings(
    max_examples=20,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(layouts())
def test_any_layout_any_cut(drawn):
    """Random models, cuts, schedules, replicas, recompute, deviation, formats: the bits are always the same."""
    model, name, depth, counts, places, recompute, reach, exchange = drawn
    cuts = spread(model, places)
    check(
        model, name, depth, counts, cuts=cuts, recompute=recompute, reach=reach, exchange=exchange
    )


def spread(model: str, places) -> list[int]:
    """Different places among those where the model can be cut."""
    _, facts, _ = graph_of(*MODELS[model])
    free = [point.after for point in cut_points(facts)]
    return sorted(free.pop(place % len(free)) for place in places)


class Cached(nn.Module):
    """A weight that is computed once for two uses. `look` is at values, so that the layer is not taken apart."""

    def __init__(self, *, look: bool) -> None:
        super().__init__()
        self.layer = Looking() if look else parametrizations.weight_norm(nn.Linear(6, 6))
        self.out = nn.Linear(6, 5)

    def forward(self, x):
        with parametrize.cached():
            for _ in range(2):
                x = torch.tanh(self.layer(x))
        return self.out(x)


class Looking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = parametrizations.weight_norm(nn.Linear(6, 6))

    def forward(self, x):
        return self.layer(x) if x.sum() < 1e9 else x


@pytest.mark.parametrize("look", [False, True])
def test_a_weight_that_is_computed_once_for_two_uses(look: bool) -> None:
    """Its gradients are added before they reach what it is computed of."""
    at_every_cut(partial(Cached, look=look), rows)


def test_a_picture_by_itself_keeps_its_strides() -> None:
    """A view of it would say otherwise how far it is to the next picture, and then another kernel computes its norm."""
    at_every_cut(
        lambda: ResNet().to(memory_format=torch.channels_last),
        lambda generator, _: pictures(generator, 1),
    )


def at_every_cut(factory, draw) -> None:
    losses, expected, own = alone(factory, draw, 2, 3)
    points = cut_points(graph_of(factory, draw)[1])
    assert points
    for point in points:
        found, states, _ = together(
            factory, draw, "1f1b", 2, (2,), steps=3, cuts=[point.after], opener=own.seed_for
        )
        assert found == losses
        assert same_weights(states, expected) == []
