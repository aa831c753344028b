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
the step only. What a script does between `steps` and `share`, and behind `share`, runs on every
worker alike, under a stream that depends on the step only.

A share may be empty: a newcomer that catches up gets the sum of a committed step without computing
anything. So what is needed behind the loop is `session.loss`, not a name from inside it.
"""

import hashlib
import random
import struct
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, Protocol, TypeVar

import msgspec
import numpy as np
import torch

from agent import shards, tree
from agent.clipping import follow
from agent.errors import Misuse, NotFinite
from agent.faults import passing
from agent.holdings import Holdings
from agent.messages import NanPolicy
from agent.pipeline.body import Body, Caller, Recording, outdated
from agent.pipeline.record import CannotRecord
from agent.schedule import Kind
from agent.store.layers import Collected, LiveLayer, collect, fill
from agent.store.memory import copy_bytes
from agent.store.shares import Gathered
from agent.sums import Contribution, Sum, Summed, SumSpace
from agent.timeline import Notes

Batch = TypeVar("Batch")


class Interrupted(Exception):  # noqa: N818 - it says what happened, and is no error
    """The layout changed while a step was in flight: the step goes on under the new one."""


class Abandoned(Exception):  # noqa: N818
    """The job went on without this worker: the step in flight here has no meaning any more."""


class _Reached(BaseException):
    """The body that is recorded has come to its `session.backward(loss)`."""

    def __init__(self, loss: Any) -> None:
        super().__init__()
        self.loss = loss


class Facts(msgspec.Struct, frozen=True):
    """What the others need to know about a session."""

    microbatches: int
    steps_total: int


class World(Protocol):
    """Those who train together. A version is a count of committed steps."""

    nan: NanPolicy

    @property
    def leader(self) -> bool: ...

    @property
    def notice_s(self) -> float | None: ...

    def boundary(self, session: "Session", facts: Facts) -> None:
        """Return when `session.version` is the version that everyone goes on from."""

    def logged(self, step: int) -> tuple[memoryview, bytes] | None:
        """The sum of a step that is committed already, to be applied again."""

    def share(self) -> tuple[int, int]:
        """The first and the number of this worker's microbatches."""

    @property
    def deep(self) -> bool:
        """Whether chains of several workers compute a microbatch."""

    def play(self, step: int, batches: Sequence[object]) -> Summed:
        """All of the microbatches and `gather` in one, where the layout is deep."""

    def fetch(self) -> None:
        """Get the layers that are not here from those who have them, for the script to use."""

    def check(self) -> None:
        """Raise `Interrupted` if the step cannot go on as it began."""

    def gather(self, step: int, partial: "Partial", total: Sum) -> None:
        """Sum over everyone into `total`."""

    def commit(self, step: int, summed: Summed) -> None:
        """Return when the step is committed: from here on nobody goes back behind it."""

    def finish(self, session: "Session", facts: Facts) -> None:
        """The loop is over: put the final state into safe hands."""


class Alone:
    """A world of one: nothing to agree on."""

    nan: NanPolicy = "fail"
    leader = True
    notice_s = None
    deep = False

    def boundary(self, session: "Session", facts: Facts) -> None:  # noqa: ARG002
        self._microbatches = facts.microbatches

    def logged(self, step: int) -> None:  # noqa: ARG002 - nothing is ever replayed alone
        return None

    def share(self) -> tuple[int, int]:
        return 0, self._microbatches

    def play(self, step: int, batches: Sequence[object]) -> Summed:
        raise NotImplementedError  # nobody is deep alone

    def fetch(self) -> None:
        return None

    def check(self) -> None:
        return None

    def gather(self, step: int, partial: "Partial", total: Sum) -> None:  # noqa: ARG002
        (whole,) = partial.nodes(0, self._microbatches)
        total.flat.copy_(whole.flat)
        total.present[:] = whole.present

    def commit(self, step: int, summed: Summed) -> None:  # noqa: ARG002
        return None

    def finish(self, session: "Session", facts: Facts) -> None:  # noqa: ARG002
        return None


