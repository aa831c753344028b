"""Optimizers are tried before they have a part of the parameters."""

from collections.abc import Callable, Iterable

import pytest
import torch
from torch.optim.swa_utils import AveragedModel

from agent.errors import Misuse
from agent.sharded.separable import refuse, refuse_one_memory

Params = Iterable[torch.Tensor]


class Own(torch.optim.Optimizer):
    """Steps by each gradient, by a factor that is asked for."""

    def __init__(self, params: Params, lr: float = 0.1, kind: str = "each") -> None:
        super().__init__(params, {"lr": lr, "kind": kind, "seen": 0.0, "training": False})

    def train(self) -> "Own":
        for group in self.param_groups:
            group["training"] = True
        return self

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            assert group["training"]
            params = [param for param in group["params"] if param.grad is not None]
            grads = torch.stack([param.grad.norm() for param in params])
            weights = torch.stack([param.norm() for param in group["params"]])
            for param in params:
                factor = {
                    "each": param.norm() / param.grad.norm(),
                    "gradients": 1 / grads.norm(),
                    "weights": weights.norm(),
                    "count": len(params),
                    "drawn": torch.rand(()),
                    "kept": 1.0,
                    "without": 1.0,
                }[group["kind"]]
                param.sub_(param.grad * factor * group["lr"])
            if group["kind"] == "without":
                for param in group["params"]:
                    slow = self.state[param].setdefault("slow", param.clone())
                    param.copy_(slow.lerp_(param, 0.5))
            if group["kind"] == "kept":
                group["seen"] = grads.sum()


def params() -> list[torch.nn.Parameter]:
    return list(torch.nn.Linear(3, 3).parameters())


@pytest.mark.parametrize(
    "optimizer",
    [
        torch.optim.SGD(params(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
        torch.optim.AdamW(params(), amsgrad=True),
        torch.optim.AdamW(params(), lr=torch.tensor(1e-3), fused=True),
        torch.optim.Adafactor(params()),
        torch.optim.NAdam(params()),
        Own(params()).train(),
    ],
    ids=lambda each: type(each).__name__,
)
def test_one_parameter_after_the_other(optimizer: torch.optim.Optimizer) -> None:
    model, before = torch.nn.Linear(3, 3), torch.get_rng_state()
    refuse([model, optimizer, object()])
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("kind", ["gradients", "weights", "count", "drawn", "kept"])
def test_something_of_all_parameters(kind: str) -> None:
    said = "^Own makes something else of a parameter when others are not here, and in this layout each worker keeps"
    with pytest.raises(Misuse, match=said):
        refuse([Own(params(), kind=kind).train()])


def test_what_has_no_gradient_is_written_to() -> None:
    """As slow weights do that follow all parameters; torch says only that they have no memory."""
    with pytest.raises(
        Misuse, match=r"^Own writes to a parameter that has no gradient .*if p.grad is None"
    ):
        refuse([Own(params(), kind="without").train()])


def test_what_cannot_be_tried() -> None:
    with pytest.raises(
        Misuse, match=r"^LBFGS could not be tried on tensors of its own \(TypeError"
    ):
        refuse([torch.optim.LBFGS(params())])


def test_an_average_of_torchs() -> None:
    with pytest.raises(Misuse, match=r"^AveragedModel takes in all weights one by one.*an object"):
        refuse([AveragedModel(torch.nn.Linear(3, 3))])


def shared(how: str) -> torch.nn.Module:
    """Two layers: in one memory side by side, in the same place, as one parameter, or a buffer of a weight."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    one, other = model[0].weight, model[1].weight
    match how:
        case "side by side":
            flat = torch.randn(2, 3, 3)
            one.data, other.data = flat
        case "tied":
            model[1].weight = one
        case "in one place":
            other.data = one.data
        case "overlapping":
            flat = torch.randn(12)
            one.data, other.data = flat[:9].view(3, 3), flat[3:].view(3, 3)
        case "a buffer":
            model[1].register_buffer("seen", one.data[1])
    return model


@pytest.mark.parametrize("how", ["side by side", "tied"])
def test_what_is_apart_in_one_memory_may_be_on_other_workers(how: str) -> None:
    refuse_one_memory({"model": shared(how)})


@pytest.mark.parametrize("how", ["in one place", "overlapping", "a buffer"])
def test_what_shares_memory_is_on_one_worker(how: str) -> None:
    with pytest.raises(
        Misuse, match=r"'0.weight' and '1.\w+' lie in one memory, so that an update"
    ):
        refuse_one_memory({"model": shared(how)})
