"""Replaying a journal: the same events must lead to the same actions.

So every incident becomes a test. An incident is a file of JSON lines: the state at the beginning if
the journal was trimmed, then the entries. `export` writes one from any journal, even the one in
Redis.
"""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from cloud import plain_file
from orchestrator import loop
from orchestrator.actions import AnyAction
from orchestrator.events import AnyEvent
from orchestrator.state import State
from orchestrator.world import Diverged, Entry, Journal, decode_state, encode_state, read_journal

SHOWN_MAX = 400


class Beginning(msgspec.Struct, frozen=True, kw_only=True):
    """The first line of an incident whose journal does not reach back to the first event."""

    state: msgspec.Raw


class ReplayWorld:
    """A world with the events of a journal; it compares actions and performs none."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        self._entries = entries
        self._given = self._compared = 0
        self._decided: list[AnyAction] = []

    async def next_event(self, by_s: float) -> AnyEvent | None:  # noqa: ARG002 - the journal knows when
        self.compare()
        if self._given == len(self._entries):
            return None
        self._given += 1
        return self._entries[self._given - 1].event

    async def perform(self, action: AnyAction) -> None:
        self._decided.append(action)

    async def show(self, state: State) -> None:
        """Do nothing, because a replay is not watched."""

    def compare(self) -> None:
        """Raise Diverged if the actions just decided differ from the journal's."""
        decided, self._decided = tuple(self._decided), []
        if self._compared == self._given:
            return
        self._compared = self._given
        entry = self._entries[self._given - 1]
        if decided == entry.actions:
            return
        pairs = zip((*decided, None), (*entry.actions, None), strict=False)
        now, then = next(pair for pair in pairs if pair[0] != pair[1])
        what = type(entry.event).__name__
        raise Diverged(
            f"entry {self._given} ({what} at {entry.event.at_s}): "
            f"decided {_shown(now)}, the journal has {_shown(then)}"
        )


def _shown(action: AnyAction | None) -> str:
    text = "nothing more" if action is None else repr(action)
    return text if len(text) <= SHOWN_MAX else text[:SHOWN_MAX] + " ..."


class _NoJournal:
    """A journal that keeps nothing, because a replay needs no record."""

    async def append(self, event: AnyEvent, actions: Sequence[AnyAction]) -> None:
        pass

    async def snapshot(self, state: State) -> None:
        pass

    async def load(self) -> tuple[State | None, Sequence[Entry]]:
        return None, ()


def replay(entries: Sequence[Entry], state: State | None = None) -> State:
    """Run the loop over a journal; raise Diverged at the first different decision."""
    world = ReplayWorld(entries)
    end = loop.run_now(loop.run(world, _NoJournal(), State() if state is None else state))
    world.compare()
    return end


async def export(journal: Journal, path: Path) -> int:
    """Write what a journal holds as an incident, and return the number of its entries."""
    state, entries = await journal.load()
    encode = msgspec.json.Encoder().encode
    with path.open("wb") as file:
        if state is not None:
            file.write(b'{"state":' + encode_state(state) + b"}\n")
        for entry in entries:
            file.write(encode(entry) + b"\n")
    return len(entries)


def read_incident(path: Path) -> tuple[State | None, list[Entry]]:
    """Read what `export` wrote; other files raise a one-line ValueError."""
    first, _, _ = plain_file.read(path).partition(b"\n")
    if not first.startswith(b'{"state":'):
        return None, read_journal(path)
    try:
        beginning = msgspec.json.decode(first, type=Beginning)
        state = decode_state(bytes(beginning.state))
    except ValueError as error:
        raise ValueError(f"{path}:1: not the state of a manager: {error}") from error
    return state, read_journal(path, after=1)
