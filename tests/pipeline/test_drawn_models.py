"""Models that nobody would write, drawn at random: cut anywhere, played in any way, they train as in one process."""

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from playing import alone, graph_of, same_weights, together
from torch import nn

from agent.pipeline.tracing.analysis import cut_points
from orchestrator.planner.simulation.schedules import MODULO, STEADY

WIDTH, CLASSES, STEPS = 6, 5, 2


class Common(nn.Module):
    """What several operations share: a layer, and bare parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.bare = nn.ParameterList([nn.Parameter(torch.randn(WIDTH)) for _ in range(3)])


class Operation(nn.Module):
    """Of two values that were there before."""

    def __init__(self, common: Common) -> None:
        super().__init__()
        self.common = common
        self.own = self.made()

    def made(self) -> nn.Module:
        return nn.Identity()


class Layer(Operation):
    def made(self):
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True))

    def forward(self, u, v):
        return self.own(u) + v


class Halves(Operation):
    """Values in a dict."""

    def made(self):
        return nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, u, v):
        a, b = self.own(u).chunk(2, -1)
        found = {"a": a, "b": torch.sigmoid(b)}
        return found["a"] * found["b"] + v


class Average(Operation):
    """A buffer that its forward writes to."""

    def __init__(self, common: Common) -> None:
        super().__init__(common)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, u, v):
        with torch.no_grad():
            self.mean.mul_(0.9).add_(u.detach().mean(0), alpha=0.1)
        return u - self.mean + v.detach()


class Normed(Operation):
    def made(self):
        return nn.BatchNorm1d(WIDTH)

    def forward(self, u, v):
        return self.own(u) * torch.sigmoid(v)


class Frozen(Operation):
    def made(self):
        layer = nn.Linear(WIDTH, WIDTH)
        layer.weight.requires_grad_(False)
        return layer

    def forward(self, u, v):
        return F.dropout(self.own(u), 0.3, self.training) + v


class Recurrent(Operation):
    def made(self):
        return nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, u, v):
        return self.own(torch.stack([u, v], 1))[0][:, -1]


class Attentive(Operation):
    def made(self):
        return nn.MultiheadAttention(WIDTH, 2, batch_first=True, dropout=0.1)

    def forward(self, u, v):
        return self.own(u.unsqueeze(1), v.unsqueeze(1), v.unsqueeze(1))[0].squeeze(1)


class Shared(Operation):
    def forward(self, u, v):
        return torch.tanh(self.common.layer(u)) + v


class Tied(Operation):
    """Another layer with the weight of the shared one."""

    def made(self):
        layer = nn.Linear(WIDTH, WIDTH)
        layer.weight = self.common.layer.weight
        return layer

    def forward(self, u, v):
        return self.own(u) - v


class Bare(Operation):
    """Parameters that meet each other before they meet a value, and one that is used twice."""

    def forward(self, u, v):
        a, b, c = self.common.bare
        return u * (a * b) + v * a + c


class Written(Operation):
    """In place, and through a view."""

    def forward(self, u, v):
        found = u * 1.5
        found += v
        found[:, :2] *= 0.5
        return found.view(-1, 2, WIDTH // 2).transpose(1, 2).reshape(-1, WIDTH)


OPERATIONS = Operation.__subclasses__()
Plan = list[tuple[type[Operation], int, int]]


class Drawn(nn.Module):
    def __init__(self, plan: Plan) -> None:
        super().__init__()
        common = Common()
        self.into, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.parts = nn.ModuleList(kind(common) for kind, _, _ in plan)
        self.places = [(a, b) for _, a, b in plan]

    def forward(self, x):
        values = [self.into(x)]
        for part, (a, b) in zip(self.parts, self.places, strict=True):
            values.append(part(values[a % len(values)], values[b % len(values)]))
        return self.out(values[-1] + values[len(values) // 2])


def rows(generator: torch.Generator, size: int):
    x = torch.randn(size, WIDTH, generator=generator)
    return x, torch.randint(0, CLASSES, (size,), generator=generator)


@st.composite
def cases(draw):
    """A model, a schedule, replicas, and places to cut at."""
    places = st.integers(0, 11)
    plan = draw(
        st.lists(st.tuples(st.sampled_from(OPERATIONS), places, places), min_size=4, max_size=10)
    )
    name, depth = draw(st.sampled_from(STEADY)), draw(st.integers(2, 3))
    counts = draw(st.lists(st.integers(1, 4), min_size=1, max_size=2))
    again = draw(st.tuples(*[st.booleans()] * depth))
    return plan, name, depth, counts, again, draw(st.sampled_from([1, 8])), draw(st.randoms())


@settings(
    max_examples=25,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
@given(cases())
def test_a_drawn_model_is_one_process(case) -> None:
    """To the bit, whatever is shared, tied, frozen, written to, normed or dropped on whichever side of a cut."""
    plan, name, depth, counts, again, reach, dice = case
    counts = [count * depth for count in counts] if name in MODULO else counts
    factory: Callable[[], nn.Module] = lambda: Drawn(plan)  # noqa: E731
    _, facts, _ = graph_of(factory, rows)
    free = [point.after for point in cut_points(facts)]
    cuts = depth * (2 if name in MODULO else 1) - 1
    assume(len(free) >= cuts)
    losses, expected, own = alone(factory, rows, sum(counts), STEPS)
    options = {"cuts": sorted(dice.sample(free, cuts)), "recompute": again, "reach": reach}
    found, states, _ = together(
        factory, rows, name, depth, counts, steps=STEPS, opener=own.seed_for, **options
    )
    assert found == losses
    assert same_weights(states, expected) == []
