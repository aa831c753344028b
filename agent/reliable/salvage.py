"""A state and its sums, put together from what workers have in host memory. No torch here.

For a keeper that has just begun, where some layers are on no worker any more: see `agent.crew.copies`. What is here twice,
with its owner and with a neighbour, is taken once.
"""

from collections.abc import Container, Iterable

import msgspec

from agent.errors import WireError
from agent.protocol import CopiedState, CopiedSum
from agent.reliable.backup import Assembly, Backup, LoggedSum, Saved
from agent.store.format import Layer
from agent.store.shares import cut_up

STATES_MAX = 8
SUMS_MAX = 10_000


class _State(msgspec.Struct, frozen=True):
    layers: int
    forms: dict[str, Layer] = {}
    bodies: dict[str, Assembly] = {}

    @property
    def whole(self) -> bool:
        return len(self.forms) == self.layers and all(map(self._is_whole, self.forms.values()))

    def _is_whole(self, form: Layer) -> bool:
        body = self.bodies.get(form.name)
        if body is None:
            return not form.layer_bytes
        return body.whole and body.total == form.layer_bytes


class Salvage:
    def __init__(self, asked: Iterable[str] = ()) -> None:
        self._awaited = set(asked)
        self._states: dict[tuple[int, int], _State] = {}  # by version and generation
        self._sums: dict[tuple[int, int], tuple[bytes, Assembly]] = {}  # by step and generation

    def awaits(self, here: Container[str]) -> bool:
        """Whether one of those who are here has not sent all that it has."""
        return any(worker in here for worker in self._awaited)

    def end(self, worker: str) -> None:
        self._awaited.discard(worker)

    def take_state(self, message: CopiedState, payload: memoryview) -> None:
        key = (message.version, message.generation)
        if len(self._states) >= STATES_MAX and key not in self._states:
            raise WireError(f"copies of more than {STATES_MAX} versions are beyond the bounds")
        state = self._states.setdefault(key, _State(message.layers))
        for form in message.share.forms:
            state.forms.setdefault(form.name, form)
        for extent, data in cut_up(payload, message.share.extents):
            body = state.bodies.get(extent.layer) or Assembly(extent.of)
            state.bodies[extent.layer] = body
            body.take(extent.start, data)

    def take_sum(self, message: CopiedSum, payload: memoryview) -> None:
        key = (message.step, message.generation)
        if len(self._sums) >= SUMS_MAX and key not in self._sums:
            raise WireError(f"copies of more than {SUMS_MAX} sums are beyond the bounds")
        if key not in self._sums:
            self._sums[key] = message.present, Assembly(message.total)
        self._sums[key][1].take(message.offset, payload)

    def best(self, committed: int) -> Saved | None:
        """What reaches furthest of what is whole; nothing newer than was committed."""
        sums = {
            step: LoggedSum(step, present, body.body)
            for (step, _), (present, body) in sorted(self._sums.items())
            if body.whole
        }
        found: list[Saved] = []
        for (version, generation), state in self._states.items():
            if version > committed or not state.whole:
                continue
            backup = Backup(
                generation=generation,
                version=version,
                layers=tuple(state.forms[name] for name in sorted(state.forms)),
                bodies={name: body.body for name, body in state.bodies.items()},
            )
            end = version
            while end < committed and end in sums:
                end += 1
            found.append(Saved(backup, tuple(sums[step] for step in range(version, end))))
        return max(found, key=lambda one: (one.reached, one.backup.version), default=None)
