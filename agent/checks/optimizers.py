"""Check that a session's parameters are trained with its own optimizers and schedules.

A joining worker makes them as the script begins, and gets their state from the other workers. The
session cannot hand on the state of an optimizer or schedule that it does not know.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from agent.checks.attributes import Attributes
from agent.checks.variables import Variables
from agent.errors import Misuse
from agent.store.groups import Groups
from agent.tensors.shards import Stateful, tensors_of

# What neither is a schedule nor can hold one.
NO_SCHEDULES = (
    torch.nn.Module,
    torch.optim.Optimizer,
    torch.amp.GradScaler,
    Attributes,
    Variables,
)


def twin_of(
    optimizer: torch.optim.Optimizer, params: Sequence[torch.Tensor], **instead: bool
) -> torch.optim.Optimizer:
    """Make an optimizer with the same settings and in the same mode.

    Some optimizers have `optimizer.train()`.
    """
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
    """The registered optimizers."""

    def __init__(
        self,
        objects: Mapping[str, Stateful],
        params: Mapping[str, torch.Tensor],
        step: Callable[[], int],
    ) -> None:
        self._objects, self._params, self._step = objects, params, step
        # Whether there are gradients that no optimizer has used.
        self.unused = False
        self._hooks = (
            register_optimizer_step_pre_hook(self._look),
            # After the step, because a closure makes gradients inside of it.
            register_optimizer_step_post_hook(self._used),
            # One that wraps another may not have called torch's `__init__`, and loads by itself.
            *(
                each.register_load_state_dict_post_hook(self._loaded)
                for each in self._known()
                if hasattr(each, "_optimizer_load_state_dict_post_hooks")
            ),
        )

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def check(self) -> None:
        """Check before the first phase of a step."""
        self._check_used()
        for thing in self._objects.values():
            if isinstance(thing, Groups):
                thing.check(self._step())
        self._check_schedules()

    def _check_used(self) -> None:
        """Refuse gradients that no optimizer used, because they do not outlive their step.

        They are no part of the state, and the next step begins new ones.
        """
        grads = [p.grad for p in self._params.values()] if self.unused else []
        left = any(grad is not None and bool(grad.any()) for grad in grads)
        if left and any(isinstance(o, torch.optim.Optimizer) for o in self._objects.values()):
            step = self._step()
            raise Misuse(
                f"step {step}: the gradients of step {step - 1} are still there, and no optimizer has "
                "used them, but each step begins new ones. To train on more at once give session.backward(...) more "
                "microbatches; to leave a step out, call optimizer.zero_grad()"
            )
        self.unused = False

    def _look(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Refuse an optimizer that is not registered, before it steps.

        Its state would be lost with its worker.
        """
        if any(thing is optimizer for thing in self._objects.values()):
            return
        mine = {id(param) for param in self._params.values()}
        if any(id(param) in mine for group in optimizer.param_groups for param in group["params"]):
            raise Misuse(
                f"step {self._step()}: {type(optimizer).__name__} trains parameters of the session, which was not given "
                "this optimizer, so its state would be lost with a worker: Session(model, optimizer, other, ...)"
            )

    def _used(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if any(thing is optimizer for thing in self._objects.values()):
            self.unused = False

    def _known(self) -> list[torch.optim.Optimizer]:
        return [one for one in self._objects.values() if isinstance(one, torch.optim.Optimizer)]

    def _loaded(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse tensors that are another optimizer's, too, as `load_state_dict` leaves them.

        A joining worker would have two, and a step would no longer change both.
        """
        mine = {id(tensor) for tensor in tensors_of(optimizer)}
        for other in self._known():
            if other is not optimizer and any(id(each) in mine for each in tensors_of(other)):
                raise Misuse(
                    f"step {self._step()}: two optimizers have the same tensors as their state, because load_state_dict(...) copies "
                    f"none, and each {type(optimizer).__name__} would change the other's: "
                    "optimizer.load_state_dict(copy.deepcopy(other.state_dict()))"
                )

    def _check_schedules(self) -> None:
        """Refuse an unregistered schedule, as a joining worker would begin it at its first step."""
        for thing in self._known():
            if getattr(thing.step, "_wrapped_by_lr_sched", False) and not self._may_have(thing):
                raise Misuse(
                    f"step {self._step()}: {type(thing).__name__} has a schedule that Session(...) was not given, so a "
                    "joining worker would train at another rate: Session(model, optimizer, scheduler, ...). Train with a new "
                    "optimizer if that schedule is over"
                )

    def _may_have(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether a registered object (its name ends with a number) may be its schedule."""
        for key, thing in self._objects.items():
            if isinstance(thing, LRScheduler):
                if thing.optimizer is optimizer:
                    return True
            elif key[-1:].isdigit() and not isinstance(thing, NO_SCHEDULES):
                return True
        return False
