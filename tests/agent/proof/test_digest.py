"""Sums over the bits of tensors: what they tell apart, and which layers are looked at when."""

import random
from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agent.proof import digest
from agent.proof.digest import Rotation, Size, digests
from agent.proof.turns import is_shown

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
]


def some(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randint(0, 2, shape).to(dtype)


def bits_of(tensors: Sequence[torch.Tensor | None]) -> int:
    (found,) = digests({"": tensors})
    return found.bits


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_bit_in_one_place_shows(dtype: torch.dtype) -> None:
    """In any type, among many tensors of several types."""
    torch.manual_seed(0)
    layers = {f"l{n}": [some(dtype, 3, 5), some(torch.float32, 7)] for n in range(9)}
    before = {one.name: one.bits for one in digests(layers)}
    flat = layers["l4"][0].view(-1)
    flat[3] = 1 - flat[3] if dtype != torch.bool else ~flat[3]
    after = {one.name: one.bits for one in digests(layers)}
    assert {name for name in before if before[name] != after[name]} == {"l4"}


def test_the_same_numbers_in_another_order_or_layer_are_others() -> None:
    """And tensors that are not there."""
    one, two = torch.tensor([1.0, 2.0]), torch.tensor([2.0, 1.0])
    found = {
        bits_of(tensors)
        for tensors in ([one], [two], [one, two], [two, one], [one, None], [None, one], [None], [])
    }
    assert len(found) == 8


def test_a_layer_has_the_digest_that_it_has_alone() -> None:
    """A worker that keeps some layers only comes to the same."""
    layers = {name: [torch.randn(4, 4), torch.randn(3)] for name in "abc"}
    alone = [digests({name: tensors})[0] for name, tensors in layers.items()]
    assert list(digests(layers)) == alone


@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.integers(0, 1 << 30))
def test_norms_are_those_of_the_tensors(sizes: list[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(size, generator=generator) for size in sizes]
    (found,) = digests({"l": tensors})
    assert found.norms == pytest.approx([float(tensor.norm()) for tensor in tensors], rel=1e-5)


def test_what_is_not_contiguous_or_needs_a_gradient_is_read() -> None:
    weight = torch.randn(6, 4)
    turned = torch.nn.Parameter(weight.t())
    assert bits_of([turned]) == bits_of([weight.t().contiguous()])


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12).view(6, 2)[:, 0],
        torch.tensor(3.5, dtype=torch.float64).expand(4),
        torch.complex(torch.arange(3.0), torch.ones(3)).conj(),
        torch.complex(torch.arange(3.0), torch.ones(3)).conj().imag,
    ],
    ids=["column", "expanded", "conjugate", "negative"],
)
def test_a_view_is_read_alone_as_among_others(tensor: torch.Tensor) -> None:
    """A target may be a column of a table, or one number for all rows."""
    plain = tensor.clone().contiguous().resolve_conj().resolve_neg()
    assert bits_of([tensor]) == bits_of([plain])
    assert bits_of([tensor, tensor]) == bits_of([plain, plain])


def test_every_layer_has_its_turn() -> None:
    """As many as fit into the budget at a time; also in the steps that are always shown."""
    sizes = {f"l{n}": Size(random.Random(n).randrange(1, 50), 1) for n in range(40)}
    rotation = Rotation(sizes, 100)
    shown = [step for step in range(1000) if is_shown(step)]
    for steps in (range(16), shown[16:]):
        seen = [rotation.at(step) for step in steps]
        assert all(sum(sizes[name].size_bytes for name in looked) <= 100 for looked in seen)
        assert sorted({name for looked in seen for name in looked}) == sorted(sizes)
    turned = Rotation(dict(reversed(sizes.items())), 100)
    assert [rotation.at(step) for step in shown] == [turned.at(step) for step in shown]
    assert sorted(Rotation(sizes).at(7)) == sorted(sizes), "all of them, where they fit"


def test_a_layer_beyond_the_budget_is_looked_at_in_windows() -> None:
    """Every word of it in some turn, and the same window on all."""
    sizes = {"large": Size(4000, 1), "small": Size(8, 1)}
    rotation = Rotation(sizes, budget_bytes=400)
    shown = [step for step in range(16, 2000) if is_shown(step)]
    steps = [step for step in shown if "large" in rotation.at(step)]
    assert len(shown) / 3 < len(steps) < len(shown) * 2 / 3
    large = torch.zeros(1000)
    before = [digests({"l": [large]}, step, 400) for step in steps]
    for place in (0, 137, 555, 999):
        large[place] = 1.0
        now = [digests({"l": [large]}, step, 400) for step in steps]
        differ = sum(a != b for a, b in zip(before, now, strict=True))
        assert 0 < differ < len(steps) / 4
        large[place] = 0.0


def _parted(flat: torch.Tensor, plan: object) -> torch.Tensor:
    """Tensors that were laid end to end, as a device has them."""
    starts = [*plan.tensors.tolist(), len(flat)]  # type: ignore[attr-defined]
    return digest._norms_there([flat[start:end] for start, end in pairwise(starts)])


def test_a_device_comes_to_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the calls that it is told, here on the host; norms as well."""
    torch.manual_seed(0)
    layers = {f"l{n}": [torch.randn(3, n + 1), some(torch.int64, 4), None] for n in range(7)}
    here = digests(layers)
    monkeypatch.setattr(digest, "_sums_here", digest._sums_there)
    monkeypatch.setattr(digest, "_norms_here", _parted)
    there = digests(layers)
    assert [one.bits for one in here] == [one.bits for one in there]
    for one, other in zip(here, there, strict=True):
        assert one.norms == pytest.approx(other.norms, rel=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_large_tensor_has_the_digest_of_one_laid_end_to_end(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    layers = {f"l{n}": [some(dtype, 5), some(dtype, 37, 111), some(dtype, n + 1)] for n in range(4)}
    found = []
    for least in (1, 1 << 10, 1 << 40):
        monkeypatch.setattr(digest, "LARGE_BYTES", least)
        found.append(digests(layers))
    for one, *others in zip(*found, strict=True):
        assert {other.bits for other in others} == {one.bits}
        assert all(other.norms == pytest.approx(one.norms, rel=1e-5) for other in others)
