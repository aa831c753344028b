"""The numbers and texts that classes of a script keep in modules and optimizers.

A module and an optimizer travel as their `state_dict` says, so a count that a class of the script
keeps beside it begins anew on a worker that joins. Such a worker tells those that have changed on it.
"""

from collections.abc import Mapping

import torch

from agent.checks.variables import Variables
from agent.source.tracebacks import is_own_class
from agent.tensors.layer_names import Models, named_modules
from agent.tensors.shards import Stateful

TOLD_MAX = 4
TRAVELS = ("training",)


class OwnValues:
    """The values of the registered objects, as they were when the session was made."""

    def __init__(self, objects: Mapping[str, Stateful], models: Models) -> None:
        optimizers = [one for one in objects.values() if isinstance(one, torch.optim.Optimizer)]
        things = [*named_modules(models).values(), *optimizers]
        self._things = [thing for thing in things if is_own_class(type(thing))]
        self._carried = [one for one in objects.values() if isinstance(one, Variables)]
        self._begun = [self._of(thing) for thing in self._things]

    def changed(self) -> tuple[str, ...]:
        """Name some of those that have changed since, by class and attribute."""
        found = dict[str, None]()
        for thing, begun in zip(self._things, self._begun, strict=True):
            for key, value in self._of(thing).items():
                if key not in begun or value != begun[key]:
                    found[f"{type(thing).__name__}.{key}"] = None
        return (*found,)[:TOLD_MAX]

    def _of(self, thing: object) -> dict[str, object]:
        return {
            key: value
            for key, value in vars(thing).items()
            if isinstance(value, bool | int | float | str)
            and key not in TRAVELS
            and not any(one.carries(thing, key) for one in self._carried)
        }
