"""Record a graph while the code runs on a real microbatch.

Placeholders fail in code that asks how large its inputs are, makes tensors of that size, or keeps
what it computes in its own objects, as model libraries do. Here the code runs on real tensors.
Every torch function that it calls becomes a node with its arguments; so does every module of
torch's own, and every module that has to be kept whole. What the code asks for besides tensors
becomes a number in the graph:

* **sizes**: the graph holds only for microbatches of these shapes;
* **values** that depend on the microbatch alone, such as whether it has padding: question and
  answer are kept (`Looks`), and the question is repeated for every microbatch;
* **values** that depend on weights, buffers or random numbers: the module that asks is kept whole.

The result of `.item()` is a node too while no code reads it, such as a number that the loss
function returns beside its loss.
"""

import inspect
import operator
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Real
from typing import Any

import torch
from torch import fx
from torch.autograd.function import _SingleLevelFunction
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from agent.errors import CannotRecord
from agent.pipeline import autocast_nodes
from agent.pipeline.tracing.recording import frozen_modules
from agent.pipeline.tracing.recording.constants import CONSTANT
from agent.pipeline.tracing.recording.module_names import written
from agent.pipeline.tracing.recording.places import asking
from agent.tensors.device import device_of, stream_state
from agent.tensors.unchanged import memory_of, version_of

PLAIN = (int, float, complex, bool, str, type(None), type(...), torch.dtype, torch.device)
WORDS = (torch.memory_format, torch.layout, range)


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Questions about a tensor that do not read its values, like every `is_...` but `is_nonzero`.
ABOUT = _names(
    "shape size dim ndim ndimension numel nelement stride storage_offset dtype device layout type requires_grad "
    "_version untyped_storage storage data_ptr element_size itemsize nbytes names output_nr __len__ __hash__ get_device "
    "dense_dim sparse_dim has_names result_type can_cast promote_types qscheme _backward_hooks"
)
# Those of them whose answers depend on how many numbers the tensor has.
SIZES = _names("shape size numel nelement stride nbytes untyped_storage storage __len__")
# Functions whose result is as large as the values of the input say.
COUNTED = _names("nonzero nonzero_numpy argwhere unique unique_consecutive bincount _unique2")
CASTS = _names("__float__ __int__ __index__")
MASKS = (torch.bool, torch.uint8)
# The names that methods are called by; the `__name__` of some is another.
METHODS = {
    method: name
    for name, method in inspect.getmembers(torch.Tensor, callable)
    if method.__hash__ is not None
}
TraceError = fx.proxy.TraceError


@contextmanager
def unsaved() -> Iterator[None]:
    """Run forwards with gradients enabled, without saving anything for a backward."""
    with saved_tensors_hooks(_drop, _dropped):
        yield


def _drop(tensor: torch.Tensor) -> None:
    """Drop a tensor that a graph saves, because there is no backward through that graph."""


def _dropped(_: None) -> torch.Tensor:
    raise RuntimeError("the forward differentiates something itself")


class Looks:
    """The questions asked about a microbatch's values, with their answers."""

    def __init__(
        self, graph: fx.GraphModule, places: Sequence[str], answers: Sequence[Any]
    ) -> None:
        self._graph, self._places = graph, places
        (output,) = (node for node in graph.graph.nodes if node.op == "output")
        self._expected: dict[fx.Node, list[tuple[int, Any]]] = {}
        for question, (node, answer) in enumerate(zip(output.args[0], answers, strict=True)):
            self._expected.setdefault(node, []).append((question, answer))

    def differs(self, batch: Sequence[torch.Tensor]) -> str:
        """Return the line that gets a different answer from this microbatch, or "" if none.

        Stop at the first difference, because later questions may be meaningless for this
        microbatch.
        """
        with torch.no_grad():
            try:
                _Asking(self._graph, self._expected).run(*batch)
            except _Differs as found:
                return self._places[found.question]
        return ""


class _Differs(Exception):  # noqa: N818 - an answer
    def __init__(self, question: int) -> None:
        self.question = question


class _Asking(fx.Interpreter):
    """Runs what the questions need, up to the first one with a different answer."""

    def __init__(
        self, graph: fx.GraphModule, expected: Mapping[fx.Node, list[tuple[int, Any]]]
    ) -> None:
        super().__init__(graph)
        self._expected = expected

    def run_node(self, n: fx.Node) -> Any:
        found = super().run_node(n)
        for question, answer in self._expected.get(n, ()):
            if found != answer:
                raise _Differs(question)
        return found


