"""Name what a script registers, and find for each object how it is saved."""

import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from agent.checks.attributes import Attributes, Registry
from agent.checks.modes import Modes
from agent.checks.state import ScriptState
from agent.checks.variables import Variables
from agent.errors import Misuse
from agent.store.encoding.plain import TENSORS, packed
from agent.store.groups import Groups
from agent.tensors.layer_names import named_parameters, summed_parameters
from agent.tensors.shards import Stateful, tensors_of

# No layer of a model has such a name.
STATE, MODES, GROUPS = "session.state", "session.modules", "session.groups"
PLAIN = (bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset)
BOTH = ("state_dict", "load_state_dict")
FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType)
DATA = "the data is not state: leave it out, and use session.data(dataset, ...)"


class Registered(msgspec.Struct, frozen=True, kw_only=True):
    """The saved objects by name, the models among them, and lines to show to the person."""

    objects: dict[str, Stateful]
    models: dict[str, torch.nn.Module]
    state: ScriptState
    groups: Groups
    said: list[str]
    unfreezes: bool = False
    # Where the tensors of an object lay that were looked at in the step before, by its name.
    looked: dict[str, set[int]] = {}

    @property
    def trained(self) -> frozenset[int]:
        """The parameters that a registered optimizer has or may be given, by identity."""
        if self.unfreezes:
            return frozenset(map(id, named_parameters(self.models).values()))
        return frozenset(
            id(param)
            for thing in self.objects.values()
            if isinstance(thing, torch.optim.Optimizer)
            for group in thing.param_groups
            for param in group["params"]
        )

    def check(self, step: int) -> None:
        """Refuse objects that cannot be saved at the end of a step, and say where they are."""
        for name, thing in self.objects.items():
            if isinstance(thing, Attributes):
                thing.check(step)
            elif isinstance(thing, ScriptState | Variables):
                lie = _memories(thing.check(step))
                lay, self.looked[name] = self.looked.get(name, set()), lie
                if lie - lay:
                    self._refuse_live(step, lie - lay, thing)

    def _refuse_live(self, step: int, memories: set[int], state: ScriptState | Variables) -> None:
        """Refuse what goes on changing with a model, as its `state_dict()` does.

        What a joining worker gets in its place does not.
        """
        values: Mapping[Any, Any] = state.values() if isinstance(state, Variables) else state
        place = "Variables(..., {!r})" if isinstance(state, Variables) else "session.state[{!r}]"
        for key, thing in self.objects.items():
            if live := memories & _memories(tensors_of(thing)):
                found = (n for n, one in values.items() if live & _memories(packed(one)[TENSORS]))
                raise Misuse(
                    f"step {step}: {place.format(next(found))} is no copy of what {key} has, and goes on changing with it: keep "
                    "copy.deepcopy(...) of a state_dict(), and a clone() of a tensor"
                )


def _memories(tensors: Iterable[torch.Tensor]) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in tensors} - {0}


def registered(objects: Sequence[object], *, unfreezes: bool = False) -> Registered:
    """Name the objects.

    The first module is the model; the order of the others is part of their names. With `unfreezes`
    any parameter may be trained later.
    """
    given = [thing for thing in objects if thing is not None]
    tensors = _tensors_of_none(given)
    if tensors:
        given.append(torch.nn.ParameterList(tensors))
    first = next((thing for thing in given if isinstance(thing, torch.nn.Module)), None)
    if first is None:
        raise Misuse(
            f"Session(model, ...): {_listed(given)} was given, but no torch.nn.Module: give it the model that is trained"
        )
    named: dict[str, Any] = {"model": first}
    others = [thing for thing in given if thing is not first]
    if len({id(thing) for thing in given}) < len(given):
        raise Misuse("Session: one object was given twice; leave it out once")
    for index, thing in enumerate(others, start=1):
        _check(thing)
        named[f"{type(thing).__name__}{index}"] = thing
    models = {key: thing for key, thing in named.items() if isinstance(thing, torch.nn.Module)}
    registry = Registry(named, models)
    saved = {
        key: thing if hasattr(thing, "state_dict") else Attributes(thing, registry)
        for key, thing in named.items()
    }
    state, groups = ScriptState(), Groups(named, models)
    said = [
        _told(type(named[key]).__name__, thing)
        for key, thing in saved.items()
        if isinstance(thing, Attributes)
    ]
    if tensors:
        shapes = ", ".join(str([*each.shape]) for each in tensors)
        said.append(f"Session: tensors of no module that are trained are kept as well ({shapes})")
    objects_saved = {**saved, STATE: state, MODES: Modes(models), GROUPS: groups}
    found = Registered(
        objects=objects_saved,
        models=models,
        state=state,
        groups=groups,
        said=said,
        unfreezes=unfreezes,
    )
    if not unfreezes:
        said.extend(_room_of_frozen(found))
    return found


