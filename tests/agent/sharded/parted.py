"""One model twice: whole, and as a worker has it that keeps some of its layers."""

from collections.abc import Callable, Collection

import torch
from torch import nn

from agent.sharded.holdings import Holdings
from agent.sharded.scaling import Scaler, measured

Optimizer = Callable[..., torch.optim.Optimizer]


class Side:
    """A model, its optimizer, and what a worker knows of where its layers are."""

    def __init__(self, make: Optimizer, types: Collection[torch.dtype]) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*[nn.Linear(4, 4).to(dtype) for dtype in types])
        self.optimizer = make(self.model.parameters())
        self.objects = {"model": self.model, "optimizer": self.optimizer}
        self.holdings = Holdings(self.objects)

    def params(self) -> list[nn.Parameter]:
        return list(self.model.parameters())


class Parted:
    """The gradients of `backward` are the same in both, as far as they are here."""

    def __init__(
        self,
        make: Optimizer = lambda params: torch.optim.SGD(params, lr=0.1),
        here: Collection[str] = ("1",),
        types: Collection[torch.dtype] = (torch.float32,) * 3,
    ) -> None:
        self.whole, self.part = Side(make, types), Side(make, types)
        self.here, self.steps = frozenset(here), 0
        self.part.holdings.keep(self.here)

    def is_here(self, param: torch.Tensor) -> bool:
        return self.part.holdings.layer_of[id(param)] in self.here

    def backward(self, scaler: Scaler | None = None, overflow: Collection[int] = ()) -> None:
        """Leave gradients; those of the parameters at `overflow` are infinite."""
        torch.manual_seed(100 + self.steps)
        self.steps += 1
        scale = 1.0 if scaler is None else scaler.get_scale()
        mine, whole = self.part.params(), self.whole.params()
        grads = [(scale * torch.randn(p.shape)).to(p.dtype) for p in whole]
        for index in overflow:
            grads[index].view(-1)[1] = torch.inf
        norms = [norm for grad in grads for norm in measured([grad], scaler)]
        self.part.holdings.begin()
        for ours, theirs, grad in zip(mine, whole, grads, strict=True):
            theirs.grad = grad.clone()
            ours.grad = grad.clone() if self.is_here(ours) else None
        self.part.holdings.hear(dict(zip(map(id, mine), norms, strict=True)))

    def alike(self) -> bool:
        """Whether the weights and gradients that are here are the ones of the whole."""
        return all(
            torch.equal(mine, other)
            and (mine.grad is None) == (other.grad is None)
            and (mine.grad is None or torch.equal(mine.grad.nan_to_num(), other.grad.nan_to_num()))
            for mine, other in zip(self.part.params(), self.whole.params(), strict=True)
            if self.is_here(mine)
        )
