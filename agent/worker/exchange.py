"""Sum a step over chains of one, block by block: each owner folds its blocks and sends them out.

In each round every worker sends each owner its sums of that owner's block. The owner adds them up
in the order of the canonical tree, and sends the block to all. A worker sends its sums of a round
only when it has the owner's block of `WINDOW` rounds before. So the owner needs room for so many
rounds, and for no more; and since it has that room before it sends the block, nobody is ever held
back in the middle of a step.

The sums of a worker are complete from their end on, as the backward of its last microbatch goes
(`agent.worker.early`), and a round leaves as soon as it is. If a gradient changes after its round
has left, its worker says with the last round that what it sent is void, and all exchange again.

Nothing here waits, so one thread can play any number of workers.
"""

from collections.abc import Callable, Hashable
from functools import cached_property, partial
from typing import NamedTuple

import torch

from agent.faults import passing
from agent.layout import Layout
from agent.store.memory import fresh
from agent.tensors.blocks import WINDOW, blocks_of
from agent.tensors.device import CPU
from agent.tensors.partial_sum import Partial
from agent.tensors.sums import Plan, Sum, paired, union
from agent.transport.transport import Slot, Ticket, Transport
from agent.worker.early import Early
from agent.worker.peers import PeerWorker
from agent.worker.promise import Preparing

PART, SUM, AGAIN = "part", "sum", " again"
VOID = b""  # in place of what a worker's sums have in them


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
        owners = range(len(keys))
        self._spans = [
            [self._blocks.span(turn, each) for each in owners]
            for turn in range(self._blocks.rounds)
        ]
        self._rings = {peer.name: self._ring(len(peer.keys)) for peer in self._peers}
        self._step, self._again = -1, ""
        self.begun = False
        """Whether our sums of the step have begun to leave."""
        self._given = 0  # rounds of our sums that are complete
        self._folds: Callable[[int, int], None] | None = None
        self._parts: dict[tuple[int, str], Ticket] = {}
        self._sums: dict[tuple[int, str], Ticket] = {}
        self._folded = self._blocks.rounds  # rounds; all, as nothing has begun
        self._pushed: dict[str, int] = {}  # rounds of our sums that each peer has got
        self._masks: list[bytes] = []

    def _ring(self, sums: int) -> list[torch.Tensor]:
        own = [spans[self._me] for spans in self._spans]
        size = sums * max(end - start for start, end in own)
        rounds = min(WINDOW, self._blocks.rounds)
        return [torch.frombuffer(fresh(max(size, 1)), dtype=torch.uint8) for _ in range(rounds)]

    # --- one step ---------------------------------------------------------------------------------

    def open(self, step: int) -> None:
        """Have room for the first rounds, because peers may be ready before this worker is."""
        if step != self._step:
            self._step, self._again = step, ""
            self._open()

    def _open(self) -> None:
        self._parts, self._sums, self._folded, self.begun = {}, {}, 0, False
        for turn in range(min(WINDOW, self._blocks.rounds)):
            self._expect(turn)

    def begin(
        self, mine: list[Sum], total: Sum, folds: Callable[[int, int], None] | None = None
    ) -> None:
        """Begin to sum `mine` of all workers, of which `give` says how much is complete.

        `folds` is called with each span of ours that is summed and on its way to the others.
        """
        self.begun, self._given, self._folds = True, 0, folds
        self._mine, self._total = mine, total
        for peer in self._peers:
            for turn in range(self._blocks.rounds):
                start, end = self._spans[turn][peer.number]
                if start < end:
                    slot, into = self._slot(SUM, turn, peer.number), total.memory(start, end)
                    self._sums[turn, peer.name] = self._transport.land(peer.name, slot, into)
        self._pushed = {peer.name: 0 for peer in self._peers}

    def give(self, rounds: int | None = None, *, void: bool = False) -> None:
        """Send so many rounds of our sums, or all, as soon as they may be sent."""
        self._given = self._blocks.rounds if rounds is None else rounds
        if self._given > self._last:
            self._marks = union((node.marks for node in self._mine), len(self._total.present))
            self._marks = VOID if void else self._marks
        for _ in range(min(WINDOW, self._blocks.rounds)):
            for peer in self._peers:
                if self._can_push(peer):
                    self._push(peer)

    def begin_again(self) -> None:
        """Exchange the sums of this step once more, because those of a worker were void."""
        self._again = AGAIN
        self._open()

    @property
    def void(self) -> bool:
        """Whether the sums of any worker were void, once all is done."""
        return VOID in self._masks

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
        if turn >= self._given:
            return False
        before = self._sums.get((turn - WINDOW, peer.name))
        return before is None or before.done

    def _push(self, peer: Peer) -> None:
        """Send our sums of a peer's next block; what they have in them is said with the last."""
        turn = self._pushed[peer.name]
        self._pushed[peer.name] = turn + 1
        start, end = self._spans[turn][peer.number]
        pieces = [node.memory(start, end) for node in self._mine] if start < end else []
        if pieces or turn == self._last:
            extra = self._marks if turn == self._last else b""
            slot = self._slot(PART, turn, peer.number)
            self._transport.push(peer.name, slot, pieces, extra)

    def _expect(self, turn: int) -> None:
        start, end = self._spans[turn][self._me]
        for peer in self._peers:
            size = len(peer.keys) * (end - start)
            if size or turn == self._last:
                into = self._rings[peer.name][turn % WINDOW][:size].numpy().data
                slot = self._slot(PART, turn, self._me)
                self._parts[turn, peer.name] = self._transport.land(peer.name, slot, into)

    def _can_fold(self) -> bool:
        if self.folded or self._folded >= self._given:
            return False
        tickets = (self._parts.get((self._folded, peer.name)) for peer in self._peers)
        return all(ticket is None or ticket.done for ticket in tickets)

    def _fold(self, turn: int) -> None:
        start, end = self._spans[turn][self._me]
        if start < end:
            parts = dict(
                zip(self._keys, (node.flat[start:end] for node in self._mine), strict=True)
            )
            self._add_up(turn, parts, start, end)
        if turn == self._last:
            extras = (self._parts[turn, peer.name].extra for peer in self._peers)
            self._masks = [self._marks, *extras]
        if turn + WINDOW <= self._last:
            self._expect(turn + WINDOW)
        for peer in self._peers:
            self._parts.pop((turn, peer.name), None)
            if start < end:
                slot, piece = self._slot(SUM, turn, self._me), self._total.memory(start, end)
                self._transport.push(peer.name, slot, [piece])
        self._folded += 1
        if start < end and self._folds is not None:
            self._folds(start, end)

    def _add_up(self, turn: int, parts: dict[Hashable, Plan], start: int, end: int) -> None:
        size = end - start
        for peer in self._peers:
            ring = self._rings[peer.name][turn % WINDOW]
            for number, key in enumerate(peer.keys):
                parts[key] = ring[number * size : (number + 1) * size]
        plan = self.partial.fold(parts, paired)
        self.partial.space.fold(plan, self._total.flat[start:end], start)

    def _slot(self, kind: str, turn: int, owner: int) -> Slot:
        block = turn * self._blocks.owners + owner
        return Slot(self._generation, self._step, kind + self._again, block)

    @cached_property
    def rounds_of(self) -> list[range]:
        """In which rounds the numbers leave, and each entry of the sum."""
        ends = [self._blocks.of_round(turn) for turn in range(self._blocks.rounds)]
        found = list[range]()
        for first, last, *_ in self.partial.space.places:
            turns = [n for n, (low, high) in enumerate(ends) if low < last and first < high]
            found.append(range(turns[0], turns[-1] + 1) if turns else range(0))
        return found

    @property
    def rounds(self) -> int:
        return self._blocks.rounds


