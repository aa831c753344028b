"""Layers of a version, asked for by workers that lack them and sent by those with them.

A worker asks for exactly the layers that it needs, each in shares from all workers that have it.
Answers come from live memory, on a separate thread. That is safe because a version does not change
in memory before every worker of the layout has prepared the next one, so before the asking worker
has been answered. A version that the script has changed all the same is refused. No worker waits
for one that was left out of the layout. So each answer is followed by a confirmation that nothing
changed while it was sent, and an answer without it is not used; and a worker that asks for a
version that the layout has passed is notified of that.

A worker that only reads weights may get them in the middle of a script's step, as soon as they are
right. A state is whole only at the step's boundary, because a schedule's or an optimizer's settings
may still change after such a read.
"""

import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Protocol

import msgspec

from agent.errors import Misuse, WireError
from agent.net.mesh import ASK, Mesh
from agent.net.wire import Connection
from agent.protocol import Part
from agent.store.layers import Collected, LiveLayer, share_of_each
from agent.store.shares import Gathered, Share
from agent.tensors.staging import Piece, here

OFFERS_MAX = 2
LOOK_AGAIN_S = 0.05

Known = Mapping[str, frozenset[str] | None]  # which layers each worker has; None is all


class Changed(Misuse):
    """What was asked for is not there any more, or has changed."""


class Ask(msgspec.Struct, frozen=True):
    """A request for layers, with which share of how many; the answer is marked with `serial`.

    `look` asks for weights only.
    """

    serial: int
    wanted: tuple[tuple[str, int, int], ...]
    look: bool = False


class LayerOffer(msgspec.Struct, frozen=True, kw_only=True):
    version: int
    state: Collected
    updates: list[int]


class Puller(Protocol):
    """What `Pulling` needs of the group that this worker is in."""

    @property
    def generation(self) -> int: ...

    def send(self, peer: str, part: Part, pieces: list[memoryview]) -> None: ...

    def take(self, peer: str, step: int, tag: str, generation: int) -> tuple[bytes, memoryview]: ...

    def now(self) -> tuple[int, Collected | None]:
        """Return the version that the session is at, and its state as it was at its beginning."""

    def past(self, version: int) -> bool:
        """Return whether the script may be changing that version, or has changed it."""


