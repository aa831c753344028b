"""What a training script sees of us: one object, three calls, and its own loop left in its hands.

    session = Session(model, optimizer, scheduler, microbatches=8)
    for step in session.steps(400):
        for x, y in session.share(batches(step)):
            session.backward(loss_of(x, y))
        optimizer.step()
        scheduler.step()

Alone, with no manager anywhere, the session is a world of one. In a job it is one of many, and whatever
happens to the others, the numbers are the same: the global batch, its order, the random streams
(torch, numpy and Python, seeded anew for every microbatch) and the order of additions depend on
the step only. With `deterministic=False` the order of additions is free: gradients take the memory of one, and
numbers differ by rounding where the layout does. What a script does between `steps` and `share`, and behind `share`, runs on every
worker alike, under a stream that depends on the step only.

A share may be empty: a newcomer that catches up gets the sum of a committed step without computing
anything. So what is needed behind the loop is `session.loss`, not a name from inside it.

A model that may be too large for one process is handed over unbuilt, `model = unbuilt(lambda: GPT(config))`: in a
job its values are made where they are kept.
"""

import hashlib
import random
import struct
import sys
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import FrameType, TracebackType
from typing import Any, TypeVar

import msgspec
import numpy as np
import torch

from agent.errors import CannotRecord, Misuse, NotFinite, StateError, WireError
from agent.faults import passing
from agent.owned import clipping, coupling, scaling
from agent.owned.holdings import Holdings
from agent.pipeline import modes
from agent.pipeline.births import Unborn
from agent.pipeline.body import Body
from agent.pipeline.doubts import Doubts
from agent.pipeline.record import Filled, attributes_kept
from agent.pipeline.recording import Recording, Told, nobody, outdated
from agent.pipeline.scaling import place
from agent.schedule import Kind
from agent.script.beside import Beside
from agent.script.between import refuse_between
from agent.script.carried import say_shown
from agent.script.form import Form
from agent.script.given import (
    check_modules,
    check_trained,
    check_unborn,
    say_clipped,
    say_divided,
    scaler_of,
)
from agent.script.gone_by import GoneBy
from agent.script.optimizers import Optimizers
from agent.script.order import Streams, refuse_order
from agent.script.rehearsal import MOST, Handed, Rehearsal
from agent.script.seen import Eyes
from agent.script.within import Within, behind_the_loop
from agent.source import own
from agent.source.found import Caller, looping, names_of
from agent.store.layers import Collected, LiveLayer, collect, fill
from agent.store.memory import Arena, copy_bytes
from agent.store.shares import Gathered
from agent.tensors import shards
from agent.tensors.away import computable, watch
from agent.tensors.device import number_of, settle
from agent.tensors.partial import partial_of
from agent.tensors.still import Still
from agent.tensors.sums import Sum, Summed, SumSpace
from agent.timeline import Notes
from agent.world import Abandoned, Alone, Facts, Interrupted, World

Batch = TypeVar("Batch")
Model = TypeVar("Model", bound=torch.nn.Module)


SENT_BACK = "others were lost with what only they had, and a loop that is left does no step again"


class _Reached(BaseException):
    """The body that is recorded has come to its `session.backward(loss)`."""

    def __init__(self, loss: Any) -> None:
        super().__init__()
        self.loss = loss


_world: World | None = None
_sessions: list["Session"] = []
_unborn: list[Unborn[Any]] = []


