"""Record a script's loss function, the `loss_of` of `session.backward(loss_of, ...)`.

`loss_of` is a plain callable of one microbatch, so it can be called at any time: with placeholders,
with a real microbatch, and once more to check that the recording computes the same. A call leaves
no trace in random streams, buffers, modules, kept placeholders or printed output. What `loss_of`
keeps elsewhere stays there, so it must give the same loss when a microbatch is computed once more.
"""

import contextlib
import io
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.nn.modules import module as every_module
from torch.utils import checkpoint as checkpointing

from agent.errors import CannotRecord, Misuse
from agent.pipeline import autocast_nodes
from agent.pipeline.flatten import Form, apart, cloned
from agent.pipeline.loss_scale import Scaler
from agent.pipeline.tracing.analysis import (
    Facts,
    cut_points,
    examined,
    refuse_sparse,
    same_numbers,
)
from agent.pipeline.tracing.closures.closure import closed_over, walked
from agent.pipeline.tracing.closures.leftovers import placeholders_removed
from agent.pipeline.tracing.graphs import (
    Recording,
    Told,
    has_constants,
    mark_of,
    nobody,
    same_graphs,
)
from agent.pipeline.tracing.recording import constants, frozen_modules
from agent.pipeline.tracing.recording.compiled import CallsCompiled, compiled_refused
from agent.pipeline.tracing.recording.eager_trace import unsaved
from agent.pipeline.tracing.recording.loss_value import LossOf, Returned, called
from agent.pipeline.tracing.recording.trace import (
    FIXED,
    METRICS,
    TRAINED,
    attributes_kept,
    functions_refused,
    learning_kept,
    record,
    streams_kept,
    trained,
    unvalidated,
)
from agent.pipeline.tracing.recording.written_back import runs_code, written_back
from agent.pipeline.tracing.variants import Variant, Variants
from agent.tensors.absent import any_away, computable
from agent.tensors.device import device_of
from agent.tensors.unchanged import version_of

LATE = "late"  # in the `meta` of a graph: guests are called as late as possible
Looked = tuple[fx.GraphModule, Facts, Any]


def record_loss(
    model: torch.nn.Module,
    loss_of: LossOf,
    microbatches: Sequence[Any],
    scaler: Scaler | None = None,
    told: Told = nobody,
    empty: Callable[[], None] = lambda: None,
) -> Recording:
    """Record what `loss_of` computes of a microbatch.

    `CannotRecord` says in a line why it cannot be recorded.

    `told` maps the mark of a graph to what another worker found out about it, if one has; then
    nothing is run, because that worker has run it. `empty` returns the model to its state before
    its first forward.
    """
    before = closed_over(loss_of)
    loss = _Loss(model, loss_of, scaler, *apart(microbatches[0]))
    with attributes_kept(model), computable(model):
        empty()
        graph, facts, number = loss.recorded(told, microbatches)
        another = partial(loss.another, empty, late=_is_late(graph))
        compare = partial(loss.compare_later, empty)
        variants = Variants(Variant(graph, facts, loss.leaves), another, compare)
        found = Recording(variants, loss.form, before.settled(closed_over(loss_of)))
        if graph.meta.get(FIXED) and number is not None and isinstance(microbatches, list | tuple):
            for leaves in map(found.flatten, microbatches[1:2]):
                # A value that was taken from the first microbatch shows as a difference in the
                # second.
                loss.compare_with(leaves.variant.graph, leaves)
    return found


def same_graph(
    recording: Recording, model: torch.nn.Module, loss_of: LossOf, scaler: Scaler | None
) -> bool:
    """Record the loss again, and return whether it still computes what was recorded."""
    known = recording.graph
    loss = _Loss(model, loss_of, scaler, [*recording.example], recording.form)
    with attributes_kept(model), computable(model):
        graph = loss.graph(loss.leaves, fixed=recording.fixed)
        if _is_late(known):
            frozen_modules.postpone(graph)
        if same_graphs(graph, known):
            return True
        # What it kept for itself while it was recorded is there now, so another graph may compute
        # the same.
        return _alike(loss.again(graph, loss.leaves), loss.again(known, loss.leaves))


