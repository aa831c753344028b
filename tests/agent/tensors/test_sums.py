"""The sums of a step: what nobody contributes to."""

import pytest
import torch

from agent.errors import Misuse
from agent.tensors.metrics import Numbers
from agent.tensors.sums import PIECE_NUMBERS, Sum, SumSpace
from agent.tensors.tree import Canonical
from agent.tensors.unchanged import Still


class Counted(torch.nn.Module):
    """A weight, and positions as whole numbers that nobody writes to."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))
        self.register_buffer("positions", torch.arange(4))


def added(order: list[int], count: int) -> Sum:
    model = Counted()
    space = SumSpace({"model": model})
    space.begin()
    partial = Canonical(space, count)
    for microbatch in order:
        model.weight.grad = torch.full((3,), 0.1 * (microbatch + 1))
        partial.add(microbatch, Numbers(values=(0.1 * microbatch,)), 0, count)
    (whole,) = partial.nodes(0, count)
    return whole


def test_a_constant_buffer_of_whole_numbers():
    """It stays as it is, and the gradients beside it are added."""
    whole = added([0, 1], 2)
    assert list(whole.present) == [1, 0]
    assert torch.equal(whole.views[1], torch.zeros(4, dtype=torch.int64))


def test_tensors_begin_where_torchs_own_do() -> None:
    """In the sum of the whole and in that of a stage, so that what an optimizer multiplies gradients by rounds alike."""
    model = torch.nn.Sequential(
        torch.nn.Linear(3, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 1)
    )
    whole = SumSpace({"model": model})
    for space in (whole, whole.part(lambda name: name != "0.weight")):
        total = Sum(space)
        assert [view.data_ptr() % 64 for view in total.views] == [0] * len(total.views)


@pytest.mark.parametrize("part", [complex("nan"), complex(0.0, float("inf"))])
def test_complex_gradients_that_are_not_finite_are_seen(part: complex) -> None:
    model = torch.nn.ParameterList([torch.ones(3), torch.ones(3, dtype=torch.complex64)])
    space = SumSpace({"model": model})
    total = Sum(space)
    assert space.finite(total)
    total.views[1][2] = part
    assert not space.finite(total)


def test_in_whatever_order_microbatches_finish():
    """First to last, last to first or mixed: the sum has the same bits."""
    expected = added([0, 1, 2, 3, 4, 5, 6], 7).flat
    for order in ([6, 5, 4, 3, 2, 1, 0], [3, 0, 6, 1, 5, 2, 4]):
        assert torch.equal(added(order, 7).flat, expected)


def test_many_large_numbers_of_half_precision_are_finite() -> None:
    """Their sum is beyond the largest number of half precision, and none of them is."""
    model = torch.nn.Linear(400, 400, bias=False).half()
    space = SumSpace({"model": model})
    total = Sum(space)
    total.views[0].fill_(1.0)
    assert space.finite(total)
    total.views[0][0, 0] = float("inf")
    assert not space.finite(total)


def test_a_pair_is_added_in_pieces_with_the_bits_of_the_whole() -> None:
    """Large gradients, and such as do not lie in one row: (a + b) is added, never a and then b."""
    model = torch.nn.Linear(PIECE_NUMBERS // 64 + 3, 131)
    space, draw = SumSpace({"model": model}), torch.Generator().manual_seed(0)
    rows, columns = model.weight.shape
    for turned in (False, True):
        space.begin()
        partial, expected = Canonical(space, 4), torch.zeros(rows, columns)
        for pair in range(2):
            a, b = (torch.randn(columns, rows, generator=draw).T for _ in range(2))
            expected = a + b if pair == 0 else expected + (a + b)
            for microbatch, found in ((2 * pair, a), (2 * pair + 1, b)):
                model.weight.grad = found if turned else found.contiguous()
                partial.add(microbatch, Numbers(), 0, 4)
        (whole,) = partial.nodes(0, 4)
        assert torch.equal(whole.views[0], expected)


class Begun(torch.nn.Module):
    """Flags that a forward sets: whether there was a first time, and which classes have been seen."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))
        self.register_buffer("begun", torch.tensor(False))
        self.register_buffer("seen", torch.tensor([True, False, False, False]))

    def forward(self, classes: list[int]) -> None:
        self.begun.fill_(True)
        self.seen[classes] = True


@pytest.mark.parametrize("count", [1, 3, 4])
def test_a_flag_is_what_any_microbatch_made_of_it(count: int) -> None:
    """Each sees the start of the step, whoever computed another one before; behind the step all have been heard."""
    model = Begun()
    space = SumSpace({"model": model})
    space.begin()
    partial = Canonical(space, count)
    for microbatch in range(count):
        assert not model.begun
        model([0, 1] if microbatch % 2 else [2])
        partial.add(microbatch, Numbers(), 0, count)
    (whole,) = partial.nodes(0, count)
    space.install(whole, count)
    assert model.begun
    assert model.seen.tolist() == [True, count > 1, True, False]


def test_what_a_script_records_of_a_gradient_is_not_recorded_of_the_sum() -> None:
    """Without `no_grad`, as scripts that know of no sum may: the next one comes into the same memory."""
    model = Counted()
    space = SumSpace({"model": model})
    total = Sum(space)
    total.present[:] = b"\1\0"
    space.install(total, 1)
    model.weight.grad.add_(model.weight, alpha=0.5)
    assert model.weight.grad.requires_grad
    assert not total.flat.requires_grad
    assert not any(view.requires_grad for view in total.views)
    assert total.views[0].tolist() == [0.5] * 3


class Masking(torch.nn.Module):
    """Whose buffer has numbers that are not finite from the start, and which its forward leaves alone."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))
        self.register_buffer("mask", torch.tensor([0.0, float("-inf"), float("nan"), 2.0]))


def test_what_is_not_finite_and_not_written_to_stays_as_it_is() -> None:
    model = Masking()
    space = SumSpace({"model": model})
    for write in (False, True):
        space.begin()
        partial = Canonical(space, 2)
        for microbatch in range(2):
            if write:
                model.mask[3] += 2.0 * microbatch
            partial.add(microbatch, Numbers(values=(0.5,)), 0, 2)
        (whole,) = partial.nodes(0, 2)
        assert space.finite(whole)
        space.install(whole, 2)
        expected = torch.tensor([0.0, float("-inf"), float("nan"), 3.0 if write else 2.0])
        assert torch.equal(model.mask.nan_to_num(9.0), expected.nan_to_num(9.0))


def test_what_is_written_over_infinity_is_refused_by_name() -> None:
    """As an observer does that begins with the smallest number of all; one of them cannot be added to it."""
    model = Masking()
    space = SumSpace({"model": model})
    space.begin()
    model.mask[1] = 1.0
    with pytest.raises(Misuse, match="infinite numbers in the buffer 'mask'"):
        space.take(Numbers())


def test_a_sparse_buffer_stays_as_it_is() -> None:
    """As the neighbours in a graph do, which are no part of a sum; who writes to them is told the name."""
    model = torch.nn.Linear(2, 1)
    near = torch.eye(2).to_sparse()
    model.register_buffer("near", near, persistent=False)
    space, still = SumSpace({"model": model}), Still({"model": model})
    assert "near" not in space.buffers
    still.step()
    still.begin()
    still.check(0)
    still.step()
    still.begin()
    near.mul_(2)
    with pytest.raises(Misuse, match="step 1: loss_of writes to the buffer 'near'"):
        still.check(1)