def unbuilt(factory: Callable[[], Model]) -> Model:
    """The model that `factory` builds. In a job no worker needs to have room for all of it: the values of a layer
    are made on those who keep it, and are the ones that a single process would have made.

    Whatever gives or changes values (initialisers, `.to(dtype)`) belongs into `factory`, and so does, last, `.to(device)`.
    Alone it is simply called.
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
    for each in (clipping, scaling):
        each.follow(lambda: _sessions[0].holdings if _sessions else None)


def _alone() -> Alone:
    """`python train.py`: what is refused there is told without the frames of ours, as in a job."""
    before = sys.excepthook

    def say(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, Misuse | StateError):
            sys.stderr.write(f"{own.traceback_of(error)}\n")
        else:
            before(kind, error, trace)

    sys.excepthook = say
    return Alone()


class Session:
    """One per script. `others` are whatever else must survive: optimizer, schedules, scaler."""

    _rows: Callable[[], object]  # what the script has been given to loop over

    def __init__(
        self,
        model: torch.nn.Module,
        *others: shards.Stateful,
        microbatches: int = 0,
        seed: int = 0,
        threads: int = 1,
        deterministic: bool = True,
    ) -> None:
        # First of all: it says how refusals are told.
        self._world = _world if _world is not None else _alone()
        if not isinstance(model, torch.nn.Module):
            raise Misuse(f"Session(model, ...): the model is a {type(model).__name__}")
        if microbatches < 1:
            raise Misuse(
                "Session(model, optimizer, microbatches=M): say of how many microbatches a step is made, at least 1"
            )
        # How many threads share an operation is part of its rounding, so it is fixed for all.
        torch.set_num_threads(threads)
        # Where there is the CPU only, `torch.manual_seed` takes 0.1 ms to note down who asks for a device's stream.
        everywhere = torch.accelerator.is_available()
        self._seed_torch = torch.manual_seed if everywhere else torch.default_generator.manual_seed
        self.microbatches, self.seed, self.deterministic = microbatches, seed, deterministic
        self.loss = float("nan")
        self.version, self.played = 0, False  # the latter: the script has been through a step here
        self.given = -1  # the newest version whose gradients the script has got, and changes it by
        self.objects: dict[str, shards.Stateful] = {"model": model}
        for index, thing in enumerate(others, start=1):
            if not hasattr(thing, "state_dict") or not hasattr(thing, "load_state_dict"):
                raise Misuse(f"Session: {thing!r} has no state_dict and load_state_dict to save")
            self.objects[f"{type(thing).__name__}{index}"] = thing
        modules = [thing for thing in self.objects.values() if isinstance(thing, torch.nn.Module)]
        check_modules(modules, built=not _unborn)
        check_unborn(_unborn, modules, others)
        check_trained(modules, others)
        for unborn in _unborn:
            unborn.used = self._fetch
        self.scaler, self._scale = scaler_of(others), 1.0
        self.unbuilt, self.birth_mark = bool(_unborn), "-".join(each.mark for each in _unborn)
        # made | bound | between | sharing | computing | shared | over; and whether what is here came from others once
        self._phase, self._loaded = "bound", False
        self.space = SumSpace(modules)
        self.holdings = Holdings(self.objects, _unborn)
        self._form, self._filled, self._still = Form(modules), Filled(modules), Still(modules)
        self._beside, self.eyes, self._doubts = Beside(self.objects), Eyes(modules), Doubts()
        self._total: Sum | None = None
        self._partial = partial_of(self.space, microbatches, deterministic=deterministic)
        self._rehearsal, self._handed = Rehearsal(self.space), Handed()
        self._facts = Facts(microbatches, 0)
        self.notes: Notes | None = None  # of the step in flight, if somebody asked for its timeline
        self._microbatch = self._backward_calls = 0
        self._microbatch_loss: float | torch.Tensor = 0.0
        self._kept: Collected | None = None
        self._arena = Arena()  # where optimizer state goes that there is no memory for yet
        self._kept_versions: list[int] = []
        self._asked: tuple[Caller, Sequence[object]] | None = None  # who shares what just now
        self._recording: Recording | None = None
        self._watched, self._gone_by = set[int](), GoneBy(self._model())
        self._optimizers = Optimizers(
            self.objects, self.space.params, lambda: self.version, lambda: self.holdings.astray
        )
        self._looked_at = False  # the loop, for what depends on the order of microbatches
        self._streams: Streams | None = None
        self._within: Within | None = None
        self._apart = False  # looked at, for what depends on all gradients
        if _sessions:
            raise Misuse("the script made a second session; one holds everything that is trained")
        _sessions.append(self)
        self._phase = "made"

    def summed(self, payload: memoryview, present: bytes) -> Summed:
        """The sum of a whole step, from its bytes."""
        total = self.total()
        copy_bytes(payload, total.memory(0, self.space.total_bytes))
        total.present[:] = present
        return self.space.summed(total)

    def total(self) -> Sum:
        """Room for the sum of a whole step, which not everybody needs."""
        self._total = self._total or Sum(self.space)
        return self._total

    def warm(self, arena: Arena) -> None:
        """Take the memory of a step before there is one, and `arena` for the optimizer's state that will be loaded.

        What is freed here is what the first backward finds: see `agent.instance.worker.keep_memory`.
        """
        self.total().flat.zero_()
        self._partial.reserve()
        params = [*self.space.params.values(), *self.space.params.values()]
        _ = [torch.empty_like(param, requires_grad=False).zero_() for param in params]
        self._arena = arena

    @property
    def sums_held(self) -> int:
        """How many times the size of the gradients a worker holds of them at most, until they are the sum of the step."""
        return self._partial.held

    @property
    def leader(self) -> bool:
        """True on exactly one worker: the one that prints."""
        if self._phase == "made":
            raise Misuse(
                "session.leader is asked before the loop over session.steps(...), where nobody leads yet; and it may be "
                "another worker in a later step. Ask in each step where it is needed, `if session.leader:`"
            )
        return self._world.leader

    @property
    def inside(self) -> int | None:
        """The step that the script is in, as its loop counts them; None outside of the loop."""
        return (
            self.version if self._phase in ("between", "sharing", "computing", "shared") else None
        )

    @property
    def notice_s(self) -> float | None:
        """Seconds until this machine is taken away, if the cloud has said so."""
        return self._world.notice_s

    def steps(self, total: int) -> Iterator[int]:
        """The steps that are still to do, up to `total`."""
        return self._beside.given_out(self._steps(total))

    def _steps(self, total: int) -> Generator[int, None, None]:
        if self._phase != "made":
            raise Misuse(
                "session.steps() was called twice; a script has one training loop, over the steps of all epochs: "
                "epoch, place = divmod(step, steps_per_epoch)"
            )
        self._facts = Facts(self.microbatches, total)
        self._form.check(self.version)
        while True:
            self._phase, self._kept = "bound", None
            self.holdings.give_back()
            self._world.boundary(self, self._facts)
            self._arena = Arena()
            if self.version >= total:
                self._phase, self._kept = "over", None
                if self._finished():
                    break
                continue  # sent back to before the end
            self._kept_versions = self.collected().versions()
            self.seed_for(self.version, self.microbatches)
            self._phase = "between"
            try:
                yield self.version
            finally:
                self._world.settle()  # a script that leaves its loop here may do with its model what it likes
            if self._phase != "shared":
                raise Misuse(
                    f"step {self.version} ended without a complete loop over session.share(...): "
                    "every step needs one, run to its end"
                    + (
                        ""
                        if self.version
                        else f"; and in step 0 up to {MOST} microbatches come twice"
                    )
                )
            self.version, self.played = self.version + 1, True

    def close(self) -> None:
        """The script has ended. If it left its loop early, what it has now is the end."""
        if self._phase == "made":
            raise Misuse("the script made a session, but never looped over session.steps(...)")
        if self._phase in ("sharing", "computing"):
            raise Misuse(f"the script ended in the middle of step {self.version}")
        if self._phase in ("between", "shared"):
            self.holdings.give_back()
            self.version += self._phase == "shared"
            self._kept = None
            self.leave()

    def leave(self) -> None:
        """Before the last step, as the script has, or as others have: with the version that there is."""
        self._phase = "over"
        if not self._finished():
            raise WireError(SENT_BACK)

    def _finished(self) -> bool:
        if not self._world.finish(self, self._facts):
            return False
        self._optimizers.close()
        return True

    def share(self, batches: Sequence[Batch]) -> Iterator[Batch]:
        """This worker's microbatches of the step. When the loop ends, the gradients are there."""
        if self._phase != "between":
            raise Misuse(
                "session.share(...) belongs into the body of `for step in session.steps(...)`, "
                "once per step"
            )
        if not hasattr(batches, "__len__") or not hasattr(batches, "__getitem__"):
            raise Misuse(
                f"session.share(batches): a {type(batches).__name__} cannot be asked for one of its microbatches, "
                "of which each worker has others: give the microbatches of this step in a list; of a DataLoader, one over the "
                "step's part of the data, `list(DataLoader(Subset(data, rows_of(step)), batch_size=B))`"
            )
        if len(batches) != self.microbatches:
            raise Misuse(
                f"session.share(batches): {len(batches)} microbatches in step {self.version}, but "
                f"Session(microbatches={self.microbatches})"
            )
        if self._kept is not None and self._kept.versions() != self._kept_versions:
            raise Misuse(
                f"step {self.version}: the model or the optimizer was changed before "
                "session.share(...); what changes them belongs behind it"
            )
        self._phase = "sharing"
        self._form.check(self.version)
        self._optimizers.check()
        frame = sys._getframe(1)
        rows = self._share(batches, Caller(frame, frame.f_lasti))
        self._rows = weakref.ref(rows)
        return rows

    def _share(self, batches: Sequence[Batch], caller: Caller) -> Iterator[Batch]:
        asking = sys._getframe().f_back
        caller = looping(caller, asking, self._rows())
        self._look(caller, asking, batches)
        self._rehearsal.begin(self.version, caller, asking)
        del asking, caller  # nobody else holds these frames
        step = self.version
        self.space.begin()
        self._partial.clear()
        self._handed.clear()
        self._still.step()
        self.holdings.norms, self.holdings.astray = {}, False
        if self.scaler is not None:
            # It makes its scale when it is first asked, and whoever computes nothing would not ask.
            self.scaler.scale(torch.zeros((), device=next(iter(self.space.params.values())).device))
            self._scale = self.scaler.get_scale()  # which changes behind the loop only
        try:
            summed = self._world.logged(step)
            if summed is None:
                self._gone_by.begin()
                summed = yield from self._compute(step, batches)
                self.eyes.look_again()
                self._gone_by.look_again()
            with self._world.unaided():
                self.seed_for(step, self.microbatches + 1)
                self._install(summed)
                passing("step: installed")
        except Abandoned:
            # The rest of the body runs out on zeros, and what it does is then overwritten. No optimizer sees them:
            # it would change the state by them, and others may be asking for it just now.
            self.space.blank()
            self.holdings.astray = True
        self._world.settle()
        self._phase, self._asked = "shared", None

    def _look(self, caller: Caller, asking: FrameType | None, batches: Sequence[object]) -> None:
        """At what the loop goes by, when it asks for its first microbatch: only then it is known where it is."""
        self._beside.look(caller, self.version, self._facts.steps_total)
        self.eyes.look(self.version, batches, whole=self.holdings.here is None)
        self.eyes.goes_by(self._gone_by.at(caller, self.version, self._world.generation))
        self._asked, self._streams, self._within = (caller, batches), None, None
        if not self._looked_at:
            self._looked_at, self._streams = True, Streams(caller)
            refuse_order(caller, asking)
            refuse_between(caller)
            self._within = Within(caller)
            if self.version == 0 and self._world.leader:
                say_divided(caller, self.microbatches)
                say_clipped(caller, self.microbatches)
                say_shown(caller)

    def _compute(self, step: int, batches: Sequence[Batch]) -> Generator[Batch, None, Summed]:
        while True:
            try:
                first, count = self._world.share()
                if self._asked is not None:
                    caller, _ = self._asked
                    self.eyes.goes_by(self._gone_by.entering(caller, self._world.generation))
                passing("step: share opened")
                self._filled.begin((self._world.deep, first, count))
                self._still.begin()
                if self._world.deep:
                    self._partial.let_go()
                    summed = self._world.play(step, batches)
                else:
                    yield from self._run_body(step, batches, first, count)
                    self._world.gather(step, self._partial, self.total())
                    summed = self.space.summed(self.total())
                self._filled.look()
                self._still.check(step)
                self._check_finite(step, summed)
                self._form.check_written(step, self.space.written(summed.present))
                self._world.commit(step, summed)
                self.eyes.seen.clear()
            except Interrupted:
                self._filled.look()
                continue
            return summed

    def _run_body(
        self, step: int, batches: Sequence[Batch], first: int, count: int
    ) -> Iterator[Batch]:
        kept = self._kept
        refuse = partial(self._refuse_kept, step, kept, [] if kept is None else kept.updates())
        missing = self._partial.missing(first, count)
        for microbatch in self._rehearsal.ahead(missing):
            with self._rehearsal.rehearsing(microbatch, batches[microbatch]) as rehearsed:
                yield from self._play_one(step, microbatch, rehearsed.given)
                rehearsed.loss = self._microbatch_loss
        for microbatch in missing:
            given = batches[microbatch]
            self._handed.hand(microbatch, given)
            with self._rehearsal.performing(microbatch):
                yield from self._play_one(step, microbatch, given)
            self._rehearsal.compare(microbatch, self._microbatch_loss, refuse)
            passing("step: microbatch computed", self.space.params)
            self._partial.add(microbatch, self._microbatch_loss, first, count)
        refuse()

    def _refuse_kept(self, step: int, kept: Collected | None, before: list[int]) -> None:
        """What has become another in the loop, and is not to."""
        if self._streams is not None:
            self._streams.refuse_draws()
        if self._within is not None:
            self._within.refuse_kept()
        if kept is not None and kept.updates() != before:
            raise Misuse(
                f"step {step}: the model or the optimizer was changed in the loop over session.share(...), where "
                f"every worker has other microbatches; {behind_the_loop(self.objects.values())}"
            )

    def _play_one(self, step: int, microbatch: int, given: Batch) -> Iterator[Batch]:
        """The script's loop, once."""
        self._world.check()
        self.seed_for(step, microbatch)
        self._microbatch, self._microbatch_loss, self._backward_calls = microbatch, 0.0, 0
        if self.notes is not None:
            self.notes.skip()
        self._phase = "computing"
        yield given
        self._phase = "sharing"
        if not self._backward_calls:
            raise Misuse(
                f"step {step}, microbatch {microbatch}: session.backward was not called before the next microbatch was "
                "asked for: the loop over session.share(...) has one at a time, and calls it for each"
            )

    def backward(self, loss: torch.Tensor) -> None:
        """Gradients of `loss` / microbatches: the mean over the step is what is trained on."""
        if self._phase == "recording":
            self._refuse_autocast()
            raise _Reached(loss)
        if self._phase != "computing":
            raise Misuse("session.backward(loss) belongs into a loop over session.share(...)")
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            what = f"shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else repr(loss)
            raise Misuse(f"session.backward(loss): the loss must be one number, not {what}")
        if self.notes is not None:
            settle(self.space.device)
            self.notes.lap(Kind.FORWARD, self._microbatch)
        (loss / self.microbatches).backward()  # type: ignore[no-untyped-call]
        if self.notes is not None:
            settle(self.space.device)
            self.notes.lap(Kind.BACKWARD, self._microbatch)
        self._microbatch_loss += number_of(loss) / self._scale
        self._backward_calls += 1

    def _refuse_autocast(self) -> None:
        """A stage's backward is under none; alone it would compute in half precision what the forward did not."""
        if modes.nesting():
            raise CannotRecord(
                f"{place(2)}: session.backward(...) is called under an "
                "autocast, which would change what the backward computes, and stages call it outside: put it behind "
                "the `with`, or train with depth 1"
            )

    def part(self) -> None:
        """From now on each worker may have gradients of its own layers only."""
        if not self._apart:
            assert self._asked is not None
            coupling.refuse(self.objects.values(), self._asked[0])
            self._apart = True

    def recording(self, told: Told = nobody) -> Recording:
        """What the loop's body computes, as a graph. `CannotRecord` says in a line why it has none. For `told` see `Body`.

        It can be had from the first `share` on, and is made anew when the body would read other numbers.
        """
        if self._asked is None and self._recording is None:
            raise Misuse("session.recording() has nothing to record before session.share(...)")
        if self._asked is not None:
            caller, batches = self._asked
            because = "" if self._recording is None else outdated(self._recording, caller)
            if self._recording is None or because:
                self._record(caller, batches, told, because)
        assert self._recording is not None
        return self._recording

    def to_play(self, told: Told = nobody, *, entered: bool) -> Recording:
        """The recording, looked at if it is time to. `entered`: in the first step of a layout."""
        self._filled.empty()  # who was there before has tables that newcomers have not made yet
        found = self.recording(told)
        if self._asked is None:
            return found
        caller, batches = self._asked
        look = partial(self._computes, caller)
        if not self._doubts.right(self.version, look, entered=entered):
            self._record(caller, batches, told, "")
        assert self._recording is not None
        return self._recording

    def _computes(self, caller: Caller) -> bool:
        assert self._recording is not None
        model = self._model()
        with attributes_kept(model), computable(model):
            self._filled.empty()
            body, known = Body(caller), self._recording
            right = body.computes(known, model, self._run_recorded, self.scaler)
        known.reads.settle(names_of(caller.frame))
        return right

    def _model(self) -> torch.nn.Module:
        modules = [thing for thing in self.objects.values() if isinstance(thing, torch.nn.Module)]
        return modules[0] if len(modules) == 1 else torch.nn.ModuleList(modules)

    def adopt(self, recording: Recording) -> None:
        """It is the same loop's, begun with a microbatch of another worker's."""
        self._recording = recording

    def _record(self, caller: Caller, batches: Sequence[object], told: Told, because: str) -> None:
        model = self._model()
        body = Body(caller)
        try:
            with attributes_kept(model), computable(model):
                self._filled.empty()
                found = body.record(
                    model, self._run_recorded, batches, self.scaler, told, self._filled.empty
                )
        except Misuse:
            if self._streams is not None:
                self._streams.refuse_draws()  # says better why
            raise
        if self._recording is not None and found.same_as(self._recording):
            found = found.begun_with(self._recording.variants.first)
        self._recording = msgspec.structs.replace(found, because=because)
        self._doubts.recorded(self.version)

    def _run_recorded(self, body: Callable[[], None]) -> Any:
        before, self._phase = self._phase, "recording"
        try:
            body()
        except _Reached as reached:
            return reached.loss
        finally:
            self._phase = before
        raise CannotRecord("the loop over session.share(...) ended without session.backward(loss)")

    def _check_finite(self, step: int, summed: Summed) -> None:
        """Before the commit, so that a job that fails on it can be resumed from before it."""
        if self._world.nan == "fail" and not summed.finite and not self._overflows():
            loss = float(summed.total.loss) / self.microbatches
            raise NotFinite(
                f"step {step}: the loss is {loss}, or one of its gradients is not finite"
            )

    def _overflows(self) -> bool:
        """Whether it is the scale of the loss that was too large: the scaler sees that in the sum, which is the
        same everywhere, skips the step and takes a smaller one. A scale below 1 has made nothing larger."""
        return self.scaler is not None and self._scale >= 1.0

    def _install(self, summed: Summed) -> None:
        self.given = self.version
        self.loss = float(summed.total.loss) / self.microbatches
        self.holdings.norms = {}
        if summed.held is not None:
            self._keep(summed.held)
        if self.holdings.here is not None:
            self.holdings.followers.begin()
        if summed.finite or self.scaler is not None:
            summed.total.space.install(summed.total, self.microbatches)
            self._optimizers.unused = summed.finite  # of an overflow the scaler makes no use
            self.holdings.hear(summed.norms)
        else:
            self.space.begin()  # a skipped step is committed, and changes nothing

    def seed_for(self, step: int, stream: int) -> None:
        """One stream per microbatch, one for what comes before, one for what comes after."""
        text = struct.pack("<qqq", self.seed, step, stream)
        number = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
        self._seed_torch(number >> 1)
        random.seed(number)
        np.random.seed(number & 0xFFFFFFFF)

    @property
    def state_bytes(self) -> int:
        return sum(collect(self.objects).sizes().values())

    @property
    def newborn(self) -> bool:
        """Whether what is not here can be born: it was handed over unbuilt, and no step has changed it. Who was sent
        back to the beginning has had steps: what these have made of buffers, and of parameters of one number, is here.
        """
        return self.unbuilt and not self._loaded and self.version == 0 and self._phase != "shared"

    def bear(self, layers: frozenset[str]) -> None:
        """Have these layers with their initial values, and of those that can be born no others."""
        self._forget()
        self.holdings.unbear(layers)
        self.holdings.bear(layers)
        self.holdings.arrived(layers)
        if self._kept is not None:
            self._kept = self._collect()

    def bear_to_look(self) -> None:
        """All weights, until the step begins."""
        lacking = self.holdings.lacking(self.holdings.all)
        self.holdings.bear(lacking)
        self.holdings.borrowed |= lacking

    @property
    def next_version(self) -> int:
        """The version that the script is at, between the sum of a step and the next step, too."""
        return self.version + (self._phase == "shared")

    def borrow(self, gathered: Gathered, layers: frozenset[str]) -> None:
        """Weights to look at until the next step begins."""
        models = {k: v for k, v in self.objects.items() if isinstance(v, torch.nn.Module)}
        self.holdings.borrow(layers)
        with self._unseen():
            fill(gathered.layers.values(), gathered.read, models, layers)

    @property
    def kept(self) -> Collected | None:
        """The state as it was when the step began, as far as it is here."""
        return None if self._phase == "shared" else self._kept

    def collected(self) -> Collected:
        """The state at the step's boundary. It can be had until the step's sum is installed: its tensors
        do not change before, and what else the script has set for the step already is not in it.
        """
        if self._kept is None:
            self._kept = self._collect()
        return self._kept

    def _collect(self) -> Collected:
        with self._unseen():
            try:
                state, here = collect(self.objects), self.holdings.here
            except StateError:
                self._form.check(self.version)  # says what has become of the model
                raise
        return state if here is None else state.only(here)

    @contextmanager
    def _unseen(self) -> Iterator[None]:
        """A state_dict of ours is not the script's."""
        phase, self._phase = self._phase, "bound"
        try:
            yield
        finally:
            self._phase = phase

    def snapshot(self) -> Collected:
        """The state as the script has it now."""
        return self._collect()

    def settled(self) -> list[LiveLayer]:
        return self.collected().finish()

    def load(self, gathered: Gathered, version: int, only: frozenset[str] | None = None) -> None:
        """Take the state over; of what is not in `only`, there is nothing here then."""
        self.eyes.forget()
        self._forget()
        self._world.settle()
        self._kept = None
        if only is None:
            self.holdings.make_room(self.holdings.all)
            self.holdings.here = None
        else:
            self._keep(only)
            self.holdings.make_room(only)
        fill(gathered.layers.values(), gathered.read, self.objects, only, arena=self._arena)
        self.version, self.given, self._loaded = version, -1, True

    def _forget(self) -> None:
        """What is here has come from others."""
        self._still.forget()
        self.holdings.followers.forget()

    def _keep(self, layers: frozenset[str]) -> None:
        """Only these are here from now on. Whoever uses the model beside the step has the rest fetched."""
        self.holdings.keep(layers)
        for thing in self.objects.values():
            if isinstance(thing, torch.nn.Module) and id(thing) not in self._watched:
                self._watched.add(id(thing))
                watch(thing, self._fetch)

    def _fetch(self) -> None:
        if self._phase in ("made", "over") and self.unbuilt and self.holdings.here is not None:
            raise Misuse(
                "the model was handed over unbuilt, and is nowhere as a whole before and behind the loop over "
                "session.steps(...): use it in a step, behind optimizer.step() for one. The trained weights are in "
                "the job's export"
            )
        if self._phase in ("between", "shared") and self.holdings.here is not None:
            self._world.fetch()

    def add(self, gathered: Gathered, layers: frozenset[str]) -> None:
        """Layers that were not here, of the version that the others have.

        What is set for an optimizer is here since the state was loaded, and the script may have set it anew.
        """
        self._forget()
        self.holdings.make_room(layers)
        with self._unseen():
            fill(gathered.layers.values(), gathered.read, self.objects, layers, settings=False)
        self.holdings.arrived(layers)
        if self._kept is not None:
            self._kept = self._kept.joined(self._collect().only(layers))
        if self._phase == "sharing":
            self.space.begin()  # buffers have come as well, and they are the step's start