class Partial:
    """The sums of a step that this worker has so far, as nodes of the canonical tree.

    They outlive a change of layout: a survivor computes only what nobody has computed for it yet.
    """

    def __init__(self, space: SumSpace, microbatches: int) -> None:
        self.space = space
        self._microbatches = microbatches
        self._held: dict[tree.Node, Sum | Contribution] = {}
        self._spare: list[Sum] = []

    def clear(self) -> None:
        self._spare += [held for held in self._held.values() if isinstance(held, Sum)]
        self._held.clear()

    def missing(self, first: int, count: int) -> list[int]:
        nodes = tree.nodes_of(first, count, self._microbatches)
        return [
            leaf for node in nodes for leaf in tree.missing(node, self._held, self._microbatches)
        ]

    def add(self, microbatch: int, loss: float, first: int, count: int) -> None:
        """Take in what the model's gradients hold now, and add up what is complete by it."""
        within, node = range(first, first + count), tree.lowest((0, microbatch), self._microbatches)
        self._held[node] = self.space.take(loss)
        while (family := self._family(node, within)) is not None:
            node, left, right = family
            if left not in self._held or right not in self._held:
                return
            self._held[node] = self._join(self._held.pop(left), self._held.pop(right))

    def _join(self, left: Sum | Contribution, right: Sum | Contribution) -> Sum:
        """Into a half that is a sum already, if one is: a + b has the bits of b + a."""
        if isinstance(left, Contribution) and isinstance(right, Contribution):
            total = self._room()
            self.space.join(total, left, right)
            return total
        if isinstance(left, Contribution):
            left, right = right, left
        assert isinstance(left, Sum)
        if isinstance(right, Contribution):
            self.space.accumulate(left, right)
        else:
            self.space.add(left, right)
            self._spare.append(right)
        return left

    def _room(self) -> Sum:
        return self._spare.pop() if self._spare else Sum(self.space)

    def _family(
        self, node: tree.Node, within: range
    ) -> tuple[tree.Node, tree.Node, tree.Node] | None:
        family = tree.family(node, self._microbatches)
        if family is None:
            return None
        covered = tree.covers(family[0], self._microbatches)
        return family if covered.start in within and covered[-1] in within else None

    def nodes(self, first: int, count: int) -> list[Sum]:
        return [self._whole(node) for node in tree.nodes_of(first, count, self._microbatches)]

    def _whole(self, node: tree.Node) -> Sum:
        """The sum of a node; its halves may come from different layouts, and are added now."""
        held = self._held.get(node)
        if held is None:
            left, right = (
                tree.lowest(half, self._microbatches)
                for half in tree.children(node, self._microbatches)
            )
            held = self._join(self._whole(left), self._whole(right))
            del self._held[left], self._held[right]
        elif isinstance(held, Contribution):
            total = self._room()
            self.space.write(total, held)
            held = total
        self._held[node] = held
        return held


_world: World | None = None
_sessions: list["Session"] = []


def made() -> list["Session"]:
    """The sessions that the script has made so far."""
    return _sessions


def join(world: World) -> None:
    """Sessions made in this process from now on belong to `world`."""
    global _world  # noqa: PLW0603 - the script makes its session itself; there is no other way in
    _world = world
    follow(lambda: _sessions[0].holdings if _sessions else None)


def _check_names(modules: Sequence[torch.nn.Module]) -> None:
    """Sums, snapshots and the optimizer's state go by the name of a parameter or buffer."""
    seen: set[str] = set()
    for module in modules:
        names = {name for name, _ in (*module.named_parameters(), *module.named_buffers())}
        if both := sorted(names & seen):
            raise Misuse(
                f"Session: two of the models both have a tensor called {both[0]!r}. Put them into one "
                "nn.ModuleDict and give that to Session, so that every name is there once"
            )
        seen |= names


