"""Which parameters and buffers there are, and of what form: what Session(...) has found is what is trained and kept.

Whatever came later would be in no sum and in no state: every worker would train it alone, and whoever joins would
begin it anew.
"""

from collections.abc import Iterable, Sequence

import torch

from agent.errors import Misuse

Look = tuple[bool, torch.dtype, torch.Size, torch.device]


class _Part:
    """One module, without its children."""

    def __init__(self, name: str, module: torch.nn.Module) -> None:
        self.name, self.module = name, module
        self.children = [*map(id, module._modules.values())]
        self.params = [*map(id, module._parameters.values())]
        self.looks = _looks(module)
        kept = {key for key in module._buffers if key not in module._non_persistent_buffers_set}
        self.buffers = {key: _form(module._buffers[key]) for key in kept}
        # Held, so that nothing new can have the identity of one that is gone.
        self._held = [*module._modules.values(), *module._parameters.values()]

    @property
    def same(self) -> bool:
        module = self.module
        return (
            [*map(id, module._modules.values())] == self.children
            and [*map(id, module._parameters.values())] == self.params
            and _looks(module) == self.looks
            and all(_form(module._buffers.get(key)) == form for key, form in self.buffers.items())
            # One that a forward has registered, and that was taken back, leaves its name among those that are not saved.
            and len(module._buffers.keys() - module._non_persistent_buffers_set)
            == len(self.buffers)
        )


class Form:
    """That of all models as they were when this was made."""

    def __init__(self, models: Sequence[torch.nn.Module]) -> None:
        self._models = models
        self._parts = [
            _Part(name, module) for model in models for name, module in model.named_modules()
        ]
        self._unsaved = {
            f"{part.name}.{key}" if part.name else key
            for part in self._parts
            for key in part.module._non_persistent_buffers_set
        }
        self._params = _params(models)
        self._before = {name: _look(param) for name, param in self._params.items()}

    def check(self, step: int) -> None:
        if not all(part.same for part in self._parts):
            raise Misuse(f"step {step}: {self._what()}")

    def check_written(self, step: int, names: Iterable[str]) -> None:
        """`names` are what a step changes; buffers among them go on from there."""
        if lost := sorted(self._unsaved.intersection(names)):
            raise Misuse(
                f"step {step}: the forward writes to the buffer {lost[0]!r}, which is not saved (persistent=False), "
                "so whoever joins later would begin it anew: leave persistent=False out, or keep in a plain attribute "
                "what no forward reads before it writes it"
            )

    def _what(self) -> str:
        now = _params(self._models)
        for name, param in now.items():
            if self._params.get(name) is param:
                continue
            how = "is another one than" if name in self._params else "was not there"
            return (
                f"the parameter {name!r} {how} when Session(...) was made, so it is in no sum and in no state. "
                f"Make the whole model before, {STILL}"
            )
        if gone := sorted(self._params.keys() - now.keys()):
            return (
                f"the parameter {gone[0]!r} was taken out of the model after Session(...) was made, which whoever "
                f"joins later would not know. Leave it in, {STILL}"
            )
        for name, param in now.items():
            trains, dtype, shape, device = self._before[name]
            if param.requires_grad != trains:
                did = "began to train" if param.requires_grad else "stopped training"
                return (
                    f"the parameter {name!r} {did} after Session(...) was made, which whoever joins later would not "
                    f"know. Let it train from the beginning, {STILL}"
                )
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
                        "and whoever joins later has room for that. Make it as large as it will be, or "
                        "register_buffer(..., persistent=False) if it can be computed anew"
                    )
        return (
            "a module was put into the model, or taken out of it, after Session(...) was made, which whoever joins "
            "later would not know. Make the whole model before"
        )


STILL = "and keep it still with a learning rate of 0"


def _look(param: torch.Tensor) -> Look:
    return param.requires_grad, param.dtype, param.shape, param.device


def _looks(module: torch.nn.Module) -> list[Look]:
    return [_look(param) for param in module._parameters.values() if param is not None]


def _form(tensor: torch.Tensor | None) -> tuple[torch.dtype, torch.Size] | None:
    return None if tensor is None else (tensor.dtype, tensor.shape)


def _said(form: tuple[torch.dtype, torch.Size] | None) -> str:
    return "not there" if form is None else f"{form[0]} {list(form[1])}"


def _params(models: Sequence[torch.nn.Module]) -> dict[str, torch.nn.Parameter]:
    return {name: param for model in models for name, param in model.named_parameters()}
