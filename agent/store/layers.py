"""Turn models and other state into layers, and fill what is here from layers.

Parameters keep the names that they have in the whole model (see `agent.tensors.layer_names` for several
models), and optimizer state has the name of its parameter, never a place in a list. So a worker
that owns three modules writes and reads three layers, whichever worker had them before. Objects
that are neither modules nor optimizers (schedules, scalers, script-defined state) are the same on
all workers, and make one layer.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import torch

from agent.errors import StateError
from agent.store.encoding import values
from agent.store.encoding.format import REST, Layer, lay_out, share
from agent.store.encoding.sharing import Sharing
from agent.store.groups import Groups
from agent.store.memory import Arena
from agent.store.reading import Index, Want
from agent.store.shares import Extent, Share
from agent.tensors.device import CPU, where
from agent.tensors.layer_names import named_parameters, prefixes
from agent.tensors.shards import DTYPES, DTYPES_BY_NAME, Stateful, bytes_of
from agent.tensors.staging import Away, Piece, mark


class LiveLayer(msgspec.Struct, frozen=True, kw_only=True):
    """A layer now: its form, and the live tensors in the order of the form.

    Tensors on a device have their contents after `mark`.
    """

    form: Layer
    tensors: tuple[torch.Tensor, ...]
    mark: torch.Event | None = None

    def pieces(self, start: int, end: int) -> list[Piece]:
        """Return the live memory of the bytes `start .. end - 1`."""
        found: list[Piece] = []
        for entry, tensor in zip(self.form.tensors, self.tensors, strict=True):
            low, high = max(start, entry.start) - entry.start, min(end, entry.end) - entry.start
            if low >= high:
                continue
            if self.mark is None or tensor.is_cpu:
                found.append(bytes_of(tensor)[low:high])
            else:
                found.append(Away(tensor, low, high, self.mark))
        return found


def share_of(live: Iterable[LiveLayer], holders: int, index: int) -> tuple[Share, list[Piece]]:
    """Return the share that holder `index` of `holders` sends of these layers, and its bytes."""
    return share_of_each((layer, index, holders) for layer in live)


def share_of_each(parts: Iterable[tuple[LiveLayer, int, int]]) -> tuple[Share, list[Piece]]:
    """Return share `index` of `holders` of each layer; share 0 has the layer's form too."""
    forms, extents, pieces = list[Layer](), list[Extent](), list[Piece]()
    for layer, index, holders in parts:
        size = layer.form.layer_bytes
        low, high = share(size, holders, index)
        if not index:
            forms.append(layer.form)
        if low < high:
            extents.append(Extent(layer.form.name, low, high - low, size))
            pieces.extend(layer.pieces(low, high))
    return Share(forms=tuple(forms), extents=tuple(extents)), pieces


def block_of(name: str) -> str:
    """Return a parameter's layer: its numbered block if it is in one, else its module."""
    path = name.split(".")
    for at, word in enumerate(path[:-1]):
        if word.isdigit():
            return ".".join(path[: at + 1])
    return ".".join(path[:-1]) or name


class _Draft:
    """The tensors and values collected for one layer."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.live: list[torch.Tensor] = []
        self.values: dict[str, Any] = {}
        self.aliases: dict[str, str] = {}

    def copy(self, path: str, value: Any) -> bool | Sequence[int]:
        """Keep a copy, made at once, of a value that may change before the next update."""
        if not isinstance(value, torch.Tensor):
            return False
        kept = self.keep(path, value.clone())
        self.live[-1] = value.detach()
        return kept

    def hold(self, path: str, value: Any) -> bool | Sequence[int]:
        """Keep a copy of a value that a script may change, so that `versions` ignores changes."""
        return self.keep(path, value.clone()) if isinstance(value, torch.Tensor) else False

    def keep(self, path: str, value: Any) -> bool | Sequence[int]:
        if not isinstance(value, torch.Tensor):
            return False
        if why := why_unsaved(value):
            raise StateError(f"{path}: {why}")
        self.tensors[path] = value.detach()
        self.live.append(self.tensors[path])
        return _strides(value) or True

    def state(self, state: Mapping[Any, Any], path: str) -> Any:
        """Strip an optimizer's state as `values.strip` does, in a fraction of the time."""
        items = []
        for key, item in state.items():
            place = f"{path}/{key}"
            taken = self.keep(place, item)
            items.append(
                [
                    key,
                    values.named(place, taken) if taken else values.strip(item, place, self.keep),
                ]
            )
        return {"$map": items}

    def finish(self, name: str, settings: "_Draft | None", mark: torch.Event | None) -> LiveLayer:
        live, told = self.tensors, self.values
        if settings is not None:
            live, told = {**live, **settings.tensors}, {**told, **settings.values}
        forms = [(key, DTYPES[item.dtype], tuple(item.shape)) for key, item in live.items()]
        form = lay_out(name, forms, json.dumps(told), self.aliases)
        tensors = tuple(live[entry.name] for entry in form.tensors)
        return LiveLayer(form=form, tensors=tensors, mark=mark)


