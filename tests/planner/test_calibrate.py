"""Calibration: the numbers of a small model, measured here."""

import itertools
import time

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from blocks import network
from torch import nn

from agent.calibration import calibrate, links
from agent.calibration.calibrate import Settings
from agent.calibration.links import RingTime
from agent.calibration.peak_memory import Living
from agent.errors import Misuse
from orchestrator.planner import plan_book
from orchestrator.planner.search import Task


class Stack(nn.Module):
    """Layers of which the third is much heavier than the others."""

    def __init__(self) -> None:
        super().__init__()
        widths = [32, 32, 512, 512, 32, 32]
        self.layers = nn.ModuleList([nn.Linear(a, b) for a, b in itertools.pairwise(widths)])

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def loss_of(model, x):
    return F.mse_loss(model(x), x)


def settings(**changes) -> Settings:
    fields = {
        "model": "stack",
        "instance_type": "here",
        "memory_bytes": 1e9,
        "network": network(),
        "rounds": 2,
    }
    return Settings(**{**fields, **changes})


def counting():
    """A clock that ticks once a look: every measured part takes exactly one second."""
    ticks = iter(range(1_000_000))
    return lambda: float(next(ticks))


def batches():
    return {size: (torch.randn(32 * size, 32),) for size in (1, 2)}


def test_a_model_becomes_a_profile():
    """Sections cover all parameters, activations are as wide as the layers, and the planner can use it."""
    torch.manual_seed(0)
    model = Stack()
    optimizer = torch.optim.AdamW(model.parameters())
    before = {name: p.clone() for name, p in model.named_parameters()}
    profile = calibrate.calibrate(
        model, loss_of, batches(), settings(), optimizer=optimizer, clock=counting()
    )
    weights = sum(p.numel() * 4 for p in model.parameters())
    assert sum(section.parameter_bytes for section in profile.sections) == weights
    assert sum(section.optimizer_bytes for section in profile.sections) == pytest.approx(
        2 * weights, rel=0.01
    )
    assert profile.microbatch_sizes == (1, 2)
    assert {section.activation_bytes for section in profile.sections[:-1]} <= {
        4.0,  # the loss
        32 * 32 * 4.0,
        32 * 512 * 4.0,
    }
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name])
    # A backward, and half of what it takes to add up two microbatches.
    assert all(section.backward_s == (1.5, 1.5) for section in profile.sections)
    assert all(section.forward_s == (1.0, 1.0) for section in profile.sections)
    plan = plan_book.best(profile, Task(global_batch=8), 3)
    assert plan.workers == 3


def test_the_heavy_layer_is_seen():
    """Measured on the thread's own clock, the section of the widest layers takes and keeps most."""
    torch.manual_seed(0)
    torch.set_num_threads(1)  # the thread's own clock sees no others
    big = {8: (torch.randn(512, 32),)}
    profile = calibrate.calibrate(Stack(), loss_of, big, settings(rounds=3), clock=time.thread_time)
    heaviest = max(profile.sections, key=lambda section: section.backward_s[0])
    assert heaviest.parameter_bytes >= 512 * 512 * 4
    assert heaviest.stash_bytes > 0


def test_the_key_knows_code_shapes_and_machine():
    """Another width, another batch or another type of instance is another profile."""
    torch.manual_seed(0)
    quick = settings(rounds=1)
    keys = {
        calibrate.calibrate(Stack(), loss_of, batches(), quick, clock=counting()).key,
        calibrate.calibrate(Stack(), loss_of, batches(), quick, clock=counting()).key,
    }
    assert len(keys) == 1
    other = calibrate.calibrate(
        Stack(), loss_of, batches(), settings(rounds=1, instance_type="there"), clock=counting()
    )
    few = {1: batches()[1]}
    fewer = calibrate.calibrate(Stack(), loss_of, few, quick, clock=counting())
    assert len({*keys, other.key, fewer.key}) == 3


