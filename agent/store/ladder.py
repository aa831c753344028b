"""Which copy of the state everyone goes on from: a decision, values in and values out. No torch here.

The rungs, best first: a live replica, the backup tier, a peer's host memory, the local disk, object
storage. A copy *reaches* further than its version if the sums of the steps behind it are held beside
it (the redo log of the backup tier): it can be rolled forward without computing a microbatch.

The rule: the newest committed version that every byte of every layer can reach; nobody gives up
a committed step for a faster copy. For each byte, the best rung that reaches that version; on one
rung the copy that needs the fewest steps done again; and equal copies share the work.
"""

from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum
from itertools import pairwise

import msgspec

from agent.store.format import Manifest, share

Range = tuple[int, int]


class Rung(IntEnum):
    LIVE = 0
    BACKUP = 1
    PEER = 2
    DISK = 3
    OBJECT = 4

    @property
    def words(self) -> str:
        return _WORDS[self]


_WORDS = {
    Rung.LIVE: "a live replica",
    Rung.BACKUP: "the backup tier",
    Rung.PEER: "a peer's host memory",
    Rung.DISK: "local disk",
    Rung.OBJECT: "object storage",
}


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """One copy of one version, whole or in part, at one holder."""

    rung: Rung
    holder: str
    version: int
    holds: Mapping[str, tuple[Range, ...]]
    reaches: int = -1  # the newest version that it can be rolled forward to; -1: only its own

    def __post_init__(self) -> None:
        if -1 < self.reaches < self.version:
            raise ValueError(f"{self.holder}: version {self.version} reaches {self.reaches}")

    @property
    def newest(self) -> int:
        return max(self.version, self.reaches)

    def gives(self, version: int) -> bool:
        return self.version <= version <= self.newest


def stored(manifest: Manifest, rung: Rung, holder: str, reaches: int = -1) -> Source:
    """A whole version that lies in a sink, as a source."""
    holds = {layer.name: ((0, layer.layer_bytes),) for layer in manifest.state}
    return Source(
        rung=rung,
        holder=holder,
        version=manifest.version - manifest.redo,
        holds=holds,
        reaches=max(reaches, manifest.version) if manifest.redo else reaches,
    )


class Pick(msgspec.Struct, frozen=True, kw_only=True):
    """Take these bytes of a layer from this copy."""

    layer: str
    start: int
    end: int
    source: int  # its place in the list of sources


class Recovery(msgspec.Struct, frozen=True, kw_only=True):
    """All meet at `version` (None: nobody can, training starts anew), and why there."""

    version: int | None
    picks: tuple[Pick, ...]
    because: str


def recover(layers: Mapping[str, int], sources: Sequence[Source], committed: int) -> Recovery:
    """Decide for `layers` (name -> bytes), when `committed` is the newest committed version.

    What is newer than that was never agreed on, and is not looked at."""
    usable = [source for source in sources if source.version <= committed]
    versions = {min(source.newest, committed) for source in usable}
    versions |= {source.version for source in usable}
    missing = "nothing holds any of it"
    why_not_newer = ""
    for version in sorted(versions, reverse=True):
        picks: list[Pick] = []
        for layer in sorted(layers):
            found, gap = _cover(layer, layers[layer], sources, version)
            picks.extend(found)
            if gap is not None:
                missing = f"nobody holds byte {gap} of layer {layer} at version {version}"
                break
        else:
            because = _because(version, committed, picks, sources, why_not_newer)
            return Recovery(version=version, picks=tuple(picks), because=because)
        why_not_newer = why_not_newer or missing
    return Recovery(
        version=None, picks=(), because=f"training starts anew: {why_not_newer or missing}"
    )


def _cover(
    layer: str, layer_bytes: int, sources: Sequence[Source], version: int
) -> tuple[list[Pick], int | None]:
    """Picks for every byte of a layer, or the first byte that nobody gives."""
    able = [
        (at, low, high)
        for at, source in enumerate(sources)
        if source.gives(version)
        for low, high in source.holds.get(layer, ())
    ]
    edges = {0, layer_bytes, *(edge for _, *both in able for edge in both)}
    cuts = sorted(edge for edge in edges if 0 <= edge <= layer_bytes)
    picks: list[Pick] = []
    for start, end in pairwise(cuts):
        holders = {at for at, low, high in able if low <= start and end <= high}
        if not holders:
            return [], start
        best = min(_rank(sources[at], version) for at in holders)
        equal = sorted(at for at in holders if _rank(sources[at], version) == best)
        for index, at in enumerate(equal):
            low, high = share(end - start, len(equal), index)
            if low < high:
                picks.append(Pick(layer=layer, start=start + low, end=start + high, source=at))
    return picks, None


def _rank(source: Source, version: int) -> tuple[int, int]:
    return source.rung, version - source.version


def _because(
    version: int,
    committed: int,
    picks: Iterable[Pick],
    sources: Sequence[Source],
    why_not_newer: str,
) -> str:
    """One sentence: from where, and what was lost or is done again."""
    counts: dict[Rung, int] = {}
    for pick in picks:
        rung = sources[pick.source].rung
        counts[rung] = counts.get(rung, 0) + pick.end - pick.start
    origins = ", ".join(f"{counts[rung]:,} bytes from {rung.words}" for rung in sorted(counts))
    again = max((version - sources[pick.source].version for pick in picks), default=0)
    text = f"version {version}: {origins or 'no bytes'}"
    if again:
        text += f", up to {again} steps applied again from their sums"
    if version < committed:
        text += f"; {committed - version} committed steps are lost, since {why_not_newer or 'no copy reaches further'}"
    return text
