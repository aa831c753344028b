"""Sums in bfloat16: each number of the tree is rounded once, whichever worker has it."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.errors import StateError
from agent.layout import data_parallel
from agent.tensors.metrics import Numbers
from agent.tensors.partial_sum import partial_of
from agent.tensors.sums import Sum, SumSpace, paired
from agent.tensors.tree import Canonical

NUMBERS = st.floats(width=32, allow_nan=False)  # with denormals, zeros of either sign, and infinity
COLUMNS = 3


def _space() -> SumSpace:
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(torch.zeros(COLUMNS))
    model.register_buffer("mean", torch.zeros(COLUMNS))
    return SumSpace({"model": model}, exchange="bfloat16")


def test_a_stored_sum_names_its_format() -> None:
    """A script of the other format is refused in a sentence; without a format, a sum is read as before."""
    rounded, exact = _space(), SumSpace({"model": torch.nn.Linear(2, 2)})
    marks = b"\1\0"
    for space in (rounded, exact):
        assert space.unsealed(space.sealed(marks)) == space.unsealed(marks) == marks
    with pytest.raises(StateError, match=r'in bfloat16, .* in float32: .*exchange="bfloat16"'):
        exact.unsealed(rounded.sealed(marks))
    with pytest.raises(StateError, match=r'in float32, .* in bfloat16: .*exchange="float32"'):
        rounded.unsealed(exact.sealed(marks))


def _share(space: SumSpace, rows: torch.Tensor, first: int, count: int) -> list[torch.Tensor]:
    """The bytes of a worker's sums of these microbatches, as it sends them."""
    partial = Canonical(space, len(rows))
    (weight,), (mean,) = space.params.values(), space.buffers.values()
    for microbatch in range(first, first + count):
        weight.grad = rows[microbatch].clone()
        mean.add_(rows[microbatch])
        partial.add(microbatch, Numbers(values=(1 / 3,)), first, count)
    return [node.flat for node in partial.nodes(first, count)]


def _total(space: SumSpace, rows: torch.Tensor, workers: int) -> Sum:
    layout = data_parallel(0, len(rows), tuple(f"w{index}" for index in range(workers)))
    tree, parts = Canonical(space, len(rows)), {}
    for one in layout.replicas:
        sums = _share(space, rows, one.first, one.count)
        parts |= dict(zip(tree.keys(one.first, one.count), sums, strict=True))
    whole = Sum(space)
    space.fold(tree.fold(parts, paired), whole.flat, 0)
    return whole


def _by_hand(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """The same number by its definition: added in float32, and rounded at every place of the tree."""
    if len(rows) == 1:
        return rows[0].to(torch.bfloat16).to(torch.float32)
    half = 1 << (len(rows) - 1).bit_length() - 1
    both = _by_hand(rows[:half]) + _by_hand(rows[half:])
    return both.to(torch.bfloat16).to(torch.float32)


@given(st.lists(st.tuples(*[NUMBERS] * COLUMNS), min_size=1, max_size=20), st.integers(1, 8))
@settings(max_examples=150)
def test_every_layout_has_the_number_that_is_rounded_at_each_place_of_the_tree(
    drawn: list[tuple[float, ...]], workers: int
) -> None:
    rows = torch.tensor(drawn, dtype=torch.float32)
    space = _space()
    found = _total(space, rows, workers)
    wanted = _by_hand(list(rows)) + 0.0  # a zero that was added to another has no sign
    (gradient,) = space.gradients(found, [0])
    assert gradient.dtype == torch.float32
    same = (gradient + 0.0).view(torch.int32) == wanted.view(torch.int32)
    assert bool((same | (gradient.isnan() & wanted.isnan())).all())


def test_only_gradients_are_rounded() -> None:
    """A loss, a metric and what a buffer has changed by are state or are shown, and are few bytes."""
    rows = torch.tensor([[1 / 3, 1.0, 2 / 3]] * 4)
    space = _space()
    found = _total(space, rows, 2)
    assert found.loss == 4 / 3
    assert torch.equal(found.views[1], rows[0] * 4)
    assert not torch.equal(found.views[0].to(torch.float32), rows[0] * 4)


def test_a_sum_is_half_as_large_and_as_near_as_the_page_says() -> None:
    """docs/data-path.md: not more than 0.4 % of the norm of a gradient, of 64 microbatches."""
    model = torch.nn.Linear(256, 256, bias=False)
    wide, space = SumSpace({"model": model}), SumSpace({"model": model}, exchange="bfloat16")
    numbers = wide.slot(0)[1]
    assert 2 * (space.total_bytes - numbers) == wide.total_bytes - numbers
    assert (wide.exchanged, space.exchanged) == (1.0, 0.5)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(64, 256, 256, generator=generator) + torch.randn(
        256, 256, generator=generator
    )
    partial = partial_of(space, len(rows), deterministic=True)
    for microbatch, row in enumerate(rows):
        model.weight.grad = row.clone()
        partial.add(microbatch, Numbers(), 0, len(rows))
    (whole,) = partial.nodes(0, len(rows))
    exact = rows.double().sum(0)
    error = (whole.views[0].double() - exact).norm() / exact.norm()
    assert 0 < float(error) < 4e-3
