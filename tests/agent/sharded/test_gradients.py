"""Gradients of which a worker has a part: clipped by the norm of all, and refused where a script changes them."""

import copy
from collections.abc import Callable

import pytest
import torch
from parted import Parted
from torch import nn

from agent.errors import Misuse
from agent.sharded.clipping import clip_grad_norm_
from agent.sharded.gradients import Gradients
from agent.tensors.sums import Norm

HALF, SINGLE, DOUBLE = torch.bfloat16, torch.float32, torch.float64


@pytest.mark.parametrize("types", [(SINGLE,) * 3, (HALF, SINGLE, DOUBLE), (DOUBLE, HALF, DOUBLE)])
@pytest.mark.parametrize("here", [("0",), ("1", "2"), ()])
def test_all_are_clipped_by_the_norm_of_all(
    types: tuple[torch.dtype, ...], here: tuple[str, ...]
) -> None:
    """The norm, the gradients and the weights have the bits of one process, also where no layer is here."""
    both = Parted(here=here, types=types)
    for _ in range(6):
        both.backward()
        expected = nn.utils.clip_grad_norm_(both.whole.params(), 0.5)
        found = clip_grad_norm_(both.part.holdings, both.part.params(), 0.5)
        assert torch.equal(found, expected)
        assert found.dtype == expected.dtype
        for side in (both.whole, both.part):
            side.optimizer.step()
            side.optimizer.zero_grad()
        assert both.alike()


def test_a_whole_layout_clips_as_torch_does() -> None:
    both = Parted()
    both.backward()
    params, twin = both.whole.params(), copy.deepcopy(both.whole.model)
    for mine, other in zip(twin.parameters(), params, strict=True):
        mine.grad = other.grad.clone()
    expected = nn.utils.clip_grad_norm_(twin.parameters(), 0.5, float("inf"))
    assert torch.equal(clip_grad_norm_(both.whole.holdings, params, 0.5, float("inf")), expected)
    assert torch.equal(params[0].grad, next(twin.parameters()).grad)


def test_parts_are_clipped_each_by_its_norm() -> None:
    """A look at the norm of all, and then the norms of two parts."""
    both = Parted()
    both.backward()
    for side in (both.whole, both.part):
        params = side.params()
        clip_grad_norm_(side.holdings, params, float("inf"))
        clip_grad_norm_(side.holdings, params[:3], 0.05)
        clip_grad_norm_(side.holdings, params[3:], 0.02)
        side.optimizer.step()
    assert both.alike()


def test_gradients_are_clipped_once() -> None:
    both = Parted(here=())
    both.backward()
    params = both.part.params()
    clip_grad_norm_(both.part.holdings, params[:2], 0.1)
    with pytest.raises(
        Misuse, match=r"^session\.clip_grad_norm_\(\.\.\.\): gradients were clipped"
    ):
        clip_grad_norm_(both.part.holdings, params[1:], 0.1)


def test_a_sum_of_two_phases_has_no_known_norm() -> None:
    both = Parted()
    both.backward()
    params, holdings = both.part.params(), both.part.holdings
    holdings.hear(holdings.gradients.norms, [id(params[2])])
    clip_grad_norm_(holdings, params[3:], 0.1)
    with pytest.raises(Misuse, match=r"optimizer\.zero_grad\(\) between phases"):
        clip_grad_norm_(holdings, params[:3], 0.1)


def test_another_norm_is_refused() -> None:
    both = Parted()
    both.backward()
    with pytest.raises(Misuse, match="norm_type=1"):
        clip_grad_norm_(both.part.holdings, both.part.params(), 0.1, 1)


def present(params: list[nn.Parameter]) -> list[nn.Parameter]:
    return [param for param in params if param.grad is not None]


def by_all_norms(params: list[nn.Parameter]) -> None:
    total = sum(param.grad.norm() ** 2 for param in present(params)) ** 0.5
    for param in present(params):
        param.grad.mul_(1 / (1 + total))


def noise(params: list[nn.Parameter]) -> None:
    for param in present(params):
        param.grad.add_(torch.randn_like(param.grad), alpha=1e-3)


def through_data(params: list[nn.Parameter]) -> None:
    for param in present(params):
        param.grad.data.mul_(0.5)


def through_numpy(params: list[nn.Parameter]) -> None:
    for param in present(params):
        param.grad.numpy()[...] *= 2


def replaced(params: list[nn.Parameter]) -> None:
    for param in present(params):
        param.grad = 2 * param.grad


def twice_replaced(params: list[nn.Parameter]) -> None:
    replaced(params)
    replaced(params)


def one_row(params: list[nn.Parameter]) -> None:
    params[2].grad[0, 0] = 0


def one_dropped(params: list[nn.Parameter]) -> None:
    params[2].grad = None


def one_given(params: list[nn.Parameter]) -> None:
    params[0].grad = torch.zeros_like(params[0])


def clipped_by_torch(params: list[nn.Parameter]) -> None:
    nn.utils.clip_grad_norm_(params, 0.1)


def values_clipped(params: list[nn.Parameter]) -> None:
    nn.utils.clip_grad_value_(params, 1e-3)


CHANGES = [by_all_norms, noise, through_data, through_numpy, replaced, twice_replaced, one_row]
CHANGES += [one_dropped, one_given, clipped_by_torch, values_clipped]
Change = Callable[[list[nn.Parameter]], None]
SAID = r"^the gradient of \d\.(weight|bias) was changed after session\.backward\(\.\.\.\)"


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("clipped", [False, True])
@pytest.mark.parametrize("steps", [1, 7])
def test_gradients_that_a_script_changes_are_refused(
    change: Change, clipped: bool, steps: int
) -> None:
    """In whatever way, before or after the session has clipped them, and in whichever step."""
    both = Parted()
    params = both.part.params()
    for _ in range(steps):
        both.part.optimizer.step()
        both.part.optimizer.zero_grad()
        both.backward()
    if clipped:
        clip_grad_norm_(both.part.holdings, params, 0.1)
    change(params)
    with pytest.raises(Misuse, match=SAID):
        both.part.optimizer.step()