class Pulling:
    def __init__(
        self, crew: Puller, mesh: Callable[[], Mesh], changed: threading.Condition
    ) -> None:
        self._crew, self._mesh, self._changed = crew, mesh, changed
        self._offers: dict[int, LayerOffer] = {}
        self._shown: LayerOffer | None = None
        # generation and version: no worker of this layout needs an earlier version
        self._past = (-1, 0)
        self._serial = 0

    def offer(self, version: int, state: Collected) -> None:
        """Let every worker that asks for this version have it."""
        with self._changed:
            self._offers[version] = _offer(version, state)
            for old in sorted(self._offers)[:-OFFERS_MAX]:
                del self._offers[old]
            self._changed.notify_all()

    def show(self, version: int, state: Collected) -> None:
        """Let every worker that reads this version have its weights; do not offer it as a state."""
        with self._changed:
            self._shown = _offer(version, state)
            self._changed.notify_all()

    def clear(self) -> None:
        """Withdraw all offers, because a different state replaces the one that is here.

        Its version may be earlier, so the versions that were offered will occur again.
        """
        with self._changed:
            self._offers, self._shown = {}, None

    def forget(self, version: int) -> None:
        """Drop offers of older versions, so that their memory is freed.

        No worker of the layout asks for them any more.
        """
        with self._changed:
            self._past = (self._crew.generation, version)
            self._offers = {v: offer for v, offer in self._offers.items() if v >= version}
            self._changed.notify_all()

    def pull(self, layers: Collection[str], version: int, known: Known) -> Gathered:
        """Return the state of these layers, from the workers that are known to have them."""
        return self._ask(layers, version, known, self._crew.generation, look=False)

    def look(
        self, layers: Collection[str], version: int, known: Known, generation: int
    ) -> Gathered:
        """Return the weights of these layers, in a layout that need not be entered yet."""
        return self._ask(layers, version, known, generation, look=True)

    def _ask(
        self,
        layers: Collection[str],
        version: int,
        known: Known,
        generation: int,
        *,
        look: bool,
    ) -> Gathered:
        asks: dict[str, list[tuple[str, int, int]]] = defaultdict(list)
        for layer in sorted(layers):
            having = [peer for peer, held in known.items() if held is None or layer in held]
            if not having:
                raise WireError(f"nobody in the layout has layer {layer} of version {version}")
            for index, peer in enumerate(having):
                asks[peer].append((layer, index, len(having)))
        self._serial += 1
        ask = Part(generation=generation, step=version, tag=ASK)
        for peer, wanted in asks.items():
            extra = msgspec.msgpack.encode(Ask(self._serial, tuple(wanted), look))
            self._crew.send(peer, msgspec.structs.replace(ask, extra=extra), [])
        gathered = Gathered()
        for peer in asks:
            tag = f"give/{self._serial}"
            extra, payload = self._crew.take(peer, version, tag, generation)
            if not extra or not self._crew.take(peer, version, f"{tag}/so", generation)[0]:
                raise Changed(
                    f"the model was changed on {peer} while it was used here: where each worker keeps its own "
                    "layers only, use the model after optimizer.step(), or on all workers alike"
                )
            gathered.add(msgspec.msgpack.decode(extra, type=Share), payload)
        return gathered

    def answer(self, peer: str, part: Part) -> None:
        """Wait until this worker is at that version, and send what is asked for.

        Each question is answered on a separate thread.
        """
        ask = msgspec.msgpack.decode(part.extra, type=Ask)
        with self._changed:
            while (found := self._find(part.step, look=ask.look)) is None:
                if self._crew.generation > part.generation:
                    return
                if self._is_past(part):
                    break
                self._changed.wait(LOOK_AGAIN_S)
        connection = self._mesh().connection(peer)
        if connection is None:
            return
        try:
            self._reply(connection, part, ask, found)
        except Exception as error:
            self._mesh().drop(peer, connection)  # else the asking worker would wait for ever
            if not isinstance(error, WireError | MemoryError):
                raise

    def _is_past(self, part: Part) -> bool:
        generation, version = self._past
        return generation == part.generation and part.step < version

    def _reply(
        self, connection: Connection, part: Part, ask: Ask, found: LayerOffer | None
    ) -> None:
        reply = Part(generation=part.generation, step=part.step, tag=f"give/{ask.serial}")
        so = False
        if found is not None and self._is_as_it_was(found):
            answer, pieces = _answer(found.state, ask)
            extra = msgspec.msgpack.encode(answer)
            connection.send(msgspec.structs.replace(reply, extra=extra), *here(pieces))
            reply = msgspec.structs.replace(reply, tag=f"{reply.tag}/so")
            so = self._is_as_it_was(found)
        if not so and self._crew.generation > part.generation:
            return  # we are steps ahead, in a layout that the asking worker has not heard of
        connection.send(msgspec.structs.replace(reply, extra=b"so" if so else b""))

    def _is_as_it_was(self, offer: LayerOffer) -> bool:
        return not self._crew.past(offer.version) and offer.state.updates() == offer.updates

    def _find(self, version: int, *, look: bool) -> LayerOffer | None:
        if version in self._offers:
            return self._offers[version]
        at, state = self._crew.now()
        if at == version and state is not None:
            return _offer(version, state)
        shown = self._shown
        return shown if look and shown is not None and shown.version == version else None


def _offer(version: int, state: Collected) -> LayerOffer:
    return LayerOffer(version=version, state=state, updates=state.updates())


def covers(having: Known, every: Collection[str]) -> bool:
    """Return whether these workers together have all layers."""
    together: set[str] = set()
    for held in having.values():
        if held is None:
            return True
        together |= held
    return together >= set(every)


def share_among(live: Iterable[LiveLayer], having: Known, me: str) -> tuple[Share, list[Piece]]:
    """Return the part of these layers that `me`, one of the workers that have them, sends."""
    found = []
    for layer in live:
        peers = [w for w, held in having.items() if held is None or layer.form.name in held]
        if me in peers:
            found.append((layer, peers.index(me), len(peers)))
    return share_of_each(found)


def _answer(state: Collected, ask: Ask) -> tuple[Share, list[Piece]]:
    live = {layer.form.name: layer for layer in state.only([n for n, *_ in ask.wanted]).finish()}
    return share_of_each((live[name], index, of) for name, index, of in ask.wanted)
