"""A worker's part of a job: its objects at one version, and the ways in and out of them.

A version counts commits. A script's step begins at a boundary; every call of `session.backward` in
it is a phase, which ends with one commit. Only at a boundary can a state be saved, or handed to a
joining worker, because a script cannot be begun in the middle of its step.
"""

import hashlib
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch.utils import _pytree as pytree

from agent.checks.arguments import scaler_of
from agent.checks.form import Form
from agent.checks.own_values import OwnValues
from agent.checks.registry import Registered
from agent.errors import Misuse, StateError
from agent.pipeline.deferred.initial_values import Unborn
from agent.pipeline.tracing.recorder import Recorder
from agent.profile import Stragglers, SumFormat
from agent.sharded.holdings import Holdings
from agent.store.layers import Collected, LiveLayer, collect, fill, share_of
from agent.store.memory import Arena
from agent.store.shares import Gathered
from agent.tensors import shards
from agent.tensors.absent import watch
from agent.tensors.device import CPU, seed_python
from agent.tensors.partial_sum import Partial
from agent.tensors.staging import here
from agent.tensors.sums import Sum, Summed, SumSpace
from agent.tensors.unchanged import Still
from agent.timeline import Notes

# With a dot in it, because a model may have a layer of any other name.
POSITION = "session.position"

# Random streams of a step that belong to no microbatch.
BEFORE, AFTER, BETWEEN = -1, -2, -3

# made      the script has made its session, and not begun its loop
# boundary  between two steps of the script
# open      in a step, before a call of `backward`
# computing in a call of `backward`
# summed    after such a call: the gradients of the phase are here
# ended     after the step, in the script's code at the end of its epoch
# aside     the script ends an epoch that the others have left, and its state is put aside
# over      the loop is over
Stage = Literal["made", "boundary", "open", "computing", "summed", "ended", "aside", "over"]


class Position:
    """The script's place in its loop, as part of the state."""

    def __init__(self, replica: "Replica") -> None:
        self._replica = replica

    def state_dict(self) -> dict[str, Any]:
        return {"step": self._replica.step, "idle": self._replica.idle}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._replica.step, self._replica.idle = int(state["step"]), int(state.get("idle", 0))