class Session:
    """One per script. `others` are whatever else must survive: optimizer, schedules, scaler."""

    def __init__(
        self,
        model: torch.nn.Module,
        *others: shards.Stateful,
        microbatches: int,
        seed: int = 0,
        threads: int = 1,
    ) -> None:
        if not isinstance(model, torch.nn.Module):
            raise Misuse(f"Session(model, ...): the model is a {type(model).__name__}")
        if microbatches < 1:
            raise Misuse(f"Session(microbatches={microbatches}): a step needs at least one")
        # How many threads share an operation is part of its rounding, so it is fixed for all.
        torch.set_num_threads(threads)
        self.microbatches = microbatches
        self.seed = seed
        self.loss = float("nan")
        self.version = 0
        self.objects: dict[str, shards.Stateful] = {"model": model}
        for index, thing in enumerate(others, start=1):
            if not hasattr(thing, "state_dict") or not hasattr(thing, "load_state_dict"):
                raise Misuse(f"Session: {thing!r} has no state_dict and load_state_dict to save")
            self.objects[f"{type(thing).__name__}{index}"] = thing
        modules = [thing for thing in self.objects.values() if isinstance(thing, torch.nn.Module)]
        _check_names(modules)
        scalers = [thing for thing in others if isinstance(thing, torch.amp.GradScaler)]
        if len(scalers) > 1:
            raise Misuse(
                "Session: two GradScalers were given; one scales the loss of all that is trained"
            )
        self._scaler = scalers[0] if scalers and scalers[0].is_enabled() else None
        self.space = SumSpace(modules)
        self.holdings = Holdings(self.objects)
        self._total: Sum | None = None
        self._partial = Partial(self.space, microbatches)
        self._world = _world if _world is not None else Alone()
        self._phase = "made"  # made | bound | between | sharing | computing | shared | over
        self._facts = Facts(microbatches, 0)
        self.notes: Notes | None = None  # of the step in flight, if somebody asked for its timeline
        self._microbatch, self._microbatch_loss = 0, 0.0
        self._backward_calls = 0
        self._kept: Collected | None = None
        self._kept_versions: list[int] = []
        self._asked: tuple[Caller, Sequence[object]] | None = None  # who shares what just now
        self._recording: Recording | None = None
        self._watched: set[int] = set()
        if _sessions:
            raise Misuse("the script made a second session; one holds everything that is trained")
        _sessions.append(self)

    def total(self) -> Sum:
        """Room for the sum of a whole step, which not everybody needs."""
        self._total = self._total or Sum(self.space)
        return self._total

    @property
    def leader(self) -> bool:
        """True on exactly one worker: the one that prints."""
        return self._world.leader

    @property
    def notice_s(self) -> float | None:
        """Seconds until this machine is taken away, if the cloud has said so."""
        return self._world.notice_s

    def steps(self, total: int) -> Iterator[int]:
        """The steps that are still to do, up to `total`."""
        if self._phase != "made":
            raise Misuse("session.steps() was called twice; a script has one training loop")
        self._facts = Facts(self.microbatches, total)
        while True:
            self._phase, self._kept = "bound", None
            self.holdings.give_back()
            self._world.boundary(self, self._facts)
            if self.version >= total:
                break
            self._kept = self._collect()
            self._kept_versions = self._kept.versions()
            self.seed_for(self.version, self.microbatches)
            self._phase = "between"
            yield self.version
            if self._phase != "shared":
                raise Misuse(
                    f"step {self.version} ended without a complete loop over session.share(...): "
                    "every step needs one, run to its end"
                )
            self.version += 1
        self._over()

    def close(self) -> None:
        """The script has ended. If it left its loop early, what it has now is the end."""
        if self._phase == "made":
            raise Misuse("the script made a session, but never looped over session.steps(...)")
        if self._phase in ("sharing", "computing"):
            raise Misuse(f"the script ended in the middle of step {self.version}")
        if self._phase in ("between", "shared"):
            self.holdings.give_back()
            self.version += self._phase == "shared"
            self._over()

    def _over(self) -> None:
        self._phase, self._kept = "over", None
        self._world.finish(self, self._facts)

    def share(self, batches: Sequence[Batch]) -> Iterator[Batch]:
        """This worker's microbatches of the step. When the loop ends, the gradients are there."""
        if self._phase != "between":
            raise Misuse(
                "session.share(...) belongs into the body of `for step in session.steps(...)`, "
                "once per step"
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
        self._check_params()
        frame = sys._getframe(1)
        self._asked = Caller(frame, frame.f_lasti), batches
        return self._share(batches)

    def _check_params(self) -> None:
        """Whatever began to train later would be in no sum: every worker would train it alone."""
        for thing in self.objects.values():
            if not isinstance(thing, torch.nn.Module):
                continue
            for name, param in thing.named_parameters():
                if param.requires_grad and name not in self.space.params:
                    raise Misuse(
                        f"step {self.version}: the parameter {name!r} began to train after Session(...) was "
                        "made. Let it train from the beginning, and keep it still with a learning rate of 0"
                    )

    def _share(self, batches: Sequence[Batch]) -> Iterator[Batch]:
        step = self.version
        self.space.begin()
        self._partial.clear()
        self.holdings.norms = {}
        if self._scaler is not None:
            # It makes its scale when it is first asked, and whoever computes nothing would not ask.
            self._scaler.scale(
                torch.zeros((), device=next(iter(self.space.params.values())).device)
            )
        try:
            if (logged := self._world.logged(step)) is not None:
                total = self.total()
                copy_bytes(logged[0], total.memory(0, self.space.total_bytes))
                total.present[:] = logged[1]
                summed = self.space.summed(total)
            else:
                summed = yield from self._compute(step, batches)
            self.seed_for(step, self.microbatches + 1)
            self._install(summed)
            passing("step: installed")
        except Abandoned:
            # The rest of the body runs out on nothing, and what it does is then overwritten. No zeros: an
            # optimizer would change the state by them, and others may be asking for it just now.
            self.space.begin()
        self._phase, self._asked = "shared", None

    def _compute(self, step: int, batches: Sequence[Batch]) -> Generator[Batch, None, Summed]:
        while True:
            try:
                first, count = self._world.share()
                passing("step: share opened")
                if self._world.deep:
                    summed = self._world.play(step, batches)
                else:
                    yield from self._run_body(step, batches, first, count)
                    self._world.gather(step, self._partial, self.total())
                    summed = self.space.summed(self.total())
                self._check_finite(step, summed)
                self._world.commit(step, summed)
            except Interrupted:
                continue
            return summed

    def _run_body(
        self, step: int, batches: Sequence[Batch], first: int, count: int
    ) -> Iterator[Batch]:
        for microbatch in self._partial.missing(first, count):
            self._world.check()
            self._open(step, microbatch)
            yield batches[microbatch]
            self._take(step, microbatch, first, count)

    def _open(self, step: int, microbatch: int) -> None:
        self.seed_for(step, microbatch)
        self._microbatch, self._microbatch_loss, self._backward_calls = microbatch, 0.0, 0
        if self.notes is not None:
            self.notes.skip()
        self._phase = "computing"

    def _take(self, step: int, microbatch: int, first: int, count: int) -> None:
        self._phase = "sharing"
        if not self._backward_calls:
            raise Misuse(f"step {step}, microbatch {microbatch}: session.backward was not called")
        passing("step: microbatch computed", self.space.params)
        self._partial.add(microbatch, self._microbatch_loss, first, count)

    def backward(self, loss: torch.Tensor) -> None:
        """Gradients of `loss` / microbatches: the mean over the step is what is trained on."""
        if self._phase == "recording":
            raise _Reached(loss)
        if self._phase != "computing":
            raise Misuse("session.backward(loss) belongs into a loop over session.share(...)")
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            what = f"shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else repr(loss)
            raise Misuse(f"session.backward(loss): the loss must be one number, not {what}")
        if self.notes is not None:
            self.notes.lap(Kind.FORWARD, self._microbatch)
        (loss / self.microbatches).backward()  # type: ignore[no-untyped-call]
        if self.notes is not None:
            self.notes.lap(Kind.BACKWARD, self._microbatch)
        scale = 1.0 if self._scaler is None else self._scaler.get_scale()
        self._microbatch_loss += float(loss.detach()) / scale
        self._backward_calls += 1

    def recording(self) -> Recording:
        """What the loop's body computes, as a graph. `CannotRecord` says in a line why it has none.

        It can be had from the first `share` on, and is made anew when the body would read other numbers.
        """
        if self._asked is None and self._recording is None:
            raise Misuse("session.recording() has nothing to record before session.share(...)")
        if self._asked is not None:
            caller, batches = self._asked
            if self._recording is None or outdated(self._recording, caller):
                self._record(caller, batches[0])
        assert self._recording is not None
        return self._recording

    def _record(self, caller: Caller, batch: object) -> None:
        modules = [thing for thing in self.objects.values() if isinstance(thing, torch.nn.Module)]
        model = modules[0] if len(modules) == 1 else torch.nn.ModuleList(modules)
        body = Body(caller)
        body.refuse_scaling(known=self._scaler is not None)
        found = body.record(model, self._run_recorded, batch)
        if self._recording is not None and found.same_as(self._recording):
            found = msgspec.structs.replace(self._recording, plain=found.plain)
        self._recording = found

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
        return self._scaler is not None and self._scaler.get_scale() >= 1.0

    def _install(self, summed: Summed) -> None:
        self.loss = float(summed.total.loss) / self.microbatches
        self.holdings.norms = {}
        if summed.held is not None:
            self._keep(summed.held)
        if summed.finite or self._scaler is not None:
            summed.total.space.install(summed.total, self.microbatches)
            self.holdings.norms = summed.norms
        else:
            self.space.begin()  # a skipped step is committed, and changes nothing

    def seed_for(self, step: int, stream: int) -> None:
        """One stream per microbatch, one for what comes before, one for what comes after."""
        text = struct.pack("<qqq", self.seed, step, stream)
        number = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
        torch.manual_seed(number >> 1)
        random.seed(number)
        np.random.seed(number & 0xFFFFFFFF)

    @property
    def state_bytes(self) -> int:
        return sum(collect(self.objects).sizes().values())

    @property
    def next_version(self) -> int:
        """The version that the script is at, between the sum of a step and the next step, too."""
        return self.version + (self._phase == "shared")

    def borrow(self, gathered: Gathered, layers: frozenset[str]) -> None:
        """Weights to look at until the next step begins."""
        models = {k: v for k, v in self.objects.items() if isinstance(v, torch.nn.Module)}
        self.holdings.borrow(layers)
        phase, self._phase = self._phase, "bound"
        fill(gathered.layers.values(), gathered.read, models, layers)
        self._phase = phase

    @property
    def kept(self) -> Collected | None:
        """The state as it was when the step began, as far as it is here."""
        return None if self._phase == "shared" else self._kept

    def collected(self) -> Collected:
        """The state at the step's boundary. It can be had until the step's sum is installed: its tensors
        do not change before, and what else the script has set for the step already is not in it.
        """
        return self._kept if self._kept is not None else self._collect()

    def _collect(self) -> Collected:
        phase, self._phase = self._phase, "bound"  # a state_dict of ours is not the script's
        state, here = collect(self.objects), self.holdings.here
        self._phase = phase
        return state if here is None else state.only(here)

    def snapshot(self) -> Collected:
        """The state as the script has it now."""
        return self._collect()

    def settled(self) -> list[LiveLayer]:
        return self.collected().finish()

    def load(self, gathered: Gathered, version: int, only: frozenset[str] | None = None) -> None:
        """Take the state over; of what is not in `only`, there is nothing here then."""
        if only is None:
            self.holdings.make_room(self.holdings.all)
            self.holdings.here = None
        else:
            self._keep(only)
            self.holdings.make_room(only)
        fill(gathered.layers.values(), gathered.read, self.objects, only)
        self.version = version

    def _keep(self, layers: frozenset[str]) -> None:
        """Only these are here from now on. Whoever uses the model beside the step has the rest fetched."""
        self.holdings.keep(layers)
        for thing in self.objects.values():
            if isinstance(thing, torch.nn.Module) and id(thing) not in self._watched:
                self._watched.add(id(thing))
                thing.register_forward_pre_hook(lambda *_: self._fetch())
                thing.register_state_dict_pre_hook(lambda *_: self._fetch())  # type: ignore[no-untyped-call]

    def _fetch(self) -> None:
        if self._phase in ("between", "shared") and self.holdings.here is not None:
            self._world.fetch()

    def add(self, gathered: Gathered, layers: frozenset[str]) -> None:
        """Layers that were not here, of the version that the others have.

        What is set for an optimizer is here since the state was loaded, and the script may have set it anew.
        """
        self.holdings.make_room(layers)
        fill(gathered.layers.values(), gathered.read, self.objects, layers, settings=False)
        self.holdings.arrived(layers)
        if self._kept is not None:
            self._kept = self._kept.joined(self._collect().only(layers))
        if self._phase == "sharing":
            self.space.begin()  # buffers have come as well, and they are the step's start
