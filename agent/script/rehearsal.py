"""The first microbatches of a job are computed twice: a microbatch has one loss, wherever it comes in the loop.

Each worker has others, in another place, and computes some again when somebody is lost. What a generator, a list, a stream
of random numbers or anything else keeps from one for the next is not always to be found in the source. So it is looked
at: what comes first is computed once before, last one first, and dropped.
"""

import ast
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import _pytree as pytree

from agent.errors import Misuse
from agent.pipeline.flat import cloned, flatten, unflatten
from agent.script.order import has, is_share
from agent.source import own
from agent.source.loops import Caller
from agent.tensors.device import CPU
from agent.tensors.still import version_of
from agent.tensors.sums import SumSpace

MOST = 4
GRAINS = 16  # a compiled model may round otherwise when it is compiled anew
LEAST, LEAST_ELSEWHERE = 2e-6, 1e-3  # on an accelerator no two sums are alike


class Rehearsed:
    """One that is computed before its turn: what the loop is given, and what it made of it."""

    def __init__(self, given: Any) -> None:
        self.given, self.loss = given, math.nan


class Rehearsal:
    """One for each worker that is there in the first step of a job."""

    def __init__(self, space: SumSpace) -> None:
        self._space = space
        self._losses: dict[int, float] = {}
        self._over = False

    def ahead(self, step: int, missing: list[int], caller: Caller | None) -> list[int]:
        """What to compute before the share begins. What is drawn along, `zip(session.share(...), names)`, ends with it."""
        self._over |= step > 0 or (caller is not None and _draws_along(caller))
        return [] if self._over else [n for n in reversed(missing[:MOST]) if n not in self._losses]

    @contextmanager
    def rehearsing(self, microbatch: int, given: Any) -> Iterator[Rehearsed]:
        """A copy of it, since the loop may write to its microbatch. It leaves nothing in the model."""
        leaves, spec = flatten(given)
        one = Rehearsed(unflatten(cloned(leaves), spec))
        yield one
        self._losses[microbatch] = one.loss
        self._space.take(0.0)

    def compare(
        self, microbatch: int, found: float | torch.Tensor, refuse: Callable[[], None]
    ) -> None:
        """`refuse` says what it sees in better words."""
        if self._over or microbatch not in self._losses:
            return
        first, loss, near = self._losses[microbatch], float(found), self._near
        if math.isclose(first, loss, rel_tol=near, abs_tol=near) or math.isnan(first + loss):
            return
        refuse()
        raise Misuse(
            f"step 0: microbatch {microbatch} was computed twice, and has a loss of {first:.6g}, and then of {loss:.6g}. Each "
            "worker has other microbatches, and computes some again when others are lost, so nothing may go from one into "
            "the next: no count of them, no stream of random numbers that goes on, nothing that a generator, a list or a "
            "module keeps. Begin anew with every microbatch, or do it before session.share(...)"
        )

    @property
    def _near(self) -> float:
        numbers = [p.dtype for p in self._space.params.values() if p.dtype.is_floating_point]
        grain = max((torch.finfo(dtype).eps for dtype in numbers), default=0.0)
        return max(GRAINS * grain, LEAST if self._space.device == CPU else LEAST_ELSEWHERE)


def _draws_along(caller: Caller) -> bool:
    """Whether something that may end is drawn along, as far as the file with the loop shows it."""
    frame = caller.frame
    nodes = [*ast.walk(own.parsed(own.source(frame.f_code.co_filename, frame.f_globals)))]
    called = {
        target.id
        for node in nodes
        if isinstance(node, ast.Assign) and has(node.value, is_share)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    return any(
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "zip"
        and has(node, lambda each: is_share(each) or getattr(each, "id", None) in called)
        for node in nodes
    )


class Handed:
    """The microbatches that the loop was given in this step, as they were: it may write to them, and then nobody can
    compute them again here."""

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
