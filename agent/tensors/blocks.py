"""The blocks in which a sum is exchanged: rounds, and in each round one block for each owner.

    top of the sum | round 0: owner 0, owner 1, ... | round 1: ... | ... | bottom

The rounds begin at the end of the sum, since a backward has the last gradients first. So all owners
work from the first round on, and what is in memory at a time is bounded by blocks, however large
the sum is.
"""

from collections.abc import Sequence
from typing import NamedTuple

from agent.tensors.shards import cut

SENT_BYTES = 64 << 20  # that are under way from a worker to all: as much as its segment holds
RING_BYTES = 256 << 20  # of a worker's host memory, for all that goes out and comes in
ROUNDS = 8  # at least, so that blocks leave before all is computed
BLOCK_BYTES_MIN = 1 << 20  # smaller ones cost more than they hide
WINDOW = 4  # rounds that a worker may be ahead of the owner of a block
ALIGN_BYTES = 64


class Blocks(NamedTuple):
    total_bytes: int
    owners: int
    rounds: int

    def of_round(self, turn: int) -> tuple[int, int]:
        """Return where a round begins and ends."""
        return cut(self.total_bytes, self.rounds, self.rounds - 1 - turn)

    def span(self, turn: int, owner: int) -> tuple[int, int]:
        """Return where the block of an owner begins and ends, in the round of this number."""
        low, high = self.of_round(turn)
        start, end = cut(high - low, self.owners, owner)
        return low + start, low + end


def rooms_of(sums: Sequence[int]) -> int:
    """Return for how many blocks of a round a worker has room, given the sums of each worker.

    Those are what it sends to the other owners, what it receives of its own block, and the folded
    blocks of all. It is an upper bound, because all workers have to cut the sum alike.
    """
    owners = len(sums)
    return (owners - 1) * max(sums) + sum(sums) + owners


def blocks_of(total_bytes: int, sums: Sequence[int], *, block_bytes: int = 0) -> Blocks:
    """Return blocks so small that the ring holds them, and of at most `block_bytes` if given.

    `sums` is how many sums each worker has of its share.
    """
    owners = len(sums)
    best = SENT_BYTES // (WINDOW * owners)
    if total_bytes >= 2 * owners * BLOCK_BYTES_MIN:
        best = min(best, max(total_bytes // (ROUNDS * owners), BLOCK_BYTES_MIN))
    most = min(block_bytes or best, RING_BYTES // (WINDOW * rooms_of(sums)))
    most = max(most // ALIGN_BYTES * ALIGN_BYTES - ALIGN_BYTES, ALIGN_BYTES)
    return Blocks(total_bytes, owners, max(1, -(-total_bytes // (owners * most))))
