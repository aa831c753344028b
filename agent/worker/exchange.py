"""Sum a step over chains of one, block by block: each owner folds its blocks and sends them out.

In each round every worker sends each owner its sums of that owner's block. The owner adds them up
in the order of the canonical tree, and sends the block to all. A worker sends its sums of a round
only when it has the owner's block of `WINDOW` rounds before. So the owner needs room for so many
rounds, and for no more; and since it has that room before it sends the block, nobody is ever held
back in the middle of a step.

Nothing here waits, so one thread can play any number of workers.
"""

from collections.abc import Callable, Hashable
from typing import NamedTuple

import torch

from agent.faults import passing
from agent.layout import Layout
from agent.store.memory import fresh
from agent.tensors.blocks import WINDOW, blocks_of
from agent.tensors.partial_sum import Partial
from agent.tensors.sums import Plan, Sum, paired, union
from agent.transport.transport import Slot, Ticket, Transport
from agent.worker.peers import PeerWorker

PART, SUM = "part", "sum"

Span = tuple[int, int]


class Peer(NamedTuple):
    """Another worker: its number among the owners, and the keys of its sums."""

    name: str
    number: int
    keys: tuple[Hashable, ...]


class Exchange:
    """The exchanges of one worker in one layout, one after the other."""

    def __init__(
        self,
        transport: Transport,
        layout: Layout,
        me: str,
        partial: Partial,
        *,
        block_bytes: int = 0,
    ) -> None:
        self.layout, self.partial = layout, partial
        self._transport, self._generation = transport, layout.generation
        keys = [tuple(partial.keys(each.first, each.count)) for each in layout.replicas]
        self._me = layout.workers.index(me)
        self._peers = [
            Peer(worker, index, keys[index])
            for index, worker in enumerate(layout.workers)
            if worker != me
        ]
        self._keys = keys[self._me]
        sums, space = sum(map(len, keys)), partial.space
        self._blocks = blocks_of(space.total_bytes, len(keys), sums, block_bytes=block_bytes)
        self._last = self._blocks.rounds - 1
        self._rings = {peer.name: self._ring(len(peer.keys)) for peer in self._peers}
        self._step = -1
        self._parts: dict[tuple[int, str], Ticket] = {}
        self._sums: dict[tuple[int, str], Ticket] = {}
        self._folded = self._blocks.rounds  # rounds; all, as nothing has begun
        self._pushed: dict[str, int] = {}  # rounds of our sums that each peer has got
        self._masks: list[bytes] = []

    def _ring(self, sums: int) -> list[torch.Tensor]:
        spans = [self._blocks.span(turn, self._me) for turn in range(self._blocks.rounds)]
        size = sums * max(end - start for start, end in spans)
        rounds = min(WINDOW, self._blocks.rounds)
        return [torch.frombuffer(fresh(max(size, 1)), dtype=torch.uint8) for _ in range(rounds)]

    # --- one step ---------------------------------------------------------------------------------

    def open(self, step: int) -> None:
        """Have room for the first rounds, because peers may be ready before this worker is."""
        if step == self._step:
            return
        self._step, self._parts, self._sums, self._folded = step, {}, {}, 0
        for turn in range(min(WINDOW, self._blocks.rounds)):
            self._expect(turn)

    def begin(self, mine: list[Sum], total: Sum) -> None:
        """Send what may be sent at once."""
        self._mine, self._total = mine, total
        self._marks = union((node.marks for node in mine), len(total.present))
        self._masks = [self._marks]
        for peer in self._peers:
            for turn in range(self._blocks.rounds):
                start, end = self._blocks.span(turn, peer.number)
                if start < end:
                    slot, into = self._slot(SUM, turn, peer.number), total.memory(start, end)
                    self._sums[turn, peer.name] = self._transport.land(peer.name, slot, into)
        self._pushed = {peer.name: 0 for peer in self._peers}
        for _ in range(min(WINDOW, self._blocks.rounds)):
            for peer in self._peers:
                self._push(peer)

    @property
    def folded(self) -> bool:
        """Whether all blocks of this worker are added up, and on their way to the others."""
        return self._folded > self._last

    @property
    def done(self) -> bool:
        return self.folded and all(ticket.done for ticket in self._sums.values())

    def ready(self) -> bool:
        """Whether `advance` has something to do."""
        return self.done or self._can_fold() or any(map(self._can_push, self._peers))

    def advance(self) -> None:
        """Do what can be done now."""
        if self._can_fold():
            self._fold(self._folded)
        for peer in self._peers:
            if self._can_push(peer):
                self._push(peer)

    def end(self) -> None:
        """Say what the sum has in it, once all is done."""
        self._total.marks = union(self._masks, len(self._total.present))

    def _can_push(self, peer: Peer) -> bool:
        turn = self._pushed[peer.name]
        if turn > self._last:
            return False
        before = self._sums.get((turn - WINDOW, peer.name))
        return before is None or before.done

    def _push(self, peer: Peer) -> None:
        """Send our sums of a peer's next block; what they have in them is said with the last."""
        turn = self._pushed[peer.name]
        self._pushed[peer.name] = turn + 1
        start, end = self._blocks.span(turn, peer.number)
        pieces = [node.memory(start, end) for node in self._mine] if start < end else []
        if pieces or turn == self._last:
            extra = self._marks if turn == self._last else b""
            slot = self._slot(PART, turn, peer.number)
            self._transport.push(peer.name, slot, pieces, extra)

    def _expect(self, turn: int) -> None:
        start, end = self._blocks.span(turn, self._me)
        for peer in self._peers:
            size = len(peer.keys) * (end - start)
            if size or turn == self._last:
                into = self._rings[peer.name][turn % WINDOW][:size].numpy().data
                slot = self._slot(PART, turn, self._me)
                self._parts[turn, peer.name] = self._transport.land(peer.name, slot, into)

    def _can_fold(self) -> bool:
        if self.folded:
            return False
        tickets = (self._parts.get((self._folded, peer.name)) for peer in self._peers)
        return all(ticket is None or ticket.done for ticket in tickets)

    def _fold(self, turn: int) -> None:
        start, end = self._blocks.span(turn, self._me)
        if start < end:
            parts = dict(
                zip(self._keys, (node.flat[start:end] for node in self._mine), strict=True)
            )
            self._add_up(turn, parts, start, end)
        if turn == self._last:
            self._masks += [self._parts[turn, peer.name].extra for peer in self._peers]
        if turn + WINDOW <= self._last:
            self._expect(turn + WINDOW)
        for peer in self._peers:
            self._parts.pop((turn, peer.name), None)
            if start < end:
                slot, piece = self._slot(SUM, turn, self._me), self._total.memory(start, end)
                self._transport.push(peer.name, slot, [piece])
        self._folded += 1

    def _add_up(self, turn: int, parts: dict[Hashable, Plan], start: int, end: int) -> None:
        size = end - start
        for peer in self._peers:
            ring = self._rings[peer.name][turn % WINDOW]
            for number, key in enumerate(peer.keys):
                parts[key] = ring[number * size : (number + 1) * size]
        plan = self.partial.fold(parts, paired)
        self.partial.space.fold(plan, self._total.flat[start:end], start)

    def _slot(self, kind: str, turn: int, owner: int) -> Slot:
        return Slot(self._generation, self._step, kind, turn * self._blocks.owners + owner)

    @property
    def spans(self) -> list[Span]:
        """Return where the blocks of this worker lie, those side by side as one."""
        found = list[Span]()
        for turn in reversed(range(self._blocks.rounds)):
            start, end = self._blocks.span(turn, self._me)
            if found and found[-1][1] == start:
                start = found.pop()[0]
            found.append((start, end))
        return found


