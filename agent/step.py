"""One call of `session.backward`: a phase, from microbatches to gradients in the model.

    prepare    this worker has computed its share, and has the sum of the phase over all workers
    promise    it has told the keeper so: it can apply the sum
    commit     the keeper has written down that all have promised
    install    the gradients are in the model

A layout that changes before the commit interrupts the phase, which is prepared again under the new
layout. The results computed already are used again there.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from types import MappingProxyType
from typing import Any, Self

import torch
from torch.utils import _pytree as pytree

from agent.checks.graph import Outside
from agent.checks.optimizers import Optimizers
from agent.data.data import Microbatches
from agent.errors import Misuse, NotFinite
from agent.faults import passing
from agent.pipeline import autocast_nodes
from agent.pipeline.tracing.recording.loss_value import called
from agent.pipeline.tracing.recording.trace import attributes_kept
from agent.profile import HELPERS_MAX
from agent.proof.evidence import Evidence, copied, versions_of
from agent.proof.turns import sampled
from agent.replica import AFTER, Replica
from agent.schedule import Kind
from agent.tensors.device import settle
from agent.tensors.metrics import Numbers
from agent.tensors.partial_sum import Partial, partial_of
from agent.tensors.sums import Sum, Summed
from agent.tensors.tree import Canonical
from agent.world import Beginning, Interrupted, World

LossOf = Callable[[Any], Any]

WHERE = "session.backward(loss_of, microbatches)"
USED_UP = "backward through the graph a second time"  # in torch's error


class Mean(float):
    """A mean over all microbatches, as a number, which answers what a tensor of one number would.

    So the lines of a script that add up, compare, print or detach its loss, and the numbers beside
    it, stay as they are. What is reckoned from it is one as well.
    """

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        """Answer as a tensor does that has no gradient."""
        if name == "backward":
            raise Misuse("result.backward(): session.backward(...) has made the gradients already")
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(torch.tensor(float(self)), name)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], _types: object, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Let a function of torch have it as a number, or where that takes none as a tensor."""
        try:
            return _given(func, float, args, kwargs or {})
        except (TypeError, AttributeError):
            return _given(func, lambda one: torch.tensor(float(one)), args, kwargs or {})

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Be written as a tensor of one number, which torch.load reads without leave."""
        number = torch.tensor(float(self), dtype=torch.float64)
        return number.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, _: object) -> Self:
        return self


RECKONED = "add radd sub rsub mul rmul truediv rtruediv pow rpow neg pos abs"


def _reckoned(name: str) -> Callable[..., Any]:
    of_float = getattr(float, name)

    def reckon(self: Mean, *others: Any) -> Any:
        found = of_float(self, *others)
        return Mean(found) if type(found) is float else found

    return reckon


for _name in RECKONED.split():
    setattr(Mean, f"__{_name}__", _reckoned(f"__{_name}__"))


class Result(Mean):
    """The means of a phase: it is that of the loss, and `result["accuracy"]` one beside it."""

    __slots__ = ("metrics",)

    metrics: Mapping[str, float]

    def __new__(cls, loss: float, metrics: Mapping[str, float] = MappingProxyType({})) -> "Result":
        result = super().__new__(cls, loss)
        result.metrics = metrics
        return result

    @property
    def loss(self) -> float:
        return float(self)

    def __getitem__(self, name: str) -> Mean:
        try:
            return Mean(self.metrics[name])
        except KeyError:
            known = ", ".join(self.metrics) or "nothing"
            raise Misuse(
                f"result[{name!r}]: loss_of returned {known} beside its loss: return loss, {{{name!r}: ...}}"
            ) from None

    def __len__(self) -> int:
        """Refuse what takes it for a list, because it has names in brackets."""
        raise Misuse(
            "a result of session.backward(...) was taken for a list, as torch.tensor(losses) takes all that has names in "
            "brackets: collect result.item() for it, or use torch.stack(losses)"
        )


def _given(func: Callable[..., Any], made: Callable[[Mean], Any], args: Any, kwargs: Any) -> Any:
    """Call `func` with what is made of each mean among its arguments."""
    args, kwargs = pytree.tree_map_only(Mean, made, (args, kwargs))
    return func(*args, **kwargs)


class _Nothing(dict[str, float]):
    """The metrics of a step that the job went on without; each is not-a-number."""

    def __missing__(self, name: str) -> float:
        return math.nan


VOID = Result(math.nan, _Nothing())


def check_call(replica: Replica, loss_of: object, microbatches: object, expected: int) -> None:
    """Refuse arguments of `backward` that have no meaning.

    `expected` is 0 as long as their number is not known.
    """
    if replica.stage == "computing":
        raise Misuse(f"{WHERE} was called by loss_of itself; loss_of returns its loss instead")
    if replica.stage not in ("open", "summed"):
        raise Misuse(
            f"{WHERE} belongs into the loop over session.steps(...); what is trained before, as in a range test of the "
            "learning rate, calls loss.backward() itself"
        )
    if isinstance(loss_of, torch.Tensor) or not callable(loss_of):
        raise Misuse(
            f"{WHERE}: loss_of is a {type(loss_of).__name__}; give a function that takes one microbatch and "
            "returns its loss"
        )
    if not hasattr(microbatches, "__len__") or not hasattr(microbatches, "__getitem__"):
        raise Misuse(
            f"{WHERE}: a {type(microbatches).__name__} cannot be asked for one of its microbatches, of which each "
            "worker has others: give the microbatches of this step in a list, or use session.data(dataset, ...)"
        )
    count = len(microbatches)
    if not count or (expected and count != expected):
        raise Misuse(
            f"{WHERE}: {count} microbatches in step {replica.turn}, where {expected or 'at least one'} are expected; "
            "every call has the same number of them; the parts of a whole batch are given one by one, "
            "session.backward(loss_of, *batch)"
        )
    if not torch.is_grad_enabled():
        raise Misuse(f"{WHERE} is called under torch.no_grad(), where nothing has a gradient")
    if autocast_nodes.nesting():
        raise Misuse(
            f"{WHERE} is called under an autocast, which would change what its backward computes: put "
            "`with torch.autocast(...)` into loss_of, around the forward"
        )


class Step:
    """The phases of a session's steps; made when the number of microbatches is known."""

    def __init__(
        self,
        world: World,
        replica: Replica,
        optimizers: Optimizers,
        outside: Outside,
        *,
        microbatches: int,
        bound: Callable[[], int],
    ) -> None:
        self._world, self._replica = world, replica
        self._optimizers, self._outside = optimizers, outside
        # `bound` returns the step of a data set before which a loop ends.
        self._microbatches, self._bound = microbatches, bound
        replica.microbatches = microbatches
        self._partial: Partial = partial_of(
            replica.space, microbatches, deterministic=replica.deterministic
        )
        replica.partial = self._partial
        # Nodes that helpers compute wait for their neighbours, and so does what is computed for
        # another worker.
        helped = HELPERS_MAX + 1 if replica.helps else 0
        replica.sums_held = (self._partial.held + helped) * replica.space.exchanged
        replica.reserve = self._partial.reserve
        self._aid: Canonical | None = None
        """What this worker has computed last of another one's share."""
        self.evidence = Evidence(replica, world.beside)
        self._scale = 1.0
        # Whether the first microbatch was computed twice, and whether loss_of writes into it.
        self._tried = self._copies = False
        # Whether a loss of this phase has been searched for unregistered parameters.
        self._seen = False

    def run(self, loss_of: LossOf, microbatches: Sequence[Any], prior: list[Any]) -> Result:
        """Do one phase. `prior` are the gradients that the step has so far."""
        version = self._replica.version
        self._begin(loss_of, microbatches)
        self._prove(loss_of, microbatches)
        logged = self._world.logged(version)
        if logged is not None:
            # The phase was committed before this worker came, and is applied again.
            return self._install(logged, prior)
        while True:
            try:
                summed = self._prepare(loss_of, microbatches)
                self._world.promise(version, summed)
                self._world.commit(version)
                return self._install(summed, prior)
            except Interrupted:
                self._replica.recorder.computed()

    def prior(self) -> list[torch.Tensor | None]:
        """Return the gradients that the step has so far, kept apart from the sum's memory."""
        if self._replica.phase == 0:
            return []
        params = self._replica.space.params.values()
        return [None if param.grad is None else param.grad.clone() for param in params]

    def blank(self) -> Result:
        """Set the gradients to zero, and return not-a-number means for the rest of the body.

        What the rest of the body does will be overwritten. Until then nobody gets this worker's
        state, so optimizers may use the zeros; some of them need every gradient.
        """
        self._make_scale()
        self._replica.space.blank()
        return VOID

    # --- before the sum ---------------------------------------------------------------------------

    def _begin(self, loss_of: LossOf, microbatches: Sequence[Any]) -> None:
        replica = self._replica
        if replica.phase == 0:
            replica.form.check(replica.turn)
            self._optimizers.check()
        replica.recorder.asked(replica.version, loss_of, microbatches)
        replica.stage = "computing"
        replica.space.begin()
        self._partial.clear()
        self.evidence.begin()
        self._seen = False
        replica.still.step()
        replica.holdings.begin()
        self._make_scale()

    def _make_scale(self) -> None:
        """Make the scaler's scale, which a worker that computes nothing would not ask for."""
        scaler = self._replica.scaler
        if scaler is not None:
            device = next(iter(self._replica.space.params.values())).device
            scaler.scale(torch.zeros((), device=device))
            self._scale = scaler.get_scale()

    def _prepare(self, loss_of: LossOf, microbatches: Sequence[Any]) -> Summed:
        """Compute this worker's share, and sum it over all workers."""
        replica, recorder = self._replica, self._replica.recorder
        first, count = self._world.share()
        passing("step: share opened")
        if isinstance(microbatches, Microbatches):
            microbatches.expect(first, count, end=self._bound())
        recorder.computing((self._world.deep, first, count))
        replica.still.begin()
        if self._world.deep:
            self._partial.let_go()
            self._aid = None
            summed = self._world.play(replica.version, microbatches)
        else:
            self._compute_share(loss_of, microbatches, first, count)
            self._world.all_reduce(replica.version, self._partial, replica.total())
            summed = replica.space.summed(replica.total())
        recorder.computed()
        replica.still.check(replica.turn)
        self._check_finite(summed)
        return summed

    def _compute_share(
        self, loss_of: LossOf, microbatches: Sequence[Any], first: int, count: int
    ) -> None:
        replica, evidence = self._replica, self.evidence
        kept = replica.kept
        before = [] if kept is None else kept.updates()
        missing = self._partial.missing(first, count)
        if missing:
            # The last one is computed first here, and after all the others when it counts.
            self._try_twice(loss_of, microbatches, [missing[-1], missing[0]])
        other = self._world.twice
        if other is not None and not evidence.has(other):
            self._compute_aside(loss_of, self._given(microbatches, other), other)
        shown = set[int]()
        if self._world.batch_shown != "nothing":
            shown.add(sampled(first, count, replica.step))
        if other is not None:
            shown.add(first)
        shown |= {each for each in missing if evidence.has(each)}
        aid = partial(self._compute_for_another, loss_of, microbatches)
        work = self._world.work(replica.version, self._partial, shown, aid)
        for microbatch in work:
            given = self._given(microbatches, microbatch)
            self._world.check()
            early = self._early(microbatch) if work.is_last else None
            with early or nullcontext():
                numbers = self._compute_one(loss_of, given, microbatch)
            passing("step: microbatch computed", replica.space.params)
            if microbatch in shown:
                self._show(microbatch, given, numbers)
            if early is None:
                self._partial.add(microbatch, numbers, first, count)
            elif not early.add(microbatch, numbers, first, count):
                self._compute_share(loss_of, microbatches, first, count)
                return
        self._show_late(loss_of, microbatches, first, count)
        written = "" if kept is None else kept.written(before)
        if written:
            raise Misuse(f"step {replica.turn}: {replica.still.what(written)}")

    def _compute_for_another(
        self, loss_of: LossOf, microbatches: Sequence[Any], node: range
    ) -> Sum:
        """Return the sum, in host memory, of microbatches of a worker that is late."""
        space, first, count = self._replica.space, node.start, len(node)
        aid = self._aid = self._aid or Canonical(space, self._microbatches)
        aid.clear()
        for microbatch in node:
            numbers = self._compute_one(loss_of, self._given(microbatches, microbatch), microbatch)
            aid.add(microbatch, numbers, first, count)
        return aid.nodes(first, count)[0]

    def _early(self, microbatch: int) -> Beginning | None:
        replica = self._replica
        return self._world.early(replica.version, self._partial, replica.total(), microbatch)

    def _compute_one(self, loss_of: LossOf, given: Any, microbatch: int) -> Numbers:
        """Leave the gradients of one microbatch in the model."""
        replica, notes = self._replica, self._replica.notes
        replica.seed_for(microbatch)
        if notes is not None:
            notes.skip()
        returned = called(loss_of, given, replica.scaler)
        self._check_unmade()
        if not self._seen:
            self._seen = True
            self._outside.look(returned.loss)
        if notes is not None:
            settle(replica.space.device)
            notes.lap(Kind.FORWARD, microbatch)
        self._go_back(returned.loss / self._microbatches)
        if notes is not None:
            settle(replica.space.device)
            notes.lap(Kind.BACKWARD, microbatch)
        return returned.numbers(self._scale)

    def _go_back(self, loss: torch.Tensor) -> None:
        """Make the gradients of one microbatch."""
        try:
            loss.backward()  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            if USED_UP not in str(error):
                raise
            raise Misuse(
                f"step {self._replica.turn}: the loss depends on what was computed with gradients outside of this call of "
                "loss_of, as exp(log_alpha) before session.backward(...); another microbatch's backward has used that up: "
                "compute it in loss_of, or detach() it"
            ) from error

    def _check_unmade(self) -> None:
        """Refuse gradients that `loss_of` has left: the microbatch's would be added to them.

        No parameter has one before it is called. Zeros, as `zero_grad` may leave, change nothing.
        """
        for name, param in self._replica.space.params.items():
            gradient = param.grad
            if gradient is not None and (gradient.is_sparse or gradient.any()):
                raise Misuse(
                    f"step {self._replica.turn}: loss_of called backward() and left a gradient in {name!r}, to which those "
                    "of the microbatch would be added: use torch.autograd.grad(...), or call zero_grad() before it returns"
                )

    def _check_finite(self, summed: Summed) -> None:
        """Refuse a sum that is not finite, before the commit.

        So a job that fails on it can be resumed from the version before it.
        """
        if self._world.nan != "fail" or summed.finite or self._overflows():
            return
        loss = summed.total.loss / self._microbatches
        said = (
            f"step {self._replica.turn}: the loss is {loss}, or one of its gradients is not finite: find out why, or leave "
            "such steps out, as a script does that checks its loss: orchestrator submit --nan skip"
        )
        if math.isnan(loss) and self._replica.space.gradients_finite(summed.total):
            said = (
                f"step {self._replica.turn}: the loss is nan, and all gradients are finite, as those of a mean over "
                "nothing are: does a microbatch leave anything for each mean of loss_of (ignore_index, a mask)? "
                "Fewer microbatches hold more each"
            )
        raise NotFinite(said)

    def _overflows(self) -> bool:
        """Return whether the loss's scale was too large.

        The scaler sees that in the sum, which is the same on all workers, skips the step and takes
        a smaller scale. A scale below 1 has made nothing larger.
        """
        return self._replica.scaler is not None and self._scale >= 1.0

    # --- after the commit -------------------------------------------------------------------------

    def _install(self, summed: Summed, prior: list[Any]) -> Result:
        """Put the gradients into the model, and return the means."""
        replica, total, count = self._replica, summed.total, self._microbatches
        with self._world.unaided():
            replica.seed_for(AFTER)
            metrics = {name: value / count for name, value in total.metrics.items()}
            result = Result(total.loss / count, metrics)
            # Numbers of the first phase have plain names; a later phase may have a loss function of
            # its own, so its names end with the phase.
            end = f".{replica.phase}" if replica.phase else ""
            numbers = {"loss": result.loss} | metrics
            self._world.output.log(
                replica.turn, {f"{key}{end}": one for key, one in numbers.items()}
            )
            replica.install(summed, prior)
            # A scaler does not use gradients that overflow, nor does a script that skips what is
            # not finite.
            self._optimizers.unused = summed.finite
            if not self._world.proves:
                passing("step: installed")
        return result

    # --- what is compared with others' ------------------------------------------------------------

    def _prove(self, loss_of: LossOf, microbatches: Sequence[Any]) -> None:
        """Compute the microbatch by which this worker shows that it computes as the job does.

        What modules keep of it is put back. Else a table that grows with its microbatch would be
        longer here than on workers that compute the step in stages, and sums would not fit.
        """
        asked = self._world.asked(self._replica.phase)
        if asked is not None:
            with attributes_kept(self._replica.model):
                self._try_twice(loss_of, microbatches, [asked])
                self._compute_aside(loss_of, self._given(microbatches, asked), asked)

    def _show(self, microbatch: int, given: Any, numbers: Numbers) -> None:
        self.evidence.sample(microbatch, given, numbers, whole=self._world.batch_shown == "all")

    def _show_late(
        self, loss_of: LossOf, microbatches: Sequence[Any], first: int, count: int
    ) -> None:
        """Compute a microbatch of this worker again if it has to be shown and was not.

        A snapshot may be asked for after the microbatches were computed, and then this step will
        have to be proven.
        """
        own = range(first, first + count)
        if own and self._world.batch_shown == "all" and not any(map(self.evidence.has, own)):
            again = sampled(first, count, self._replica.step)
            self._compute_aside(loss_of, self._given(microbatches, again), again)

    def _try_twice(self, loss_of: LossOf, microbatches: Sequence[Any], tried: list[int]) -> None:
        """Compute these microbatches of a process's first step once before, to compare results.

        They are copies, because loss_of may write into its microbatch; if it does, it gets a copy
        each time. What they have written to in the model is named here: results that differ could
        not tell what they differ by.
        """
        if self._tried:
            return
        replica = self._replica
        replica.still.begin()
        self._copies, writes = True, False
        for microbatch in dict.fromkeys(tried):
            given = self._given(microbatches, microbatch)
            versions = versions_of(given)
            self._compute_aside(loss_of, given, microbatch)
            writes |= versions_of(given) != versions
        self._copies, self._tried = writes, True
        replica.form.check(replica.turn)
        replica.still.check(replica.turn)
        replica.still.begin()

    def _compute_aside(self, loss_of: LossOf, given: Any, microbatch: int) -> None:
        """Compute a microbatch whose gradients are looked at, and then dropped."""
        self._world.check()
        numbers = self._compute_one(loss_of, given, microbatch)
        self._show(microbatch, given, numbers)
        self._replica.space.take(numbers)

    def _given(self, microbatches: Sequence[Any], microbatch: int) -> Any:
        given = microbatches[microbatch]
        return copied(given) if self._copies or not self._tried else given
