"""The first microbatches of a job are computed twice: a microbatch has one loss, wherever it comes in the loop.

Each worker has others, in another place, and computes some again when somebody is lost. What has a name in the script's source
is found there, and told better (`order`, `between`, `within`). What a generator, an iterator or a hook keeps to itself is not.
So it is looked at: what comes first is computed once before, last one first, and dropped.
"""

import ast
import io
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout
from types import FrameType
from typing import Any

import torch
from torch.utils import _pytree as pytree

from agent.errors import Misuse
from agent.pipeline.flat import flatten, unflatten
from agent.source.found import Caller, found_loop
from agent.source.loops import GOES_ON
from agent.tensors.device import CPU
from agent.tensors.still import version_of
from agent.tensors.sums import SumSpace

MOST = 4
GRAINS = 16  # a compiled model may round otherwise when it is compiled anew
LEAST, LEAST_ELSEWHERE = 2e-6, 1e-3  # on an accelerator no two sums are alike
OF_GRADIENTS = 100  # they round in more places than a loss
ENDING = {"zip", "map", "islice", "zip_longest", "takewhile", "batched"}


class Rehearsed:
    """One that is computed before its turn: what the loop is given, and what it made of it."""

    def __init__(self, given: Any) -> None:
        self.given = given
        self.loss: float | torch.Tensor = math.nan
        self.norms: list[float] = []


class Rehearsal:
    """One for each worker that is there in the first step of a job."""

    def __init__(self, space: SumSpace) -> None:
        self._space = space
        self._rehearsed: dict[int, Rehearsed] = {}
        self._is_on = False

    def begin(self, step: int, caller: Caller, asking: FrameType | None) -> None:
        """`asking` is the loop, or the generator nearest to the microbatches that hands them on."""
        self._is_on = step == 0 and not _may_end(caller, asking)

    def ahead(self, missing: Sequence[int]) -> list[int]:
        """What to compute before the share begins."""
        return [n for n in reversed(missing[:MOST]) if self._is_on and n not in self._rehearsed]

    @contextmanager
    def rehearsing(self, microbatch: int, given: Any) -> Iterator[Rehearsed]:
        """A copy of it, since the loop may write to its microbatch. It leaves nothing in the model."""
        leaves, spec = flatten(given)
        one = Rehearsed(unflatten([_copied(each) for each in leaves], spec))
        yield one
        one.given, one.norms = None, self._norms()
        self._space.take(0.0)
        self._rehearsed[microbatch] = one

    def performing(self, microbatch: int) -> AbstractContextManager[object]:
        """What the loop prints of a microbatch that it has had before, it has printed."""
        return redirect_stdout(io.StringIO()) if self._knows(microbatch) else nullcontext()

    def compare(
        self, microbatch: int, loss: float | torch.Tensor, refuse: Callable[[], None]
    ) -> None:
        """`refuse` says what it sees in better words."""
        if not self._knows(microbatch):
            return
        before = self._rehearsed[microbatch]
        near, first, again = self._near, float(before.loss), float(loss)
        if not _alike([first], [again], near):
            what = f"loss ({again:.7g}, not {first:.7g})"
        elif not _alike(before.norms, self._norms(), OF_GRADIENTS * near):
            what = "gradient"
        else:
            return
        refuse()
        raise Misuse(
            f"step 0, microbatch {microbatch}: the same microbatch has another {what} when the loop over "
            f"session.share(...) is given it in another place: {GOES_ON}"
        )

    def _knows(self, microbatch: int) -> bool:
        return self._is_on and microbatch in self._rehearsed

    def _norms(self) -> list[float]:
        gradients = [each.grad for each in self._space.params.values()]
        return [
            0.0 if each is None or each.is_sparse else float(torch.linalg.vector_norm(each))
            for each in gradients
        ]

    @property
    def _near(self) -> float:
        numbers = [p.dtype for p in self._space.params.values() if p.dtype.is_floating_point]
        grain = max((torch.finfo(dtype).eps for dtype in numbers), default=0.0)
        return max(GRAINS * grain, LEAST if self._space.device == CPU else LEAST_ELSEWHERE)


def _copied(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return leaf.detach().clone().requires_grad_(leaf.requires_grad)


def _alike(before: Sequence[float], found: Sequence[float], near: float) -> bool:
    """By the largest of them: what is almost nothing beside it is rounding. Where nothing is a number, nothing is known."""
    largest = max((abs(each) for each in (*before, *found) if math.isfinite(each)), default=0.0)
    least = near * max(largest, near)
    return all(
        math.isclose(a, b, rel_tol=near, abs_tol=least) or not math.isfinite(a + b)
        for a, b in zip(before, found, strict=True)
    )


def _may_end(caller: Caller, asking: FrameType | None) -> bool:
    """Whether something beside the microbatches may end before they do, if there are more of them."""
    loop = found_loop(caller)
    names = (
        {each.id for each in ast.walk(loop.over) if isinstance(each, ast.Name)} if loop else set()
    )
    while asking is not None and (asking is not caller.frame or loop is None):
        names |= {*asking.f_code.co_names}
        if asking is caller.frame:
            break
        asking = asking.f_back
    return bool(ENDING & names)


class Handed:
    """The microbatches that the loop was given in this step, as they were: it may write to them, or take them apart, and
    then nobody can compute them again here."""

    def __init__(self) -> None:
        self._versions: dict[int, list[int]] = {}

    def clear(self) -> None:
        self._versions.clear()

    def hand(self, microbatch: int, given: Any) -> None:
        leaves = pytree.tree_leaves(given)
        now = [version_of(each) for each in leaves if isinstance(each, torch.Tensor)]
        if self._versions.setdefault(microbatch, now) != now:
            raise Misuse(
                f"microbatch {microbatch} has to be computed again, since others were lost, and the loop over "
                "session.share(...) has written to it: give what is made of it a place of its own, `x = x - mean` for "
                "`x -= mean`. The job can be resumed"
            )
