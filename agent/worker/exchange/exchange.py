"""Sum a step over chains of one, block by block: each owner folds its blocks and sends them out.

In each round every worker sends each owner its sums of that owner's block. The owner adds them up
in the order of the canonical tree, and sends the block to all. A worker sends its sums of a round
only when it has the owner's block of `WINDOW` rounds before. So the owner needs room for so many
rounds, and for no more; and since it has that room before it sends the block, nobody is ever held
back in the middle of a step. A worker has room for the owner's block before it sends its own sums
of the round, for the same reason.

What a device has added up leaves it block by block through pinned memory, and the owner folds on
its device. The bits are those of a host. A device waits for copies, and never for a peer.

The sums of a worker are complete from their end on, as the backward of its last microbatch goes
(`agent.worker.exchange.early`), and a round leaves as soon as it is. If a gradient changes after its round
has left, its worker says with the last round that what it sent is void, and all exchange again.

Nothing here waits, so one thread can play any number of workers.
"""

from collections.abc import Callable, Hashable, Iterator
from functools import cached_property, partial
from typing import NamedTuple

import torch

from agent.faults import passing
from agent.layout import Layout
from agent.store.memory import fresh
from agent.tensors.blocks import WINDOW, blocks_of
from agent.tensors.device import CPU
from agent.tensors.partial_sum import Partial
from agent.tensors.staging import Block, Direct, Lanes, Staged
from agent.tensors.sums import Plan, Sum, paired, union
from agent.transport.transport import Slot, Ticket, Transport
from agent.worker.exchange.early import Early
from agent.worker.exchange.help import Help
from agent.worker.exchange.promise import Preparing
from agent.worker.peers import PeerWorker

PART, SUM, AGAIN = "part", "sum", " again"
MINE, FOLDED = "mine", "folded"  # rooms, beside those of what is received
VOID = b""  # in place of what a worker's sums have in them


Folds = Callable[[int, int, torch.Event | None], None]


