"""The canonical tree: the order, in every layout, of adding the microbatches of a step.

Floating-point addition is not associative, so the order is part of the numbers. It is fixed once:

    node (level, index) covers microbatches  index * 2^level  ..  min((index + 1) * 2^level, M) - 1
    sum(level, index) = sum(level - 1, 2 index) + sum(level - 1, 2 index + 1)

and a node whose right half is empty is the same as its left half. A contiguous range of
microbatches is a handful of whole nodes, which a worker adds up alone.
"""

from collections.abc import Callable, Container, Mapping
from functools import partial
from typing import TypeVar

from agent.tensors.device import CPU, settle
from agent.tensors.metrics import Numbers
from agent.tensors.sums import Contribution, Last, Lent, Sum, SumSpace

Node = tuple[int, int]
T = TypeVar("T")


class Tree:
    """The canonical tree of a step of so many microbatches."""

    def __init__(self, total: int) -> None:
        self._total = total
        self.root = self.lowest(((total - 1).bit_length(), 0))

    def covers(self, node: Node) -> range:
        level, index = node
        return range(index << level, min((index + 1) << level, self._total))

    def halves(self, node: Node) -> tuple[Node, ...]:
        """Return the halves of a node that have something in them."""
        level, index = node
        halves = ((level - 1, 2 * index), (level - 1, 2 * index + 1))
        return halves if self.covers(halves[1]) else halves[:1]

    def lowest(self, node: Node) -> Node:
        """Return the lowest of the nodes that cover the same microbatches, as their one name."""
        while node[0] > 0 and len(halves := self.halves(node)) == 1:
            node = halves[0]
        return node

    def nodes_of(self, first: int, count: int) -> tuple[Node, ...]:
        """Return the fewest nodes that together cover exactly `first .. first + count - 1`."""
        nodes = []
        start, end = first, first + count
        while start < end:
            level = 0
            while start % (2 << level) == 0 and min(start + (2 << level), self._total) <= end:
                if start + (1 << level) >= self._total:
                    break
                level += 1
            nodes.append((level, start >> level))
            start += 1 << level
        return tuple(nodes)

    def missing(self, node: Node, held: Container[Node]) -> tuple[int, ...]:
        """Return the microbatches of `node` that no held node inside it covers."""
        node = self.lowest(node)
        if node in held:
            return ()
        if node[0] == 0:
            return (node[1],)
        return tuple(leaf for half in self.halves(node) for leaf in self.missing(half, held))

    def pair(self, node: Node, within: range) -> tuple[Node, Node] | None:
        """Return the parent of a node and the half that it is added to, if all lies `within`."""
        while len(self.covers(node)) < self._total:
            node, inner = (node[0] + 1, node[1] >> 1), self.lowest(node)
            if len(halves := self.halves(node)) == 2:
                covered = self.covers(node)
                if covered.start not in within or covered[-1] not in within:
                    return None
                left, right = map(self.lowest, halves)
                return node, right if left == inner else left
        return None

    def most(self, node: Node) -> int:
        """Return the most sums at a time while the microbatches of `node` are added in order.

        Two neighbouring microbatches are added directly into one sum.
        """
        if len(self.covers(node)) <= 2:
            return 1
        left, right = self.halves(self.lowest(node))
        return max(self.most(left), 1 + self.most(right))

    def fold(self, node: Node, parts: Mapping[Node, T], add: Callable[[T, T], T]) -> T:
        """Return the sum at `node`, added in tree order from the parts that are there."""
        node = self.lowest(node)
        if node in parts:
            return parts[node]
        sums = [self.fold(half, parts, add) for half in self.halves(node)]
        return add(sums[0], sums[1])


