"""The one object that a training script sees of us; the loop stays in the script.

    session = Session(model, optimizer, scheduler)
    for step in session.steps(400):
        result = session.backward(loss_of, batches(step))
        optimizer.step()
        scheduler.step()

Alone, with no manager anywhere, the session is a world of one. In a job it is one of many, and the
numbers are the same whatever happens to the others, because the global batch, its order, the random
streams (torch, numpy and Python, seeded for every microbatch) and the order of additions depend on
the step only. With `deterministic=False` the order of additions is free. Then gradients take the
memory of one set, and numbers differ by rounding where the layout does. With `exchange="bfloat16"`
half as many bytes of gradients cross between workers: numbers are rounded more, and alike in every
layout (`agent.tensors.sums`). With `stragglers="flexrr"` workers that are done compute microbatches
of a worker that is late (`agent.worker.exchange.help`), and the numbers stay the same.

`docs/script.md` is the whole contract.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

import torch

from agent.checks.arguments import (
    check_exchange,
    check_modules,
    check_stragglers,
    check_trained,
    check_unborn,
    counted,
    items_of,
    numbers_of,
)
from agent.checks.process import OwnProcess
from agent.checks.registry import registered
from agent.checks.state import ScriptState
from agent.checks.variables import Variables
from agent.data.batch import cut, supervised
from agent.data.data import Data, opened
from agent.errors import Misuse
from agent.loop import Loop
from agent.output.save import save
from agent.pipeline.deferred.initial_values import Unborn
from agent.pipeline.tracing.recording.compiled import compile_each_shape
from agent.profile import Stragglers, SumFormat
from agent.replica import Replica
from agent.sharded import scaling
from agent.sharded.clipping import clip_grad_norm_, clip_grad_value_
from agent.step import LossOf, Result
from agent.world import Alone, World

__all__ = ["Result", "Session", "Variables", "supervised", "unbuilt"]

Model = TypeVar("Model", bound=torch.nn.Module)

_world: World | None = None
_process: OwnProcess | None = None
_sessions: list["Session"] = []
_unborn: list[Unborn[Any]] = []


def unbuilt(factory: Callable[[], Model]) -> Model:
    """Return the model that `factory` builds; in a job no worker needs room for all of it.

    The values of a layer are made on the workers that keep it, and are those that a single process
    would have made. Everything that gives or changes values (initialisers, `.to(dtype)`) belongs
    into `factory`, and so does, last, `.to(device)`. Alone, `factory` is simply called.
    """
    if _world is None or isinstance(_world, Alone):
        return factory()
    unborn = Unborn(factory)
    _unborn.append(unborn)
    return unborn.model


def made() -> list["Session"]:
    """Return the sessions that the script has made so far."""
    return _sessions


def join(world: World) -> None:
    """Let sessions made in this process from now on belong to `world`."""
    global _world, _process
    _world, _process = world, OwnProcess()


def check_process() -> None:
    """Raise `Misuse` if a process that the script forked has tried to train."""
    if _process is not None:
        _process.check()


def world() -> World | None:
    """Return the world that this process has joined, if it is one of many."""
    return _world


class Session:
    """One per script. It is given what must survive: models, optimizers, schedules, a scaler.

    `steps` is the number of steps of all loops together, if there are several. With `unfreezes`
    parameters that are frozen now, and that no optimizer has, may be trained later.
    """

    def __init__(  # noqa: PLR0913 - a parameter per option
        self,
        *objects: object,
        microbatches: int = 0,
        seed: int = 0,
        threads: int = 1,
        deterministic: bool = True,
        exchange: SumFormat = "float32",
        stragglers: Stragglers = "wait",
        steps: int = 0,
        unfreezes: bool = False,
    ) -> None:
        if _sessions:
            raise Misuse(
                "the script made a second session; one holds everything that is trained: what is trained one after the other, as "
                "the folds of a cross-validation, is a job each, with the fold as an argument of the script"
            )
        microbatches = counted(microbatches, "Session(microbatches=...)")
        steps = counted(steps, "Session(steps=...)")
        joined = _world if _world is not None else Alone()
        # The number of threads that share an operation affects its rounding, so it is fixed for
        # all.
        torch.set_num_threads(threads)
        if deterministic:
            compile_each_shape()
        found = registered(objects, unfreezes=unfreezes)
        check_modules(found.models, built=not _unborn)
        check_unborn(_unborn, found.models, objects)
        check_trained(found.models, found.objects.values())
        for line in found.said:
            sys.stderr.write(f"{line}\n")
        check_exchange(exchange, found.models, deterministic=deterministic)
        check_stragglers(stragglers, deterministic=deterministic)
        self.replica = replica = Replica(
            found,
            _unborn,
            seed=seed,
            deterministic=deterministic,
            exchange=exchange,
            stragglers=stragglers,
        )
        replica.fetch = joined.fetch
        if replica.scaler is not None:
            scaling.follow(replica.scaler, replica.holdings)
        self._loop = Loop(joined, replica, found, microbatches, _process or OwnProcess(), steps)
        self._cuts = microbatches > 0
        _sessions.append(self)

    # --- what a script uses -----------------------------------------------------------------------

    @property
    def leader(self) -> bool:
        """True on exactly one worker, the one that prints."""
        if self.replica.stage == "made":
            raise Misuse(
                "session.leader is asked before the loop over session.steps(...), where nobody leads yet; another worker "
                "may lead in a later step. Ask in each step where it is needed, `if session.leader:`"
            )
        return self._world.leader

    @property
    def notice_s(self) -> float | None:
        """Seconds until this machine is taken away, if the cloud has said so."""
        return self._world.notice_s

    @property
    def output(self) -> Path:
        """A folder whose files outlive the machine.

        In a job they are gathered in the job's storage after every step.
        """
        return self._world.output.folder

    @property
    def objects(self) -> Mapping[str, Any]:
        """The registered objects, by name."""
        return self.replica.objects

    def log(self, /, **numbers: Any) -> None:
        """Send numbers of this step to dashboards, once however often the step is done.

        After the loop they are numbers of the last step.
        """
        step = self.replica.newest
        if step is not None:
            self._world.output.log(step, numbers)
        elif self.replica.stage != "aside":
            raise Misuse(
                "session.log(...) belongs into the loop over session.steps(...), or after it"
            )

    def save(self, path: str | PathLike[str], thing: object = None) -> Path:
        """Write the model's weights, or `thing`, to session.output / path, whole.

        Every worker calls it, and one file is kept with the job.
        """
        return save(self, path, thing)

    @property
    def state(self) -> ScriptState:
        """A dict of script-defined values, which travels with the job."""
        return self.replica.state

    @property
    def seed(self) -> int:
        return self.replica.seed

    @property
    def step(self) -> int:
        """The step that the loop is in."""
        return self.replica.turn

    def steps(self, total: int | range) -> Iterator[int]:
        """Go through the steps that are still to do, of `total`; of a range, by its numbers.

        They count from the beginning in a further loop, which `Session(..., steps=...)` has to know
        of; `session.step` counts on.
        """
        numbers = numbers_of(total, "session.steps(...)")
        return map(numbers.__getitem__, self._loop.steps(len(numbers)))

    def data(self, dataset: Any, *, microbatches: int = 0, **options: Any) -> Data:
        """Return the steps of an epoch of this data set, or of that of a DataLoader.

        A step is a sequence of so many microbatches. Without `microbatches` it is a whole batch,
        which every worker loads. See `agent.data.data.Data` for the options.
        """
        microbatches = counted(microbatches, "session.data(microbatches=...)")
        dataset, options = opened(dataset, options)
        loop, whole = self._loop, not microbatches
        microbatches = microbatches or loop.microbatches
        if loop.microbatches not in (0, microbatches):
            raise Misuse(
                f"session.data(microbatches={microbatches}): a step of this job has {loop.microbatches} of them"
            )
        loop.microbatches = microbatches
        found = Data(loop, dataset, microbatches=microbatches, whole=whole, **options)
        loop.data.append(found)
        return found

    def epochs(self, count: int | range, data: Sized | int | None = None) -> Iterator[int]:
        """Go through the epochs that are still to do, of so many; of a range, by its numbers.

        `for microbatches in data` goes through the steps of one. A worker that joins in the middle
        of an epoch begins with the code at the start of that epoch. `data` is what an epoch goes
        through, or the number of its steps.
        """
        found = self._loop.data
        if data is None and len(found) != 1:
            raise Misuse(
                f"session.epochs(n): {len(found)} data sets were given to session.data(...); say which one an epoch "
                "goes through: session.epochs(n, data)"
            )
        length = len(items_of(found[0] if data is None else data, "session.epochs(n, ...)"))
        numbers = numbers_of(count, "session.epochs(...)")
        return map(numbers.__getitem__, self._loop.epochs(len(numbers), length))

    def each(self, items: Sequence[Any] | int) -> Iterator[Any]:
        """Go through these items in the present epoch, one in each step.

        The epoch is the one that the loop over `epochs(n, items)` is in. A worker that joins in the
        middle of it begins with the item of its step.
        """
        found = items_of(items, "session.each(...)", by_number=True)
        count = len(found)
        return (found[step % count] for step in self._loop.steps_of_epoch(count))

    def backward(self, loss_of: LossOf, *batch: Any, dim: int = 0) -> Result:
        """Put the gradients of a step into the model; return the means over its microbatches.

        `batch` is the sequence of the step's microbatches; or the parts of a whole batch, several
        or a dict, or one tensor where `Session` was given `microbatches`, which are cut into
        microbatches along `dim`. This worker computes its share:
        `loss_of(microbatch)`, or `loss_of(*parts)`, is a loss, or a loss and a dict of numbers
        beside it. The loss that is trained on is the mean over all microbatches. Called again in
        the same step, this adds to the gradients, as torch does; gradients do not outlive the step.
        """
        loop = self._loop
        given = [data.given for data in loop.data]
        return loop.backward(*cut(loss_of, batch, dim, loop.microbatches, self._cuts, given))

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        parameters: torch.Tensor | Sequence[torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Clip by the norm of all gradients, on whichever workers they are; return that norm."""
        return clip_grad_norm_(self.replica.holdings, self._params(parameters), max_norm, norm_type)

    def clip_grad_value_(
        self,
        clip_value: float,
        parameters: torch.Tensor | Sequence[torch.Tensor] | None = None,
    ) -> None:
        """Clip every number of the gradients."""
        clip_grad_value_(self.replica.holdings, self._params(parameters), clip_value)

    def _params(self, given: torch.Tensor | Sequence[torch.Tensor] | None) -> list[torch.Tensor]:
        if isinstance(given, torch.Tensor):
            return [given]
        return [*self.replica.space.params.values()] if given is None else [*given]

    # --- what the worker's process uses -----------------------------------------------------------

    @property
    def _world(self) -> World:
        return self._loop.world

    @property
    def passes_over(self) -> bool:
        """Whether the script runs code of its loops without their steps."""
        return self.replica.comes_in or self._loop.passed_over

    def close(self) -> None:
        """End with the script; if it left its loop early, its present state is the final one."""
        self._loop.close()

    def leave(self) -> None:
        """End before the last step, with the present version, because others have."""
        self._loop.leave()
