"""The scale of a loss in a recording: a node that asks the scaler.

So no graph contains the scale as a constant.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from agent.errors import CannotRecord

Scaler = torch.amp.GradScaler
SCALE = Scaler.scale  # the original, which is replaced while a loss is recorded


def place(up: int) -> str:
    """Return the current line of the frame `up` levels above the caller of `place`."""
    frame = sys._getframe(up + 1)
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


class Scaling(torch.nn.Module):
    """A module that calls the original `scaler.scale(...)`."""

    def __init__(self, scaler: Scaler) -> None:
        super().__init__()
        self.scaler = scaler

    def forward(self, outputs: torch.Tensor) -> torch.Tensor:
        scaled: torch.Tensor = SCALE(self.scaler, outputs)
        return scaled

    @contextmanager
    def recorded(self, refused: type[CannotRecord]) -> Iterator[None]:
        """Make `scale` call this module meanwhile, and refuse `get_scale`."""

        def scale(scaler: Scaler, outputs: Any) -> Any:
            if not scaler.is_enabled():
                return outputs
            if scaler is not self.scaler:
                raise refused(
                    f"{place(1)}: another GradScaler than that of Session(...) scales the loss"
                )
            several = isinstance(outputs, list | tuple)
            return type(outputs)(map(self, outputs)) if several else self(outputs)

        def get_scale(scaler: Scaler) -> float:
            if not scaler.is_enabled():
                return 1.0
            raise refused(
                f"{place(1)}: scaler.get_scale() is asked in loss_of, and the model cannot be cut into stages with a number that "
                "changes from step to step: let the session scale the loss, or train with depth 1"
            )

        before = Scaler.scale, Scaler.get_scale
        Scaler.scale, Scaler.get_scale = scale, get_scale  # type: ignore[method-assign,assignment]
        try:
            yield
        finally:
            Scaler.scale, Scaler.get_scale = before  # type: ignore[method-assign]