class Canonical:
    """The sums of a step that this worker has so far, as nodes of the canonical tree.

    They outlive a change of layout, so a survivor computes only what it does not hold yet. They lie
    on the device that computes them; other workers receive copies from host memory.
    """

    def __init__(self, space: SumSpace, microbatches: int) -> None:
        self.space = space
        self._tree, self._microbatches = Tree(microbatches), microbatches
        self._held: dict[Node, Sum | Contribution] = {}
        self._lent: Lent | None = None
        self._spare: list[Sum] = []
        self._copies: list[Sum] = []
        self._copied = 0  # the number of copies in use

    @property
    def held(self) -> int:
        most = self._tree.most(self._tree.root)
        return max(most, min(self._microbatches, 2))  # two that are joined are both held until then

    def reserve(self) -> None:
        """Allocate the memory of a sum before there is one."""
        self._spare.append(self._room())
        self._spare[-1].flat.zero_()

    def clear(self) -> None:
        self._spare += [held for held in self._held.values() if isinstance(held, Sum)]
        self._held.clear()
        self._lent, self._copied = None, 0

    def let_go(self) -> None:
        self.clear()
        self._spare.clear()
        self._copies.clear()

    def missing(self, first: int, count: int) -> list[int]:
        nodes = self.keys(first, count)
        return [leaf for node in nodes for leaf in self._tree.missing(node, self._held)]

    def lend(self, microbatch: int, first: int, count: int) -> None:
        """Put the half that this microbatch is added to into the model's gradients, if it can be.

        That half must be a contribution that is not in a sum yet. The backward then adds to it on
        the way, and needs no separate memory. Only for a backward that no script sees.
        """
        pair = self._tree.pair((0, microbatch), range(first, first + count))
        if pair is not None and isinstance(beside := self._held.get(pair[1]), Contribution):
            del self._held[pair[1]]
            self._lent = self.space.lend(beside)

    def add(self, microbatch: int, numbers: Numbers, first: int, count: int) -> None:
        """Take what the model's gradients hold now, and add up what is complete with it."""
        node, within = (0, microbatch), range(first, first + count)
        one = self.space.take(numbers)
        if self._lent is None or (pair := self._tree.pair(node, within)) is None:
            self._held[node] = one
        else:
            node, _ = pair
            self._held[node] = self._returned(self._lent, one)
            self._lent = None
        for addition in self._climb(node, within):
            addition()

    def is_node(self, microbatches: range) -> bool:
        """Whether these are all that a node of the tree covers."""
        first, count = microbatches.start, len(microbatches)
        inside = 0 < count <= self._microbatches - first
        return inside and len(self._tree.nodes_of(first, count)) == 1

    def place(self, node: range, payload: memoryview, marks: bytes, within: range) -> None:
        """Take the sum of these microbatches of a share from another worker."""
        (name,) = self._tree.nodes_of(node.start, len(node))
        total = self._room()
        total.fill(payload)
        total.marks = marks
        self._held[name] = total
        for addition in self._climb(name, within):
            addition()

    def last(self, microbatch: int, first: int, count: int) -> Last | None:
        """Return a way to add the last missing microbatch entry by entry, if all else is held."""
        node, keys, within = (0, microbatch), self.keys(first, count), range(first, first + count)
        while node not in keys:
            pair = self._tree.pair(node, within)
            if pair is None or pair[1] not in self._held:
                return None
            node = pair[0]
        for key in keys:
            if key != node:
                self._whole(key)
        one = Contribution(Numbers(), [None] * len(self.space.tensors))
        self._held[0, microbatch] = one
        additions = self._climb((0, microbatch), within)
        if not additions:
            total = self._held[node] = self._room()
            additions = [partial(self.space.write, total, one)]
        return Last(one, additions, [self._whole(key) for key in keys])

    def _climb(self, node: Node, within: range) -> list[Callable[..., None]]:
        """Join a held node with what is held beside it, as far as that goes.

        Return the additions that make the sums so, which are still to be done, in this order.
        """
        found, space, one = list[Callable[..., None]](), self.space, self._held.pop(node)
        while (pair := self._tree.pair(node, within)) is not None and pair[1] in self._held:
            node, beside = pair[0], self._held.pop(pair[1])
            if isinstance(one, Contribution) and isinstance(beside, Contribution):
                pair = self._tree.pair(node, within)
                if pair is not None and isinstance(other := self._held.get(pair[1]), Sum):
                    # The two can be added into the sum beside their own.
                    node, _ = pair[0], self._held.pop(pair[1])
                    found.append(partial(space.accumulate, other, one, beside))
                    one = other
                else:
                    total = self._room()
                    found.append(partial(space.join, total, one, beside))
                    one = total
                continue
            if isinstance(one, Contribution):
                one, beside = (
                    beside,
                    one,
                )  # into the half that is a sum; a + b has the bits of b + a
            found.append(self._into(one, beside))
        self._held[node] = one
        return found

    def _into(self, one: Sum | Contribution, other: Sum | Contribution) -> Callable[..., None]:
        assert isinstance(one, Sum)
        if isinstance(other, Contribution):
            return partial(self.space.accumulate, one, other)
        self._spare.append(other)
        return partial(self.space.add, one, other)

    def _returned(self, lent: Lent, one: Contribution) -> Sum | Contribution:
        """Return two contributions that a backward has added up.

        They are written into the reserved sum if it is not in use yet.
        """
        both = self.space.returned(lent, one)
        if not self._spare or any(isinstance(held, Sum) for held in self._held.values()):
            return both
        total = self._room()
        self.space.write(total, both)
        return total

    def _room(self) -> Sum:
        return self._spare.pop() if self._spare else Sum(self.space, self.space.device)

    def keys(self, first: int, count: int) -> tuple[Node, ...]:
        return self._tree.nodes_of(first, count)

    def fold(self, parts: Mapping[Node, T], add: Callable[[T, T], T]) -> T:
        return self._tree.fold(self._tree.root, parts, add)

    def sums(self, first: int, count: int) -> list[Sum]:
        return [self._whole(node) for node in self.keys(first, count)]

    def nodes(self, first: int, count: int) -> list[Sum]:
        """Return the sums of these microbatches in host memory."""
        sums = self.sums(first, count)
        if self.space.device == CPU:
            return sums
        # On the stream that has added them up, because the device has nothing else to do meanwhile.
        while len(self._copies) < self._copied + len(sums):
            self._copies.append(Sum(self.space))
        found = self._copies[self._copied : self._copied + len(sums)]
        self._copied += len(sums)
        for copy, node in zip(found, sums, strict=True):
            copy.copy_(node)
        settle(self.space.device)
        return found

    def _whole(self, node: Node) -> Sum:
        """Return the sum of a node; halves from different layouts are added now."""
        held = self._held.get(node)
        if held is None:
            left, right = map(self._tree.lowest, self._tree.halves(node))
            held, other = self._whole(left), self._whole(right)
            self._into(held, other)()
            del self._held[left], self._held[right]
        elif isinstance(held, Contribution):
            total = self._room()
            self.space.write(total, held)
            held = total
        self._held[node] = held
        return held
