"""Half precision and the places where a model may be cut: what an autocast casts, and casts once, is as in one process."""

import itertools

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from playing import MODELS, alone, graph_of, rows, same_weights, together
from torch import nn

from agent.errors import CannotRecord
from agent.pipeline.tracing.analysis import cut_points
from orchestrator.planner.simulation.schedules import MODULO

HALVES = (torch.bfloat16, torch.float16)


class Under(nn.Module):
    """All of another model under one autocast."""

    def __init__(self, inner: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.inner, self.dtype = inner, dtype

    def forward(self, x):
        with torch.autocast("cpu", self.dtype):
            return self.inner(x)


class Shared(nn.Module):
    """One value goes into three layers, and a value in float32 lives on beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.into = nn.LayerNorm(6), nn.Linear(6, 6)
        self.three = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])
        self.out = nn.Linear(6, 5)

    def forward(self, x):
        h = self.norm(self.into(x).float())
        q, k, v = (each(h) for each in self.three)
        return self.out((q * k).float().softmax(-1) * v + h)


class Again(nn.Module):
    """One weight is used twice under one autocast, once under another right behind it, and once outside."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.into, self.again, self.out = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 5)

    def forward(self, x):
        with torch.autocast("cpu", self.dtype):
            h = self.again(self.into(x)).relu()
            with torch.autocast("cpu", enabled=False):
                h = torch.tanh(h.float() @ self.into.weight)
            h = self.again(h)
        with torch.autocast("cpu", self.dtype):
            h = self.again(h)
        return self.out(torch.tanh(self.again(h.float())))


def case(name: str, dtype: torch.dtype):
    if name == "again":
        return (lambda: Again(dtype)), rows
    inner, draw = (Shared, rows) if name == "shared" else MODELS[name]
    return (lambda: Under(inner(), dtype)), draw


def check(name: str, dtype: torch.dtype, depth: int, counts, schedule: str = "1f1b", **options):
    factory, draw = case(name, dtype)
    losses, expected, own = alone(factory, draw, sum(counts), 2)
    found, states, _ = together(
        factory, draw, schedule, depth, counts, steps=2, opener=own.seed_for, **options
    )
    assert found == losses
    assert same_weights(states, expected) == []
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", ["shared", "again", "tied"])
def test_every_cut(name: str, dtype: torch.dtype) -> None:
    """Wherever it is cut, the bits are those of one process."""
    points = cut_points(graph_of(*case(name, dtype))[1])
    assert len(points) > 4
    for point in points:
        check(name, dtype, 2, (2,), cuts=[point.after])


def test_what_is_cast_once_is_not_cut_apart() -> None:
    """Between two uses of a weight under one autocast there is no cut; between two autocasts there is."""
    graph, facts, _ = graph_of(*case("again", torch.bfloat16))
    uses = [i for i, node in enumerate(graph.graph.nodes) if str(node.target) == "model.again"]
    between = [
        sum(first <= point.after < last for point in cut_points(facts))
        for first, last in itertools.pairwise(uses)
    ]
    assert between[0] == 0
    assert min(between[1:]) > 0


def has_lstm(dtype: torch.dtype) -> bool:
    """On older processors torch has none in bfloat16 either, and what cannot run is refused with the line."""
    try:
        with torch.autocast("cpu", dtype):
            nn.LSTM(2, 2)(torch.zeros(1, 1, 2))
    except RuntimeError:
        return False
    return True


@settings(
    max_examples=15,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(
    st.sampled_from(["shared", "again", *sorted(MODELS)]),
    st.sampled_from(HALVES),
    st.sampled_from(["gpipe", "1f1b", "varuna", "zero-bubble", "eager", *MODULO]),
    st.lists(st.integers(0, 10_000), min_size=3, max_size=3),
    st.booleans(),
)
def test_any_model_any_cut(name, dtype, schedule, places, recompute) -> None:
    """Random models, schedules, recompute and cuts, under an autocast that is around all of the model."""
    if name == "lstm":
        dtype = torch.bfloat16  # in float16 torch has no LSTM on most processors
    if name == "lstm" and not has_lstm(dtype):
        with pytest.raises(CannotRecord, match="fails on the first microbatch"):
            graph_of(*case(name, dtype))
        return
    points = [point.after for point in cut_points(graph_of(*case(name, dtype))[1])]
    depth = 2 if schedule in MODULO or len(points) < 3 else 3
    stages = depth * (2 if schedule in MODULO else 1)
    if len(points) < stages - 1:
        return
    cuts = sorted(points.pop(place % len(points)) for place in places[: stages - 1])
    check(name, dtype, depth, (2, 4), schedule, cuts=cuts, recompute=(recompute,) * depth)
