"""The gradients of a step where a worker has those of its own layers only.

The norm of every gradient is sent to all workers with the sums of the step, so
`session.clip_grad_norm_` and a GradScaler know of all of them. Anything else that a script computes
over the gradients it finds covers only some layers, silently. So a script is refused if an
optimizer finds another gradient than `session.backward` has left, or another weight than its last
step has. Elementwise changes are refused as well, because they look the same.

A script that only reads gradients cannot be seen here. What it computes from them differs between
workers, so it is found where the states of workers are compared, as soon as it gets into a learning
rate or `session.state`.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import msgspec
import torch
from torch.utils.hooks import RemovableHandle

from agent.errors import Misuse
from agent.sharded.refusals import APART, ROOM
from agent.tensors.layer_names import named_parameters
from agent.tensors.shards import Stateful
from agent.tensors.sums import Norm

SAMPLE = 4096
GRADIENT, WEIGHT = "the gradient of ", ""
UNREGISTERED = "a parameter that Session(...) was not given"
# Where a tensor lies, how often it was written to, and some of its numbers.
Mark = tuple[int, int, bytes]


class Gradients:
    """The gradients of the models among `objects`.

    As long as `norms` is empty all gradients are here, and nothing is refused.
    """

    def __init__(
        self, objects: Mapping[str, Stateful], is_here: Callable[[torch.Tensor], bool]
    ) -> None:
        self._objects, self._is_here = objects, is_here
        self._models = {k: v for k, v in objects.items() if isinstance(v, torch.nn.Module)}
        self.norms: dict[int, Norm] = {}  # by the identity of parameters
        self._unknown: set[int] = set()  # parameters whose gradients' norms are not known
        self._clipped: set[int] = set()  # parameters whose gradients' norms have changed
        self._marks: dict[tuple[str, int], Mark | None] = {}
        self._hooks: list[RemovableHandle] = []
        self._heard = 0

    def begin(self) -> None:
        """Forget the gradients of the last phase."""
        self.norms, self._unknown, self._clipped, self._marks = {}, set(), set(), {}
        while self._hooks:
            self._hooks.pop().remove()

    def hear(self, norms: dict[int, Norm], added: Iterable[int]) -> None:
        """Note the norms of new gradients.

        Those of `added` contain another phase's gradients, so their norms are not known.
        """
        self.begin()
        self._heard += 1
        if not norms:
            return
        self.norms, self._unknown = norms, set(added)
        params = [*named_parameters(self._models).values()]
        for param in params:
            if param.grad is not None:
                # So it has its own count of writes, instead of one shared by all views of a sum.
                param.grad = param.grad.data
        self._mark(params, GRADIENT, WEIGHT)
        for optimizer in self._optimizers():
            # Registered again in each step, so that a hook of the script's has done its work
            # before.
            self._hooks.append(optimizer.register_step_pre_hook(self._before_step))
            self._hooks.append(optimizer.register_step_post_hook(self._after_step))

    def forget_weights(self) -> None:
        """Forget the weights, because the session itself changes them."""
        self._marks = {key: mark for key, mark in self._marks.items() if key[0] != WEIGHT}

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        return [o for o in self._objects.values() if isinstance(o, torch.optim.Optimizer)]

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        params = params_of(optimizer)
        # A script may drop all gradients in order to leave out the step.
        if any(param.grad is not None for param in params):
            self._check(params)
        self.check_weights()

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._mark(params_of(optimizer), GRADIENT, WEIGHT)

    def _mark(self, params: Iterable[torch.Tensor], *what: str) -> None:
        here = [param for param in params if self._is_here(param)]
        for index, param in enumerate(here):
            # Writes through `tensor.data` are not counted, so the numbers of one tensor are kept, a
            # different one in each step.
            close = index == self._heard % len(here)
            for each in what:
                tensor = param if each == WEIGHT else param.grad
                self._marks[each, id(param)] = _mark(tensor, close=close)

    def _check(self, params: Collection[torch.Tensor]) -> None:
        """Refuse gradients that were changed."""
        for param in params if self.norms else ():
            self._compare(GRADIENT, param, param.grad)

    def check_weights(self) -> None:
        """Refuse weights that were changed."""
        for optimizer in self._optimizers():
            for param in params_of(optimizer):
                if (WEIGHT, id(param)) in self._marks:
                    self._compare(WEIGHT, param, param)

    def _compare(self, what: str, param: torch.Tensor, now: torch.Tensor | None) -> None:
        mark = self._marks.get((what, id(param)))
        if mark != _mark(now, close=bool(mark and mark[2])):
            names = {id(each): name for name, each in named_parameters(self._models).items()}
            raise Misuse(
                f"{what}{names.get(id(param), UNREGISTERED)} was changed after session.backward(...) by something else than "
                "session.clip_grad_norm_(...), a registered scaler or the step of a registered optimizer, and "
                f"{APART}, so what is computed over all layers would be of some: clip with session.clip_grad_norm_(...); "
                f"for any other change, an elementwise one too, {ROOM}"
            )

    @contextmanager
    def changing(self, params: Collection[torch.Tensor]) -> Iterator[None]:
        """Allow a change of these gradients inside; the caller knows its effect on the norms."""
        self._check(params)
        yield
        if self.norms:
            self._mark(params, GRADIENT)

    def clipped(self, params: Iterable[torch.Tensor]) -> None:
        """Note that their norms have changed; what was finite still is."""
        self._clipped |= {id(param) for param in params}

    def unscaled(self, params: Iterable[torch.Tensor]) -> None:
        """Note that a scaler has taken its scale out of these, on any worker."""
        for each in {id(param) for param in params} & self.norms.keys():
            known = self.norms[each]
            self.norms[each] = msgspec.structs.replace(known, norm=known.unscaled)

    def known(
        self, call: str, params: Iterable[torch.Tensor], *, normed: bool = True
    ) -> dict[int, Norm]:
        """Return the known norms of those parameters that have a gradient on any worker.

        Refuse parameters without a known norm; if not `normed`, allow clipped ones.
        """
        ids = dict.fromkeys(id(param) for param in params)
        if ids.keys() & (self._unknown | (self._clipped if normed else set())):
            raise Misuse(
                f"{call}: gradients were clipped already or are sums of two phases, and {APART}, so nothing is known of "
                "all of them: call scaler.unscale_(...) first, session.clip_grad_norm_(...) once, and "
                f"optimizer.zero_grad() between phases, or {ROOM}"
            )
        return {each: self.norms[each] for each in ids if each in self.norms}


def params_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _mark(tensor: torch.Tensor | None, *, close: bool) -> Mark | None:
    if tensor is None:
        return None
    sample = b""
    if close:
        # As bytes, because not-a-number differs from itself.
        row = tensor.detach().reshape(-1)[:: max(tensor.numel() // SAMPLE, 1)]
        sample = row.cpu().contiguous().view(torch.uint8).numpy().tobytes()
    return tensor.data_ptr(), tensor._version, sample