@pytest.mark.parametrize("change", CHANGES)
def test_changed_gradients_are_not_clipped(change: Change) -> None:
    both = Parted()
    both.backward()
    change(both.part.params())
    with pytest.raises(Misuse, match=SAID):
        clip_grad_norm_(both.part.holdings, both.part.params(), 0.1)


def test_a_hook_of_the_optimizer_is_seen() -> None:
    """Also one that the script has registered after Session was made."""
    both = Parted()
    both.backward()
    both.part.optimizer.register_step_pre_hook(lambda *_: noise(both.part.params()))
    both.backward()
    with pytest.raises(Misuse, match=SAID):
        both.part.optimizer.step()


def test_a_step_may_be_left_out() -> None:
    both = Parted()
    both.backward()
    both.part.optimizer.zero_grad()
    both.part.optimizer.step()
    both.backward()
    both.part.holdings.check(0)


def test_dropped_gradients_are_not_clipped_by_their_norm() -> None:
    """One process would take the norm of the rest, and who has the rest does not know that they were dropped."""
    both = Parted()
    both.backward()
    both.part.optimizer.zero_grad()
    with pytest.raises(Misuse, match=SAID):
        clip_grad_norm_(both.part.holdings, both.part.params(), 0.1)


def test_gradients_that_no_optimizer_has_are_clipped_with_the_others() -> None:
    both = Parted(lambda params: torch.optim.SGD(list(params)[4:], lr=0.1), here=("1", "2"))
    both.backward()
    for side in (both.whole, both.part):
        clip_grad_norm_(side.holdings, side.params(), 0.1)
        side.optimizer.step()
    assert both.alike()


def test_two_optimizers_take_turns() -> None:
    """What the first one makes of its gradients, and drops, is no change of the other's."""
    both = Parted(lambda params: torch.optim.SGD(list(params)[:3], lr=0.1), here=("0", "1", "2"))
    part = both.part
    part.objects["second"] = second = torch.optim.AdamW(part.params()[3:], lr=0.1)
    for _ in range(3):
        both.backward()
        part.optimizer.step()
        part.optimizer.zero_grad(set_to_none=False)
        second.step()
        second.step()
        second.zero_grad()
    part.holdings.check(2)


@torch.no_grad()
def by_hand(params: list[nn.Parameter]) -> None:
    for param in present(params):
        param.sub_(param.grad / param.grad.norm())


def weights_through_data(params: list[nn.Parameter]) -> None:
    for param in present(params):
        param.data.clamp_(-1e-3, 1e-3)


def weights_replaced(params: list[nn.Parameter]) -> None:
    params[2].data = params[2].data * 2


@pytest.mark.parametrize("change", [by_hand, weights_through_data, weights_replaced])
@pytest.mark.parametrize("before", [False, True])
def test_weights_that_a_script_changes_are_refused(change: Change, before: bool) -> None:
    """Before the optimizer's step, or after it."""
    both = Parted()
    both.backward()
    said = pytest.raises(Misuse, match=r"^1\.(weight|bias) was changed after session")
    if before:
        change(both.part.params())
        clip_grad_norm_(both.part.holdings, both.part.params(), 0.1)
        with said:
            both.part.optimizer.step()
    else:
        both.part.optimizer.step()
        change(both.part.params())
        with said:
            both.part.holdings.check(0)


def test_weights_that_the_session_changes_are_its_own() -> None:
    """A state is loaded, layers come and go."""
    both = Parted()
    both.backward()
    both.part.optimizer.step()
    both.part.holdings.forget()
    with torch.no_grad():
        both.part.params()[2].zero_()
    both.part.holdings.check(0)
    both.backward()
    both.part.holdings.keep(frozenset({"2"}))
    both.part.holdings.check(1)


def test_layers_that_are_borrowed_come_and_go() -> None:
    """A script looks at its model before and after the step of its optimizer, and in a second phase."""
    both = Parted()
    for _ in range(6):
        both.backward()
        both.part.holdings.borrow(frozenset("02"))
        both.part.optimizer.step()
        both.backward()
        both.part.optimizer.step()
        both.part.holdings.give_back()
        both.part.holdings.check(0)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float64, torch.bfloat16])
def test_weights_of_any_type_are_watched(dtype: torch.dtype) -> None:
    model = nn.ParameterDict({key: torch.ones(3, 3, dtype=dtype) for key in ("weight", "bias")})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gradients = Gradients({"model": model, "optimizer": optimizer}, lambda _: True)
    for index in range(4):
        for param in model.parameters():
            param.grad = torch.full_like(param, torch.nan)
        gradients.hear({id(param): Norm(1.0) for param in model.parameters()}, ())
        if index < 3:
            optimizer.step()
    for param in model.parameters():
        param.grad.data.zero_()
    with pytest.raises(Misuse, match=r"^the gradient of"):
        optimizer.step()


def test_nothing_is_refused_where_all_is_here() -> None:
    both = Parted()
    whole = both.whole
    for change in (by_all_norms, noise, through_data, replaced, values_clipped, by_hand):
        both.backward()
        whole.holdings.begin()
        whole.holdings.hear({})
        change(whole.params())
        whole.optimizer.step()
        whole.holdings.check(0)