class _Loss:
    """A loss function, and the microbatch that it is recorded with."""

    def __init__(
        self,
        model: torch.nn.Module,
        loss_of: LossOf,
        scaler: Scaler | None,
        leaves: Sequence[Any],
        form: Form,
    ) -> None:
        _check_leaves(leaves, form)
        _refuse_hooks(model)
        for name, buffer in model.named_buffers():
            refuse_sparse(f"the buffer {name!r}", buffer)
        self.leaves, self.form = cloned(leaves), form  # it may write into its microbatch
        self._model, self._loss_of, self._scaler = model, loss_of, scaler

    # --- as a graph ---------------------------------------------------------------------------------

    def recorded(self, told: Told, microbatches: Sequence[Any]) -> Looked:
        """Record with placeholders; if that fails or computes another loss, with real tensors.

        The loss returned is the function's own, or None if another worker has examined the graph.
        """
        try:
            graph, facts, loss = self._looked(told, fixed=False)
        except CallsCompiled:
            raise
        except CannotRecord as error:
            # What fails here also fails in the training step, and is reported there with its own
            # traceback.
            with contextlib.suppress(CannotRecord), _misuse_only():
                self._twice()
            try:
                graph, facts, loss = self._looked(told, fixed=True)
            except CannotRecord:
                raise error from None
        if loss is None:
            return graph, facts, None
        found = self._twice()
        if runs_code(self._model, found.loss):
            self._refuse_written_back()
            self._compare_written(graph)
        if not graph.meta.get(FIXED) and not (
            _alike(loss, found) and self._constants_hold(graph, microbatches)
        ):
            graph, facts, loss = self._looked(told, fixed=True)
        if loss is not None:
            self.compare(loss, found)
        return graph, facts, loss

    def _constants_hold(self, graph: fx.GraphModule, microbatches: Sequence[Any]) -> bool:
        """Return whether a graph with constants computes the second microbatch as the function does.

        Placeholders call no hook of a module that is one node. So what a hook has collected of the
        first microbatch may have become a constant, which shows in no comparison with the first.
        """
        if not has_constants(graph) or len(microbatches) < 2:
            return True
        leaves, form = apart(microbatches[1])
        if form != self.form:
            return True
        with attributes_kept(self._model):
            found = self.as_it_is(leaves)
            try:
                return _alike(self.again(graph, leaves), found)
            except Exception:  # a constant of the first one's shape, for one
                return False

    def _looked(self, told: Told, *, fixed: bool) -> Looked:
        with attributes_kept(self._model):
            graph = self.graph(self.leaves, fixed=fixed)
            late = frozen_modules.postpone(graph)
            known = None if has_constants(graph) else told(mark_of(graph))
            graph.meta[LATE] = True
            if known:
                return graph, known, None
            facts, out = examined(graph, self.leaves)
            nodes = list(graph.graph.nodes)
            if any(nodes[index] in late for index in facts.draws):
                graph = self.graph(self.leaves, fixed=fixed)
                facts, out = examined(graph, self.leaves)
        return graph, facts, _outcome(graph, out)

    def graph(self, example: Sequence[Any], *, fixed: bool) -> fx.GraphModule:
        def loss_of(_: torch.nn.Module, *leaves: Any) -> Any:
            return self._call(leaves)

        make_kept = partial(self._make_kept, example)
        for _ in range(2):
            before = closed_over(self._loss_of)
            with placeholders_removed(self._model, walked(self._loss_of)) as removed:
                graph = record(
                    self._model,
                    loss_of,
                    cloned(example),
                    self._scaler,
                    fixed=fixed,
                    before_example=make_kept,
                )
            if removed:
                make_kept()
            # With what has been kept meanwhile, placeholders may lead somewhere else.
            fell_back = graph.meta.get(FIXED) and not fixed
            if not removed and not (fell_back and before.changed(closed_over(self._loss_of))):
                break
        constants.copied(graph)
        graph.meta[TRAINED] = trained(self._model)
        return graph

    def _make_kept(self, example: Sequence[Any]) -> None:
        """Call it, so that what code keeps once it is made, as a mask, is there in each recording.

        A worker that has trained has it, and a joining worker would record how it is made.
        """
        with contextlib.suppress(Exception), attributes_kept(self._model), compiled_refused():
            self.as_it_is(example)

    def another(
        self, empty: Callable[[], None], example: Sequence[Any], *, late: bool
    ) -> fx.GraphModule:
        """Record the graph of a microbatch that is computed in another way."""
        with attributes_kept(self._model), computable(self._model):
            empty()
            graph = self.graph(example, fixed=True)
        if late:
            frozen_modules.postpone(graph)
        return graph

    def _call(self, leaves: Sequence[Any], *, whole: bool = False) -> Any:
        with contextlib.redirect_stdout(io.StringIO()):
            return self._loss_of(self.form.filled(leaves, whole=whole))

    # --- called directly ---------------------------------------------------------------------------

    def _twice(self) -> Returned:
        """Compute a microbatch twice, and refuse a loss that depends on an earlier call.

        What is kept between calls may come from another microbatch, and that may be another
        worker's.
        """
        with attributes_kept(self._model):
            one, again = (self.as_it_is(self.leaves) for _ in range(2))
        if not _alike(one, again):
            raise Misuse(
                "session.backward(loss_of, ...): a microbatch has another loss when it is computed once more, because loss_of "
                "or the model keeps something from one microbatch to the next, and that may be another worker's: let "
                "the loss depend on the model, the microbatch and session.state only"
            )
        return one

    def _refuse_written_back(self) -> None:
        call = partial(self._call, whole=True)
        with attributes_kept(self._model), _as_before(self._model):
            name = written_back(
                self._model, lambda: called(call, cloned(self.leaves), self._scaler).loss
            )
        if name:
            raise CannotRecord(
                f"a backward writes to the buffer {name!r}, in a hook or in an autograd.Function, and stages keep what a forward "
                "writes: write to it after session.backward(...), or train with depth 1"
            )

    def as_it_is(self, leaves: Sequence[Any]) -> Returned:
        call = partial(self._call, whole=True)
        return self._run(lambda: called(call, cloned(leaves), self._scaler))

    def again(self, graph: fx.GraphModule, leaves: Sequence[Any]) -> Returned:
        return self._run(lambda: _outcome(graph, graph(*cloned(leaves))))

    def _run(self, run: Callable[[], Returned]) -> Returned:
        """Run it, then put buffers and random streams back."""
        model = self._model
        with contextlib.ExitStack() as stack:
            if any_away(model):  # a number stands in, of which a distribution might complain
                stack.enter_context(unvalidated())
            stack.enter_context(_reentrant_refused())
            written = stack.enter_context(_written_in_checkpoints(model))
            try:
                with _as_before(model), unsaved():
                    found = run()
            except RuntimeError:  # it needs what it saves; any other error is raised again
                with _as_before(model):
                    found = run()
        if written:
            raise CannotRecord(
                f"the buffer {min(written)!r} is written to within torch.utils.checkpoint, which on one device writes to it "
                "once more in each backward, and stages do not: leave the norm or module that has it out of the checkpoint, "
                "or train with depth 1"
            )
        return found

    def compare_later(
        self, empty: Callable[[], None], first: Variant, leaves: Sequence[Any]
    ) -> None:
        """Compare a graph with the function in the middle of a step, and what is known of it."""
        with attributes_kept(self._model), computable(self._model):
            empty()
            facts, out = examined(first.graph, leaves)
            self.compare(_outcome(first.graph, out), self.as_it_is(leaves))
        if _crossing(facts) != _crossing(first.facts):
            raise CannotRecord(
                "session.backward(loss_of, microbatches): a microbatch of other types than the recorded one cannot be cut where "
                "that is: make all alike, or train with depth 1"
            )

    def compare_with(self, graph: fx.GraphModule, leaves: Sequence[Any]) -> None:
        self.compare(self.again(graph, leaves), self.as_it_is(leaves))

    def compare(self, recorded: Returned, found: Returned) -> None:
        """Refuse a recording with another loss, as code that asks about its inputs may have.

        While it is recorded, such code sees placeholders and may take another branch.
        """
        if not _alike(recorded, found):
            one, other = (_shown(each) for each in (recorded, found))
            raise CannotRecord(
                f"recorded, loss_of computes another loss than it does when it is called ({one}, not {other}), because "
                "something in it asks what its inputs are, and is told something else while it is recorded: train with depth 1"
            )

    def _compare_written(self, graph: fx.GraphModule) -> None:
        """Refuse a recording that leaves other buffers behind.

        A hook of a backward that `loss_of` does itself runs with the graph, and no longer sees what
        `loss_of` has set for it meanwhile.
        """
        own = self._left(lambda: self._call(cloned(self.leaves), whole=True))
        there = self._left(lambda: graph(*cloned(self.leaves)))
        for name, buffer in own.items():
            if not same_numbers(buffer, there[name]):
                raise CannotRecord(
                    f"recorded, loss_of writes something else to the buffer {name!r} than it does when it is called, because a "
                    "hook writes to it that asks what the script has set meanwhile: train with depth 1"
                )

    def _left(self, run: Callable[[], object]) -> dict[str, torch.Tensor]:
        """Return what a forward leaves in the buffers of the model, and put them back."""
        with _as_before(self._model):
            run()
            return {name: each.detach().clone() for name, each in self._model.named_buffers()}


