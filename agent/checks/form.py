"""Check that models keep the parameters and buffers of the time the session was made.

A parameter or buffer that came later would be in no sum and in no state. Whether a parameter
requires a gradient may change, because that travels with the state (see `agent.checks.modes`); but
a step's sum has room only for what could be trained when the session was made.
"""

from collections.abc import Container

import torch

from agent.errors import Misuse
from agent.tensors.layer_names import Models, named_modules, named_parameters

Look = tuple[torch.dtype, torch.Size, torch.device]
STILL = "and keep it unchanged with a learning rate of 0"


class _Part:
    """One module, without its children."""

    def __init__(self, name: str, module: torch.nn.Module) -> None:
        self.name, self.module = name, module
        self.children = [*map(id, module._modules.values())]
        self.params = [*map(id, module._parameters.values())]
        self.looks = _looks(module)
        kept = {key for key in module._buffers if key not in module._non_persistent_buffers_set}
        self.buffers = {key: _form(module._buffers[key]) for key in kept}
        # Held, so that no new object can have the identity of one that is gone.
        self._held = _held(module)

    @property
    def same(self) -> bool:
        module = self.module
        return (
            [*map(id, module._modules.values())] == self.children
            and [*map(id, module._parameters.values())] == self.params
            and _looks(module) == self.looks
            and all(_form(module._buffers.get(key)) == form for key, form in self.buffers.items())
            # A buffer that a forward registered, and that was taken back, leaves its name among
            # those not saved.
            and len(module._buffers.keys() - module._non_persistent_buffers_set)
            == len(self.buffers)
        )

    def renamed(self) -> list[str]:
        """Return the names that something else has now, or nothing."""
        then, now = ({(k, id(it)) for k, it in held} for held in (self._held, _held(self.module)))
        return sorted(f"{self.name}.{key}".strip(".") for key, _ in then ^ now)


class Form:
    """The form of all models at its making.

    `summed` are the parameters in a step's sum, by identity.
    """

    def __init__(self, models: Models, summed: Container[int]) -> None:
        self._models = models
        self._parts = [_Part(name, module) for name, module in named_modules(models).items()]
        self._params = named_parameters(models)
        self._before = {name: _look(param) for name, param in self._params.items()}
        self._frozen = {n: param for n, param in self._params.items() if id(param) not in summed}

    def check(self, step: int) -> None:
        if not all(part.same for part in self._parts):
            raise Misuse(f"step {step}: {self._what()}")
        for name, param in self._frozen.items():
            if param.requires_grad:
                raise Misuse(
                    f"step {step}: the parameter {name!r} was unfrozen, but when Session(...) was made it required no "
                    "gradient and no optimizer had it, so a step's sum has no room for it: Session(..., unfreezes=True) makes "
                    "room for all that is frozen; or give it before to the optimizer, frozen as it is"
                )

    def _what(self) -> str:
        now = named_parameters(self._models)
        for name, param in now.items():
            if self._params.get(name) is param:
                continue
            how = "is not the same object as" if name in self._params else "was not there"
            return (
                f"the parameter {name!r} {how} when Session(...) was made, so it is in no sum and in no state. "
                f"Make the whole model before, {STILL}"
            )
        if gone := sorted(self._params.keys() - now.keys()):
            return (
                f"the parameter {gone[0]!r} was taken out of the model after Session(...) was made, which a joining "
                f"worker would not know. Leave it in, {STILL}"
            )
        for name, param in now.items():
            dtype, shape, device = self._before[name]
            if (param.dtype, param.shape) != (dtype, shape):
                return (
                    f"the parameter {name!r} is {_said((param.dtype, param.shape))}, but was {_said((dtype, shape))} "
                    "when Session(...) was made: model.to(...), .double() or .half() belong before it"
                )
            if param.device != device:
                return (
                    f"the parameter {name!r} is on {param.device}, but was on {device} when Session(...) was made: "
                    "model.to(device) belongs before it"
                )
        return self._what_buffer()

    def _what_buffer(self) -> str:
        for part in self._parts:
            buffers = part.module._buffers
            for key in sorted(part.buffers.keys() | buffers.keys()):
                before, found = part.buffers.get(key), _form(buffers.get(key))
                name = f"{part.name}.{key}" if part.name else key
                if before != found and key not in part.module._non_persistent_buffers_set:
                    return (
                        f"the buffer {name!r} is {_said(found)}, but was {_said(before)} when Session(...) was made, "
                        "and a joining worker has room for that only. Make it as large as it will be, or "
                        "register_buffer(..., persistent=False) if it can be computed again"
                    )
        name = next((name for part in self._parts for name in part.renamed()), "a module")
        return (
            f"{name!r} was put into the model, taken out of it or replaced after Session(...) was made, which a "
            "joining worker would not know. Make the whole model before"
        )


def _look(param: torch.Tensor) -> Look:
    return param.dtype, param.shape, param.device


def _held(module: torch.nn.Module) -> list[tuple[str, object]]:
    return [*module._modules.items(), *module._parameters.items()]


def _looks(module: torch.nn.Module) -> list[Look]:
    return [_look(param) for param in module._parameters.values() if param is not None]


def _form(tensor: torch.Tensor | None) -> tuple[torch.dtype, torch.Size] | None:
    return None if tensor is None else (tensor.dtype, tensor.shape)


def _said(form: tuple[torch.dtype, torch.Size] | None) -> str:
    return "not there" if form is None else f"{form[0]} {list(form[1])}"
