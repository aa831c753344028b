"""The flags and buffers that a script sets in its modules beside their weights.

A script sets `train()` and `eval()`, or freezes layers, once in many steps. A worker that joins
between has not run that part of the script, so these flags travel with the state. So do buffers
that are not saved (`persistent=False`), if their values differ from those that they had when the
session was made.
"""

import hashlib
from collections.abc import Mapping
from operator import attrgetter
from typing import Any

import torch

from agent.errors import StateError
from agent.tensors.device import CPU
from agent.tensors.layer_names import Models, named_modules, named_parameters
from agent.tensors.shards import bytes_of

training, requires_grad = attrgetter("training"), attrgetter("requires_grad")
version = attrgetter("_version")
_Marks = tuple[list[int], list[int]]


class Modes:
    """The flags of all modules and parameters, and the unsaved buffers that were changed."""

    def __init__(self, models: Models) -> None:
        modules = named_modules(models)
        self._modules = [*modules.values()]
        self._params = [*named_parameters(models).values()]
        self._training, self._grads = _Flags(), _Flags()
        # Many masks are the same, so each value is kept once.
        originals = dict[bytes, torch.Tensor]()
        self._buffers: dict[str, _Buffer] = {}
        for path, module in modules.items():
            for key in sorted(module._non_persistent_buffers_set):
                tensor = module._buffers.get(key)
                if tensor is not None and tensor.layout is torch.strided and not tensor.is_meta:
                    name = f"{path}.{key}" if path else key
                    self._buffers[name] = _Buffer(module, key, tensor, originals)

        self._homes = [(each.place, each.key) for each in self._buffers.values()]
        # The buffers when they were last looked at, their marks, and those with a different value.
        self._seen: tuple[list[torch.Tensor | None], _Marks] = [], ([], [])
        self._changed: dict[str, torch.Tensor] = {}

    def _buffers_changed(self) -> dict[str, torch.Tensor]:
        """Return the changed buffers; look closer only if a tensor was replaced or written to."""
        now = [place.get(key) for place, key in self._homes]
        marks = _marks(now)
        if marks is None or marks != self._seen[1]:
            found = {name: buffer.changed() for name, buffer in self._buffers.items()}
            self._changed = {name: value for name, value in found.items() if value is not None}
            self._seen = now, marks or ([], [-1])
        return self._changed

    def state_dict(self) -> dict[str, Any]:
        return {
            "training": self._training.text(tuple(map(training, self._modules))),
            "requires_grad": self._grads.text(tuple(map(requires_grad, self._params))),
            "buffers": self._buffers_changed(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        modes, grads = state["training"], state["requires_grad"]
        if (len(modes), len(grads)) != (len(self._modules), len(self._params)):
            raise StateError(
                f"the saved state is of {len(modes)} modules and {len(grads)} parameters, but there are "
                f"{len(self._modules)} and {len(self._params)} here: give Session the same models as before"
            )
        for module, flag in zip(self._modules, modes, strict=True):
            module.training = flag == "1"
        for param, flag in zip(self._params, grads, strict=True):
            if param.requires_grad != (flag == "1"):
                param.requires_grad_(flag == "1")
        for name, buffer in self._buffers.items():
            buffer.restore(state["buffers"].get(name))


def _marks(tensors: list[torch.Tensor | None]) -> _Marks | None:
    """Return which tensors these are, and how often each was written to.

    Return None if a tensor does not count its changes.
    """
    try:
        return [*map(id, tensors)], [*map(version, tensors)]
    except (RuntimeError, AttributeError):
        return None


class _Flags:
    """Flags as text, which is made again only if one has changed."""

    def __init__(self) -> None:
        self._flags: tuple[Any, ...] = ()
        self._text = ""

    def text(self, flags: tuple[Any, ...]) -> str:
        if flags != self._flags:
            self._flags, self._text = flags, "".join("1" if flag else "0" for flag in flags)
        return self._text


class _Buffer:
    """A buffer that is not saved, and its value when the session was made.

    A buffer of a different size is a table that a forward makes as large as it needs. Each worker's
    needs differ, so it is neither carried nor compared.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        key: str,
        tensor: torch.Tensor,
        originals: dict[bytes, torch.Tensor],
    ) -> None:
        self.place, self.key, self._home = module._buffers, key, tensor
        self._digest = _digest(tensor)
        if self._digest not in originals:
            originals[self._digest] = _real(tensor).to(CPU, copy=True)
        self._original = originals[self._digest]
        self._is_changed = False
        self._note(tensor)

    def _note(self, tensor: torch.Tensor) -> None:
        # A tensor made in inference mode counts no changes, so it is looked at each time.
        self._noted, self._version = tensor, -1 if tensor.is_inference() else tensor._version

    def _now(self) -> torch.Tensor | None:
        now, home = self.place.get(self.key), self._home
        if now is None or (now.dtype, now.shape) != (home.dtype, home.shape):
            return None
        return now

    def changed(self) -> torch.Tensor | None:
        """Return its value, or None if that is the one of the beginning."""
        now = self._now()
        if now is None:
            return None
        if now is not self._noted or now.is_inference() or now._version != self._version:
            self._is_changed = _digest(now) != self._digest
            self._note(now)
        return _real(now) if self._is_changed else None

    def restore(self, value: torch.Tensor | None) -> None:
        if value is None and (self._now() is None or self.changed() is None):
            return
        with torch.no_grad():
            _real(self._home).copy_(self._original if value is None else value)
        self.place[self.key] = self._home
        self._is_changed = value is not None
        self._note(self._home)


def _real(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _digest(tensor: torch.Tensor) -> bytes:
    return hashlib.blake2b(bytes_of(_real(tensor)), digest_size=16).digest()
