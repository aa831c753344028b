"""What a training script sees of us: one object, and its own loop left in its hands.

    session = Session(model, optimizer, scheduler)
    for step in session.steps(400):
        result = session.backward(loss_of, batches(step))
        optimizer.step()
        scheduler.step()

Alone, with no manager anywhere, the session is a world of one. In a job it is one of many, and whatever happens to
the others, the numbers are the same: the global batch, its order, the random streams (torch, numpy and Python, seeded
for every microbatch) and the order of additions depend on the step only. With `deterministic=False` the order of
additions is free: gradients take the memory of one, and numbers differ by rounding where the layout does.

`docs/script.md` is the whole contract.
"""

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch

from agent.data.data import Data, Microbatches, opened
from agent.errors import Misuse, NotFinite, WireError
from agent.faults import passing
from agent.output.saving import save
from agent.owned import scaling
from agent.owned.clipping import clip_grad_norm_, clip_grad_value_
from agent.pipeline import modes
from agent.pipeline.births import Unborn
from agent.pipeline.returned import called
from agent.proof.evidence import Evidence, copied, versions_of
from agent.proof.turns import sampled
from agent.replica import AFTER, BEFORE, Replica
from agent.schedule import Kind
from agent.script.given import check_modules, check_trained, check_unborn
from agent.script.graph import Outside
from agent.script.optimizers import Optimizers
from agent.script.registered import registered
from agent.script.state import ScriptState
from agent.tensors.device import settle
from agent.tensors.numbers import Numbers
from agent.tensors.partial import Partial, partial_of
from agent.tensors.sums import Summed
from agent.world import Abandoned, Alone, Facts, Interrupted, World

Model = TypeVar("Model", bound=torch.nn.Module)
LossOf = Callable[[Any], Any]

SENT_BACK = "others were lost with what only they had, and a loop that is left does no step again"


class Result(msgspec.Struct, frozen=True):
    """The means of a phase over all its microbatches: `result.loss`, `result["accuracy"]`."""

    loss: float
    metrics: Mapping[str, float]
    # Of a step that the job went on without: everything is not-a-number, and used by nobody.
    void: bool = False

    def item(self) -> float:
        """The loss, as a tensor of one number gives it."""
        return self.loss

    __float__ = item

    def __format__(self, spec: str) -> str:
        return format(self.loss, spec)

    def __getitem__(self, name: str) -> float:
        if self.void:
            return math.nan
        try:
            return self.metrics[name]
        except KeyError:
            known = ", ".join(self.metrics) or "nothing"
            raise Misuse(
                f"result[{name!r}]: loss_of returned {known} beside its loss: return loss, {{{name!r}: ...}}"
            ) from None


_world: World | None = None
_sessions: list["Session"] = []
_unborn: list[Unborn[Any]] = []


def unbuilt(factory: Callable[[], Model]) -> Model:
    """Return the model that `factory` builds, of which in a job no worker needs to have room for all.

    The values of a layer are made on the workers that keep it, and are those that a single process would have made.
    Whatever gives or changes values (initialisers, `.to(dtype)`) belongs into `factory`, and so does, last,
    `.to(device)`. Alone it is simply called.
    """
    if _world is None or isinstance(_world, Alone):
        return factory()
    unborn = Unborn(factory)
    _unborn.append(unborn)
    return unborn.model


def made() -> list["Session"]:
    """The sessions that the script has made so far."""
    return _sessions


def join(world: World) -> None:
    """Sessions made in this process from now on belong to `world`."""
    global _world  # noqa: PLW0603 - the script makes its session itself; there is no other way in
    _world = world