class Exchanging:
    """The exchange as a part of a worker, whose thread waits between what can be done."""

    def __init__(self, crew: PeerWorker, transport: Transport, preparing: Preparing) -> None:
        self._crew, self._transport, self._preparing = crew, transport, preparing
        self._present: Exchange | None = None
        self._early: Early | None = None  # the last microbatch that was watched
        self._never = False  # whether nothing may leave early
        self.block_bytes = 0  # of at most; 0 is as many as are best

    def drop(self) -> None:
        """Free the sums and rings of a layout that is over; the next may need none of its own."""
        self._present = self._early = None

    def open(self, step: int, partial: Partial) -> Exchange:
        """Prepare for the sums of a step that this worker is about to compute."""
        layout = self._crew.layout
        present = self._present
        if present is None or present.layout is not layout or present.partial is not partial:
            self._present = None  # its memory is free before there is more
            present = self._present = Exchange(
                self._transport, layout, self._crew.me, partial, block_bytes=self.block_bytes
            )
        present.open(step)
        return present

    def early(self, step: int, partial: Partial, total: Sum, microbatch: int) -> Early | None:
        """Return what takes the gradients of the last missing microbatch as they come."""
        exchange, own = self.open(step, partial), self._crew.layout.replica_of(self._crew.me)
        watched = self._early is not None and self._early.over
        self._never |= self._early is not None and self._early.spoilt
        if self._never or exchange.begun or exchange.rounds == 1 or partial.space.device != CPU:
            return None
        acts = watched and not total.is_lent
        last = partial.last(microbatch, own.first, own.count) if acts else None
        if last is not None:
            self._begin(exchange, step, last.nodes, total)
        self._early = Early(exchange, last)
        return self._early

    def _begin(self, exchange: Exchange, step: int, mine: list[Sum], total: Sum) -> None:
        self._preparing.begin(step)
        exchange.begin(mine, total, partial(self._preparing.add, total))

    def run(self, step: int, sums: Partial, total: Sum) -> None:
        """Sum over all workers into `total`, and send the keeper this worker's spans of it."""
        exchange, own = self.open(step, sums), self._crew.layout.replica_of(self._crew.me)
        if not exchange.begun:
            self._begin(exchange, step, sums.nodes(own.first, own.count), total)
            exchange.give()
        self._play(exchange)
        if exchange.void:
            self._never = True
            self._preparing.withhold()
            exchange.begin_again()
            exchange.begin(sums.nodes(own.first, own.count), total)
            exchange.give()
            self._play(exchange)
        exchange.end()

    def _play(self, exchange: Exchange) -> None:
        passing("step: sums sent")
        while not exchange.folded:
            self._crew.wait(exchange.ready)
            exchange.advance()
        passing("step: sums taken")
        while not exchange.done:
            self._crew.wait(exchange.ready)
            exchange.advance()