class Exchanging:
    """The exchange as a part of a worker, whose thread waits between what can be done."""

    def __init__(self, crew: PeerWorker, transport: Transport) -> None:
        self._crew, self._transport = crew, transport
        self._present: Exchange | None = None

    def drop(self) -> None:
        """Free the sums and rings of a layout that is over; the next may need none of its own."""
        self._present = None

    def open(self, step: int, partial: Partial) -> None:
        """Prepare for the sums of a step that this worker is about to compute."""
        layout = self._crew.layout
        present = self._present
        if present is None or present.layout is not layout or present.partial is not partial:
            self._present = None  # its memory is free before there is more
            present = self._present = Exchange(self._transport, layout, self._crew.me, partial)
        present.open(step)

    def run(
        self, step: int, partial: Partial, total: Sum, reduced: Callable[[list[Span]], None]
    ) -> None:
        """Sum over all workers into `total`.

        `reduced` is called with the spans of this worker when they are complete and on their way to
        the others, whose spans it need not wait for.
        """
        self.open(step, partial)
        exchange, own = self._present, self._crew.layout.replica_of(self._crew.me)
        assert exchange is not None
        exchange.begin(partial.nodes(own.first, own.count), total)
        passing("step: sums sent")
        while not exchange.folded:
            self._crew.wait(exchange.ready)
            exchange.advance()
        passing("step: sums taken")
        reduced(exchange.spans)
        while not exchange.done:
            self._crew.wait(exchange.ready)
            exchange.advance()
        exchange.end()
