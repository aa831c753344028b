"""Script-defined values that travel with the job: `session.state`."""

from collections.abc import Mapping
from typing import Any

import torch

from agent.errors import Misuse
from agent.store.encoding.plain import TENSORS, Unsavable, packed, unpacked


class ScriptState(dict[Any, Any]):
    """A dict of plain values, nested, that comes back exactly.

    Its values are numbers, strings, None, tensors, NumPy arrays, and lists, tuples, dicts and sets
    of them. Tuples come back as tuples, named ones as those of their class, True as True, each
    number with its bits, a list in two places as one list. The one exception is a NumPy float64,
    which comes back as the Python number that it is.
    """

    def check(self, step: int) -> list[torch.Tensor]:
        """Refuse a value that cannot be saved, and say where it is. Return the tensors in all."""
        tensors: list[torch.Tensor] = self._packed(f"step {step}: ")[TENSORS]
        return tensors

    def state_dict(self) -> dict[str, Any]:
        return self._packed("")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        found = unpacked(state, {**self})
        self.clear()
        self.update(found)

    def _packed(self, when: str) -> dict[str, Any]:
        try:
            return packed({**self})
        except Unsavable as error:
            raise Misuse(f"{when}session.state{error.path} {error.what}") from None