def test_links_and_rings_are_fitted():
    """Numbers that a link or a ring would give bring its latency and bandwidth back."""
    sizes = [1e3, 1e5, 1e7]
    link = links.fit_link(sizes, [1e-4 + size / 1e9 for size in sizes])
    assert link.latency_s == pytest.approx(1e-4)
    assert link.bandwidth_bytes_per_s == pytest.approx(1e9)
    times = [
        RingTime(
            workers=d,
            size_bytes=v,
            at_once=k,
            seconds=2 * (d - 1) * 5e-5 + 2 * (d - 1) / d * v * k / 2e9,
        )
        for d in (2, 4, 8)
        for v in (1e5, 1e7)
        for k in (1, 2)
    ]
    ring = links.fit_ring(times)
    assert ring.latency_s == pytest.approx(5e-5)
    assert ring.bandwidth_bytes_per_s == pytest.approx(2e9)
    assert ring.lanes == 1
    shrinking = links.fit_link([1e3, 1e6], [2e-3, 1e-3])
    assert shrinking.latency_s > 0


@pytest.mark.parametrize("lanes", [1, 2, 4])
def test_lanes_are_found(lanes):
    """Of one, two, four and eight at once as many run at full speed as the link has lanes."""
    times = [
        RingTime(workers=2, size_bytes=v, at_once=k, seconds=1e-4 + v * max(1, k / lanes) / 1e9)
        for v in (1e5, 1e7)
        for k in (1, 2, 4, 8)
    ]
    ring = links.fit_ring(times)
    assert ring.lanes == lanes
    assert ring.bandwidth_bytes_per_s == pytest.approx(1e9)
    assert links.fit_ring(times[:1]).lanes == 1  # nothing was tried: as if there were one


def test_jitter_is_that_of_the_draws():
    """Delays drawn as the simulator draws them give their mean back; one that waited for a second changes little."""
    rng = np.random.default_rng(3)
    delays = (1e-3 + rng.exponential(2e-4, 2000)).tolist()
    assert links.jitter_s(delays) == pytest.approx(2e-4, rel=0.1)
    assert links.jitter_s([*delays, 1.0]) == pytest.approx(2e-4, rel=0.1)
    assert links.jitter_s([1e-3]) == 0.0


def test_work_space_is_what_lives_besides():
    """A product that is thrown away at once counts while it lives; what is kept counts on."""
    x = torch.randn(64, 64)
    with Living() as living:
        y = torch.relu(x @ x)
        del x
    assert living.most_bytes == 2 * y.nbytes
    assert living.now_bytes == y.nbytes
    del y
    assert living.now_bytes == 0


def test_work_space_is_reserved():
    """What a backward has in its hands beside what is kept: at least the widest activation, on top of the stash."""
    torch.manual_seed(0)
    few, many = (
        calibrate.calibrate(
            Stack(), loss_of, {n: (torch.randn(64 * n, 32),)}, settings(), clock=counting()
        )
        for n in (1, 8)
    )
    assert few.reserved_bytes >= 64 * 512 * 4
    assert few.copies == 1.0  # of a share of the state, in the same memory
    assert many.reserved_bytes == pytest.approx(8 * few.reserved_bytes, rel=0.2)
    assert few.send_s == 1.0  # by the clock that ticks once a look


def test_nothing_to_measure_with_is_refused():
    """No example batch: one line."""
    with pytest.raises(Misuse, match="no batches to measure with"):
        calibrate.calibrate(Stack(), loss_of, {}, settings())


def test_an_optimizer_is_measured_with_what_it_trains():
    """Muon takes matrices only, and another trains the rest of the model."""
    model = Stack()
    optimizer = torch.optim.Muon([param for param in model.parameters() if param.ndim == 2])
    profile = calibrate.calibrate(model, loss_of, batches(), settings(), optimizer=optimizer)
    assert sum(section.optimizer_bytes for section in profile.sections) > 0.0
