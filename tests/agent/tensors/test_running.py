"""Sums in the order in which they come: as torch adds them up, and in no more memory."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.layout import data_parallel
from agent.tensors.metrics import Numbers
from agent.tensors.partial_sum import Partial, partial_of
from agent.tensors.running_sum import Running
from agent.tensors.sums import Plan, Sum, SumSpace, paired
from agent.tensors.tree import Canonical


class _Model(torch.nn.Module):
    """Of three parameters one is used by some inputs only, and one never; a buffer counts."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.always, self.sometimes, self.never = (torch.nn.Linear(3, 2) for _ in range(3))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, number: int) -> torch.Tensor:
        self.seen += 1
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(number))
        y = self.always(x)
        return (y + self.sometimes(x) if number % 3 == 0 else y).square().mean()


def _compute(model: _Model, sums: Running, number: int, *, lends: bool) -> None:
    if lends:
        sums.lend(number, 0, 0)
    loss = model(number)
    loss.backward()
    sums.add(number, Numbers(values=(loss.item(),)), 0, 0)
    assert all(param.grad is None for param in model.parameters())


def _plain(numbers: list[int]) -> _Model:
    model = _Model()
    for number in numbers:
        model(number).backward()
    return model


def _same(space: SumSpace, total: Sum, plain: _Model) -> None:
    space.install(total, 1)
    for (name, param), other in zip(space.params.items(), plain.parameters(), strict=True):
        assert (param.grad is None) == (other.grad is None), name
        if param.grad is not None:
            assert torch.equal(param.grad, other.grad), name


@given(st.permutations(range(6)), st.integers(1, 6), st.booleans(), st.booleans())
@settings(max_examples=40)
def test_one_worker_adds_up_as_torch_does(
    order: list[int], count: int, lends: bool, twice: bool
) -> None:
    """In whatever order they come, the bits are those of as many backwards without us; also in the next step."""
    model = _Model()
    space = SumSpace({"model": model})
    sums = Running(space)
    for _ in range(1 + twice):
        space.begin()
        sums.clear()
        for number in order[:count]:
            _compute(model, sums, number, lends=lends)
        sums._done = {*range(count)}  # what they are called does not matter
        (total,) = sums.nodes(0, count)
        assert int(total.views[-1]) == count
    assert total.loss == sum(_losses(order[:count]))
    _same(space, total, _plain(order[:count]))


def _losses(numbers: list[int]) -> list[float]:
    model = _Model()
    return [model(number).item() for number in numbers]


@given(st.integers(1, 9), st.integers(1, 11))
@settings(max_examples=40)
def test_workers_together_have_the_sum_of_all(total: int, workers: int) -> None:
    """However the microbatches are shared out, also with workers that have none, it is the sum but for rounding."""
    parts: dict[int, Plan] = {}
    for replica in data_parallel(0, total, tuple(f"w{n}" for n in range(workers))).replicas:
        model = _Model()
        space = SumSpace({"model": model})
        sums = Running(space)
        space.begin()
        for number in sums.missing(replica.first, replica.count):
            _compute(model, sums, number, lends=True)
        found = [node.flat for node in sums.nodes(replica.first, replica.count)]
        parts |= dict(zip(sums.keys(replica.first, replica.count), found, strict=True))
    whole = Sum(space)
    space.fold(sums.fold(parts, paired), whole.flat, 0)
    plain = _plain([*range(total)])
    for view, param in zip(whole.views, plain.parameters(), strict=False):
        wanted = torch.zeros_like(param) if param.grad is None else param.grad
        torch.testing.assert_close(view, wanted, rtol=1e-5, atol=1e-6)
    assert int(whole.views[-1]) == total


def test_a_share_that_has_all_of_it_goes_on_from_what_there_is() -> None:
    """A survivor of a change computes what is missing only; what another has now it cannot take out of its sum."""
    model = _Model()
    space = SumSpace({"model": model})
    sums = Running(space)
    space.begin()
    for number in (2, 3):
        _compute(model, sums, number, lends=True)
    assert sums.missing(1, 4) == [1, 4]
    assert sums.missing(3, 2) == [3, 4]
    for number in (3, 4):
        _compute(model, sums, number, lends=True)
    (total,) = sums.nodes(3, 2)
    _same(space, total, _plain([3, 4]))


def test_gradients_lie_in_the_sum_itself() -> None:
    """The backward of a lent microbatch needs no memory of its own: the second one writes where the first did."""
    model = _Model()
    space = SumSpace({"model": model})
    sums = Running(space)
    space.begin()
    seen = []
    for number in (0, 3):
        sums.lend(number, 0, 0)
        model(number).backward()
        gradient = model.always.weight.grad
        assert gradient is not None
        seen.append(gradient.data_ptr())
        sums.add(number, Numbers(), 0, 0)
    sums._done = {0, 1}
    (total,) = sums.nodes(0, 2)
    assert seen == [total.views[0].data_ptr()] * 2


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("total", range(1, 18))
def test_so_many_sums_are_held_as_is_said(total: int, deterministic: bool) -> None:
    """The planner reckons with it. Let go of, they are begun anew."""
    model = _Model()
    space = SumSpace({"model": model})
    sums = partial_of(space, total, deterministic=deterministic)
    for _ in range(2):
        space.begin()
        most = 0
        for number in sums.missing(0, total):
            sums.lend(number, 0, total)
            fresh = isinstance(sums, Canonical) and sums._lent is None
            most = max(most, _held(sums) + fresh)
            model(number).backward()
            sums.add(number, Numbers(), 0, total)
            most = max(most, _held(sums))
        assert most <= sums.held
        assert most == sums.held or total not in (4, 8, 16)
        sums.let_go()
        assert sums.missing(0, total) == [*range(total)]
        assert _held(sums) == 0


def _held(sums: Partial) -> int:
    if isinstance(sums, Running):
        return int(sums._sum is not None)
    assert isinstance(sums, Canonical)
    return len(sums._held) + (sums._lent is not None)
