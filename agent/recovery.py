"""From what a job goes on, when neither the keeper nor the workers together hold its newest state. No torch here.

`ladder.recover` decides between what workers have in host memory, what the disk has, and what lies elsewhere. What
turns out to be damaged
while it is read is set aside, and the decision is made again without it. So it is with what cannot be read, once nobody
has the patience to ask for it again; but what could not be read is never taken for what is not there.
"""

import logging
from collections.abc import Sequence

import msgspec

from agent import saving
from agent.backup import Saved
from agent.errors import CheckpointError
from agent.store.archive import TRIES, Archive, Mark
from agent.store.errors import Damaged, Unavailable
from agent.store.format import Manifest
from agent.store.ladder import Rung, Source, recover, stored

log = logging.getLogger(__name__)


class Shelf(msgspec.Struct, frozen=True):
    """An archive, and which rung of the ladder it is."""

    rung: Rung
    archive: Archive


class Found(msgspec.Struct, frozen=True):
    """What was read, and why just that. No state: training begins anew."""

    saved: Saved | None
    because: str


def newest(
    shelves: Sequence[Shelf], committed: int, copied: Saved | None = None, *, patient: bool = True
) -> Found:
    """The best version of all that lies on the shelves, and of what workers had in host memory."""
    limits: list[int | None] = [None] * len(shelves)
    unread = list[CheckpointError]()
    for _ in range(TRIES):
        held = [
            _look(shelf, limit, None if patient else unread)
            for shelf, limit in zip(shelves, limits, strict=True)
        ]
        there = [at for at, manifest in enumerate(held) if manifest is not None]
        manifests = [manifest for manifest in held if manifest is not None]
        sources = [
            stored(manifest, shelves[at].rung, shelves[at].archive.sink.name)
            for at, manifest in zip(there, manifests, strict=True)
        ]
        if copied is not None:
            sources.append(_source(copied))
        if not sources and unread:
            raise unread[0]
        if not sources:
            return Found(None, "nothing is stored")
        top = max(sources, key=lambda source: source.newest)
        sizes = {layer: end for layer, ((_, end),) in top.holds.items()}
        decided = recover(sizes, sources, max(committed, top.newest))
        at = decided.picks[0].source if decided.picks else sources.index(top)
        if at == len(manifests):
            return Found(copied, decided.because)
        shelf, chosen = shelves[there[at]], manifests[at]
        try:
            return Found(saving.load(shelf.archive, chosen), decided.because)
        except Damaged as error:
            mark = Mark(chosen.version, chosen.generation)
            shelf.archive.set_aside(mark, str(error))
            limits[there[at]] = chosen.version - 1
        except Unavailable as error:
            if patient:
                raise
            unread.append(error)
            limits[there[at]] = chosen.version - 1
    raise CheckpointError(f"{TRIES} versions were damaged, and no more were looked at")


def _source(copied: Saved) -> Source:
    return Source(
        rung=Rung.PEER,
        holder="workers",
        version=copied.backup.version,
        holds={layer.name: ((0, layer.layer_bytes),) for layer in copied.backup.layers},
        reaches=copied.reached,
    )


def _look(shelf: Shelf, limit: int | None, unread: list[CheckpointError] | None) -> Manifest | None:
    """What lies there. Why something cannot be read is noted in `unread`, or else an error."""
    try:
        return shelf.archive.newest(limit, unread)
    except CheckpointError as error:
        if unread is None:
            raise
        unread.append(error)
        return None