class Session:
    """One per script. What it is given is what must survive: models, optimizers, schedules, a scaler."""

    def __init__(
        self,
        *objects: object,
        microbatches: int = 0,
        seed: int = 0,
        threads: int = 1,
        deterministic: bool = True,
    ) -> None:
        if _sessions:
            raise Misuse("the script made a second session; one holds everything that is trained")
        self._world = _world if _world is not None else Alone()
        # How many threads share an operation is part of its rounding, so it is fixed for all.
        torch.set_num_threads(threads)
        found = registered(objects)
        check_modules(found.models, built=not _unborn)
        check_unborn(_unborn, found.models, objects)
        check_trained(found.models, found.objects.values())
        for line in found.said:
            sys.stderr.write(f"{line}\n")
        self._registered = found
        self.replica = replica = Replica(found, _unborn, seed=seed, deterministic=deterministic)
        self._outside = Outside({id(p) for m in found.models.values() for p in m.parameters()})
        replica.fetch = self._world.fetch
        if replica.scaler is not None:
            scaling.follow(replica.scaler, replica.holdings)
        self._microbatches = microbatches or self._world.microbatches
        self._optimizers = Optimizers(
            replica.objects,
            replica.space.params,
            lambda: replica.step,
            lambda: replica.holdings.astray,
        )
        self._partial: Partial | None = None
        # Whether the others know of this session.
        self._bound = False
        self._data: list[Data] = []
        self._facts = Facts(0, 0)
        self._kept_versions: list[int] = []
        self._scale = 1.0
        self._evidence: Evidence | None = None
        # Whether the first microbatch was computed twice, and whether loss_of writes into it.
        self._tried = self._copies = self._seen = False
        self._result = Result(math.nan, {}, void=True)
        _sessions.append(self)

    # --- what a script uses -------------------------------------------------------------------------

    @property
    def leader(self) -> bool:
        """True on exactly one worker: the one that prints."""
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
        """A folder whose files outlive the machine: in a job they are gathered in its storage, behind every step."""
        return self._world.output.folder

    @property
    def objects(self) -> Mapping[str, Any]:
        """What was registered, by name."""
        return self.replica.objects

    def log(self, /, **numbers: Any) -> None:
        """Tell numbers of this step to dashboards, once however often the step is done."""
        step = self.replica.inside
        if step is not None:
            self._world.output.log(step, numbers)
        elif self.replica.stage != "aside":
            raise Misuse("session.log(...) belongs into the loop over session.steps(...)")

    def save(self, path: str | PathLike[str], thing: object = None) -> Path:
        """Write the model's weights, or `thing`, to session.output / path, whole and once. Every worker calls it."""
        return save(self, path, thing)

    @property
    def state(self) -> ScriptState:
        """A dict of the script's own values, which travels with the job."""
        return self.replica.state

    @property
    def seed(self) -> int:
        return self.replica.seed

    @property
    def step(self) -> int:
        """The step that the loop is in."""
        return self.replica.step

    def steps(self, total: int) -> Iterator[int]:
        """Go through the steps that are still to do, up to `total`."""
        self._begin_loop(total)
        while self._arrive():
            yield from self._one_step()

    def data(self, dataset: Any, *, microbatches: int, **options: Any) -> Data:
        """Return the steps of an epoch of this data set, or of that of a DataLoader.

        See `agent.data.data.Data` for the options.
        """
        dataset, options = opened(dataset, options)
        if self._microbatches not in (0, microbatches):
            raise Misuse(
                f"session.data(microbatches={microbatches}): a step of this job has {self._microbatches} of them"
            )
        self._microbatches = microbatches
        found = Data(self, dataset, microbatches=microbatches, **options)
        self._data.append(found)
        return found

    def epochs(self, count: int, data: Data | None = None) -> Iterator[int]:
        """Go through the epochs that are still to do; `for microbatches in data` goes through the steps of one.

        A worker that joins in the middle of an epoch begins with the code at the start of that epoch.
        """
        data = data or self._only_data()
        self._begin_loop(count * len(data))
        while self._arrive():
            epoch, place = divmod(self.replica.step, len(data))
            if place:
                # What the script does at an epoch's start was done in this one already.
                self._set_aside()
            yield epoch
            if self.replica.stage not in ("ended", "aside", "over"):
                raise Misuse(
                    f"epoch {epoch}: the loop over the data of session.data(...) was left in step {self.replica.step}; "
                    "go through all of it, or leave the loop over session.epochs(...) as well"
                )

    def steps_of_epoch(self, data: Data) -> Iterator[int]:
        """Go through the steps of the epoch that the loop over `epochs` is in. For `Data` only."""
        self._take_up()
        if self.replica.stage != "open":
            raise Misuse(
                "the data of session.data(...) is gone through inside `for epoch in session.epochs(n)`, once per epoch; "
                "with session.steps(n) use data.at(step)"
            )
        epoch = self.replica.step // len(data)
        while True:
            yield from self._one_step()
            # The next boundary comes after what the script does at the end of its epoch.
            if self.replica.step % len(data) == 0:
                return
            if not self._arrive():
                return
            if self.replica.step // len(data) != epoch:
                # The script ends its epoch on what is here, and has its state back at the next one.
                self._set_aside()
                return

    def backward(self, loss_of: LossOf, microbatches: Sequence[Any]) -> Result:
        """Put the gradients of a whole step into the model, and return the means over its microbatches.

        This worker computes its share: `loss_of(microbatch)` is a loss, or a loss and a dict of numbers beside it.
        What is trained on is the mean over all microbatches. Called again in the same step it adds to the gradients,
        as torch does; gradients do not outlive the step.
        """
        self._check_call(loss_of, microbatches)
        replica = self.replica
        # Of a step that the job went on without, no call counts.
        void = replica.stage == "summed" and self._result.void
        if replica.stage == "summed":
            replica.version, replica.phase = replica.version + 1, replica.phase + 1
        prior = self._prior()
        if not void and (self._bound or self._bind(len(microbatches))):
            self._begin_phase(loss_of, microbatches)
            try:
                self._prove(loss_of, microbatches)
                summed = self._world.logged(replica.version)
                if summed is None:
                    summed = self._compute(loss_of, microbatches)
                with self._world.unaided():
                    replica.seed_for(AFTER)
                    self._install(summed, prior)
                    if not self._world.proves:
                        passing("step: installed")
            except Abandoned:
                self._give_up()
        else:
            self._give_up()
        self._world.settle()
        replica.stage = "summed"
        return self._result

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        parameters: torch.Tensor | Sequence[torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Clip by the norm of all gradients, whichever worker has them; return that norm."""
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

    # --- the loop -----------------------------------------------------------------------------------

    def _begin_loop(self, total: int) -> None:
        if self.replica.stage != "made":
            raise Misuse(
                "session.steps() was called twice; a script has one training loop, over the steps of all epochs: "
                "epoch, place = divmod(step, steps_per_epoch)"
            )
        self.replica.form.check(0)
        total = min(total, self._world.stop_at or total)
        self._facts = Facts(self._microbatches, total)

    def _only_data(self) -> Data:
        if len(self._data) != 1:
            raise Misuse(
                f"session.epochs(n): {len(self._data)} data sets were given to session.data(...); say which one an epoch "
                "goes through: session.epochs(n, data)"
            )
        return self._data[0]

    def _one_step(self) -> Iterator[int]:
        """The script's body of one step."""
        try:
            yield self.replica.step
        finally:
            # A script that leaves its loop here may do with its model what it likes.
            self._world.settle()
        self._end_step()

    def _arrive(self) -> bool:
        """Be at the start of a step; False if there is none."""
        self._take_up()
        stage = self.replica.stage
        return stage == "open" or (stage != "over" and self._next_step())

    def _set_aside(self) -> None:
        """What the script does until `_take_up` is for nothing: it is not where the job is."""
        self._world.settle()
        self._world.stray(away=True)
        self.replica.set_aside()

    def _take_up(self) -> None:
        if self.replica.stage == "aside":
            self.replica.take_up()
            self._world.stray(away=False)
            self._open()

    def _next_step(self) -> bool:
        """Come to the boundary of the next step; False if there is none."""
        replica, total = self.replica, self._facts.steps_total
        self._close_step()
        while True:
            replica.begin_boundary()
            if self._microbatches:
                self._know(self._microbatches)
                self._bound = True
                self._world.boundary(replica, self._facts)
                replica.forget_arena()
            if replica.step < total:
                break
            replica.stage = "over"
            replica.drop_collected()
            self._show_reached()
            if self._finished():
                return False
        self._show_reached()
        self._open()
        return True

    def _show_reached(self) -> None:
        """Say what state the script has come to, which others can compare with theirs."""
        if self._evidence is None:
            return
        shown = self._world.state_shown
        if shown == "nothing":
            self._evidence.pass_over()
        else:
            self._world.arrived(self._evidence.look(whole=shown == "all"))

    def _open(self) -> None:
        """The script's step begins."""
        replica = self.replica
        self._kept_versions = replica.collected().versions()
        replica.holdings.astray = False
        replica.seed_for(BEFORE)
        replica.stage = "open"

    def _end_step(self) -> None:
        replica = self.replica
        if replica.stage != "summed":
            raise Misuse(
                f"step {replica.step} ended without session.backward(loss_of, microbatches): every step needs one"
            )
        replica.version, replica.step, replica.played = replica.version + 1, replica.step + 1, True
        replica.drop_collected()
        replica.stage = "ended"

    def _close_step(self) -> None:
        """The script is through with its step, and with what it does at the end of an epoch."""
        replica = self.replica
        if replica.stage == "ended":
            step = replica.step - 1
            self._registered.check(step)
            self._outside.check(step)
            self._world.end_step(step)

    def _know(self, microbatches: int) -> None:
        """Now it is known of how many microbatches a step is made."""
        if self._partial is None:
            replica = self.replica
            self._microbatches = replica.microbatches = microbatches
            self._facts = msgspec.structs.replace(self._facts, microbatches=microbatches)
            self._partial = partial_of(
                replica.space, microbatches, deterministic=replica.deterministic
            )
            replica.sums_held, replica.reserve = self._partial.held, self._partial.reserve
            self._evidence = Evidence(replica)
            self._world.evidence = self._evidence

    def _bind(self, microbatches: int) -> bool:
        """Join the others from within the first step; False if they are further than that."""
        self._know(microbatches)
        self._bound = True
        return self._world.bind(self.replica, self._facts)

    def close(self) -> None:
        """The script has ended. If it left its loop early, what it has now is the end."""
        replica = self.replica
        if replica.stage == "made":
            raise Misuse("the script made a session, but never looped over session.steps(...)")
        if replica.stage == "computing":
            raise Misuse(f"the script ended in the middle of step {replica.step}")
        if replica.stage == "summed":
            self._end_step()
        if replica.stage in ("open", "ended"):
            self._close_step()
            replica.holdings.give_back()
            replica.drop_collected()
            self.leave()

    def leave(self) -> None:
        """End before the last step, as the script has, or as others have: with the version that there is."""
        self.replica.stage, self.replica.phase = "over", 0
        if not self._finished():
            raise WireError(SENT_BACK)

    def _finished(self) -> bool:
        if not self._world.finish(self.replica, self._facts):
            return False
        self._optimizers.close()
        for data in self._data:
            data.close()
        return True

    # --- a phase ------------------------------------------------------------------------------------

    def _check_call(self, loss_of: object, microbatches: object) -> None:
        replica, where = self.replica, "session.backward(loss_of, microbatches)"
        if replica.stage == "computing":
            raise Misuse(f"{where} was called by loss_of itself; loss_of returns its loss instead")
        if replica.stage not in ("open", "summed"):
            raise Misuse(f"{where} belongs into the loop over session.steps(...)")
        if isinstance(loss_of, torch.Tensor) or not callable(loss_of):
            raise Misuse(
                f"{where}: loss_of is a {type(loss_of).__name__}; give a function that takes one microbatch and "
                "returns its loss"
            )
        if not hasattr(microbatches, "__len__") or not hasattr(microbatches, "__getitem__"):
            raise Misuse(
                f"{where}: a {type(microbatches).__name__} cannot be asked for one of its microbatches, of which each "
                "worker has others: give the microbatches of this step in a list, or use session.data(dataset, ...)"
            )
        count = len(microbatches)
        if not count or (self._microbatches and count != self._microbatches):
            raise Misuse(
                f"{where}: {count} microbatches in step {replica.step}, where "
                f"{self._microbatches or 'at least one'} are expected; every call has the same number of them"
            )
        if not torch.is_grad_enabled():
            raise Misuse(f"{where} is called under torch.no_grad(), where nothing has a gradient")
        if modes.nesting():
            raise Misuse(
                f"{where} is called under an autocast, which would change what its backward computes: put "
                "`with torch.autocast(...)` into loss_of, around the forward"
            )

    def _prior(self) -> list[torch.Tensor | None]:
        """The gradients that the step has so far, kept apart from the sum's memory."""
        if self.replica.phase == 0:
            return []
        params = self.replica.space.params.values()
        return [None if param.grad is None else param.grad.clone() for param in params]

    def _begin_phase(self, loss_of: LossOf, microbatches: Sequence[Any]) -> None:
        replica = self.replica
        if replica.phase == 0:
            if replica.collected().versions() != self._kept_versions:
                raise Misuse(
                    f"step {replica.step}: the model or the optimizer was changed before session.backward(...); what "
                    "changes them belongs after it"
                )
            replica.form.check(replica.step)
            self._optimizers.check()
        assert self._partial is not None and self._evidence is not None
        replica.recorder.asked(replica.version, loss_of, microbatches)
        replica.stage = "computing"
        replica.space.begin()
        self._partial.clear()
        self._evidence.begin()
        # One loss of each phase shows what it was made of.
        self._seen = False
        replica.still.step()
        replica.holdings.begin()
        self._make_scale()

    def _make_scale(self) -> None:
        """A scaler makes its scale when it is first asked, and a worker that computes nothing would not ask."""
        scaler = self.replica.scaler
        if scaler is not None:
            device = next(iter(self.replica.space.params.values())).device
            scaler.scale(torch.zeros((), device=device))
            self._scale = scaler.get_scale()

    def _compute(self, loss_of: LossOf, microbatches: Sequence[Any]) -> Summed:
        """Compute this worker's share, sum it over all, and see it committed.

        prepare  every worker has the sum of the phase
        commit   the keeper has written that all are prepared
        """
        replica, world, recorder = self.replica, self._world, self.replica.recorder
        version = replica.version
        while True:
            try:
                first, count = world.share()
                passing("step: share opened")
                if isinstance(microbatches, Microbatches):
                    microbatches.expect(first, count, end=self._facts.steps_total)
                recorder.computing((world.deep, first, count))
                replica.still.begin()
                summed = self._prepare(loss_of, microbatches, first, count)
                recorder.computed()
                replica.still.check(replica.step)
                self._check_finite(summed)
                world.commit(version, summed)
            except Interrupted:
                recorder.computed()
                continue
            return summed

    def _prepare(
        self, loss_of: LossOf, microbatches: Sequence[Any], first: int, count: int
    ) -> Summed:
        replica, partial, evidence = self.replica, self._partial, self._evidence
        assert partial is not None and evidence is not None
        if self._world.deep:
            partial.let_go()
            return self._world.play(replica.version, microbatches)
        kept = replica.kept
        before = [] if kept is None else kept.updates()
        missing = partial.missing(first, count)
        self._compare(loss_of, microbatches, missing)
        shown = set[int]()
        if self._world.batch_shown != "nothing":
            shown.add(sampled(first, count, replica.step))
        if self._world.twice is not None:
            shown.add(first)
        for microbatch in missing:
            given = self._given(microbatches, microbatch)
            numbers = self._compute_one(loss_of, given, microbatch)
            passing("step: microbatch computed", replica.space.params)
            if microbatch in shown or evidence.has(microbatch):
                evidence.sample(microbatch, given, numbers, whole=self._world.batch_shown == "all")
            partial.add(microbatch, numbers, first, count)
        self._show_late(loss_of, microbatches, first, count)
        if kept is not None and kept.updates() != before:
            raise Misuse(
                f"step {replica.step}: loss_of changed the model or the optimizer, but every worker calls it for other "
                "microbatches; change them after session.backward(...)"
            )
        self._world.gather(replica.version, partial, replica.total())
        return replica.space.summed(replica.total())

    def _prove(self, loss_of: LossOf, microbatches: Sequence[Any]) -> None:
        """Compute the microbatch by which this worker shows that it does what the job does."""
        asked = self._world.asked(self.replica.phase)
        if asked is not None:
            self._try_twice(loss_of, microbatches, [asked])
            self._compute_aside(loss_of, self._given(microbatches, asked), asked)

    def _compare(self, loss_of: LossOf, microbatches: Sequence[Any], missing: list[int]) -> None:
        """Compute what is compared with others', or with itself, and used for nothing else."""
        assert self._evidence is not None
        if missing:
            # The last one has no others before it here, and all of them when it counts.
            self._try_twice(loss_of, microbatches, [missing[-1], missing[0]])
        other = self._world.twice
        if other is not None and not self._evidence.has(other):
            self._compute_aside(loss_of, self._given(microbatches, other), other)

    def _show_late(
        self, loss_of: LossOf, microbatches: Sequence[Any], first: int, count: int
    ) -> None:
        """Compute one of this worker's again if a snapshot was asked for after they were: someone has to prove this step."""
        assert self._evidence is not None
        own = range(first, first + count)
        if own and self._world.batch_shown == "all" and not any(map(self._evidence.has, own)):
            again = sampled(first, count, self.replica.step)
            self._compute_aside(loss_of, self._given(microbatches, again), again)

    def _try_twice(self, loss_of: LossOf, microbatches: Sequence[Any], tried: list[int]) -> None:
        """Compute these microbatches of a process's first step once before, to see whether they come out the same.

        They are copies, because loss_of may write into its microbatch; if it does it gets a copy each time.
        """
        if self._tried:
            return
        self._copies, writes = True, False
        for microbatch in dict.fromkeys(tried):
            given = self._given(microbatches, microbatch)
            versions = versions_of(given)
            self._compute_aside(loss_of, given, microbatch)
            writes |= versions_of(given) != versions
        self._copies, self._tried = writes, True

    def _compute_aside(self, loss_of: LossOf, given: Any, microbatch: int) -> None:
        """Compute a microbatch whose gradients are looked at, and dropped."""
        assert self._evidence is not None
        numbers = self._compute_one(loss_of, given, microbatch)
        self._evidence.sample(microbatch, given, numbers, whole=self._world.batch_shown == "all")
        self.replica.space.take(numbers)

    def _given(self, microbatches: Sequence[Any], microbatch: int) -> Any:
        given = microbatches[microbatch]
        return copied(given) if self._copies else given

    def _compute_one(self, loss_of: LossOf, given: Any, microbatch: int) -> Numbers:
        """Leave the gradients of one microbatch in the model."""
        replica, notes = self.replica, self.replica.notes
        self._world.check()
        replica.seed_for(microbatch)
        if notes is not None:
            notes.skip()
        returned = called(loss_of, given, replica.scaler)
        if not self._seen:
            self._seen = True
            self._outside.look(returned.loss)
        if notes is not None:
            settle(replica.space.device)
            notes.lap(Kind.FORWARD, microbatch)
        (returned.loss / self._microbatches).backward()  # type: ignore[no-untyped-call]
        if notes is not None:
            settle(replica.space.device)
            notes.lap(Kind.BACKWARD, microbatch)
        return returned.numbers(self._scale)

    def _check_finite(self, summed: Summed) -> None:
        """Before the commit, so that a job that fails on it can be resumed from before it."""
        if self._world.nan != "fail" or summed.finite or self._overflows():
            return
        loss = summed.total.loss / self._microbatches
        raise NotFinite(
            f"step {self.replica.step}: the loss is {loss}, or one of its gradients is not finite"
        )

    def _overflows(self) -> bool:
        """Whether it is the scale of the loss that was too large.

        The scaler sees that in the sum, which is the same everywhere, skips the step and takes a smaller scale. A
        scale below 1 has made nothing larger.
        """
        return self.replica.scaler is not None and self._scale >= 1.0

    def _install(self, summed: Summed, prior: Sequence[torch.Tensor | None]) -> None:
        total, count = summed.total, self._microbatches
        metrics = {name: value / count for name, value in total.metrics.items()}
        self._result = Result(total.loss / count, metrics)
        # Of the first phase by their names; a later one may have a loss of its own.
        end = f".{self.replica.phase}" if self.replica.phase else ""
        told = {
            f"{name}{end}": value for name, value in ({"loss": self._result.loss} | metrics).items()
        }
        self._world.output.log(self.replica.step, told)
        self.replica.install(summed, prior)
        # Of an overflow the scaler makes no use, and so does whoever skips what is not finite.
        self._optimizers.unused = summed.finite

    def _give_up(self) -> None:
        """The rest of the body runs out on zeros, and what it does is overwritten then.

        No optimizer sees them: it would change the state by them, and others may be asking for it just now.
        """
        self._make_scale()
        self.replica.space.blank()
        self.replica.holdings.astray = True
        self._result = Result(math.nan, {}, void=True)
