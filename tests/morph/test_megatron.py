"""The published tables of PTD-P."""

import pytest
from blocks import network

from orchestrator.morph import book, megatron
from orchestrator.morph.megatron import Shape
from orchestrator.morph.search import Task

TABLE_4_1 = [  # parameters in 1e9, heads, hidden, layers
    (1.7, 24, 2304, 24),
    (3.6, 32, 3072, 30),
    (7.5, 32, 4096, 36),
    (18.4, 48, 6144, 40),
    (39.1, 64, 8192, 48),
    (76.1, 80, 10240, 60),
    (145.6, 96, 12288, 80),
    (310.1, 128, 16384, 96),
    (529.6, 128, 20480, 105),
    (1008.0, 160, 25600, 128),
]
TABLE_4_2 = [  # parameters in 1e9, workers, achieved Tflop/s per worker, days for 300e9 tokens
    (174.6, 384, 144, 90),
    (174.6, 768, 88, 74),
    (174.6, 1536, 44, 74),
    (174.6, 384, 153, 84),
    (174.6, 768, 149, 43),
    (174.6, 1536, 141, 23),
    (529.6, 640, 138, 169),
    (529.6, 1120, 98, 137),
    (529.6, 2240, 48, 140),
    (529.6, 560, 171, 156),
    (529.6, 1120, 167, 80),
    (529.6, 2240, 159, 42),
]


@pytest.mark.parametrize(("billions", "heads", "hidden", "layers"), TABLE_4_1)
def test_parameter_counts(billions, heads, hidden, layers):
    """Equation 4.3 gives the first column of Table 4.1, to its last digit."""
    shape = Shape(layers=layers, hidden=hidden, heads=heads)
    assert round(megatron.parameters(shape) / 1e9, 1) == billions


@pytest.mark.parametrize(("billions", "workers", "tflops", "days"), TABLE_4_2)
def test_training_days(billions, workers, tflops, days):
    """Equation 4.2 gives the days of Table 4.2 to within one."""
    layers, hidden = (96, 12288) if billions < 500 else (105, 20480)
    shape = Shape(layers=layers, hidden=hidden, heads=128)
    assert round(megatron.parameters(shape) / 1e9, 1) == billions
    found = megatron.days(shape, 300e9, workers, tflops * 1e12)
    assert abs(found - days) <= 1


def test_the_two_headline_runs():
    """GPT-3 on 1024 workers in 34 days, a trillion parameters on 3072 in 84."""
    assert round(megatron.about_days(300e9, 175e9, 1024, 140e12)) == 34
    assert round(megatron.about_days(450e9, 1008e9, 3072, 163e12)) == 84


@pytest.mark.parametrize(
    ("heads", "hidden", "layers", "batch", "peak"),
    [(24, 2304, 24, 512, 4.4e15), (96, 12288, 80, 2304, 227.1e15), (160, 25600, 128, 3072, 502e15)],
)
def test_achieved_operations(heads, hidden, layers, batch, peak):
    """Equation 4.2 over the printed aggregate pace gives the step; its parts add up to the profile's."""
    shape = Shape(layers=layers, hidden=hidden, heads=heads)
    step_s = megatron.step_flops(shape, batch) / peak
    assert 1 < step_s < 300
    profile = megatron.profile(shape, network(), flops_per_s=peak, memory_bytes=1e15, sizes=(1,))
    once = sum(section.forward_s[0] for section in profile.sections)
    again = once - 2 * shape.sequence * hidden * shape.vocabulary / peak  # the logits: no recompute
    assert batch * (3 * once + again) == pytest.approx(step_s, rel=1e-6)


def test_a_large_model_is_cut_before_it_is_replicated():
    """39 billion parameters do not fit on one 80 GB accelerator: the plan is a deep pipeline that fits."""
    shape = Shape(layers=48, hidden=8192, heads=64)
    profile = megatron.profile(
        shape, network(2.5e10, 1e-5), flops_per_s=138e12, memory_bytes=80e9, sizes=(1,)
    )
    plan = book.best(profile, Task(global_batch=512), 64)
    assert plan.way.depth >= 8
    assert max(plan.memory_bytes) <= 80e9