def _tensors_of_none(given: Sequence[object]) -> list[torch.Tensor]:
    """Make parameters of the tensors that optimizers train and no module has, and return these.

    A parameter of no module is left alone: it is probably one of a module that was not given.
    """
    named = {id(p) for m in given if isinstance(m, torch.nn.Module) for p in m.parameters()}
    optimizers = [thing for thing in given if isinstance(thing, torch.optim.Optimizer)]
    trained = {
        id(p): p for one in optimizers for group in one.param_groups for p in group["params"]
    }
    found = [p for key, p in trained.items() if type(p) is torch.Tensor and key not in named]
    for tensor in found:
        # As torch does when a parameter gets its shape; it stays the object that the script has.
        tensor.__class__ = torch.nn.Parameter
    return found


def _room_of_frozen(found: Registered) -> Iterator[str]:
    """Warn if most of a step's sum is for parameters that are frozen now.

    Sums are sent in every step.
    """
    summed = summed_parameters(found.models, found.trained).values()
    frozen = sum(param.nbytes for param in summed if not param.requires_grad)
    if 2 * frozen > sum(param.nbytes for param in summed):
        yield (
            f"Session: an optimizer has frozen parameters of {frozen / 1e6:.1f} MB, for which every step's sum has room, "
            "because they may be unfrozen later: if they never are, give the optimizer only those that require gradients"
        )


def _listed(given: Sequence[object]) -> str:
    return ", ".join(type(thing).__name__ for thing in given) or "nothing"


def _check(thing: object) -> None:
    kind = type(thing).__name__
    if isinstance(thing, type):
        raise Misuse(
            f"Session: {thing.__name__} is a class: give an object of it, {thing.__name__}(...)"
        )
    if isinstance(thing, torch.Tensor):
        raise Misuse(
            f"Session: a {kind} of shape {[*thing.shape]} was given: if it is trained put it into a module, "
            "`torch.nn.ParameterList([...])`, and give that; if not, keep it in session.state"
        )
    if isinstance(thing, PLAIN):
        raise Misuse(
            f'Session: a {kind} was given: keep it in session.state, session.state["name"] = ...'
        )
    if isinstance(thing, DataLoader | Dataset | Sampler) and not _is_stateful(thing):
        raise Misuse(f"Session: a {kind} was given, but {DATA}")
    if isinstance(thing, FUNCTIONS):
        name = getattr(thing, "__name__", kind)
        raise Misuse(f"Session: {name} is a function, which has no state: leave it out")
    for there, lacking in (BOTH, BOTH[::-1]):
        if hasattr(thing, there) and not hasattr(thing, lacking):
            raise Misuse(
                f"Session: {kind} has {there} but no {lacking}: add it to the class, or remove {there}"
            )


def _is_stateful(thing: object) -> bool:
    return all(hasattr(thing, name) for name in BOTH)


def _told(kind: str, saved: Attributes) -> str:
    what = f"its attributes {', '.join(saved.saved)} are saved"
    if len(saved.saved) == 1:
        what = f"its attribute {saved.saved[0]} is saved"
    if not saved.saved:
        what = "its attributes are saved, of which there are none yet"
    left = f"; {', '.join(saved.left)} stay as the script makes them" if saved.left else ""
    return f"Session: {kind} has no state_dict, so {what}{left}"
