"""The body of the script's loop over `session.share(...)`, taken out so that it can be run with placeholders.

    for x, y in session.share(batches):      the body is the recording: there is no second place in which
        loss = loss_of(model, x, y)          a script would have to say what its step computes
        session.backward(loss)

A loop's body cannot be run from outside, and what fails in it cannot be caught there. So the loop is looked up
in the script's source (`loops.py`) and compiled once more, over a single microbatch, in a copy of the script's names:
nothing that it sets is seen by the script, and what fails is a reason, not an end.
"""

import ast
import contextlib
import io
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import CodeType
from typing import Any

import torch
from torch import fx
from torch.utils import checkpoint as checkpointing

from agent.errors import CannotRecord, Misuse
from agent.pipeline import guests, modes
from agent.pipeline.examine import Facts, examined, same_numbers
from agent.pipeline.flat import cloned, flatten, is_leaf, unflatten
from agent.pipeline.leftovers import held_by, placeholders_removed
from agent.pipeline.record import (
    FIXED,
    Kept,
    attributes_kept,
    functions_refused,
    record,
    streams_kept,
    unvalidated,
)
from agent.pipeline.recording import (
    Recording,
    Told,
    has_constants,
    mark_of,
    nobody,
    same_graphs,
)
from agent.pipeline.scaling import Scaler
from agent.pipeline.variants import Variant, Variants
from agent.pipeline.witness import unsaved
from agent.source import own
from agent.source.found import MICROBATCH, Caller, find, names_of
from agent.source.heard import Heard
from agent.source.loops import GOES_ON, refuse, uncleared
from agent.source.reads import Reads, taken_apart
from agent.tensors.away import any_away, computable
from agent.tensors.device import device_of
from agent.tensors.still import version_of

BARE = torch.nn.Module()
LATE = "late"  # in the `meta` of a graph: guests are asked as late as can be
Run = Callable[..., Any]
Looked = tuple[fx.GraphModule, Facts, Any]


