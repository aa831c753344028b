"""How a sum is cut into blocks: what a worker has in host memory at a time is bounded, whatever the sum's size."""

from itertools import pairwise

import pytest

from agent.tensors.blocks import RING_BYTES, WINDOW, blocks_of, rooms_of

GPT_BYTES = 4 * 1_300_000_000


@pytest.mark.parametrize("sums", [[1, 1], [3, 2], [1] * 8, [4, 5, 6], [1] * 64])
@pytest.mark.parametrize("total_bytes", [64, 10_000_000, GPT_BYTES, 100 * GPT_BYTES])
def test_rooms_of_a_worker_are_bounded(total_bytes: int, sums: list[int]) -> None:
    blocks = blocks_of(total_bytes, sums)
    spans = [
        blocks.span(turn, owner) for turn in (0, blocks.rounds - 1) for owner in range(len(sums))
    ]
    most = max(end - start for start, end in spans)
    assert WINDOW * rooms_of(sums) * most <= RING_BYTES


def test_blocks_cover_the_sum_once() -> None:
    blocks = blocks_of(GPT_BYTES, [2, 1, 1])
    spans = sorted(blocks.span(turn, owner) for turn in range(blocks.rounds) for owner in range(3))
    assert spans[0][0] == 0
    assert spans[-1][1] == GPT_BYTES
    assert all(one[1] == other[0] for one, other in pairwise(spans))
