"""From what a job goes on, when neither the keeper nor the workers together hold its newest state. No torch here.

`ladder.recover` decides between what workers have in host memory, what a keeper before us has left in
memory, what the disk has, and what lies elsewhere. What turns out to be damaged while it is read is set aside, and the decision is made again without it. So it is with what
cannot be read, once nobody has the patience to ask for it again; but what could not be read is never taken for what is
not there.
"""

import logging
from collections.abc import Callable, Sequence

import msgspec

from agent.errors import CheckpointError
from agent.reliable import saving
from agent.reliable.backup import Saved
from agent.store.archive import TRIES, Archive, Mark
from agent.store.errors import Damaged, Unavailable, Unknown
from agent.store.format import Manifest
from agent.store.ladder import Rung, Source, recover, stored

log = logging.getLogger(__name__)


class Shelf(msgspec.Struct, frozen=True):
    """An archive, and which rung of the ladder it is."""

    rung: Rung
    archive: Archive


class Kept(msgspec.Struct, frozen=True):
    """What somebody has in memory, and which rung of the ladder that is."""

    saved: Saved
    rung: Rung
    holder: str


class Found(msgspec.Struct, frozen=True):
    """What was read, and why just that. No state: training begins anew."""

    saved: Saved | None
    because: str


def newest(
    shelves: Sequence[Shelf],
    committed: int,
    kept: Kept | None = None,
    *,
    patient: bool = True,
    further: Callable[[], Sequence[Shelf]] = tuple,
) -> Found:
    """The best version of all that lies on the shelves, and of what is in memory. What lies `further` away
    is asked for once the others do not reach what is committed, whatever they seemed to have."""
    places, asked = [*shelves], False
    limits, unread = dict[int, int](), list[CheckpointError]()
    noted = None if patient else unread
    for _ in range(TRIES):
        looked = [(at, _look(shelf, limits.get(at), noted)) for at, shelf in enumerate(places)]
        held = [(places[at], at, manifest) for at, manifest in looked if manifest is not None]
        sources = [stored(m, shelf.rung, shelf.archive.sink.name) for shelf, _, m in held]
        if kept is not None:
            sources.append(_source(kept))
        top = max(sources, key=lambda source: source.newest, default=None)
        if not asked and (top is None or top.newest < committed):
            places, asked = [*places, *_opened(further, noted)], True
            continue
        if top is None and unread:
            raise unread[0]
        if top is None:
            return Found(None, "nothing is stored")
        sizes = {layer: end for layer, ((_, end),) in top.holds.items()}
        decided = recover(sizes, sources, max(committed, top.newest))
        pick = decided.picks[0].source if decided.picks else sources.index(top)
        if kept is not None and pick == len(held):
            return Found(kept.saved, _told(decided.because, places))
        shelf, at, chosen = held[pick]
        try:
            return Found(saving.load(shelf.archive, chosen), _told(decided.because, places))
        except Damaged as error:
            shelf.archive.set_aside(Mark(chosen.version, chosen.generation), str(error))
        except Unavailable as error:
            if patient:
                raise
            unread.append(error)
        limits[at] = chosen.version - 1
    raise CheckpointError(f"{TRIES} versions could not be read, and no more were looked at")


def _told(because: str, places: Sequence[Shelf]) -> str:
    """What was newer than what is gone on from, and is damaged, cost somebody money."""
    damage = (each for shelf in places for each in shelf.archive.damage())
    return "; ".join((because, *damage))


def _opened(
    further: Callable[[], Sequence[Shelf]], unread: list[CheckpointError] | None
) -> Sequence[Shelf]:
    try:
        return further()
    except CheckpointError as error:
        if unread is None:
            raise
        unread.append(error)
        return ()


def _source(kept: Kept) -> Source:
    backup = kept.saved.backup
    return Source(
        rung=kept.rung,
        holder=kept.holder,
        version=backup.version,
        holds={layer.name: ((0, layer.layer_bytes),) for layer in backup.layers},
        reaches=kept.saved.reached,
    )


def _look(shelf: Shelf, limit: int | None, unread: list[CheckpointError] | None) -> Manifest | None:
    """What lies there. Why something cannot be read is noted in `unread`, or else an error; what can never be read by us is
    not passed over: the versions before it would be gone on from, and it would be void."""
    try:
        return shelf.archive.newest(limit, unread)
    except Unknown:
        raise
    except CheckpointError as error:
        if unread is None:
            raise
        unread.append(error)
        return None