class Body:
    """The loop that a caller of `session.share` is about to run over its microbatches."""

    def __init__(self, caller: Caller) -> None:
        self._file = caller.frame.f_code.co_filename
        self._names = names_of(caller.frame)
        self._loop = uncleared(find(caller), self._names)
        self._code = self._compile()
        things = own.names(caller.frame).values()
        self._own = [thing for thing in things if not isinstance(thing, torch.Tensor)]
        self._heard = Heard(self._own)

    def record(
        self,
        model: torch.nn.Module,
        run: Run,
        batches: Sequence[object],
        scaler: Scaler | None = None,
        told: Told = nobody,
        empty: Callable[[], None] = lambda: None,
    ) -> Recording:
        """`run(body)` runs it, and gives the loss that was handed to `session.backward`. `told` may know what another
        worker has found out about the graph of this mark: the body is not run then, for it was there. `empty` makes the
        model what it was before its first forward."""
        leaves, spec = flatten(batches[0])
        self._check_leaves(leaves)
        loss_of = self._loss_of(run, spec)
        self._refuse_hooks(model)
        leaves = cloned(leaves)  # the body may write into its microbatch

        def as_it_is(batch: Sequence[torch.Tensor] = leaves) -> Any:
            return loss_of(None, *cloned(batch))

        def next_one() -> Any:
            other, shape = flatten(batches[min(1, len(batches) - 1)])
            return self._loss_of(run, shape)(None, *cloned(other))

        def recorded_of(example: Sequence[Any], *, fixed: bool) -> fx.GraphModule:
            # Behind the listening, to which what the loop puts there itself has to be seen.
            with placeholders_removed(model, held_by(model)), self._heard.listening(model):
                return record(model, loss_of, example, scaler, fixed=fixed, names=self._own)

        def recorded(fixed: bool) -> Looked:
            with attributes_kept(model):
                graph = recorded_of(leaves, fixed=fixed)
                late = guests.postpone(graph)
                known = None if has_constants(graph) else told(mark_of(graph))
                graph.meta[LATE] = True
                if known:
                    return graph, known, None
                facts, loss = examined(graph, leaves)
                nodes = list(graph.graph.nodes)
                if any(nodes[index] in late for index in facts.draws):
                    graph = recorded_of(leaves, fixed=fixed)
                    facts, loss = examined(graph, leaves)
                return graph, facts, loss

        try:
            graph, facts, loss = self._recorded(
                recorded, partial(self._run_twice, model, as_it_is, next_one)
            )
        except CannotRecord as error:
            raise CannotRecord(self._short(str(error))) from error

        def another(batch: Sequence[torch.Tensor]) -> fx.GraphModule:
            with attributes_kept(model), computable(model):
                empty()
                other = recorded_of(cloned(batch), fixed=True)
            if graph.meta.get(LATE):
                guests.postpone(other)
            return other

        variants = Variants(Variant(graph, facts, leaves), another)
        found = Recording(variants, spec, self._reads(graph, model))
        if graph.meta.get(FIXED) and loss is not None and isinstance(batches, list | tuple):
            for other in [found.flatten(batch) for batch in batches[1:]][:1]:
                # What was taken from the first one shows.
                loss = self._again(model, partial(other.variant.graph, *other))
                self._compare(loss, self._again(model, partial(as_it_is, other)))
        return found

    def _check_leaves(self, leaves: Sequence[Any]) -> None:
        if not all(map(is_leaf, leaves)) or not any(map(torch.is_tensor, leaves)):
            kinds = sorted({type(leaf).__name__ for leaf in leaves})
            raise CannotRecord(
                f"{self._at(self._loop)}: a microbatch is made of {', '.join(kinds) or 'nothing'}; "
                "cutting the model into stages needs tensors and numbers, or tuples, lists, dicts and objects of them"
            )

    def computes(
        self, recording: Recording, model: torch.nn.Module, run: Run, scaler: Scaler | None
    ) -> bool:
        """Whether the body still computes what was recorded: it may go by something that nobody sees it read."""
        example, known = recording.example, recording.graph
        loss_of, fixed = self._loss_of(run, recording.spec), bool(known.meta.get(FIXED))
        with attributes_kept(model):
            with placeholders_removed(model, held_by(model)):
                graph = record(
                    model, loss_of, cloned(example), scaler, fixed=fixed, names=self._own
                )
            if known.meta.get(LATE):
                guests.postpone(graph)
            if same_graphs(graph, known):
                return True
            # What it kept for itself when it was recorded is there now: another graph may compute the same.
            losses = [
                self._again(model, partial(each, *cloned(example))) for each in (graph, known)
            ]
        return _alike(*losses)

    def _loss_of(self, run: Run, spec: Any) -> Callable[..., Any]:
        def loss_of(_: torch.nn.Module | None, *tensors: Any) -> Any:
            return run(lambda: self._play(unflatten(tensors, spec)))

        return loss_of

    def _recorded(self, recorded: Callable[[bool], Looked], run: Callable[[], Any]) -> Looked:
        """With placeholders, and where these lead astray with tensors as they are. The loss is that of the loop itself;
        there is none if somebody has looked before."""
        try:
            graph, facts, loss = recorded(False)
        except CannotRecord as error:
            with self._failing_left_to_the_script():
                run()
            try:
                graph, facts, loss = recorded(True)
            except CannotRecord:
                raise error from None
        if loss is None:
            return graph, facts, None
        found = run()
        if not _alike(loss, found) and not graph.meta.get(FIXED):
            graph, facts, loss = recorded(True)
        self._compare(loss, found)
        return graph, facts, loss

    @contextlib.contextmanager
    def _failing_left_to_the_script(self) -> Iterator[None]:
        """What fails here will fail there, where it is told with its own traceback."""
        try:
            yield
        except CannotRecord:
            pass
        except Misuse:
            raise
        except Exception:  # noqa: S110 - whatever the person's code raises
            pass

    def _refuse_hooks(self, model: torch.nn.Module) -> None:
        """A stage asks for gradients, and does not accumulate them; and of a tied parameter each has a part."""
        for name, param in model.named_parameters():
            if param._backward_hooks or getattr(param, "_post_accumulate_grad_hooks", None):
                raise CannotRecord(
                    f"the parameter {name!r} has a hook, which stages would call at other moments than one backward "
                    "does: change its gradient behind the loop over session.share(...), or train with depth 1"
                )

    def _compare(self, loss: Any, again: Any) -> None:
        """The recording computes what the body computes: code that asks what its inputs are sees placeholders
        while it is recorded, and may take another way with them."""
        if not _alike(loss, again):
            raise CannotRecord(
                f"{self._at(self._loop)}: recorded, this loop computes another loss than it does when it is run "
                f"({float(loss.detach().mean())}, not {float(again.detach().mean())}): something in it asks what its inputs are, and "
                "is told something else by a placeholder. Train with depth 1"
            )

    def _run_twice(
        self, model: torch.nn.Module, run: Callable[[], Any], other: Callable[[], Any]
    ) -> Any:
        """What a module keeps for itself may not go into the loss of the next microbatch, which others may have."""
        begun, attributes = Kept(model), _attributes(model)
        with attributes_kept(model):
            one, before = self._again(model, run), _attributes(model)
            behind = self._again(model, other) if begun.anything else None
            again, after = self._again(model, run), _attributes(model)
        if not _alike(one, again):
            self._refuse_kept("when it is computed once more", before, after)
        if behind is not None:
            first = begun.without(model, partial(self._again, model, other))
            if not _alike(behind, first):
                self._refuse_kept("when no other was computed before it", attributes, before)
        return one

    def _refuse_kept(self, when: str, before: dict[str, Any], after: dict[str, Any]) -> None:
        kept = sorted(name for name in after if after[name] is not before.get(name))
        if not kept:
            raise Misuse(
                f"{self._at(self._loop)}: a microbatch has another loss {when}, and it is not the model that keeps something: "
                f"{GOES_ON}"
            )
        what = " and ".join(f"`{name}`" for name in kept[:2])
        raise Misuse(
            f"{self._at(self._loop)}: a microbatch has another loss {when}: the model keeps "
            f"{what} from one forward to the next, which may be that of another worker. Begin anew with every "
            "microbatch, or put it into a buffer, of which every microbatch sees the step's start. What is made once of "
            "some data can be made before Session(...)"
        )

    def _again(self, model: torch.nn.Module, run: Callable[[], Any]) -> Any:
        """The loss of the body as it is. Buffers and random streams are as before then."""
        # A number stands in for what is not here, of which a distribution might complain.
        asking = unvalidated() if any_away(model) else contextlib.nullcontext()
        with self._reentrant_refused(), _written_in_checkpoints(model) as written, asking:
            try:
                with _as_before(model), unsaved():
                    loss = run()
            except RuntimeError:  # it needs what it saves; any other error comes up again
                with _as_before(model):
                    loss = run()
        if written:
            raise CannotRecord(
                f"{self._at(self._loop)}: the buffer {min(written)!r} is written to within torch.utils.checkpoint, which on one "
                "device writes to it once more in each backward, and stages do not: leave the norm or module that has it "
                "out of the checkpoint, or train with depth 1"
            )
        return loss

    @contextlib.contextmanager
    def _reentrant_refused(self) -> Iterator[None]:
        try:
            with functions_refused(checkpointing.CheckpointFunction):
                yield
        except fx.proxy.TraceError as error:
            raise CannotRecord(
                f"{self._at(self._loop)}: torch.utils.checkpoint is called with use_reentrant=True, which asks for "
                "backward(), and stages ask for gradients: give it use_reentrant=False, or train with depth 1"
            ) from error

    def _play(self, batch: object) -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            exec(self._code, {**self._names, MICROBATCH: [batch]})  # noqa: S102 - the script's own code

    def _compile(self) -> CodeType:
        refuse(self._loop, self._names, self._at)
        try:
            module = ast.Module(body=[self._loop.single], type_ignores=[])
            return compile(ast.fix_missing_locations(module), self._file, "exec")
        except SyntaxError as error:
            raise CannotRecord(
                f"{self._at(self._loop)}: the loop over session.share(...) cannot be run apart from the code "
                f"around it ({error.msg})"
            ) from error

    def _reads(self, graph: fx.GraphModule, model: torch.nn.Module) -> Reads:
        whole = {str(node.target) for node in graph.graph.nodes if node.op == "call_module"}
        parts = [self._loop.whole.target, *self._loop.whole.body]
        asked = [guest.called[0] for guest in guests.guests(graph)]
        apart = list(taken_apart(model, whole))
        return Reads(parts, self._names, apart, asked, self._heard, [*model.modules()])

    def _at(self, node: Any) -> str:
        return f"{Path(self._file).name}:{node.lineno}"

    def _short(self, text: str) -> str:
        return text.replace(self._file, Path(self._file).name)


