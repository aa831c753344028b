"""Transports within one process under a virtual clock, over links and flows of limited speed.

For tests and predictions: bytes are really moved, and only time is not real. A link is held by one
chunk after the other, for as long as the link needs for it, and a flow for as long as the flow
needs.
"""

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from itertools import count

from agent.errors import WireError
from agent.protocol import Chunk
from agent.transport.landings import Landings
from agent.transport.transport import (
    BEGUN,
    CHUNK_BYTES,
    GONE,
    Broken,
    Outgoing,
    Slot,
    Ticket,
    chunks_of,
)

Piece = tuple[Outgoing, Chunk, list[memoryview]]


class Fabric:
    """The clock and the network that its transports share."""

    def __init__(
        self,
        link_bytes_per_s: float = 1e9,
        flow_bytes_per_s: float = 1e9,
        latency_s: float = 1e-4,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        self.link, self.flow = link_bytes_per_s, flow_bytes_per_s
        self.latency_s, self.chunk_bytes = latency_s, chunk_bytes
        self.now_s = 0.0
        self.members: dict[str, Virtual] = {}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._serials = count()

    def after(self, wait_s: float, happens: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now_s + wait_s, next(self._serials), happens))

    def go_on(self) -> bool:
        """Let the next thing happen. Return False if there is none."""
        if not self._events:
            return False
        self.now_s, _, happens = heapq.heappop(self._events)
        happens()
        return True


class Way:
    """The way to one peer."""

    def __init__(self, flows: int) -> None:
        self.idle = flows  # flows that carry nothing now
        self.queue: deque[Piece] = deque()
        self.under_way: list[Outgoing] = []  # the blocks of the chunks that flows carry
        self.open = False


class Virtual:
    """The transport of one member of a fabric."""

    def __init__(
        self,
        fabric: Fabric,
        name: str,
        broken: Broken,
        flows: int = 4,
        link_bytes_per_s: float | None = None,
    ) -> None:
        """Join a fabric; `link_bytes_per_s` is of a link that is slower than the others' are."""
        self.link = link_bytes_per_s or fabric.link
        self._fabric, self._name, self._broken, self._flows = fabric, name, broken, flows
        self._landings = Landings(lambda: None)
        self._ways: dict[str, Way] = {}
        self._met: set[str] = set()
        self._link_free_s = 0.0
        self._held: list[Callable[[], None]] = []  # chunks that cannot land here yet
        self._generation = -1
        self.closed = self.stopped = False
        fabric.members[name] = self

    # --- the transport ----------------------------------------------------------------------------

    def offer(self) -> bytes:
        return self._name.encode()

    def meet(self, peer: str, offered: bytes) -> None:
        if peer not in self._met and not self.closed:
            self._met.add(peer)
            self._fabric.after(self._fabric.latency_s, lambda: self._connect(peer, offered))

    def push(
        self, peer: str, slot: Slot, pieces: Sequence[memoryview], extra: bytes = b""
    ) -> Ticket:
        chunks = chunks_of(slot, pieces, extra, self._fabric.chunk_bytes)
        block = Outgoing(slot, len(chunks))
        if slot.generation < self._generation or self.closed:
            block.ticket.fail(BEGUN.format(self._generation))
            return block.ticket
        self._way(peer).queue.extend((block, *chunk) for chunk in chunks)
        self._start(peer)
        return block.ticket

    def land(self, peer: str, slot: Slot, into: memoryview) -> Ticket:
        ticket = self._landings.expect(peer, slot, into.cast("B"))
        self._look_again()
        return ticket

    def enter(self, generation: int) -> None:
        self._generation = max(self._generation, generation)
        self._landings.enter(generation)
        for way in self._ways.values():
            queued = list(way.queue)
            for block in [*(piece[0] for piece in queued), *way.under_way]:
                if block.slot.generation < generation:
                    block.ticket.fail(BEGUN.format(generation))
            way.queue = deque(piece for piece in queued if not piece[0].ticket.failed)
        self._look_again()

    def forget(self, peer: str) -> None:
        self._met.discard(peer)
        way = self._ways.pop(peer, None) or Way(0)
        for block in [*(piece[0] for piece in way.queue), *way.under_way]:
            block.ticket.fail(GONE.format(peer))
        self._landings.forget(peer, GONE.format(peer))
        other = self._fabric.members.get(peer)
        if way.open and other is not None:
            self._fabric.after(self._fabric.latency_s, lambda: other.lose(self._name))

    def close(self) -> None:
        for peer in [*self._ways]:
            self.forget(peer)
        self.closed = True

    # --- what happens to it -----------------------------------------------------------------------

    def lose(self, peer: str) -> None:
        """See that the connection to a peer is gone."""
        if peer in self._met and self._way(peer).open:
            self._way(peer).open = False
            self.forget(peer)
            self._broken(peer)

    def stop(self) -> None:
        """Stand still as a stopped process does, whose connections stay."""
        self.stopped = True

    def go_on(self) -> None:
        self.stopped = False
        self._look_again()
        for peer in list(self._ways):
            self._start(peer)

    def _way(self, peer: str) -> Way:
        return self._ways.setdefault(peer, Way(self._flows))

    def _connect(self, peer: str, offered: bytes) -> None:
        other = self._fabric.members.get(offered.decode())
        if other is None or other.closed:
            self.forget(peer)
            self._broken(peer)
        elif peer in self._met and self._name in other._met:
            self._way(peer).open = other._way(self._name).open = True
            self._start(peer)
            other._start(self._name)

    def _start(self, peer: str) -> None:
        """Give each idle flow a chunk."""
        way, fabric = self._way(peer), self._fabric
        while way.open and way.queue and way.idle and not self.stopped:
            block, chunk, pieces = way.queue.popleft()
            way.idle -= 1
            way.under_way.append(block)
            size = sum(piece.nbytes for piece in pieces)
            begins_s = max(fabric.now_s, self._link_free_s)
            self._link_free_s = begins_s + size / self.link
            link = min(self.link, fabric.members[peer].link)
            lasts_s = size / min(fabric.flow, link) + fabric.latency_s
            piece = block, chunk, pieces
            fabric.after(begins_s - fabric.now_s + lasts_s, self._arrival(peer, way, piece))

    def _arrival(self, peer: str, way: Way, piece: Piece) -> Callable[[], None]:
        return lambda: self._arrive(peer, way, piece)

    def _arrive(self, peer: str, way: Way, piece: Piece) -> None:
        block, chunk, pieces = piece
        other = self._fabric.members[peer]
        if self._ways.get(peer) is not way or not way.open:
            return
        berth = None if other.stopped else other._landings.wait(self._name, block.slot)
        if berth is None and (other.stopped or block.slot.generation >= other._generation):
            other._held.append(self._arrival(peer, way, piece))
            return
        if berth is not None:
            taken = b"" if block.ticket.failed else b"".join(pieces)
            try:
                berth.span(chunk.offset, len(taken), chunk.size)[:] = taken
            except WireError:
                other._landings.leave(berth)
                other.lose(self._name)
                self.lose(peer)
                return
            other._landings.take(berth, len(taken), chunk.extra)
        way.idle += 1
        way.under_way.remove(block)
        block.sent()
        self._start(peer)

    def _look_again(self) -> None:
        held, self._held = self._held, []
        for arrive in held:
            self._fabric.after(0.0, arrive)