def _asked(*_: object) -> Any:
    raise TraceError("it looks at values that are computed")


def _computed(operation: Callable[..., Any], *, turned: bool = False) -> Any:
    def compute(later: "Later", *others: Any) -> "Later":
        operands = (*others, later) if turned else (later, *others)
        if not all(isinstance(each, Later | Real) for each in others):
            _asked()
        return later.made_by(operation, operands)

    return compute


class Later:
    """A number not read yet; it can be computed with, shown, and returned beside a loss."""

    def __init__(self, witness: "Witness", node: fx.Node, value: Any) -> None:
        self._witness, self.node, self._value = witness, node, value

    def made_by(self, operation: Callable[..., Any], operands: tuple[Any, ...]) -> "Later":
        values = (each._value if isinstance(each, Later) else each for each in operands)
        nodes = tuple(each.node if isinstance(each, Later) else each for each in operands)
        value = operation(*values)
        return Later(self._witness, self._witness.graph.call_function(operation, nodes), value)

    def __format__(self, how: str) -> str:
        return format(self._value, how)

    def __repr__(self) -> str:
        return repr(self._value)

    __add__, __radd__ = _computed(operator.add), _computed(operator.add, turned=True)
    __sub__, __rsub__ = _computed(operator.sub), _computed(operator.sub, turned=True)
    __mul__, __rmul__ = _computed(operator.mul), _computed(operator.mul, turned=True)
    __pow__, __rpow__ = _computed(operator.pow), _computed(operator.pow, turned=True)
    __truediv__ = _computed(operator.truediv)
    __rtruediv__ = _computed(operator.truediv, turned=True)
    __floordiv__, __mod__ = _computed(operator.floordiv), _computed(operator.mod)
    __neg__, __abs__ = _computed(operator.neg), _computed(operator.abs)
    __round__ = _computed(round)
    __bool__ = __int__ = __float__ = __index__ = __hash__ = _asked
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _asked