@contextlib.contextmanager
def _as_before(model: torch.nn.Module) -> Iterator[None]:
    """Buffers, random streams and modes are what they were, also for whoever tries again."""
    before = [
        (module._buffers, key, buffer, buffer.detach().clone())
        for module in model.modules()
        for key, buffer in module._buffers.items()
        if buffer is not None
    ]
    try:
        with streams_kept(device_of(model)), modes.kept():
            yield
    finally:
        with torch.no_grad():
            for owner, key, buffer, kept in before:
                buffer.copy_(kept)
                there = owner.get(key)
                if there is None or there.shape == buffer.shape:  # else a table that has grown
                    owner[key] = buffer


@contextlib.contextmanager
def _written_in_checkpoints(model: torch.nn.Module) -> Iterator[set[str]]:
    """The buffers that what is computed once more in the backward writes to."""
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


def _alike(one: Any, other: Any) -> bool:
    """What is no loss is left to `session.backward`, which says what it has to be."""
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return True
    return same_numbers(one, other)


def _attributes(model: torch.nn.Module) -> dict[str, Any]:
    """What modules have besides parameters, modules and buffers that are there from the beginning."""
    return {
        f"{name}.{key}" if name else key: value
        for name, module in model.named_modules()
        for key, value in (*vars(module).items(), *module._buffers.items())
        if key not in vars(BARE)
    }