class Replica:
    """The registered objects, and where they are in the job."""

    def __init__(
        self,
        registered: Registered,
        unborn: Sequence[Unborn[Any]] = (),
        *,
        seed: int = 0,
        deterministic: bool = True,
        exchange: SumFormat = "float32",
        stragglers: Stragglers = "wait",
    ) -> None:
        self.objects: dict[str, shards.Stateful] = {
            **registered.objects,
            POSITION: Position(self),
        }
        self.models, self.state = registered.models, registered.state
        self.groups = registered.groups
        self.own_values = OwnValues(registered.objects, registered.models)
        self.seed, self.deterministic = seed, deterministic
        self.helps = stragglers == "flexrr"
        """Whether workers that are done compute microbatches of a worker that is late."""
        self.microbatches = 0  # of a step; 0 as long as it is not known
        self.stage: Stage = "made"
        self.version, self.step, self.phase = 0, 0, 0
        self.idle = 0  # turns of the script's loop that trained nothing
        self.played = False  # the script has done the step that led to this version
        self.loaded = False  # whether the state here ever came from other workers
        self._lost = False  # whether the job has gone on without this worker's step
        self.given = -1  # the newest version whose gradients the script has got
        self.unborn, self.unbuilt = unborn, bool(unborn)
        self.birth_mark = "-".join(each.mark for each in unborn)
        for each in unborn:
            # Until all is made, because a request for a state here is not the script's.
            each.used = lambda: None
        self.space = SumSpace(self.models, registered.trained, exchange=exchange)
        self.holdings = Holdings(self.objects, unborn)
        self.holdings.astray = lambda: self.astray
        self.form = Form(self.models, {*map(id, self.space.params.values())})
        self.still = Still(self.models)
        self.scaler = scaler_of(self.objects.values())
        self.notes: Notes | None = None  # of the step in flight, if its timeline was asked for
        self.partial: Partial | None = None  # of the step, once it is known how it is added up
        self.sums_held = 1.0  # in multiples of the gradients
        self.fetch: Callable[[], None] = lambda: None
        self.reserve: Callable[[], None] = lambda: None
        self.recorder = Recorder(lambda: self.model, [*self.models.values()], self.scaler)
        self._total: Sum | None = None
        self._total_here: Sum | None = None
        self._kept: Collected | None = None
        self._arena = Arena()  # the memory for optimizer state that has none yet
        self._aside: Gathered | None = None
        self.keeps_own = False
        """Whether a state from before the present one leads to a place that the script left."""
        self._own: Gathered | None = None
        self._settings_aside: list[dict[str, Any]] = []
        self._comes_in = False
        self.between = False
        """Whether the script's code between two loops is still to be done to the state here."""
        self._watched: set[int] = set()
        # Where there is only the CPU, `torch.manual_seed` takes 0.1 ms to ask for other devices.
        everywhere = torch.accelerator.is_available()
        self._seed_torch = torch.manual_seed if everywhere else torch.default_generator.manual_seed
        for each in unborn:
            each.used = self.look

    @property
    def adding(self) -> str:
        """Return how gradients are added up, on which the costs of a step depend."""
        return f"{self.sums_held:g} gradients held, {self.space.exchange}"

    @property
    def model(self) -> torch.nn.Module:
        """All registered models as one."""
        modules = [*self.models.values()]
        return modules[0] if len(modules) == 1 else torch.nn.ModuleList(modules)

    @property
    def turn(self) -> int:
        """The turn of the script's loop: the steps before it, and the turns that trained nothing."""
        return self.step + self.idle

    @property
    def inside(self) -> int | None:
        """The turn that the script is in; None outside of the loop."""
        if self.stage == "ended":
            return self.turn - 1
        return self.turn if self.stage in ("open", "computing", "summed") else None

    @property
    def newest(self) -> int | None:
        """The turn that the script is in or, after the loop, its last one; None before the loop."""
        return max(0, self.turn - 1) if self.stage == "over" else self.inside

    @property
    def at_boundary(self) -> bool:
        """Whether the state of `version` is here in a form that others could load."""
        return self.phase == 0 and self.stage not in ("summed", "ended", "aside")

    @property
    def next_version(self) -> int:
        """The version that the script's objects are at; a summed phase counts as committed."""
        return self.version + (self.stage == "summed")

    @property
    def astray(self) -> bool:
        """Whether the script's actions until the next boundary count for nothing.

        The job has gone on without its step, or the script ends an epoch that others have left.
        """
        return self._lost or self.stage == "aside"

    def go_astray(self) -> None:
        self._lost = True

    def rejoin(self) -> None:
        """Let the script's actions count again from this boundary on."""
        self._lost = False

    def seed_for(self, stream: int, step: int | None = None) -> None:
        """Begin the stream of a microbatch of this phase, or `BEFORE`, `AFTER` or `BETWEEN`."""
        at, phase = (self.turn, self.phase) if step is None else (step, 0)
        text = struct.pack("<qqqq", self.seed, at, phase, stream)
        number = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
        self._seed_torch(number >> 1)
        seed_python(number)

    # --- the sum of a phase -----------------------------------------------------------------------

    def total(self) -> Sum:
        """Return room for the sum of a whole step, where the model is; not every worker needs it."""
        self._total = self._total or Sum(self.space, self.space.device)
        return self._total

    def total_here(self) -> Sum:
        """Return such room in host memory, for stages, which put the sum together there."""
        if self.space.device == CPU:
            return self.total()
        self._total_here = self._total_here or Sum(self.space)
        return self._total_here

    def summed(self, payload: memoryview, marks: bytes) -> Summed:
        """Read the sum of a whole step from its bytes."""
        marks, total = self.space.unsealed(marks), self.total()
        total.fill(payload)
        total.marks = marks
        return self.space.summed(total)

    def warm(self, arena: Arena) -> None:
        """Allocate the memory of a step ahead; `arena` is for the optimizer state to be loaded.

        The first backward reuses the memory that is freed here: see
        `agent.store.memory.keep_memory`.
        """
        self.total().flat.zero_()
        self.reserve()
        params = [*self.space.params.values(), *self.space.params.values()]
        _ = [torch.empty_like(param, requires_grad=False).zero_() for param in params]
        self._arena = arena

    def install(self, summed: Summed, prior: Sequence[torch.Tensor | None]) -> None:
        """Put the gradients of a phase into the model, added to those that the step had before."""
        self.given = self.version
        if summed.held is not None:
            self._keep(summed.held)
        useful = summed.finite or self.scaler is not None
        if useful:
            summed.total.space.install(summed.total, self.microbatches)
        else:
            # A skipped phase is committed, and changes nothing.
            self.space.begin()
        if prior:
            for param, before in zip(self.space.params.values(), prior, strict=True):
                if before is not None:
                    param.grad = before if param.grad is None else before + param.grad
        pairs = zip(self.space.params.values(), prior, strict=False)
        added = [id(param) for param, before in pairs if before is not None and before.any()]
        self.holdings.hear(summed.norms if useful else {}, added)

    # --- the state at a boundary ------------------------------------------------------------------

    @property
    def state_bytes(self) -> int:
        return sum(collect(self.objects).sizes().values())

    def begin_boundary(self) -> None:
        """Take note that the script is between two steps.

        Borrowed weights are given back, because they are of an old version.
        """
        self.stage, self.phase, self._kept = "boundary", 0, None
        self.groups.come_to_boundary()
        self.holdings.give_back()

    def forget_arena(self) -> None:
        """Release the arena, because a state that was to be loaded has been loaded."""
        self._arena = Arena()

    @property
    def kept(self) -> Collected | None:
        """The state when the step began, as far as it is here; None if it is gone."""
        return self._kept if self.at_boundary else None

    def collected(self) -> Collected:
        """Return the state at the step's boundary.

        It is available until the step's first sum is installed, because its tensors do not change
        before. Other values that the script has set for the step already are not in it.
        """
        if self._kept is None:
            self._kept = self.snapshot()
        return self._kept

    def changed_since(self, versions: list[int]) -> str:
        """Return the name of what the script has changed since these versions, or ""."""
        changed = self.still.take_changed()
        return self.collected().changed(versions) or changed

    def drop_collected(self) -> None:
        """Drop the collected state, because the script is about to change its state."""
        self._kept = None

    def snapshot(self) -> Collected:
        """Collect the state as the script has it now."""
        with self._unseen():
            try:
                state, here = collect(self.objects), self.holdings.here
            except StateError:
                # These explain better what has become of the model and its optimizers.
                self.form.check(self.turn)
                self.groups.check(self.turn)
                raise
        return state if here is None else state.only(here)

    def settled(self) -> list[LiveLayer]:
        return self.collected().finish()

    @contextmanager
    def _unseen(self) -> Iterator[None]:
        """Hide a request for a state_dict from the check of whether the script uses its model."""
        stage, self.stage = self.stage, "boundary"
        try:
            yield
        finally:
            self.stage = stage

    def load(self, gathered: Gathered, version: int, only: frozenset[str] | None = None) -> None:
        """Take over a state; layers that are not in `only` are not here afterwards."""
        if version > self.version:
            self._own = None
        elif self.keeps_own and version < self.version and self._own is None:
            self._own = self._copied(only)
        self._forget()
        self._kept = None
        if only is None:
            self.holdings.make_room(self.holdings.all)
            self.holdings.here = None
        else:
            self._keep(only)
            self.holdings.make_room(only)
        self._fill(gathered, only)
        self.version, self.given, self.loaded = version, -1, True
        # The step that led here was done by others.
        self.played = False

    def _fill(self, gathered: Gathered, only: frozenset[str] | None = None) -> None:
        with self._unseen():
            fill(gathered.layers.values(), gathered.read, self.objects, only, arena=self._arena)

    def add(self, gathered: Gathered, layers: frozenset[str]) -> None:
        """Take over layers that were not here, of the version that the others have.

        Settings of optimizers are left alone, because they came when the state was loaded, and the
        script may have changed them since.
        """
        self._forget()
        self.holdings.make_room(layers)
        with self._unseen():
            fill(gathered.layers.values(), gathered.read, self.objects, layers, settings=False)
        self.holdings.arrived(layers)
        if self._kept is not None:
            self._kept = self._kept.joined(self.snapshot().only(layers))
        if self.stage == "computing":
            # Buffers have come as well, and they are the phase's start.
            self.space.begin()

    @property
    def comes_in(self) -> bool:
        """Whether the script runs code that others have done, on its way to where they are."""
        return self._comes_in and self.stage == "aside" and self.holdings.here is None

    def set_aside(self, *, comes_in: bool, to_epoch: bool = False) -> None:
        """Put the boundary's state aside, because the script is not where it can go on with it.

        With `to_epoch` the script begins the present epoch, otherwise it goes on where it was.
        """
        self._comes_in = comes_in
        self._aside = self._copied()
        # The layers that are here need not be of every group.
        self._settings_aside = [_settings_of(group) for group in self._param_groups()]
        self.stage, self._kept = "aside", None
        self.groups.go_back(to_epoch=to_epoch)
        if self._own is not None:
            # The end of an epoch may need what its steps have made.
            held = self.holdings.here or self.holdings.all
            self._fill(self._own, held & self._own.layers.keys())
            self._own = None

    def _copied(self, only: frozenset[str] | None = None) -> Gathered:
        state = self.collected() if only is None else self.collected().only(only)
        share, pieces = share_of(state.finish(), 1, 0)
        copied = Gathered()
        copied.add(share, memoryview(b"".join(here(pieces))))
        return copied

    def take_up(self) -> None:
        """Restore the state that was put aside, whatever the script has done to its objects."""
        assert self._aside is not None
        gathered, self._aside = self._aside, None
        self.load(gathered, self.version, self.holdings.here)
        for group, settings in zip(self._param_groups(), self._settings_aside, strict=True):
            for name in {*group} - {*settings, "params"}:
                del group[name]
            group.update(settings)

    def _param_groups(self) -> list[dict[str, Any]]:
        optimizers = (o for o in self.objects.values() if isinstance(o, torch.optim.Optimizer))
        return [group for one in optimizers for group in one.param_groups]

    def _forget(self) -> None:
        """Drop what was noted of the state, because it is replaced by others' state."""
        self.still.forget()
        self.holdings.forget()

    # --- layers that are elsewhere ----------------------------------------------------------------

    def _keep(self, layers: frozenset[str]) -> None:
        """Keep only these layers; the rest is fetched if a script uses it outside of the step."""
        self.holdings.keep(layers)
        for module in self.models.values():
            if id(module) not in self._watched:
                self._watched.add(id(module))
                watch(module, self.look)

    def look(self) -> None:
        """Fetch the missing layers, because the script is about to use its whole model."""
        if self.holdings.here is None:
            return
        if self.stage in ("made", "over") and self.unbuilt:
            raise Misuse(
                "the model was handed over unbuilt, and no worker has all of it before or after the loop over "
                "session.steps(...): use it in a step, after optimizer.step() for example. The trained weights are in "
                "the job's export"
            )
        if self.stage in ("open", "summed", "ended"):
            self.fetch()

    def borrow(self, gathered: Gathered, layers: frozenset[str]) -> None:
        """Take over weights to look at until the next step begins."""
        self.holdings.borrow(layers)
        with self._unseen():
            fill(gathered.layers.values(), gathered.read, self.models, layers)

    @property
    def newborn(self) -> bool:
        """Whether missing layers can be made here, because no step has changed them yet.

        A worker that was sent back to the beginning has done steps, and its buffers have changed in
        them.
        """
        return self.unbuilt and not self.loaded and self.next_version == 0

    def bear(self, layers: frozenset[str]) -> None:
        """Make these layers with their initial values; drop others that can be made again."""
        self._forget()
        self.holdings.unbear(layers)
        self.holdings.bear(layers)
        self.holdings.arrived(layers)
        if self._kept is not None:
            self._kept = self.snapshot()

    def bear_to_look(self) -> None:
        """Make all missing weights, until the step begins."""
        lacking = self.holdings.lacking(self.holdings.all)
        self.holdings.bear(lacking)
        self.holdings.borrowed |= lacking


def _settings_of(group: dict[str, Any]) -> dict[str, Any]:
    """Copy the settings of an optimizer's group."""
    settings = {key: value for key, value in group.items() if key != "params"}
    copied: dict[str, Any] = pytree.tree_map_only(torch.Tensor, torch.clone, settings)
    return copied