class Witness(TorchFunctionMode):
    """Runs the code once and records what it calls. `failed` is the module to keep whole.

    If it is `patient`, `.item()` returns a `Later`, so that its number is not read yet; `waited`
    says that there was one.
    """

    def __init__(
        self,
        whole: torch.nn.Module,
        kept: frozenset[str],
        is_leaf: Callable[..., bool],
        *,
        patient: bool,
    ) -> None:
        super().__init__()
        self.graph = fx.Graph()
        self.failed: str | None = None
        self._patient, self.waited = patient, False
        self._device = device_of(whole)
        self.switches = autocast_nodes.Switches()
        self._whole, self._kept, self._is_leaf = whole, kept, is_leaf
        self._paths = {id(module): path for path, module in whole.named_modules()}
        self._attributes = dict(_attributes(whole))
        self._constants = sum(path.startswith(CONSTANT) for path in self._attributes.values())
        self._hooks = {id(each): backward_hooks(each) for each in whole.modules()}
        self._settings = settings(whole)
        self._known: dict[int, tuple[weakref.ref[torch.Tensor], fx.Node, int]] = {}
        self._grad = torch.is_grad_enabled()
        self._inside = 0  # a node's own code is running
        self._asking = False  # that code is a guest's, and not all of its results are followed
        self._unseen = _Unseen(lambda: self._inside > 0 and not self._asking)
        self._input = fx.Graph()  # what depends on the microbatch alone
        self._inputs: dict[fx.Node, fx.Node] = {}
        self._asked: list[tuple[fx.Node, str, Any]] = []
        self._told = set[fx.Node]()  # sizes that the code asked for
        self._counted: dict[fx.Node, dict[fx.Node, tuple[fx.Node, Any] | None]] = {}

    def trace(self, example: Sequence[torch.Tensor]) -> tuple[fx.Graph, Looks | None]:
        for index, leaf in enumerate(example):
            node = self.graph.placeholder(f"batch_{index}")
            self._inputs[node] = self._input.placeholder(node.name)
            self._remember(leaf, node)  # a number is one in the graph
        with self._calls(), self._unseen, self:
            returned = self._whole(*example)
        self.switches.write(self.graph)
        self.graph.output(tuple(map(self._given_out, returned)))
        if not self._asked:
            return self.graph, None
        self._input.output(tuple(node for node, _, _ in self._asked))
        _, places, answers = zip(*self._asked, strict=True)
        return self.graph, Looks(written(self._whole, self._input), places, answers)

    def _given_out(self, value: Any) -> Any:
        return value.node if isinstance(value, Later) else self._taken(value)

    # --- what is called -------------------------------------------------------------------------------

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = func.__name__
        if name in ("__get__", "__set__", "__delete__"):
            name = func.__self__.__name__
        if not self._inside:
            refuse_switched(func, args, kwargs, self._attributes)
        if self._inside or name in ABOUT or (name.startswith("is_") and name != "is_nonzero"):
            if name in SIZES and not self._inside:
                self._tell_sizes([self._known_node(tensor) for tensor in _tensors(args[:1])])
            return func(*args, **kwargs)
        if name == "grad_fn":
            raise TraceError(
                "it asks for `grad_fn`, of which stages have another, without the hooks that it may get"
            )
        if name in ("register_hook", "register_post_accumulate_grad_hook"):
            raise TraceError(
                "it gives a hook to a tensor, which a stage would call with a part of its gradient"
            )
        if func.__name__ == "__set__":
            raise TraceError(f"it sets `{name}` of a tensor")
        if func.__name__ == "__get__":
            return self._call("call_function", getattr, func, args, (args[0], name), {})
        if name == "__setitem__":
            return self._call("call_function", operator.setitem, func, args, args, kwargs)
        if getattr(torch.Tensor, name, None) is not func:  # `**` calls itself pow, which is another
            name = METHODS.get(func, "")
        if name:
            return self._call("call_method", name, func, args, args, kwargs)
        return self._call("call_function", func, func, args, args, kwargs)

    def _call(self, op: str, target: Any, func: Any, given: Any, args: Any, kwargs: Any) -> Any:
        tensors = _tensors((args, kwargs))
        taken = (self._taken(args), self._taken(kwargs)) if tensors else None
        versions = [version_of(tensor) for tensor in tensors]
        stream = stream_state(self._device)
        with self._own_code():
            out = func(*given, **kwargs)
        if out is NotImplemented or (not tensors and not _tensors(out)):
            return out
        taken = taken or (self._taken(args), self._taken(kwargs))
        pure = all(node in self._inputs for node in _nodes(taken))
        pure = pure and all(map(self._as_it_was, tensors, versions))
        pure = pure and torch.equal(stream_state(self._device), stream)
        if pure:
            self._renew(tensors)
        if self._patient and target == "item":
            self.waited = True
            return Later(self, self._create(op, target, *taken, pure=False), out)
        if out is not None and not _tensors(out):
            self._look(op, target, taken, pure, out)
            return out
        if isinstance(out, list | tuple):
            self._tell_sizes(_nodes(taken))  # there may be one for each row
        node = self._create(op, target, *taken, pure)
        name = target if isinstance(target, str) else func.__name__
        for tensor in _counted(name, args, kwargs):
            self._count(node, name, tensor, out)
        self._remember(out, node)
        return out

    def _create(self, op: str, target: Any, args: Any, kwargs: Any, pure: bool) -> fx.Node:
        self.switches.write(self.graph)
        node = self.graph.create_node(op, target, args, kwargs)
        for source in _nodes((args, kwargs)):
            if source in self._counted:
                self._counted[node] = self._counted.get(node, {}) | self._counted[source]
        if pure:
            self._inputs[node] = self._input.node_copy(node, self._inputs.__getitem__)
        return node

    def _look(self, op: str, target: Any, given: tuple[Any, Any], pure: bool, answer: Any) -> None:
        """Record a value that the code reads, because the code may branch on it."""
        if not pure or not _is_plain(answer):
            instead = (
                "; a number that is only returned is had by .item()" if target in CASTS else ""
            )
            raise TraceError(f"it looks at values that are computed{instead}")
        made = self._input.create_node(
            op, target, *fx.node.map_arg(given, self._inputs.__getitem__)
        )
        self._asked.append((made, asking(), answer))

    def _count(self, node: fx.Node, name: str, by: torch.Tensor, out: Any) -> None:
        """Note which values decide the size of `out`, for the case that code reads the size."""
        source, how, told = self._node(by), COUNTS.get(name), None
        if how is None and node in self._inputs:
            told = self._input.call_function(_sizes, (self._inputs[node],)), _sizes(out)
        elif how and source in self._inputs and self._as_it_was(by, version_of(by)):
            with self._own_code():
                told = self._input.call_function(how, (self._inputs[source],)), how(by)
        self._counted[node] = self._counted.get(node, {}) | {source: told}

    def _tell_sizes(self, nodes: Iterable[fx.Node | None]) -> None:
        """Record that the code asks for the sizes of these nodes."""
        for node in nodes:
            for told in (self._counted.get(node, {}) if node else {}).values():
                if told is None:
                    raise TraceError("it looks at values that are computed")
                if told[0] not in self._told:
                    self._told.add(told[0])
                    self._asked.append((told[0], asking(), told[1]))

    # --- modules, and functions with their own backward --------------------------------------------

    @contextmanager
    def _calls(self) -> Iterator[None]:
        original = torch.nn.Module.__call__

        def call(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return original(module, *args, **kwargs)
            return self._module(module, original, args, kwargs)

        def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
            function = super(_SingleLevelFunction, cls).apply  # type: ignore[misc]
            if self._inside:
                return function(*args, **kwargs)
            return self._call("call_function", _applied(cls), function, args, args, kwargs)

        torch.nn.Module.__call__ = call  # type: ignore[method-assign]
        _SingleLevelFunction.apply = classmethod(apply)  # type: ignore[attr-defined]
        try:
            yield
        finally:
            torch.nn.Module.__call__ = original  # type: ignore[method-assign]
            del _SingleLevelFunction.apply  # type: ignore[attr-defined]

    def _module(
        self, module: torch.nn.Module, original: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        path = self._paths.get(id(module))
        if path is None:
            return self._beside(module, original, args, kwargs)
        kept = path and path in self._kept
        if kept:
            refuse_lent(module, self._attributes)
            refuse_kept_weights(module)
        if kept or (path and self._is_leaf(module, path) and not lent(module, self._attributes)):
            refuse_hooks(module, path, self._hooks)
            refuse_settings(module, path, self._settings)
            taken, named = self._taken(args), self._taken(kwargs)
            with self._own_code():
                out = _apart(original(module, *args, **kwargs), (args, kwargs))
            self._settings |= settings(module)  # what it has set itself is set in a stage as well
            node = self._create("call_module", path, taken, named, pure=False)
            self._remember(out, node)
            if kept:
                _refuse_numbers(out)
                if (form := _form(out)) is not True:
                    self._create("call_function", as_recorded, (node, form), {}, pure=False)
            return out
        buffers = [*module._buffers.values()]
        try:
            out = original(module, *args, **kwargs)
            refuse_replaced(module, buffers)
        except Exception:
            self.failed = self.failed or path or None
            raise
        return out

    def _beside(
        self, module: torch.nn.Module, original: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """Call a guest, or a loss without state that was made beside the model."""
        learns = any(tensor.requires_grad for tensor in _tensors((args, kwargs)))
        asked = not torch.is_grad_enabled() or not learns
        path = frozen_modules.received(self._whole, module) if asked else None
        if path is None:
            return original(module, *args, **kwargs)
        taken = self._taken(args), self._taken(kwargs)
        self._asking = True
        try:
            with self._own_code():
                out = _apart(original(module, *args, **kwargs), (args, kwargs))
        finally:
            self._asking = False
        with torch.set_grad_enabled(self._grad):
            node = self._create("call_module", path, *taken, pure=False)
        for target, key, each in _parts(out):
            if isinstance(each, torch.Tensor) and self._known_node(each) is not None:
                continue  # it was an argument of the call
            if target is None:
                self._remember(each, node)
            elif _is_followed(each):
                self._remember(
                    each, self._create("call_function", target, (node, key), {}, pure=False)
                )
        return out

    @contextmanager
    def _own_code(self) -> Iterator[None]:
        self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1

    # --- tensors and nodes ----------------------------------------------------------------------------

    def _taken(self, value: Any) -> Any:
        """Return `value` as an argument for a node, with nodes in place of tensors."""
        match value:
            case torch.Tensor():
                return self._node(value)
            case tuple() if hasattr(value, "_fields"):
                return type(value)(*map(self._taken, value))
            case list() | tuple():
                return (list if isinstance(value, list) else tuple)(map(self._taken, value))
            case dict():
                return {key: self._taken(each) for key, each in value.items()}
            case slice():
                return slice(*map(self._taken, (value.start, value.stop, value.step)))
        number = getattr(value, "shape", None) == () and hasattr(value, "item")  # of numpy's
        if number or isinstance(value, PLAIN + WORDS):
            return value.item() if number else value
        raise TraceError(f"a {type(value).__name__} goes into what it calls")

    def _node(self, tensor: torch.Tensor) -> fx.Node:
        known = self._known_node(tensor)
        if known is not None:
            return known
        path = self._attributes.get(id(tensor))
        if path is None:
            fixed = not tensor.requires_grad or (tensor.is_leaf and not torch.is_grad_enabled())
            if not fixed or self._unseen.made(tensor) or _wrapped(tensor):
                raise TraceError("it computes in a way that cannot be followed")
            # Counted by themselves: a forward leaves tensors in modules, on one worker only.
            path, self._constants = f"{CONSTANT}{self._constants}", self._constants + 1
            still = torch.nn.Parameter(tensor.detach(), requires_grad=False)
            setattr(self._whole, path, still if tensor.requires_grad else tensor)
            self._attributes[id(tensor)] = path
        self.switches.write(self.graph)
        node = self.graph.get_attr(path)
        if path.startswith(CONSTANT):
            self._inputs[node] = self._input.get_attr(path)
            self._remember(tensor, node)
        return node

    def _known_node(self, tensor: torch.Tensor) -> fx.Node | None:
        known = self._known.get(id(tensor))  # a tensor that is gone may have had the same id
        return known[1] if known is not None and known[0]() is tensor else None

    def _as_it_was(self, tensor: torch.Tensor, version: int) -> bool:
        """Return whether everything written to the tensor depends on the microbatch alone."""
        known = self._known.get(id(tensor))
        return known is None or known[2] == version

    def _renew(self, tensors: Sequence[torch.Tensor]) -> None:
        """Record that what was just written to these tensors depends on the microbatch alone."""
        for tensor in tensors:
            ref, node, _ = self._known[id(tensor)]
            self._known[id(tensor)] = ref, node, version_of(tensor)

    def _remember(self, value: Any, node: fx.Node) -> None:
        """Record which node a tensor comes from. Each tensor of a collection gets its own node."""
        match value:
            case torch.Tensor():
                self._known[id(value)] = weakref.ref(value), node, version_of(value)
            case dict():
                for key, each in value.items():
                    self._remember_item(each, node, key)
            case list() | tuple():
                for index, each in enumerate(value):
                    self._remember_item(each, node, index)
            case _ if not isinstance(value, PLAIN):
                raise TraceError(f"a {type(value).__name__} comes out of what it calls")

    def _remember_item(self, value: Any, node: fx.Node, key: Any) -> None:
        if not isinstance(value, PLAIN):
            pure = node in self._inputs
            self._remember(
                value, self._create("call_function", operator.getitem, (node, key), {}, pure)
            )


def lent(module: torch.nn.Module, own: Container[int]) -> bool:
    """Return whether the module computes with weights lent to it by its caller.

    `torch.func.functional_call` lends weights; a node of the module would compute with its own.
    """
    return any(id(param) not in own for param in module.parameters())


def refuse_lent(module: torch.nn.Module, own: Container[int]) -> None:
    if lent(module, own):
        raise TraceError("it computes with weights that it is lent")


def refuse_switched(
    func: Any, args: Any, kwargs: Mapping[str, Any] | None, own: Container[int]
) -> None:
    """Refuse code that freezes or unfreezes a weight; a graph does not show which uses follow."""
    setting = func.__name__ == "__set__" and func.__self__.__name__ == "requires_grad"
    if not setting and func.__name__ != "requires_grad_":
        return
    weight, *rest = args
    wanted = bool(rest[0]) if rest else (kwargs or {}).get("requires_grad", True)
    if id(weight) in own and weight.requires_grad != wanted:
        raise TraceError(
            "it freezes or unfreezes a weight, which can be done before session.backward(...)"
        )


class Unswitched(TorchFunctionMode):
    """Refuses to freeze or unfreeze these weights."""

    def __init__(self, own: Container[int]) -> None:
        super().__init__()
        self._own = own

    def __torch_function__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        refuse_switched(func, args, kwargs, self._own)
        return func(*args, **(kwargs or {}))


def weights_kept(module: torch.nn.Module) -> bool:
    """Return whether `parametrize.cached()` keeps values computed for it between calls."""
    return bool(parametrize._cache_enabled) and any(
        map(parametrize.is_parametrized, module.modules())
    )


def backward_hooks(module: torch.nn.Module) -> list[Callable[..., Any]]:
    return [*module._backward_hooks.values(), *module._backward_pre_hooks.values()]


def refuse_hooks(
    module: torch.nn.Module, path: str, before: Mapping[int, list[Callable[..., Any]]]
) -> None:
    """Refuse a module, called as one node, with backward hooks that it did not have `before`."""
    for name, each in module.named_modules(prefix=path):
        if backward_hooks(each) != before.get(id(each), []):
            raise CannotRecord(
                f"loss_of gives {name.removeprefix('model.')!r} a backward hook, which that module would not have where "
                "a stage calls it: give it the hook before the loop over session.steps(...), or train with depth 1"
            )


def settings(module: torch.nn.Module) -> dict[int, dict[str, Any]]:
    """Return the plain attributes of a module and of all inside, by which their code may go."""
    return {
        id(each): {key: value for key, value in vars(each).items() if isinstance(value, PLAIN)}
        for each in module.modules()
    }


def refuse_settings(
    module: torch.nn.Module, path: str, before: Mapping[int, dict[str, Any]]
) -> None:
    """Refuse a module, called as one node, with other settings than it had `before`.

    Whoever has set them is not called by a stage. A module that sets them itself is kept whole.
    """
    now = settings(module)
    for name, each in module.named_modules(prefix=path):
        mine, known = now[id(each)], before.get(id(each), now[id(each)])
        for key in sorted(mine.keys() | known.keys()):
            if mine.get(key) != known.get(key):
                raise TraceError(
                    f"it sets {key!r} of {name.removeprefix('model.')!r}, which is called where a stage does not set it"
                )


def refuse_kept_weights(module: torch.nn.Module) -> None:
    if weights_kept(module):
        raise TraceError("it computes with weights that parametrize.cached() keeps")


def refuse_replaced(module: torch.nn.Module, before: list[torch.Tensor | None]) -> None:
    if any(a is not b for a, b in zip(module._buffers.values(), before, strict=False)):
        raise TraceError("it puts another buffer in the place of one")


class _Unseen(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tensors that were made while no recorded code was running."""

    def __init__(self, seen: Callable[[], bool]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seen = seen
        self._made: dict[int, weakref.ref[torch.Tensor]] = {}

    def made(self, tensor: torch.Tensor) -> bool:
        ref = self._made.get(id(tensor))
        return ref is not None and ref() is tensor

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if not self._seen():
            self._made.update({id(tensor): weakref.ref(tensor) for tensor in _tensors(out)})
        return out


class Derived(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tensors that were computed from the known ones, or share their memory (`p.data`)."""

    def __init__(self, known: Sequence[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known = {id(tensor) for tensor in known}
        self._memories = {memory_of(tensor) for tensor in known}
        self._made: dict[int, weakref.ref[torch.Tensor]] = {}

    def knows(self, tensor: torch.Tensor) -> bool:
        return id(tensor) in self._known

    def has(self, tensor: torch.Tensor) -> bool:
        ref = self._made.get(id(tensor))
        if ref is not None and ref() is tensor:
            return True
        plain = tensor.layout is torch.strided
        return plain and memory_of(tensor) in self._memories

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if any(map(self.has, _tensors((args, kwargs or {})))):
            self._made.update({id(tensor): weakref.ref(tensor) for tensor in _tensors(out)})
        return out


def _counted(name: str, args: Any, kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return the tensors whose values decide how large the result is."""
    tensors = _tensors((args, kwargs))
    match name:
        case "__getitem__":
            return [index for index in _tensors(args[1:]) if index.dtype in MASKS]
        case "repeat_interleave" | "tensor_split" if len(args) + len(kwargs) == 1:
            return tensors
        case "repeat_interleave" | "tensor_split" | "masked_select":
            return tensors[1:2]
        case "one_hot" if kwargs.get("num_classes", args[1] if len(args) > 1 else -1) < 0:
            return tensors
        case "where" if len(args) == 1:
            return tensors
    return tensors[:1] if name in COUNTED else []


def _trues(values: torch.Tensor) -> int:
    return int(torch.count_nonzero(values))


def _total(values: torch.Tensor) -> int:
    return int(values.sum())


# How the values of a tensor give the size. If a name is missing, the result's size is read instead.
COUNTS: dict[str, Callable[[torch.Tensor], Any]] = {
    "__getitem__": _trues,
    "masked_select": _trues,
    "nonzero": _trues,
    "where": _trues,
    "repeat_interleave": _total,
    "tensor_split": torch.Tensor.tolist,
}


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return isinstance(value, PLAIN)


def _sizes(value: Any) -> Any:
    return [tuple(tensor.shape) for tensor in _tensors(value)]


def _tensors(value: Any) -> list[torch.Tensor]:
    match value:
        case torch.Tensor():
            return [value]
        case list() | tuple():
            return [tensor for each in value for tensor in _tensors(each)]
        case dict():
            return _tensors([*value.values()])
        case slice():
            return _tensors([value.start, value.stop, value.step])
    return []


def _apart(out: Any, given: Any) -> Any:
    """Return what a module returned, with tensors of their own for those that it got.

    A module with a random branch returns its argument for one microbatch and a new tensor for the
    next, so what uses the argument and what uses the result are different nodes.
    """
    taken = {id(tensor) for tensor in _tensors(given)}

    def own(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if id(value) in taken:
                return torch.ops.aten.alias(value)
            taken.add(id(value))
            return value
        if type(value) is dict:
            return {key: own(each) for key, each in value.items()}
        if type(value) in (list, tuple):
            return type(value)(map(own, value))
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*map(own, value))
        return value

    return own(out)


def _refuse_numbers(out: Any) -> None:
    """Refuse a number beside tensors, which would be that of the example for every microbatch."""
    parts = [*out.values()] if isinstance(out, dict) else out
    if isinstance(parts, list | tuple):
        for each in parts:
            _refuse_numbers(each)
    elif isinstance(out, int | float | complex):
        raise TraceError("it gets a number from a module that looks at values")


def as_recorded(out: Any, form: Any) -> None:
    """Refuse a result in which there is something else beside its tensors than when it was recorded."""
    if _form(out) != form:
        raise CannotRecord(
            "a module that looks at values returned None or text where it returned something else for the microbatch that "
            "was recorded, or the other way round: return tensors for every microbatch, or train with depth 1"
        )


def _form(out: Any) -> Any:
    """Return what a result is made of, with True in place of its tensors."""
    if isinstance(out, dict):
        return "dict", tuple((key, _form(each)) for key, each in out.items())
    if isinstance(out, list | tuple):
        return "list", tuple(map(_form, out))
    return True if isinstance(out, torch.Tensor) else (out if isinstance(out, str) else None,)


def _parts(out: Any) -> Iterator[tuple[Callable[..., Any] | None, Any, Any]]:
    """Yield the parts of a guest's result, each after the function and key that get it."""
    match out:
        case torch.Tensor():
            yield None, None, out
        case dict():
            yield from ((operator.getitem, key, each) for key, each in out.items())
        case list() | tuple():
            yield from ((operator.getitem, index, each) for index, each in enumerate(out))
        case _:
            yield from ((getattr, key, each) for key, each in getattr(out, "__dict__", {}).items())


def _is_followed(value: Any) -> bool:
    if isinstance(value, list | tuple | dict):
        return all(map(_is_followed, value.values() if isinstance(value, dict) else value))
    return isinstance(value, torch.Tensor)


def _nodes(value: Any) -> list[fx.Node]:
    found: list[fx.Node] = []
    fx.node.map_arg(value, found.append)
    return found


def _attributes(whole: torch.nn.Module) -> Iterator[tuple[int, str]]:
    """Yield the tensors that modules have, each under the first name found."""
    seen: set[int] = set()
    for path, module in whole.named_modules():
        for tensors in (module._parameters, module._buffers, vars(module)):
            for key, tensor in tensors.items():
                if isinstance(tensor, torch.Tensor) and id(tensor) not in seen:
                    seen.add(id(tensor))
                    yield id(tensor), f"{path}.{key}" if path else key


def _wrapped(tensor: torch.Tensor) -> bool:
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def _applied(cls: Any) -> Callable[..., Any]:
    """Wrap `cls.apply` under a module name outside torch.

    With one of torch's, `torch.fx` would write the class in its place, which is not what is called.
    """

    def applied(*args: Any, **kwargs: Any) -> Any:
        return cls.apply(*args, **kwargs)

    applied.__name__, applied.__qualname__, applied.__module__ = (
        cls.__name__,
        cls.__qualname__,
        f"applied.{cls.__module__}",
    )
    return applied