class Collected:
    """The tensors and values that make up the state, from which their form can be made later.

    Making the form takes as long as the collecting, and need not be done while a step waits. The
    optimizers' settings are known for all layers, whichever are among these. Tensors on a device
    have their contents after `mark`.
    """

    def __init__(
        self,
        drafts: Mapping[str, _Draft],
        settings: Mapping[str, _Draft],
        mark: torch.Event | None = None,
    ) -> None:
        self._drafts, self._settings, self._mark = drafts, settings, mark

    @property
    def device(self) -> torch.device | None:
        return None if self._mark is None else self._mark.device

    def _all(self) -> Iterator[tuple[str, _Draft]]:
        for name, draft in self._drafts.items():
            yield name, draft
            if name in self._settings:
                yield name, self._settings[name]

    def contents(self) -> Iterator[tuple[str, list[torch.Tensor], dict[str, Any]]]:
        """Yield the tensors and values of every layer.

        A layer may come twice, the second time with the settings of optimizers. What may change
        before the next update is a copy.
        """
        for name, draft in self._all():
            yield name, [*draft.tensors.values()], draft.values

    def sizes(self) -> dict[str, int]:
        """Return the bytes of every layer."""
        found = dict.fromkeys(self._drafts, 0)
        for name, draft in self._all():
            found[name] += sum(tensor.nbytes for tensor in draft.tensors.values())
        return found

    def versions(self) -> list[int]:
        """Return numbers that change whenever one of the tensors is written to."""
        return [tensor._version for _, draft in self._all() for tensor in draft.live]

    def updates(self) -> list[int]:
        """Return numbers that change with parameters and optimizer state, but not with buffers."""
        return [item._version for _, draft in self._all() for item in draft.tensors.values()]

    def written(self, before: list[int]) -> str:
        """Return the name of a tensor that was written to since these updates, or ""."""
        return self._differing(before, self.updates())

    def changed(self, before: list[int]) -> str:
        """Return the name of a tensor that was written to since these versions, or ""."""
        return self._differing(before, self.versions())

    def _differing(self, before: list[int], now: list[int]) -> str:
        if before == now:
            return ""
        names = (path for _, draft in self._all() for path in draft.tensors)
        pairs = zip(names, before, now, strict=True)
        return next((name for name, was, is_ in pairs if was != is_), "")

    def joined(self, others: "Collected") -> "Collected":
        """Return these layers and those, with the optimizers' settings of these."""
        mark = others._mark or self._mark  # the later one
        return Collected({**self._drafts, **others._drafts}, self._settings, mark)

    def only(self, layers: Container[str]) -> "Collected":
        """Return some of the layers; of the others there may be nothing here."""
        drafts = {name: draft for name, draft in self._drafts.items() if name in layers}
        return Collected(drafts, self._settings, self._mark)

    def finish(self) -> list[LiveLayer]:
        return [
            draft.finish(name, self._settings.get(name), self._mark)
            for name, draft in self._drafts.items()
        ]


def collect(objects: Mapping[str, Stateful]) -> Collected:
    """Note which tensors and values make up the state now.

    Parameters and optimizer state are noted live, because nothing changes them before the next
    update. Buffers do change (a forward counts its batches), and so may settings: they are copied.
    """
    drafts: dict[str, _Draft] = defaultdict(_Draft)
    settings: dict[str, _Draft] = defaultdict(_Draft)
    names: dict[torch.Tensor, str] = {}
    first: dict[torch.Tensor, str] = {}
    models = _modules(objects)
    for key, prefix in prefixes(models).items():
        for name, tensor in _tensors_of(models[key]):
            draft, path = drafts[block_of(prefix + name)], f"{key}/{name}"
            if tensor in first:
                draft.aliases[path] = first[tensor]
                continue
            keep = draft.keep if isinstance(tensor, torch.nn.Parameter) else draft.copy
            keep(path, tensor)
            first[tensor], names[tensor] = path, prefix + name
    sharing = Sharing()
    for key, thing in objects.items():
        if isinstance(thing, torch.optim.Optimizer):
            _take_optimizer(key, thing, drafts, settings, names)
        elif not isinstance(thing, torch.nn.Module):
            draft = drafts[REST]
            with sharing.of(key):
                draft.values[key] = values.strip(thing.state_dict(), key, draft.hold)
    device = where(names)
    return Collected(drafts, settings, None if device == CPU else mark(device))