def _host_room(size: int) -> torch.Tensor:
    return torch.frombuffer(fresh(size), dtype=torch.uint8)


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
        space = partial.space
        sums = [len(each) for each in keys]
        self._blocks = blocks_of(space.total_bytes, sums, block_bytes=block_bytes)
        self._last = self._blocks.rounds - 1
        owners = range(len(keys))
        self._spans = [
            [self._blocks.span(turn, each) for each in owners]
            for turn in range(self._blocks.rounds)
        ]
        self.lanes: Lanes = Direct(_host_room) if space.device == CPU else Staged(space.device)
        self._step, self._again = -1, ""
        self.begun = False
        """Whether our sums of the step have begun to leave."""
        self._given = 0  # rounds of our sums that are complete
        self._folds: Folds | None = None
        self._parts: dict[tuple[int, str], Ticket] = {}
        # Sums of other owners that are not in their places yet, and those that are brought there.
        self._sums: dict[tuple[int, str], Ticket] = {}
        self._brought: set[tuple[int, str]] = set()
        # Rounds that are being folded, or are; all, as nothing has begun.
        self._folding = self._folded = self._blocks.rounds
        # Rounds of our sums that each peer gets; all, as nothing has begun.
        self._pushed = {peer.name: self._blocks.rounds for peer in self._peers}
        self._masks: list[bytes] = []

    # --- one step ---------------------------------------------------------------------------------

    def open(self, step: int) -> None:
        """Have room for the first rounds, because peers may be ready before this worker is."""
        if step != self._step:
            self._step, self._again = step, ""
            self._open()

    def _open(self) -> None:
        self._parts, self._sums, self._brought = {}, {}, set()
        self._folding = self._folded = 0
        self._pushed = {peer.name: 0 for peer in self._peers}
        self.begun = False
        for turn in range(min(WINDOW, self._blocks.rounds)):
            self._expect(turn)

    def begin(self, mine: list[Sum], total: Sum, folds: Folds | None = None) -> None:
        """Begin to sum `mine` of all workers, of which `give` says how much is complete.

        `folds` is called with each span of ours that is summed and on its way to the others, and
        with the device's mark after which it is.
        """
        self.begun, self._given, self._folds = True, 0, folds
        self._mine, self._total = mine, total
        self.lanes.follow()

    def give(self, rounds: int | None = None, *, void: bool = False) -> None:
        """Send so many rounds of our sums, or all, as soon as they may be sent."""
        self._given = self._blocks.rounds if rounds is None else rounds
        self.lanes.follow()
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
    def late(self) -> list[str]:
        """Return the workers whose sums are not here yet, of the rounds that are expected now."""
        return sorted({peer for (_, peer), ticket in self._parts.items() if not ticket.done})

    @property
    def done(self) -> bool:
        sent = all(turns > self._last for turns in self._pushed.values())
        return self.folded and sent and not self._sums

    def ready(self) -> bool:
        """Whether `advance` has something to do."""
        can = self.done or self._can_fold() or any(map(self._can_push, self._peers))
        return can or self.lanes.due or any(self._come())

    def advance(self) -> None:
        """Do what can be done now."""
        self.lanes.advance()
        for turn, peer in [*self._come()]:
            self._bring(turn, peer)
        if self._can_fold():
            self._fold(self._folding)
        for peer in self._peers:
            if self._can_push(peer):
                self._push(peer)

    def end(self) -> None:
        """Say what the sum has in it, once all is done."""
        self._total.marks = union(self._masks, len(self._total.present))
        self.lanes.rejoin()

    def _can_push(self, peer: Peer) -> bool:
        turn = self._pushed[peer.name]
        return turn < self._given and (turn - WINDOW, peer.name) not in self._sums

    def _push(self, peer: Peer) -> None:
        """Send our sums of a peer's next block; what they have in them is said with the last."""
        turn, owner = self._pushed[peer.name], peer.number
        self._pushed[peer.name] = turn + 1
        start, end = self._spans[turn][owner]
        if start < end:
            slot, key = self._slot(SUM, turn, owner), (SUM, owner, turn % WINDOW)
            into = self.lanes.landing(key, Block(self._total, start, end))
            self._sums[turn, peer.name] = self._transport.land(peer.name, slot, into)
        blocks = [Block(node, start, end) for node in self._mine] if start < end else []
        if blocks or turn == self._last:
            extra = self._marks if turn == self._last else b""
            slot = self._slot(PART, turn, owner)
            push = partial(self._transport.push, peer.name, slot, extra=extra)
            self.lanes.out((MINE, owner, turn % WINDOW), blocks, push)

    def _come(self) -> Iterator[tuple[int, Peer]]:
        """Return the sums of other owners that have landed and are not brought to their places."""
        for peer in self._peers:
            for turn in range(max(self._pushed[peer.name] - WINDOW, 0), self._pushed[peer.name]):
                ticket = self._sums.get((turn, peer.name))
                if ticket is not None and ticket.done and (turn, peer.name) not in self._brought:
                    yield turn, peer

    def _bring(self, turn: int, peer: Peer) -> None:
        start, end = self._spans[turn][peer.number]
        key, into = (SUM, peer.number, turn % WINDOW), Block(self._total, start, end)
        self._brought.add((turn, peer.name))
        self.lanes.into(key, into, partial(self._sums.pop, (turn, peer.name)))

    def _expect(self, turn: int) -> None:
        start, end = self._spans[turn][self._me]
        for peer in self._peers:
            size = len(peer.keys) * (end - start)
            if size or turn == self._last:
                into = self._ring(peer, turn, size).numpy().data
                slot = self._slot(PART, turn, self._me)
                self._parts[turn, peer.name] = self._transport.land(peer.name, slot, into)

    def _ring(self, peer: Peer, turn: int, size: int) -> torch.Tensor:
        return self.lanes.room((PART, peer.number, turn % WINDOW), size)

    def _can_fold(self) -> bool:
        if self._folding >= min(self._given, self._folded + WINDOW, self._blocks.rounds):
            return False  # of later rounds nothing is expected yet
        tickets = (self._parts.get((self._folding, peer.name)) for peer in self._peers)
        return all(ticket is None or ticket.done for ticket in tickets)

    def _fold(self, turn: int) -> None:
        self._folding += 1
        start, end = self._spans[turn][self._me]
        if start < end:
            parts = dict(
                zip(self._keys, (node.flat[start:end] for node in self._mine), strict=True)
            )
            with self.lanes.inward():
                self._add_up(turn, parts, start, end)
        if turn == self._last:
            extras = (self._parts[turn, peer.name].extra for peer in self._peers)
            self._masks = [self._marks, *extras]
        if start < end and self._peers:
            then = partial(self._end_fold, turn)
            whole = Block(self._total, start, end)
            self.lanes.out((FOLDED, turn % WINDOW), [whole], then, inward=True)
        else:
            self._end_fold(turn, [])

    def _end_fold(self, turn: int, pieces: list[memoryview]) -> None:
        """Send a block of ours to all, as it is added up."""
        start, end = self._spans[turn][self._me]
        if turn + WINDOW <= self._last:
            self._expect(turn + WINDOW)
        for peer in self._peers:
            self._parts.pop((turn, peer.name), None)
            if start < end:
                self._transport.push(peer.name, self._slot(SUM, turn, self._me), pieces)
        self._folded += 1
        if start < end and self._folds is not None:
            self._folds(start, end, self.lanes.mark())

    def _add_up(self, turn: int, parts: dict[Hashable, Plan], start: int, end: int) -> None:
        size = end - start
        for peer in self._peers:
            ring = self.lanes.near(self._ring(peer, turn, len(peer.keys) * size))
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

    def __init__(
        self,
        crew: PeerWorker,
        transport: Transport,
        preparing: Preparing,
        help_: Help | None = None,
    ) -> None:
        self._crew, self._transport, self._preparing = crew, transport, preparing
        self._help = help_
        self._present: Exchange | None = None
        self._early: Early | None = None  # the last microbatch that was watched
        self._never = False  # whether nothing may leave early
        self.block_bytes = 0  # of at most; 0 is as many as are best

    def drop(self) -> None:
        """Free the sums and rings of a layout that is over; the next may need none of its own."""
        if self._present is not None:
            self._present.lanes.settle()
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
        if self._never or exchange.begun or exchange.rounds == 1:
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
            self._begin(exchange, step, sums.sums(own.first, own.count), total)
            exchange.give()
        if self._help is not None:
            self._help.offer(exchange.late)
        self._play(exchange)
        if exchange.void:
            self._never = True
            self._preparing.withhold()
            exchange.begin_again()
            exchange.begin(sums.sums(own.first, own.count), total)
            exchange.give()
            self._play(exchange)
        exchange.end()

    def _play(self, exchange: Exchange) -> None:
        passing("step: sums sent")
        while not exchange.folded:
            self._go_on(exchange)
        passing("step: sums taken")
        while not exchange.done:
            self._go_on(exchange)

    def _go_on(self, exchange: Exchange) -> None:
        """Do what can be done, after a wait for copies or else for peers."""
        if exchange.lanes.busy and not exchange.ready():
            exchange.lanes.wait()
        elif self._help is None:
            self._crew.wait(exchange.ready)
        else:
            asked = self._help
            self._crew.wait(lambda: exchange.ready() or (asked.is_asked and not exchange.folded))
            if not exchange.ready():
                asked.answer(exchange.late)
        exchange.advance()
