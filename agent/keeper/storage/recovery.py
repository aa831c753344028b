"""Choose what a job goes on from if neither workers nor keeper hold the newest state.

No torch here. Three places are searched: what an earlier keeper left in this machine's memory, the
disk, and remote storage. The newest committed version wins, because a committed step is worth more
than a faster copy; of equal ones, the nearer wins. A version that turns out to be damaged while it
is read is set aside, and the choice is made again without it. So is one that cannot be read, once
the caller is no longer patient; but what could not be read is never taken for missing.
"""

import logging
from collections.abc import Callable, Sequence

import msgspec

from agent.errors import CheckpointError
from agent.keeper.storage import versions
from agent.keeper.storage.backup import Room, Saved
from agent.store.archive import TRIES, Archive, Mark
from agent.store.encoding.format import Manifest
from agent.store.errors import Damaged, Unavailable, Unknown
from agent.store.memory import ordinary

log = logging.getLogger(__name__)

MEMORY = "the memory of the keeper before"
DISK, OBJECT = "local disk", "object storage"


class Shelf(msgspec.Struct, frozen=True):
    """An archive, and the name of its place for the manager; `only` is the one version wanted."""

    place: str
    archive: Archive
    only: int | None = None


class Found(msgspec.Struct, frozen=True):
    """What was read, and the reason for the choice. Without a state training begins again."""

    saved: Saved | None
    because: str


def newest(
    shelves: Sequence[Shelf],
    committed: int,
    left: Saved | None = None,
    *,
    patient: bool = True,
    further: Callable[[], Sequence[Shelf]] = tuple,
    room: Room = ordinary,
) -> Found:
    """Return the newest of what lies on the shelves and of what was `left` in memory.

    The shelves are in order of preference. Places `further` away are not searched if what was
    `left` reaches what is committed. Where the shelves reach it, too, they are searched in case
    Redis is an older copy, and may be away. What is read lies in `room`.
    """
    places, asked = [*shelves], False
    limits, unread = dict[int, int](), list[CheckpointError]()
    noted = None if patient else unread
    for _ in range(TRIES):
        looked = ((at, _look(shelf, limits.get(at), noted)) for at, shelf in enumerate(places))
        held = [(at, manifest) for at, manifest in looked if manifest is not None]
        best = max(held, key=lambda one: one[1].version, default=None)
        reached = max(-1 if best is None else best[1].version, -1 if left is None else left.reached)
        if not asked and (reached < committed or left is None or left.reached < reached):
            noted = noted if reached < committed else unread
            places, asked = [*places, *_opened(further, noted)], True
            continue
        if left is not None and left.reached == reached:
            return Found(left, _because(reached, len(left.redo), committed, MEMORY, places))
        if best is None and unread:
            raise unread[0]
        if best is None:
            return Found(None, "nothing is stored")
        at, chosen = best
        shelf = places[at]
        try:
            saved = versions.load(shelf.archive, chosen, room)
        except Damaged as error:
            shelf.archive.set_aside(Mark(chosen.version, chosen.generation), str(error))
        except Unavailable as error:
            if patient:
                raise
            unread.append(error)
        else:
            because = _because(chosen.version, chosen.redo, committed, shelf.place, places)
            return Found(saved, because)
        limits[at] = chosen.version - 1
    raise CheckpointError(f"{TRIES} versions could not be read, and no more were looked at")


def _because(version: int, redo: int, committed: int, place: str, places: Sequence[Shelf]) -> str:
    """Say from where and what is lost; newer damaged versions cost money, so they are named."""
    text = f"version {version} from {place}"
    if redo:
        text += f", up to {redo} steps applied again from their sums"
    if version > committed > 0:
        text += f"; Redis knows only the first {committed} commits, so it is an older copy"
    if version < committed:
        text += f"; {committed - version} committed steps are lost, since no copy reaches further"
    damage = (each for shelf in places for each in shelf.archive.damage())
    return "; ".join((text, *damage))


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


def _look(shelf: Shelf, limit: int | None, unread: list[CheckpointError] | None) -> Manifest | None:
    """Return the newest version that lies there, or the only one that is wanted.

    An error that prevents reading is added to `unread`, or raised without it. A version of other
    software is never passed over, because going on from an older one would make it void.
    """
    only = shelf.only
    if only is not None and limit is not None and limit < only:
        return None  # it was damaged
    try:
        found = shelf.archive.newest(limit if only is None else only, unread)
    except Unknown:
        raise
    except CheckpointError as error:
        if unread is None:
            raise
        unread.append(error)
        return None
    return found if found is None or only in (None, found.version) else None