def _check_leaves(leaves: Sequence[Any], form: Form) -> None:
    if not any(map(torch.is_tensor, leaves)):
        raise CannotRecord(
            f"session.backward(loss_of, microbatches): a microbatch is made of {', '.join(form.kinds) or 'nothing'}; cutting the "
            "model into stages needs a tensor in it, alone or in tuples, lists, dicts and objects"
        )


def _refuse_hooks(model: torch.nn.Module) -> None:
    """Refuse parameters with gradient hooks, because a stage would call them at other moments.

    A stage asks for gradients and does not accumulate them, and each stage of a tied parameter has
    only a part of its gradient. A hook of the backwards of all modules would miss those that a
    stage does not call as modules.
    """
    if every_module._global_backward_hooks or every_module._global_backward_pre_hooks:
        raise CannotRecord(
            "a backward hook of all modules is registered, and stages take modules apart, which are not called as modules "
            "then: register it on the modules that it is for, before the loop over session.steps(...), or train with depth 1"
        )
    for name, param in model.named_parameters():
        if param._backward_hooks or getattr(param, "_post_accumulate_grad_hooks", None):
            raise CannotRecord(
                f"the parameter {name!r} has a hook, which stages would call at other moments than one backward does: "
                "change its gradient after session.backward(...), or train with depth 1"
            )


