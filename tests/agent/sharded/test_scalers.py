"""A scaler where a worker has a part of the gradients: it decides by all of them, and is the only one that does."""

import copy
import pickle

import pytest
import torch
from parted import Parted, Side
from torch import nn

from agent.errors import Misuse
from agent.sharded.clipping import clip_grad_norm_
from agent.sharded.scaling import Scaler, follow

METHOD = Scaler._unscale_grads_


def made() -> Scaler:
    scaler = Scaler("cpu", init_scale=64.0, growth_interval=2)
    scaler.scale(torch.ones(()))
    return scaler


def stepped(side: Side, scaler: Scaler, *, unscaled: bool) -> torch.Tensor:
    """A step as scripts make it."""
    norm = torch.zeros(())
    if unscaled:
        scaler.unscale_(side.optimizer)
        norm = clip_grad_norm_(side.holdings, side.params(), 0.5)
    scaler.step(side.optimizer)
    scaler.update()
    return norm.nan_to_num()


@pytest.mark.parametrize("unscaled", [False, True])
@pytest.mark.parametrize("here", [("0",), ("1", "2")])
@pytest.mark.parametrize("fused", [False, True])
def test_all_workers_decide_alike(unscaled: bool, here: tuple[str, ...], fused: bool) -> None:
    """Overflows in layers that are here and elsewhere: the same scales, norms and weights as in one process."""
    both = Parted(lambda params: torch.optim.AdamW(params, lr=0.1, fused=fused), here=here)
    whole, part = made(), made()
    follow(part, both.part.holdings)
    scales = []
    for overflow in ((), (), (0,), (3,), (), (), (1, 4), ()):
        both.backward(whole, overflow)
        expected = stepped(both.whole, whole, unscaled=unscaled)
        assert torch.equal(stepped(both.part, part, unscaled=unscaled), expected)
        scales.append(whole.get_scale())
        assert part.get_scale() == scales[-1]
        assert both.alike()
    assert len(set(scales)) > 2


def test_a_worker_with_no_layer_decides_too() -> None:
    both, scaler = Parted(here=()), made()
    follow(scaler, both.part.holdings)
    both.backward(scaler, overflow=(2,))
    stepped(both.part, scaler, unscaled=True)
    assert scaler.get_scale() == 32.0


def test_each_optimizer_is_answered_for_its_own_gradients() -> None:
    """Layers that are elsewhere overflow: only the optimizer that trains them skips its step."""
    both = Parted(lambda params: torch.optim.SGD(list(params)[:2], lr=0.1), here=("0", "1"))
    part, scaler = both.part, made()
    part.objects["second"] = second = torch.optim.SGD(part.params()[2:], lr=0.1)
    follow(scaler, part.holdings)
    both.backward(scaler, overflow=(5,))
    before = [param.detach().clone() for param in part.params()]
    scaler.step(part.optimizer)
    scaler.step(second)
    scaler.update()
    assert not torch.equal(part.params()[0], before[0])
    assert torch.equal(part.params()[2], before[2])
    assert scaler.get_scale() == 32.0


@pytest.mark.parametrize("whole", [True, False])
def test_a_step_without_gradients_is_skipped(whole: bool) -> None:
    """The job went on without this worker: the script runs on, and no weight changes, in any layout."""
    both, scaler = Parted(), made()
    side = both.whole if whole else both.part
    follow(scaler, side.holdings)
    side.holdings.begin()
    side.holdings.astray = lambda: True
    for param in side.params():
        param.grad = torch.ones_like(param) if whole or both.is_here(param) else None
    before = [param.detach().clone().nan_to_num() for param in side.params()]
    stepped(side, scaler, unscaled=True)
    pairs = zip(before, side.params(), strict=True)
    assert all(torch.equal(a, b.nan_to_num()) for a, b in pairs)


@pytest.mark.parametrize("overflow", [(), (2,)])
def test_what_was_clipped_before_is_as_finite_as_it_was(overflow: tuple[int, ...]) -> None:
    """A script may clip by the scaled norm: an overflow in another worker's layers is still one here."""
    both, scaler = Parted(here=()), made()
    follow(scaler, both.part.holdings)
    both.backward(scaler, overflow)
    clip_grad_norm_(both.part.holdings, both.part.params(), 0.5)
    scaler.step(both.part.optimizer)
    scaler.update()
    assert scaler.get_scale() == (32.0 if overflow else 64.0)


def test_gradients_that_a_script_unscales_by_hand_are_refused() -> None:
    both, scaler = Parted(), made()
    follow(scaler, both.part.holdings)
    both.backward(scaler)
    for param in both.part.params():
        if param.grad is not None:
            param.grad.div_(scaler.get_scale())
    with pytest.raises(Misuse, match="was changed after session"):
        scaler.step(both.part.optimizer)


def test_one_scaler_is_followed() -> None:
    """Torch's class is as it was; a copy and a pickle have their own method, and go on as torch's do."""
    both, scaler = Parted(), made()
    follow(scaler, both.part.holdings)
    assert Scaler._unscale_grads_ is METHOD
    for other in (copy.deepcopy(scaler), pickle.loads(pickle.dumps(scaler))):
        assert other._unscale_grads_.__self__ is other
        assert other._unscale_grads_.__func__ is METHOD
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        other.scale(model(torch.ones(1, 2)).sum()).backward()
        other.step(optimizer)
        other.update()


def test_a_scaler_of_a_whole_layout_does_what_torchs_does() -> None:
    both, scaler, expected = Parted(), made(), made()
    follow(scaler, both.whole.holdings)
    for overflow in ((), (2,), ()):
        both.backward(scaler, overflow)
        twin = copy.deepcopy(both.whole.model)
        for mine, other in zip(twin.parameters(), both.whole.params(), strict=True):
            mine.grad = other.grad.clone()
        scaler.step(both.whole.optimizer)
        expected.step(torch.optim.SGD(twin.parameters(), lr=0.1))
        scaler.update()
        expected.update()
        assert scaler.get_scale() == expected.get_scale()
        pairs = zip(twin.parameters(), both.whole.params(), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)
