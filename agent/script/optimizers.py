"""What a session's parameters are trained with: the optimizers and schedules that it was given, and no others.

A newcomer makes them as the script begins, and has their state from those who are there. What the session does not know of
it cannot hand on, and the numbers would be others from then on.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from agent.errors import Misuse
from agent.tensors.shards import Stateful


def twin_of(
    optimizer: torch.optim.Optimizer, params: Sequence[torch.Tensor], **instead: bool
) -> torch.optim.Optimizer:
    """Another one with the same settings, and in the same mode: some are brought into one, by `optimizer.train()`."""
    known = inspect.signature(type(optimizer)).parameters
    settings = {key: value for key, value in optimizer.defaults.items() if key in known}
    settings |= {key: value for key, value in instead.items() if key in settings}
    twin = type(optimizer)(params, **settings)
    now = optimizer.param_groups[0].items()
    modes = {key: value for key, value in now if isinstance(value, bool) and key not in settings}
    for group in twin.param_groups:
        group.update(modes)
    return twin


class Optimizers:
    def __init__(
        self,
        objects: Mapping[str, Stateful],
        params: Mapping[str, torch.Tensor],
        step: Callable[[], int],
        astray: Callable[[], bool],
    ) -> None:
        self._objects, self._params, self._step, self._astray = objects, params, step, astray
        self.unused = False  # there are gradients, and no optimizer has been at work since
        self._trained = self._counted()
        self._strangers = register_optimizer_step_pre_hook(self._look)

    def close(self) -> None:
        self._strangers.remove()

    def check(self) -> None:
        """Before a step begins."""
        self._check_used()
        if self._counted() != self._trained:
            raise Misuse(
                f"step {self._step()}: parameters were added to an optimizer after Session(...) was made, which "
                "whoever joins later would not know. Add them before, with a learning rate of 0 until then"
            )
        self._check_schedules()

    def _check_used(self) -> None:
        """Gradients are a step's own: what the one before has left is neither added to, nor part of the state."""
        grads = [p.grad for p in self._params.values()] if self.unused else []
        left = any(grad is not None and bool(grad.any()) for grad in grads)
        if left and any(isinstance(o, torch.optim.Optimizer) for o in self._objects.values()):
            step = self._step()
            raise Misuse(
                f"step {step}: the gradients of step {step - 1} are still there, and no optimizer has "
                "used them; session.share(...) begins new ones. To train on more at once give Session(...) more "
                "microbatches; to leave a step out, call optimizer.zero_grad()"
            )
        self.unused = False

    def _counted(self) -> list[int]:
        return [
            len(group["params"])
            for thing in self._objects.values()
            if isinstance(thing, torch.optim.Optimizer)
            for group in thing.param_groups
        ]

    def _look(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """The state of one that is not ours would stay behind when others take over from this worker."""
        if self._astray():  # these gradients are none
            for param in self._params.values():
                param.grad = None
        if any(thing is optimizer for thing in self._objects.values()):
            self.unused = False
            return
        mine = {id(param) for param in self._params.values()}
        if any(id(param) in mine for group in optimizer.param_groups for param in group["params"]):
            raise Misuse(
                f"step {self._step()}: an optimizer that Session(...) was not given trains its parameters: "
                "Session(model, optimizer, other, ...)"
            )

    def _check_schedules(self) -> None:
        """A newcomer would begin a schedule that is not part of the state from its first step."""
        kinds = torch.nn.Module | torch.optim.Optimizer | torch.amp.GradScaler
        if all(isinstance(thing, kinds) for thing in self._objects.values()):
            for thing in self._objects.values():
                if getattr(getattr(thing, "step", None), "_wrapped_by_lr_sched", False):
                    raise Misuse(
                        f"step {self._step()}: the optimizer has a schedule that Session(...) was not given, so "
                        "whoever joins later would train at another rate: Session(model, optimizer, scheduler, ...)"
                    )
