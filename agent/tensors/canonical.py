"""The sums of a step that a worker has so far, in the order of the canonical tree: the same bits in every layout."""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from agent.tensors import tree
from agent.tensors.device import CPU, settle
from agent.tensors.numbers import Numbers
from agent.tensors.sums import Contribution, Lent, Sum, SumSpace

T = TypeVar("T")


class Canonical:
    """The sums of a step that this worker has so far, as nodes of the canonical tree.

    They outlive a change of layout: a survivor computes only what nobody has computed for it yet. They lie on the
    device that computes them; what others are told is a copy in host memory.
    """

    def __init__(self, space: SumSpace, microbatches: int) -> None:
        self.space = space
        self._microbatches = microbatches
        self._held: dict[tree.Node, Sum | Contribution] = {}
        self._lent: Lent | None = None
        self._spare: list[Sum] = []
        self._copies: list[Sum] = []
        self._copied = 0  # how many copies are in use

    @property
    def held(self) -> int:
        most = tree.held(tree.root(self._microbatches), self._microbatches)
        return max(most, min(self._microbatches, 2))  # of two both, until they are one

    def reserve(self) -> None:
        """Have the memory of a sum before there is one."""
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
        return [
            leaf
            for node in self.keys(first, count)
            for leaf in tree.missing(node, self._held, self._microbatches)
        ]

    def lend(self, microbatch: int, first: int, count: int) -> None:
        """Put what this one is to be added to into the model's gradients, if that lies apart: its backward adds to them as
        it goes, and needs no memory for all of its own. Only for a backward that no script sees."""
        node, within = tree.lowest((0, microbatch), self._microbatches), range(first, first + count)
        pair = self._pair(node, within)
        if pair is not None and isinstance(beside := self._held.get(pair[1]), Contribution):
            del self._held[pair[1]]
            self._lent = self.space.lend(beside)

    def add(self, microbatch: int, numbers: Numbers, first: int, count: int) -> None:
        """Take in what the model's gradients hold now, and add up what is complete by it."""
        node, within = tree.lowest((0, microbatch), self._microbatches), range(first, first + count)
        one = self.space.take(numbers)
        if self._lent is None or (pair := self._pair(node, within)) is None:
            self._held[node] = one
        else:
            node, _ = pair
            self._held[node] = self._returned(self._lent, one)
            self._lent = None
        while (pair := self._pair(node, within)) is not None and pair[1] in self._held:
            left, right = self._held.pop(node), self._held.pop(pair[1])
            if isinstance(left, Contribution) and isinstance(right, Contribution):
                node, total = self._join_apart(pair[0], within, left, right)
            else:
                node, total = pair[0], self._join(left, right)
            self._held[node] = total

    def _returned(self, lent: Lent, one: Contribution) -> Sum | Contribution:
        """Two that were added up by a backward; in the room that lies there for the sum anyway, if it is not in use yet."""
        both = self.space.returned(lent, one)
        if not self._spare or any(isinstance(held, Sum) for held in self._held.values()):
            return both
        total = self._room()
        self.space.write(total, both)
        return total

    def _join_apart(
        self, node: tree.Node, within: range, one: Contribution, other: Contribution
    ) -> tuple[tree.Node, Sum]:
        """The sum of `node`; or that of its parent, if its sibling's is here: it then needs no room of its own."""
        pair = self._pair(node, within)
        if pair is not None and isinstance(beside := self._held.get(pair[1]), Sum):
            self.space.accumulate(beside, one, other)
            del self._held[pair[1]]
            return pair[0], beside
        return node, self._join(one, other)

    def _join(self, left: Sum | Contribution, right: Sum | Contribution) -> Sum:
        """Into a half that is a sum already, if one is: a + b has the bits of b + a."""
        if isinstance(left, Contribution) and isinstance(right, Contribution):
            total = self._room()
            self.space.join(total, left, right)
            return total
        if isinstance(left, Contribution):
            left, right = right, left
        assert isinstance(left, Sum)
        if isinstance(right, Contribution):
            self.space.accumulate(left, right)
        else:
            self.space.add(left, right)
            self._spare.append(right)
        return left

    def _room(self) -> Sum:
        return self._spare.pop() if self._spare else Sum(self.space, self.space.device)

    def _pair(self, node: tree.Node, within: range) -> tuple[tree.Node, tree.Node] | None:
        """What becomes of a node, and what it is added to for that, if all of it is to be found in here."""
        family = tree.family(node, self._microbatches)
        if family is None:
            return None
        parent, left, right = family
        covered = tree.covers(parent, self._microbatches)
        if covered.start not in within or covered[-1] not in within:
            return None
        return parent, right if left == node else left

    def keys(self, first: int, count: int) -> tuple[tree.Node, ...]:
        return tree.nodes_of(first, count, self._microbatches)

    def fold(self, parts: Mapping[tree.Node, T], add: Callable[[T, T], T]) -> T:
        return tree.fold(tree.root(self._microbatches), parts, self._microbatches, add)

    def nodes(self, first: int, count: int) -> list[Sum]:
        """In host memory."""
        found = [self._whole(node) for node in self.keys(first, count)]
        return found if self.space.device == CPU else self._fetched(found)

    def _fetched(self, sums: Sequence[Sum]) -> list[Sum]:
        """On the stream that has added them up: there is nothing else for the device to do meanwhile."""
        while len(self._copies) < self._copied + len(sums):
            self._copies.append(Sum(self.space))
        found = self._copies[self._copied : self._copied + len(sums)]
        self._copied += len(sums)
        for copy, node in zip(found, sums, strict=True):
            copy.copy_(node)
        settle(self.space.device)
        return found

    def _whole(self, node: tree.Node) -> Sum:
        """The sum of a node; its halves may come from different layouts, and are added now."""
        held = self._held.get(node)
        if held is None:
            left, right = (
                tree.lowest(half, self._microbatches)
                for half in tree.children(node, self._microbatches)
            )
            held = self._join(self._whole(left), self._whole(right))
            del self._held[left], self._held[right]
        elif isinstance(held, Contribution):
            total = self._room()
            self.space.write(total, held)
            held = total
        self._held[node] = held
        return held
