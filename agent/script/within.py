"""What a script keeps of its microbatches: a total, a list of losses, a state for the next time.

Each worker has a part of the microbatches, and another part tomorrow. So what is counted up in the loop over
`session.share(...)` is right on nobody, and what is kept there for the next step is somebody else's by then. Looked for
under the names that the person's own code has (see `agent.source.own`), in the first step.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, TypeGuard

import torch

from agent.errors import Misuse
from agent.script.counts import gone_by
from agent.script.order import ELSEWISE
from agent.script.parts import left_by, read_elsewhere
from agent.source import own
from agent.source.found import Caller, found_loop
from agent.source.loops import stored_in

ITEMS_MAX = 1_000
NAMES_MAX = 10_000


def behind_the_loop(given: Iterable[object]) -> str:
    """What a person can do about a model that changes with its microbatches."""
    for model in given:
        for name, layer in model.named_modules() if isinstance(model, torch.nn.Module) else ():
            if getattr(layer, "max_norm", None) is not None:
                return (
                    f"`{name}` does that by its max_norm to the rows that are looked up: leave that out, and behind the "
                    f"loop, under torch.no_grad(), say weight.copy_(torch.renorm(weight, {layer.norm_type}, 0, "
                    f"{layer.max_norm}))"
                )
    return "optimizer.step() belongs behind the loop"


class Within:
    def __init__(self, caller: Caller) -> None:
        self._caller, self._sources = caller, own.sources(caller.frame)
        # What the body itself sets anew is looked for in the source: it may be nobody's behind the loop.
        self._set = stored_in(found_loop(caller))
        self._held: list[object] = []  # so that nothing new has the identity of what was there
        self._before = dict(self._marks())

    def refuse_kept(self) -> None:
        """Behind the loop of a worker that computed something."""
        now = dict(self._marks())
        for name, before in self._before.items():
            if before != now.get(name, before) and before[0] == now[name][0]:
                raise Misuse(
                    f"`{name}` becomes another in the loop over session.share(...), where every worker has other "
                    f"microbatches, so it would be of this worker's only: {ELSEWISE}"
                )

    def _marks(self) -> Iterator[tuple[str, Any]]:
        for name, thing in [*own.names(self._caller.frame).items()][:NAMES_MAX]:
            if name[:2] != "__" and name not in self._set:
                mark = self._mark(thing)
                if mark is not None:
                    yield name, mark
                if isinstance(thing, torch.nn.Module):
                    yield from self._counts_in(name, thing)

    def _counts_in(self, name: str, model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
        """What modules of the person's own count in their forward, and go by: `self.calls += 1`."""
        for path, module in model.named_modules():
            kind: type = type(module)
            for key in gone_by(kind) & vars(module).keys():
                if _is_number(value := vars(module)[key]):
                    yield ".".join(each for each in (name, path, key) if each), (0, value)

    def _mark(self, thing: object) -> tuple[object, ...] | None:
        """What it is and what is in it; None for what is not looked at. Another list of the same name is begun anew."""
        match thing:
            case int() | float() if _is_number(thing):
                return 0, thing
            case list() | deque():
                return self._id(thing), len(thing), *map(self._id, [*thing][-ITEMS_MAX:])
            case dict():
                # A value that is no number may have been loaded, and is kept so as not to load it again.
                counts = {key: value for key, value in dict.items(thing) if _is_number(value)}
                return self._id(thing), counts if len(counts) <= ITEMS_MAX else 0
            case torch.nn.Module() if next(thing.parameters(), None) is None:
                # Nothing learns in a metric of a library's, which counts how often it was asked.
                return self._id(thing), *map(self._numbers, thing.modules())
        return None

    def _numbers(self, module: torch.nn.Module) -> dict[str, float]:
        """But those that each forward sets anew, and nobody else asks for."""
        numbers = {key: value for key, value in vars(module).items() if _is_number(value)}
        kind: type = type(module)
        left = {
            key
            for key in left_by(kind) & numbers.keys()
            if not read_elsewhere(key, kind, self._sources)
        }
        return {key: value for key, value in numbers.items() if key not in left}

    def _id(self, thing: object) -> int:
        self._held.append(thing)
        return id(thing)


def _is_number(thing: object) -> TypeGuard[int | float]:
    return isinstance(thing, int | float) and not isinstance(thing, bool)