def _crossing(facts: Facts) -> list[tuple[int, list[tuple[str, bool]]]]:
    """Return where a graph may be cut, and what crosses there."""
    return [
        (each.after, [(value.name, value.needs_grad) for value in each.values])
        for each in cut_points(facts)
    ]


def _is_late(graph: fx.GraphModule) -> bool:
    return bool(graph.meta.get(LATE))


def _outcome(graph: fx.GraphModule, out: Any) -> Returned:
    loss, *metrics = out
    return Returned(loss=loss, metrics=dict(zip(graph.meta[METRICS], metrics, strict=True)))


def _alike(one: Returned, other: Returned) -> bool:
    """Compare losses, and only the names of metrics, because these may show the time, for one."""
    tensors = all(isinstance(each.loss, torch.Tensor) for each in (one, other))
    named = one.metrics.keys() == other.metrics.keys()
    return tensors and named and same_numbers(one.loss, other.loss)


def _shown(found: Returned) -> str:
    loss: Any = found.loss
    beside = "".join(f" and {name!r}" for name in found.metrics)
    if not isinstance(loss, torch.Tensor):
        return f"a {type(loss).__name__}{beside}"
    return f"{float(loss.detach().mean())}{beside}"


@contextlib.contextmanager
def _misuse_only() -> Iterator[None]:
    try:
        yield
    except Misuse:
        raise
    except Exception:  # noqa: S110 - the person's code may raise any exception
        pass


@contextlib.contextmanager
def _reentrant_refused() -> Iterator[None]:
    try:
        with functions_refused(checkpointing.CheckpointFunction):
            yield
    except fx.proxy.TraceError as error:
        raise CannotRecord(
            "torch.utils.checkpoint is called with use_reentrant=True, which asks for backward(), and stages ask for "
            "gradients: give it use_reentrant=False, or train with depth 1"
        ) from error


@contextlib.contextmanager
def _as_before(model: torch.nn.Module) -> Iterator[None]:
    """Put buffers, random streams and modes back, also for a caller that tries again."""
    before = [
        (module._buffers, key, buffer, buffer.detach().clone())
        for module in model.modules()
        for key, buffer in module._buffers.items()
        if buffer is not None
    ]
    try:
        with streams_kept(device_of(model)), autocast_nodes.kept(), learning_kept(model):
            yield
    finally:
        with torch.no_grad():
            for owner, key, buffer, kept in before:
                buffer.copy_(kept)
                there = owner.get(key)
                if there is None or there.shape == buffer.shape:  # a table that has grown stays
                    owner[key] = buffer


@contextlib.contextmanager
def _written_in_checkpoints(model: torch.nn.Module) -> Iterator[set[str]]:
    """Yield the names of buffers written to by code that a backward computes once more."""
    written, hook = set[str](), checkpointing._checkpoint_hook

    class Watched(hook):  # type: ignore[misc, valid-type]
        def __enter__(self) -> None:
            self.before = {name: version_of(buffer) for name, buffer in model.named_buffers()}
            super().__enter__()

        def __exit__(self, *why: object) -> None:
            for name, buffer in model.named_buffers():
                if self.before.get(name) not in (None, version_of(buffer)):
                    written.add(name)
            super().__exit__(*why)

    checkpointing._checkpoint_hook = Watched  # type: ignore[misc]
    try:
        yield written
    finally:
        checkpointing._checkpoint_hook = hook  # type: ignore[misc]
