"""The two seams of the loop: the world that things happen in, and the journal that remembers them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from orchestrator.actions import AnyAction
from orchestrator.errors import OrchestratorError
from orchestrator.events import AnyEvent
from orchestrator.state import STATE_VERSION, State


class Superseded(OrchestratorError):  # noqa: N818 - it names what happened
    """A manager with a newer epoch took over; this one must not do anything any more."""


class Diverged(OrchestratorError):  # noqa: N818
    """A replayed decision differs from the one in the journal."""


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One turn of the loop: what happened, and what was decided."""

    event: AnyEvent
    actions: tuple[AnyAction, ...]


class World(Protocol):
    """Live, simulated or replayed: events come out, actions go in."""

    async def next_event(self, by_s: float) -> AnyEvent | None:
        """The next thing that happened; a `Tick` at `by_s` if nothing did until then; None at the end.

        Asking again says that the event given before is in the journal and its actions are set
        going: a world that reads a durable inbox may forget it now, not earlier.
        """
        ...

    async def perform(self, action: AnyAction) -> None:
        """Set it going. The outcome, failure too, comes back as an event; nothing is raised for it.

        Launch      -> Launched | LaunchFailed          Terminate -> Terminated
        ListMachines-> Listed | ListFailed              KeepQuotes -> QuotesKept
        The rest  -> reports, or nothing
        After a restart the manager may ask again for what was already done: OpenJob, CloseJob,
        StartWorker (same worker id), Regroup (same generation) and Terminate must be idempotent.
        """
        ...

    async def show(self, state: State) -> None:
        """The state after every turn, to publish a view of; a world may look as rarely as it likes."""
        ...


class Journal(Protocol):
    """Append-only memory of the loop, with a snapshot now and then."""

    async def append(self, event: AnyEvent, actions: Sequence[AnyAction]) -> None:
        """Returns when the entry is durable. Raises Superseded under an older epoch."""
        ...

    async def snapshot(self, state: State) -> None:
        """Keep the state as it is after the last entry; entries before it may be trimmed."""
        ...

    async def load(self) -> tuple[State | None, Sequence[Entry]]:
        """The newest snapshot and every entry after it, in order."""
        ...


class MemoryJournal:
    """Keeps everything; snapshots are encoded, so that nothing leaks from one life to the next."""

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


class FileJournal:
    """One JSON object per line, so that an incident can be copied, read and replayed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._encoder = msgspec.json.Encoder()
        self._file = path.open("ab")

    async def append(self, event: AnyEvent, actions: Sequence[AnyAction]) -> None:
        entry = Entry(event=event, actions=tuple(actions))
        self._file.write(self._encoder.encode(entry) + b"\n")

    async def snapshot(self, state: State) -> None:  # noqa: ARG002
        """The file holds every entry, so that a snapshot would add nothing: it is only flushed."""
        self._file.flush()

    async def load(self) -> tuple[State | None, Sequence[Entry]]:
        self._file.flush()
        return None, read_journal(self._path)

    def close(self) -> None:
        self._file.close()


def read_journal(path: Path, after: int = 0) -> list[Entry]:
    """The entries of a JSON-lines journal after so many lines of something else.

    A torn last line (a crash while writing) is left out.
    """
    decoder = msgspec.json.Decoder(Entry)
    lines = path.read_bytes().split(b"\n")
    entries = []
    for number, line in enumerate(lines[after:-1], start=after + 1):
        try:
            entries.append(decoder.decode(line))
        except msgspec.DecodeError as error:
            raise ValueError(f"{path}:{number}: not a journal entry: {error}") from error
    return entries


_state_decoder: msgspec.json.Decoder[State] = msgspec.json.Decoder(State)
_state_encoder = msgspec.json.Encoder()
_STATE_HEAD = b'{"version":%d,' % STATE_VERSION


def encode_state(state: State) -> bytes:
    return _state_encoder.encode(state)


def decode_state(data: bytes) -> State:
    """The same state: it decides exactly as the one that was encoded.

    Raises DecodeError for a state of another version: what it lacks would be read as nothing.
    """
    if not data.startswith(_STATE_HEAD):
        raise msgspec.DecodeError(f"the state is not of version {STATE_VERSION} of its format")
    return _state_decoder.decode(data)
