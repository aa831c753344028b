"""Variables of a script that survive: `Session(model, Variables(globals(), "best", "hidden"))`."""

from collections.abc import Mapping, MutableMapping
from typing import Any

import torch

from agent.errors import Misuse
from agent.store.encoding.plain import TENSORS, Unsavable, packed, unpacked


class Variables:
    """Names of a namespace, or attributes of an object, whose values travel with the job.

    They may be what `session.state` may hold. Each has a value after a step.
    """

    def __init__(self, owner: Any, *names: str) -> None:
        """`owner` is `globals()`, or an object such as a trainer. Locals cannot be set."""
        self._owner: MutableMapping[str, Any] = owner if isinstance(owner, dict) else vars(owner)
        self._names = names
        if not names or not all(isinstance(name, str) for name in names):
            raise Misuse(
                f"Variables(owner, {', '.join(map(repr, names))}): give the names that are saved: "
                'Variables(globals(), "best_loss")'
            )

    def carries(self, space: Mapping[str, Any], name: str) -> bool:
        """Return whether this name of a namespace is one of those."""
        return name in self._names and self._owner is space

    def check(self, step: int) -> list[torch.Tensor]:
        """Refuse a name that has no value after a step, and a value that cannot be saved.

        Return the tensors in all values.
        """
        for name in self._names:
            if name not in self._owner:
                raise Misuse(
                    f"step {step}: Variables(..., {name!r}): there is no such name after the step: give it a value before "
                    f"the loop, {name} = None; a variable of a function is none of globals(): declare it `global`, or keep "
                    "it in session.state"
                )
        tensors: list[torch.Tensor] = self._packed(f"step {step}: ")[TENSORS]
        return tensors

    def state_dict(self) -> dict[str, Any]:
        return self._packed("")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        found = unpacked(state, self.values())
        for name in self._names:
            if name in found:
                self._owner[name] = found[name]
            else:
                self._owner.pop(name, None)

    def values(self) -> dict[str, Any]:
        """Return those that there are, by name."""
        return {name: self._owner[name] for name in self._names if name in self._owner}

    def _packed(self, when: str) -> dict[str, Any]:
        try:
            return packed(self.values())
        except Unsavable as error:
            raise Misuse(f"{when}Variables{error.path} {error.what}") from None
