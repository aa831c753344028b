"""The parameters of each optimizer, where a script gives it more of them in mid-run.

A worker that joins has the optimizers as the script begins them, so what was added since travels
with the state, and is added there before the rest of an optimizer's state is filled in. A worker
that runs code which others have done before, as that at the start of an epoch, does so with the
groups of that time, and adds its own.
"""

from collections.abc import Mapping
from typing import Any

import torch

from agent.errors import Misuse
from agent.tensors.layer_names import Models, named_parameters

# For each optimizer that has grown: of each group the names of its parameters, and its settings.
Structure = dict[str, list[tuple[list[str], dict[str, Any]]]]


class Groups:
    """The groups of the registered optimizers that are not as they were when they were given."""

    def __init__(self, objects: Mapping[str, object], models: Models) -> None:
        self._params = named_parameters(models)
        self._names = {id(param): name for name, param in self._params.items()}
        self._optimizers = {
            key: thing for key, thing in objects.items() if isinstance(thing, torch.optim.Optimizer)
        }
        self._begun: Structure = {key: self._of(each) for key, each in self._optimizers.items()}
        self._sizes = {key: _sizes(each) for key, each in self._optimizers.items()}
        # The names of the settings that no step has made.
        self.begun_with = {
            key: frozenset({"params"}.union(*each.param_groups))
            for key, each in self._optimizers.items()
        }
        # Where the present epoch began, and where the script came to the present boundary.
        self._epoch: Structure = {}
        self._script: Structure = {}

    def check(self, step: int) -> None:
        """Refuse parameters that were added and are in no registered model."""
        for optimizer in self._grown().values():
            for param in (each for group in optimizer.param_groups for each in group["params"]):
                if id(param) not in self._names:
                    raise Misuse(
                        f"step {step}: a parameter of shape {[*param.shape]} was added to {type(optimizer).__name__} that is in no "
                        "model that Session(...) was given, so it is in no sum and in no state: make the whole model before"
                    )

    def begin_epoch(self) -> None:
        """Note the groups with which the script's code at the start of an epoch begins."""
        self._epoch = self._now()

    def come_to_boundary(self) -> None:
        """Note the groups that the script has come to by itself, before others' state is loaded."""
        self._script = self._now()

    def go_back(self, *, to_epoch: bool) -> None:
        """Set what the script's code expects that others have done before."""
        self._set(self._epoch if to_epoch else self._script)

    def state_dict(self) -> dict[str, Any]:
        return {"now": self._now(), "epoch": self._epoch}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._epoch = state["epoch"]
        self._set(state["now"])

    def _grown(self) -> dict[str, torch.optim.Optimizer]:
        sizes = self._sizes
        return {key: one for key, one in self._optimizers.items() if _sizes(one) != sizes[key]}

    def _now(self) -> Structure:
        return {key: self._of(each) for key, each in self._grown().items()}

    def _of(self, optimizer: torch.optim.Optimizer) -> list[tuple[list[str], dict[str, Any]]]:
        return [
            (
                [self._names.get(id(param), "") for param in group["params"]],
                # A tensor among its settings comes with the state of its parameters.
                {k: v for k, v in group.items() if k != "params" and _is_plain(v)},
            )
            for group in optimizer.param_groups
        ]

    def _set(self, structure: Structure) -> None:
        for key, optimizer in self._optimizers.items():
            wanted, groups = structure.get(key, self._begun[key]), optimizer.param_groups
            if [names for names, _ in wanted] == [names for names, _ in self._of(optimizer)]:
                continue
            del groups[len(wanted) :]
            for group, (names, _) in zip(groups, wanted, strict=False):
                group["params"][:] = [self._params[name] for name in names]
            for names, settings in wanted[len(groups) :]:
                params = [self._params[name] for name in names]
                optimizer.add_param_group({**settings, "params": params})


def _sizes(optimizer: torch.optim.Optimizer) -> list[int]:
    return [len(group["params"]) for group in optimizer.param_groups]


def _is_plain(setting: object) -> bool:
    return not (callable(setting) or isinstance(setting, torch.Tensor))
