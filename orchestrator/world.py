"""The two interfaces of the loop: the world, where things happen, and the journal of them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from cloud import plain_file
from orchestrator.actions import AnyAction
from orchestrator.errors import OrchestratorError
from orchestrator.events import AnyEvent
from orchestrator.state import STATE_VERSION, State


class Superseded(OrchestratorError):  # noqa: N818 - it names what happened
    """A manager with a newer epoch took over; this manager must not do anything any more."""


class Diverged(OrchestratorError):  # noqa: N818
    """A replayed decision differs from the one in the journal."""


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One turn of the loop: what happened, and what was decided."""

    event: AnyEvent
    actions: tuple[AnyAction, ...]


class World(Protocol):
    """Live, simulated or replayed: events come out, actions go in."""

    async def next_event(self, by_s: float) -> AnyEvent | None:
        """Return the next event, a `Tick` at `by_s` if there is none before, None at the end.

        The call also says that the event before is in the journal and that its actions have been
        started, so a world that reads a durable inbox may delete that event now, not earlier.
        """
        ...

    async def perform(self, action: AnyAction) -> None:
        """Start the action. Its outcome, even a failure, comes back as an event; none is raised.

        Launch      -> Launched | LaunchFailed          Terminate -> Terminated | EndFailed
        ListMachines-> Listed | ListFailed              KeepQuotes -> QuotesKept
        The rest  -> reports, or nothing
        After a restart the manager may ask again for what was already done: OpenJob, CloseJob,
        StartWorker (same worker id), Regroup (same generation) and Terminate must be idempotent.
        """
        ...

    async def show(self, state: State) -> None:
        """Take the state after a turn and publish a view of it; a world may skip any state."""
        ...


class Journal(Protocol):
    """Append-only record of the loop, with a snapshot now and then."""

    async def append(self, event: AnyEvent, actions: Sequence[AnyAction]) -> None:
        """Append an entry, and return when it is durable; raise Superseded under an older epoch."""
        ...

    async def snapshot(self, state: State) -> None:
        """Keep the state after the last entry; the entries up to there may be trimmed."""
        ...

    async def load(self) -> tuple[State | None, Sequence[Entry]]:
        """Return the newest snapshot and every entry after it, in order."""
        ...


class MemoryJournal:
    """A journal in memory; snapshots are encoded, so that lives of a manager share no objects."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self._snapshot: bytes | None = None
        self._taken = 0

    async def append(self, event: AnyEvent, actions: Sequence[AnyAction]) -> None:
        self.entries.append(Entry(event=event, actions=tuple(actions)))

    async def snapshot(self, state: State) -> None:
        self._snapshot = encode_state(state)
        self._taken = len(self.entries)

    async def load(self) -> tuple[State | None, Sequence[Entry]]:
        state = None if self._snapshot is None else decode_state(self._snapshot)
        return state, self.entries[self._taken :]


def read_journal(path: Path, after: int = 0) -> list[Entry]:
    """Return the entries of a JSON-lines journal, without its first `after` lines.

    A torn last line, which a crash while writing leaves, is left out.
    """
    decoder = msgspec.json.Decoder(Entry)
    lines = plain_file.read(path).split(b"\n")
    entries = []
    for number, line in enumerate(lines[after:-1], start=after + 1):
        try:
            entries.append(decoder.decode(line))
        except ValueError as error:
            raise ValueError(f"{path}:{number}: not a journal entry: {error}") from error
    return entries


_state_decoder: msgspec.json.Decoder[State] = msgspec.json.Decoder(State)
_state_encoder = msgspec.json.Encoder()
_STATE_HEAD = b'{"version":%d,' % STATE_VERSION


def encode_state(state: State) -> bytes:
    return _state_encoder.encode(state)


def decode_state(data: bytes) -> State:
    """Return a state that decides exactly as the encoded one did.

    Raises DecodeError for a state of another version, because missing fields would get defaults.
    """
    if not data.startswith(_STATE_HEAD):
        raise msgspec.DecodeError(f"the state is not of version {STATE_VERSION} of its format")
    return _state_decoder.decode(data)
