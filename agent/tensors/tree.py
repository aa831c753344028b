"""The canonical tree: in which order the microbatches of a step are added, whatever the layout.

Floating-point addition is not associative, so the order is part of the numbers. It is fixed once:

    node (level, index) covers microbatches  index * 2^level  ..  min((index + 1) * 2^level, M) - 1
    sum(level, index) = sum(level - 1, 2 index) + sum(level - 1, 2 index + 1)

and a node whose right half is empty is the same as its left half. A contiguous range of microbatches
is a handful of whole nodes: what a worker adds up alone.
"""

from collections.abc import Callable, Container, Mapping
from typing import TypeVar

Node = tuple[int, int]
T = TypeVar("T")


def covers(node: Node, total: int) -> range:
    level, index = node
    return range(index << level, min((index + 1) << level, total))


def root(total: int) -> Node:
    return lowest(((total - 1).bit_length(), 0), total)


def children(node: Node, total: int) -> tuple[Node, ...]:
    """The halves of a node that have something in them."""
    level, index = node
    halves = ((level - 1, 2 * index), (level - 1, 2 * index + 1))
    return halves if covers(halves[1], total) else halves[:1]


def lowest(node: Node, total: int) -> Node:
    """One name for nodes that cover the same microbatches: the one nearest to the leaves."""
    while node[0] > 0 and len(halves := children(node, total)) == 1:
        node = halves[0]
    return node


def nodes_of(first: int, count: int, total: int) -> tuple[Node, ...]:
    """The fewest nodes that together cover exactly `first .. first + count - 1`."""
    nodes = []
    start, end = first, first + count
    while start < end:
        level = 0
        while start % (2 << level) == 0 and min(start + (2 << level), total) <= end:
            if start + (1 << level) >= total:
                break
            level += 1
        nodes.append((level, start >> level))
        start += 1 << level
    return tuple(nodes)


def missing(node: Node, held: Container[Node], total: int) -> tuple[int, ...]:
    """The microbatches of `node` that no held node inside it covers."""
    node = lowest(node, total)
    if node in held:
        return ()
    if node[0] == 0:
        return (node[1],)
    return tuple(leaf for half in children(node, total) for leaf in missing(half, held, total))


def family(node: Node, total: int) -> tuple[Node, Node, Node] | None:
    """The parent in which `node` is added to its other half, then its left and right half."""
    while len(covers(node, total)) < total:
        node = (node[0] + 1, node[1] >> 1)
        halves = children(node, total)
        if len(halves) == 2:
            return node, lowest(halves[0], total), lowest(halves[1], total)
    return None


def held(node: Node, total: int) -> int:
    """How many sums there are at most while the microbatches of `node` are added one after the other, two beside each
    other in one place."""
    if len(covers(node, total)) <= 2:
        return 1
    left, right = children(lowest(node, total), total)
    return max(held(left, total), 1 + held(right, total))


def fold(node: Node, parts: Mapping[Node, T], total: int, add: Callable[[T, T], T]) -> T:
    """The sum at `node`, added in tree order from the parts that are there."""
    node = lowest(node, total)
    if node in parts:
        return parts[node]
    sums = [fold(half, parts, total, add) for half in children(node, total)]
    return add(sums[0], sums[1])
