"""Copies of the only copy: what a worker's neighbour has of it in host memory, in case that the keeper goes with it.

Where every layer is on one worker only, what goes to the keeper (a state every few commits, and the sum of every
commit) has two sinks more: the worker's own host memory, and that of the next one in the chain. Nobody is prepared
for a commit before it has its neighbour's part of the sum. If the keeper and an owner die in the same moment, the others
have a whole state and all sums since between them, and the next keeper asks for them: nothing that was
committed is lost. In other layouts every layer is on several workers, and nothing is kept here.

An older version goes when the keeper has said twice that its backup is newer: between the two everybody has
heard from its neighbour, behind all that the neighbour had to send of the newer version.
"""

import contextlib
import logging
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from agent.errors import WireError
from agent.faults import passing
from agent.layout import Layout
from agent.net.link import Link
from agent.net.mesh import KEEP
from agent.net.wire import Connection
from agent.protocol import CopiedState, CopiedSum, CopiesSent, Message, Part
from agent.store.memory import joined
from agent.store.shares import Share

log = logging.getLogger(__name__)

SUM = "sum of mine"
RESERVE = 8  # copies are kept as long as one of so many parts of the machine's memory is free
SUMS_FACTOR = 4  # as many bytes as the states have; so many the keeper holds as well before it waits for another state
SUMS_BYTES_FREE = 1 << 32
MEMORY = Path("/proc/meminfo")

Kept = tuple[bytes, memoryview]  # what it is, encoded, and its bytes


class StateCopy(msgspec.Struct, frozen=True):
    """Some of a worker's share of a state that has so many layers in all."""

    share: Share
    layers: int


class SumCopy(msgspec.Struct, frozen=True):
    """A worker's part of the sum of a step: pieces of so many bytes, each from an offset on."""

    total: int
    present: bytes
    places: tuple[tuple[int, int], ...]


class Crew(Protocol):
    """What is needed of the group that this worker is in."""

    def send(self, peer: str, part: Part, pieces: list[memoryview]) -> None: ...

    def take(self, peer: str, step: int, tag: str, generation: int) -> tuple[bytes, memoryview]: ...


class Copies:
    """`changed` guards all of it."""

    def __init__(self, crew: Crew, me: str, changed: threading.Condition) -> None:
        self._crew, self._me, self._changed = crew, me, changed
        # By version or step, generation, and whose it is.
        self._states: dict[tuple[int, int, str], list[Kept]] = defaultdict(list)
        self._sums: dict[tuple[int, int, str], Kept] = {}
        self._backups = (-1, -1)  # the keeper's, as it said in the last two commits
        self._roomy = True

    @property
    def any(self) -> bool:
        return bool(self._states)

    # --- what goes to the keeper goes here as well ----------------------------------------------------

    def share(
        self, layout: Layout, version: int, layers: int, share: Share, data: memoryview
    ) -> None:
        """Some of our share of a state that has so many layers. Its bytes change no more."""
        extra = msgspec.msgpack.encode(StateCopy(share, layers))
        part = Part(generation=layout.generation, step=version, tag=KEEP, extra=extra)
        self.take(self._me, part, data)
        self._crew.send(self._neighbour(layout, 1), part, [data])
        passing("save: copy sent")

    def exchange(
        self,
        layout: Layout,
        step: int,
        present: bytes,
        total: int,
        slices: Sequence[tuple[int, list[memoryview]]],
    ) -> None:
        """Our part of a sum to the next in the chain; back when that of the one before us is here."""
        places = tuple((offset, sum(p.nbytes for p in pieces)) for offset, pieces in slices)
        copy = SumCopy(total, present, places)
        extra = msgspec.msgpack.encode(copy)
        part = Part(generation=layout.generation, step=step, tag=SUM, extra=extra)
        data = joined([piece for _, pieces in slices for piece in pieces])
        self.take(self._me, part, data)
        self._crew.send(self._neighbour(layout, 1), part, [data])
        before = self._neighbour(layout, -1)
        extra, theirs = self._crew.take(before, step, SUM, layout.generation)
        self.take(before, msgspec.structs.replace(part, extra=extra), theirs)
        passing("step: copies exchanged")

    def _neighbour(self, layout: Layout, by: int) -> str:
        chain = layout.workers
        return chain[(chain.index(self._me) + by) % len(chain)]

    def take(self, whose: str, part: Part, data: memoryview) -> None:
        """Keep it, if there is room for it."""
        roomy = has_room()
        if not roomy and self._roomy:
            log.warning("memory is short: no copies are kept of what goes to the keeper")
        self._roomy = roomy
        with self._changed:
            key = (part.step, part.generation, whose)
            if roomy and part.tag == SUM:
                if self._has_room_for_sum(data.nbytes):
                    self._sums[key] = (part.extra, data)
            elif roomy:
                self._states[key].append((part.extra, data))

    def _has_room_for_sum(self, count: int) -> bool:
        """Where the keeper does without them, a state may be long on its way."""
        states = sum(data.nbytes for held in self._states.values() for _, data in held)
        sums = sum(data.nbytes for _, data in self._sums.values())
        return sums + count <= max(SUMS_BYTES_FREE, SUMS_FACTOR * states)

    def heard(self, backup: int) -> None:
        """A step was committed, and this is the version of the keeper's backup."""
        with self._changed:
            self._backups = (self._backups[1], backup)
            oldest = min(self._backups)
            for key in [key for key in self._states if key[0] < oldest]:
                del self._states[key]
            for key in [key for key in self._sums if key[0] < oldest]:
                del self._sums[key]

    def clear(self) -> None:
        """Every layer is on several workers again."""
        with self._changed:
            self._states.clear()
            self._sums.clear()
            self._backups = (-1, -1)

    # --- for a keeper that has nothing ----------------------------------------------------------------

    def send_all(self, link: Link) -> None:
        """On a thread of its own, and to the keeper that has asked: the next one asks anew, and takes the end of this for
        the end of all."""
        if link.connection is not None:
            threading.Thread(
                target=self._send_all, args=(link.connection,), name="copies", daemon=True
            ).start()

    def _send_all(self, connection: Connection) -> None:
        with contextlib.suppress(WireError):
            for message, data in self._messages():
                connection.send(message, data)
                passing("salvage: copy sent")
            connection.send(CopiesSent())

    def _messages(self) -> Iterator[tuple[Message, memoryview]]:
        """All of it, ours and our neighbour's."""
        with self._changed:
            states = [(key, kept) for key, held in self._states.items() for kept in held]
            sums = list(self._sums.items())
        for (version, generation, _), (extra, data) in states:
            copy = msgspec.msgpack.decode(extra, type=StateCopy)
            said = CopiedState(
                generation=generation, version=version, share=copy.share, layers=copy.layers
            )
            yield said, data
        for (step, generation, _), (extra, data) in sums:
            part, at = msgspec.msgpack.decode(extra, type=SumCopy), 0
            for offset, size in part.places:
                piece = CopiedSum(
                    generation=generation,
                    step=step,
                    offset=offset,
                    total=part.total,
                    present=part.present,
                )
                yield piece, data[at : at + size]
                at += size


def has_room(count: int = 0) -> bool:
    """Whether the machine has memory to spare, with so many bytes less; as far as it says."""
    try:
        lines = dict(line.split(":", 1) for line in MEMORY.read_text().splitlines())
        available, total = (int(lines[name].split()[0]) for name in ("MemAvailable", "MemTotal"))
    except (OSError, KeyError, ValueError):
        return True
    return (available - (count >> 10)) * RESERVE > total