def _modules(objects: Mapping[str, Stateful]) -> dict[str, torch.nn.Module]:
    return {key: thing for key, thing in objects.items() if isinstance(thing, torch.nn.Module)}


def why_unsaved(value: torch.Tensor) -> str:
    """Return why a tensor cannot be saved, and what to do; "" if it can."""
    if value.dtype in DTYPES and value.layout is torch.strided:
        return ""
    instead = f"keep it as one of {', '.join(sorted(str(each)[6:] for each in DTYPES))}"
    if value.layout is not torch.strided:
        instead = "keep it dense, and make it what it is where it is used"
    elif value.is_complex():
        instead = "keep it as complex64, or torch.view_as_real(...) of it, and torch.view_as_complex(...) where it is used"
    return f"a tensor of {value.dtype} ({value.layout}) cannot be saved: {instead}"


def _tensors_of(module: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Return every parameter and saved buffer under every name, as `state_dict` does."""
    state = module.state_dict(keep_vars=True)
    found = [(name, item) for name, item in state.items() if isinstance(item, torch.Tensor)]
    if len(found) != len(state):
        odd = sorted(name for name, item in state.items() if not isinstance(item, torch.Tensor))
        raise StateError(
            f"{odd[0]}: the model's state_dict() has something there that is no tensor, which cannot be saved by layer: "
            "keep it as a buffer if it changes; if it does not, have a class of your own that leaves it out, "
            f"`def state_dict(self, *args, **named): found = super().state_dict(*args, **named); found.pop({odd[0]!r}); "
            "return found`"
        )
    return found


def _take_optimizer(
    key: str,
    optimizer: torch.optim.Optimizer,
    drafts: dict[str, _Draft],
    settings: dict[str, _Draft],
    names: dict[torch.Tensor, str],
) -> None:
    for at, one in enumerate(optimizer.param_groups):
        # A function is the script's, the same on every worker.
        told = {k: item for k, item in one.items() if k != "params" and not callable(item)}
        for parameter in one["params"]:
            if parameter not in names:
                raise StateError(f"{key} trains a tensor that belongs to none of the saved modules")
            name = names[parameter]
            layer = block_of(name)
            draft, path, shared = drafts[layer], f"{key}/{name}", f"{key}@{layer}/{at}"
            setting = settings[layer]
            # Many parameters have the same settings; a layer with any of them has one copy.
            if shared not in setting.values:
                setting.values[shared] = values.strip(told, shared, setting.copy)
            state = optimizer.state.get(parameter, {})
            draft.values[path] = {"state": draft.state(state, f"{path}/state"), "settings": shared}
    if odd := _of_none(optimizer):
        draft = drafts[REST]
        draft.values[f"{key}@{REST}"] = values.strip(odd, f"{key}@{REST}", draft.copy)


def _of_none(optimizer: torch.optim.Optimizer) -> dict[Any, Any]:
    """Return state of a script-defined optimizer that is of no parameter, as a count of steps."""
    return {key: item for key, item in optimizer.state.items() if not isinstance(key, torch.Tensor)}


def with_settings(objects: Mapping[str, Stateful]) -> frozenset[str]:
    """Return layers that have the settings of every optimizer group, in few bytes."""
    sizes = collect(objects).sizes()
    names = {tensor: name for name, tensor in named_parameters(_modules(objects)).items()}
    found: set[str] = set()
    for thing in objects.values():
        if isinstance(thing, torch.optim.Optimizer):
            for group in thing.param_groups:
                layers = {block_of(names[parameter]) for parameter in group["params"]}
                if layers and not layers & found:
                    found.add(min(layers, key=lambda layer: (sizes[layer], layer)))
    return frozenset(found)


def fill(
    layers: Iterable[Layer],
    read_wants: Callable[[list[Want]], int],
    objects: Mapping[str, Stateful],
    only: Container[str] | None = None,
    *,
    settings: bool = True,
    arena: Arena | None = None,
) -> int:
    """Give every object its state from layers of any layout. Return the bytes read.

    With `only`, these layers are filled, and what belongs to others is unchanged. Without
    `settings` an optimizer keeps the learning rate and the like that it has. Tensors that have no
    memory yet are made in `arena`.
    """
    loading = _Loading(Index(layers), arena or Arena())
    groups = [key for key, thing in objects.items() if isinstance(thing, Groups)]
    for key in filter(loading.has, groups):
        objects[key].load_state_dict(loading.value(key))
    filled = [
        _fill_optimizer(loading, key, thing, objects, only, settings=settings)
        for key, thing in objects.items()
        if isinstance(thing, torch.optim.Optimizer)
    ]
    models, first = _modules(objects), dict[torch.Tensor, tuple[str, str]]()
    for key, prefix in prefixes(models).items():
        for name, tensor in _tensors_of(models[key]):
            place = f"{key}/{name}", block_of(prefix + name)
            path, layer = first.setdefault(tensor, place)
            if only is None or layer in only:
                loading.take(path, tensor.detach())
    others = {
        key: loading.value(key)
        for key, thing in objects.items()
        if not isinstance(thing, torch.nn.Module | torch.optim.Optimizer | Groups)
        and (only is None or REST in only)
    }
    count = read_wants(loading.wants)
    loading.finish()
    for apply in filled:
        apply()
    sharing = Sharing()
    for key, state in others.items():
        try:
            with sharing.of(key):
                objects[key].load_state_dict(state)
        except (RuntimeError, ValueError, KeyError, TypeError) as error:
            raise StateError(f"{key} does not take the state that was saved: {error}") from error
    return count


class _Loading:
    """The memory to be filled, and the tensors to be copied from it afterwards."""

    def __init__(self, index: Index, arena: Arena) -> None:
        self.wants: list[Want] = []
        self._index = index
        self._late: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._seen: set[tuple[int, str]] = set()
        self._arena = arena
        self._held: dict[str, torch.Tensor] = {}
        self._values: dict[str, Any] = {}
        for layer in index.layers.values():
            self._values.update(json.loads(layer.values))

    def take(self, name: str, target: torch.Tensor) -> None:
        """Plan to fill `target` with the tensor `name`, directly in its memory if possible."""
        found = self._index.find(name)
        if found is None:
            raise _missing(name)
        entry = found[1]
        if (DTYPES.get(target.dtype), tuple(target.shape)) != (entry.dtype, entry.shape):
            raise StateError(
                f"{name} is {target.dtype} {list(target.shape)} here, "
                f"but {entry.dtype} {list(entry.shape)} in the saved state"
            )
        if (target.data_ptr(), entry.name) in self._seen and target.numel():
            return  # tied tensors share their memory
        self._seen.add((target.data_ptr(), entry.name))
        memory = target
        plain = target.is_contiguous() and not target.is_conj() and not target.is_neg()
        if target.device.type != "cpu" or not plain:
            memory = torch.empty(target.shape, dtype=target.dtype, device=CPU)
            self._late.append((target, memory))
        self.wants.append(self._index.want(name, memory_of(memory)))

    def value(self, path: str) -> Any:
        """Return what was stripped at `path`, with new tensors that will be filled."""
        if path not in self._values:
            raise _missing(path)
        return values.fill(self._values[path], self._fresh)

    def has(self, path: str) -> bool:
        return path in self._values

    def has_layer(self, layer: str) -> bool:
        return layer in self._index.layers

    def optimizer_state(self, path: str) -> dict[Any, Any]:
        """Return the state of one parameter."""
        if path not in self._values:
            raise _missing(path)
        found: dict[Any, Any] = values.fill(self._values[path]["state"], self._fresh)
        return found

    def settings(self, path: str) -> dict[str, Any]:
        """Return the settings of a parameter's group; empty if its layer is not among these."""
        if path not in self._values:
            return {}
        found: dict[str, Any] = self.value(self._values[path]["settings"])
        return found

    def hold(self, path: str, state: Mapping[Any, Any]) -> None:
        """Fill the tensors that an optimizer has already in place."""
        for key, item in state.items():
            if isinstance(item, torch.Tensor):
                self._held[f"{path}/state/{key}"] = item

    def _fresh(self, name: str, strides: Sequence[int] | None) -> torch.Tensor:
        found = self._index.find(name)
        if found is None:
            raise _missing(name)
        entry, held = found[1], self._held.get(name)
        dtype = DTYPES_BY_NAME[entry.dtype]
        if held is not None and _like(held) == (dtype, entry.shape, strides):
            tensor = held
        elif strides is not None:
            tensor = torch.empty_strided(entry.shape, strides, dtype=dtype, device=CPU)
        elif entry.end > entry.start:
            memory = self._arena.take(entry.end - entry.start)
            tensor = torch.frombuffer(memory, dtype=dtype).view(entry.shape)
        else:
            tensor = torch.empty(entry.shape, dtype=dtype, device=CPU)
        self.take(name, tensor)
        return tensor

    def saved_as(self, key: str, model: str, name: str, starts: Mapping[str, str]) -> str:
        """Return the path of a parameter's optimizer state; it may have been tied when saved."""
        path = f"{key}/{starts[model]}{name}"
        found = self._index.find(f"{model}/{name}")
        if path in self._values or found is None:
            return path
        model, _, name = found[1].name.partition("/")
        return f"{key}/{starts.get(model, '')}{name}"

    def finish(self) -> None:
        with torch.no_grad():
            for target, memory in self._late:
                target.copy_(memory)


def _fill_optimizer(
    loading: _Loading,
    key: str,
    optimizer: torch.optim.Optimizer,
    objects: Mapping[str, Stateful],
    only: Container[str] | None,
    *,
    settings: bool,
) -> Callable[[], None]:
    """Plan reads of an optimizer's state. The returned function puts it in place afterwards.

    The settings of a group are with every layer that has any of its parameters; one copy is enough.
    """
    models = _modules(objects)
    starts = prefixes(models)
    names: dict[torch.Tensor, tuple[str, str]] = {}
    for model, module in models.items():
        for name, tensor in module.named_parameters():
            names.setdefault(tensor, (model, name))
    states: dict[torch.Tensor, dict[Any, Any]] = {}
    others = set[torch.Tensor]()
    told: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        found: dict[str, Any] = {}
        for parameter in group["params"]:
            if parameter not in names:
                raise StateError(f"{key} trains a tensor that belongs to none of the saved modules")
            model, name = names[parameter]
            path = loading.saved_as(key, model, name, starts)
            if only is None or block_of(starts[model] + name) in only:
                loading.hold(path, optimizer.state.get(parameter, {}))
                states[parameter] = loading.optimizer_state(path)
            else:
                others.add(parameter)
            if settings and not found:
                found = loading.settings(path)
        told.append(found)
    odd = loading.value(f"{key}@{REST}") if loading.has(f"{key}@{REST}") else {}
    all_of_none = only is None or loading.has_layer(REST)
    known = next((one.begun_with for one in objects.values() if isinstance(one, Groups)), None)

    def apply() -> None:
        # What is here and not in the state is of steps after it.
        for one in [*optimizer.state]:
            elsewhere = one in others if isinstance(one, torch.Tensor) else not all_of_none
            if not elsewhere:
                del optimizer.state[one]
        optimizer.state.update(odd)
        for group, kept in zip(optimizer.param_groups, told, strict=True):
            if kept and known is not None:
                for name in {*group} - {*kept} - known[key]:
                    if not callable(group[name]):
                        del group[name]
            group.update(kept)
            for parameter in group["params"]:
                if states.get(parameter):
                    optimizer.state[parameter] = _near(states[parameter], parameter, group)

    return apply


def _strides(tensor: torch.Tensor) -> list[int] | None:
    """Return the strides of a dense tensor with its axes in another order; otherwise None.

    Kernels are chosen by the strides, and round differently.
    """
    if tensor.is_contiguous():
        return None
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda axis: -strides[axis])
    return list(strides) if tensor.permute(order).is_contiguous() else None


def _like(tensor: torch.Tensor) -> tuple[torch.dtype, tuple[int, ...], list[int] | None]:
    return tensor.dtype, tuple(tensor.shape), _strides(tensor)


def _near(state: dict[Any, Any], parameter: torch.Tensor, group: dict[str, Any]) -> dict[Any, Any]:
    """Return optimizer state where its optimizer expects it.

    That is on the parameter's device, except for the count of steps, which is on the host unless
    the whole update runs on the device.
    """
    on_device = group.get("capturable") or group.get("fused")
    return {
        key: item.to(parameter.device)
        if isinstance(item, torch.Tensor) and (key != "step" or on_device)
        else item
        for key, item in state.items()
    }


def _missing(name: str) -> StateError:
    return StateError(
        f"the saved state has no {name}: give Session the same objects, in the same order, as before"
    )


def memory_of(tensor: torch.Tensor) -> memoryview:
    """Return the writable memory of a dense CPU tensor."""
    return tensor.detach().view(-1).view(torch.uint8).numpy().data
