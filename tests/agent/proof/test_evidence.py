"""What one worker finds when it computes the same microbatch twice, and which it computes twice."""

import msgspec
import pytest
import torch

from agent.proof.evidence import _same, copied
from agent.proof.turns import EARLY, drawn, is_shown, sampled, turn_of
from agent.protocol import Computed, Digest


def test_each_microbatch_is_compared_in_its_turn() -> None:
    assert [sampled(2, 3, step) for step in range(4)] == [2, 3, 4, 2]
    assert sampled(2, 0, 7) == 2


@pytest.mark.parametrize("count", [*range(1, 13), 16, 24, 25])
def test_steps_in_even_distances_pass_over_nothing(count: int) -> None:
    """Whichever of two kinds of steps are looked at, each choice comes, with each of another kind."""
    shown = [step for step in range(EARLY, 60_000) if is_shown(step)]
    twice = [step for step in range(EARLY, 60_000) if turn_of(step, 8) is not None]
    for steps in (shown, twice):
        assert {sampled(0, count, step) for step in steps} == {*range(count)}
        pairs = {(drawn(step, count), drawn(step, 4, 1)) for step in steps}
        assert len(pairs) == 4 * count


def test_both_workers_have_their_turn_early() -> None:
    turns = [turn_of(step, 2) for step in range(9)]
    assert [turn is not None for turn in turns] == [step in (0, 1, 2, 4, 8) for step in range(9)]
    assert {turn % 2 for turn in turns if turn is not None} == {0, 1}


@pytest.mark.parametrize("count", [1, 2, 8, 64, 500])
def test_computing_twice_stays_cheap(count: int) -> None:
    """Of what a worker computes in a job of some length it is less than a hundredth, and what the first steps take."""
    steps = 20_000
    asked = sum(turn_of(step, count) is not None for step in range(steps))
    assert asked <= steps * count / 250 + 16


@pytest.mark.parametrize(
    "given",
    [
        torch.arange(24.0).view(4, 6)[:, ::2],
        torch.arange(24.0)[3:9],
        torch.arange(3.0).expand(4, 3),
        torch.arange(24.0).view(4, 6).t(),
        torch.tensor(2.0),
        torch.empty(0, 4),
        torch.arange(4.0, requires_grad=True),
        torch.arange(4).to_sparse(),
        torch.view_as_complex(torch.arange(4.0).view(2, 2)).conj(),
    ],
)
def test_a_copy_lies_as_what_was_given(given: torch.Tensor) -> None:
    """So that kernels round it alike; and writing into it changes nothing else."""
    (copy,) = copied([given])
    assert copy.requires_grad == given.requires_grad
    if given.layout is not torch.strided:
        assert torch.equal(copy.to_dense(), given.to_dense())
        return
    assert torch.equal(copy, given)
    if given.numel() and not given.is_conj():
        assert copy.stride() == given.stride()
        assert copy.data_ptr() % 64 == given.data_ptr() % 64
    assert not given.numel() or copy.data_ptr() != given.data_ptr()


def test_the_first_steps_and_one_of_every_few_are_shown() -> None:
    shown = [step for step in range(28) if is_shown(step)]
    assert shown == [*range(16), 23]


@pytest.mark.parametrize(("bits", "same"), [(7, True), (8, False)])
def test_two_samples_of_a_microbatch_are_compared_in_the_layers_of_both(
    bits: int, same: bool
) -> None:
    """One is shown with some layers and the other with all, where a snapshot was asked for meanwhile."""
    batch, first, other = Digest("batch", 1), Digest("a", 7), Digest("b", 9)
    some = Computed(version=0, microbatch=0, batch=batch, loss=1.0, gradients=(first,))
    both = msgspec.structs.replace(some, gradients=(other, Digest("a", bits)))
    assert _same(some, both) == _same(both, some) == same
