"""What every transport promises, and the values that it is asked with.

A transfer needs both sides: the sender pushes a block, and the receiver says where that block is to
land. So a block is received into its place without a copy, and a sender that is ahead of its
receiver is held back by the connection and takes no memory there. Neither call waits. Each returns
a ticket, which is done when the transfer is, or failed with its peer.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from agent.protocol import Chunk

CHUNK_BYTES = 1 << 20  # of a block, in one frame of one flow
GONE = "the connection to {} is gone"
BEGUN = "generation {} has begun"


class Slot(NamedTuple):
    """Which block it is: the same on both sides."""

    generation: int
    step: int
    kind: str
    block: int


class Ticket:
    """A transfer of one block. Its transport's condition is notified when it is done, or failed."""

    __slots__ = ("done", "extra", "failed")

    def __init__(self) -> None:
        self.done, self.failed = False, ""
        self.extra = b""  # what the sender said with the block

    def fail(self, why: str) -> None:
        if not self.done:
            self.failed = self.failed or why


class Transport(Protocol):
    """Blocks to and from peers.

    * Blocks arrive whole and unchanged, each in the place of its own slot, in any order.
    * What fails with a peer leaves the transfers of all others alone.
    * A call that fails tickets has returned only when no memory of theirs is read or written
      any more, so their owner may use it again.
    """

    def offer(self) -> bytes:
        """Return how this worker is reached."""

    def meet(self, peer: str, offered: bytes) -> None:
        """Connect to a peer in the background, ahead of need."""

    def push(
        self, peer: str, slot: Slot, pieces: Sequence[memoryview], extra: bytes = b""
    ) -> Ticket:
        """Send a block that lies in these pieces, which stay unchanged until the ticket is done.

        If the peer is not connected yet, the block is sent when it is. What is pushed to several
        peers under one slot and from the same memory is one block.
        """

    def land(self, peer: str, slot: Slot, into: memoryview) -> Ticket:
        """Have a block of exactly this size land in this memory."""

    def enter(self, generation: int) -> None:
        """Fail all tickets of older generations, whose blocks are dropped from now on."""

    def forget(self, peer: str) -> None:
        """Disconnect from a peer, and fail all tickets with it and no other."""

    def close(self) -> None: ...


Broken = Callable[[str], None]


class Outgoing:
    """A block on its way, and how many of its chunks are not sent yet."""

    __slots__ = ("left", "slot", "ticket")

    def __init__(self, slot: Slot, left: int) -> None:
        self.slot, self.left, self.ticket = slot, left, Ticket()

    def sent(self) -> bool:
        """Note that one more chunk is sent; return whether that makes the ticket done."""
        self.left -= 1
        self.ticket.done = not self.left and not self.ticket.failed
        return self.ticket.done


def chunks_of(
    slot: Slot, pieces: Sequence[memoryview], extra: bytes, chunk_bytes: int = CHUNK_BYTES
) -> list[tuple[Chunk, list[memoryview]]]:
    """Cut a block into chunks; an empty block is one empty chunk."""
    rest = deque(piece.cast("B") for piece in pieces if piece.nbytes)
    size, at = sum(piece.nbytes for piece in rest), 0
    chunks = list[tuple[Chunk, list[memoryview]]]()
    while at < size or not chunks:
        wanted, taken = min(chunk_bytes, size - at), list[memoryview]()
        room = wanted
        while room:
            piece = rest.popleft()
            taken.append(piece[:room])
            if piece.nbytes > room:
                rest.appendleft(piece[room:])
            room -= taken[-1].nbytes
        said = Chunk(
            generation=slot.generation,
            step=slot.step,
            kind=slot.kind,
            block=slot.block,
            offset=at,
            size=size,
            extra=b"" if chunks else extra,
        )
        chunks.append((said, taken))
        at += wanted
    return chunks
