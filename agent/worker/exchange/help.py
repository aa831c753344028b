"""Help within a step: workers that are done compute microbatches of a worker that is late.

    offer    a worker has computed its share; it says so to workers whose sums it still waits for
    ask      a late worker gives the end of what it has not begun to those that offered
    answer   the helper sends the sum of these microbatches, which gets its place in the tree

The bits of a microbatch do not depend on who computes it. So nothing has to be agreed on: an answer
that is not waited for any more is dropped, a question for a step that is over is not answered, and
a late worker that waited for as long as the work would take itself does it itself. Offers are the
only messages while nobody lags by a microbatch.

The threads of the mesh call `hear`, with the lock that they hold for it.
"""

import time
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import msgspec

from agent.errors import WireError
from agent.faults import passing
from agent.net.mesh import HELP
from agent.profile import HELPERS_MAX
from agent.protocol import Part
from agent.tensors.tree import Canonical
from agent.worker.peers import PeerWorker
from agent.world import Compute
from cloud.ranges import Count

OFFER, ASK, ANSWER = f"{HELP}/offer", f"{HELP}/ask", f"{HELP}/answer"
OFFERS_MAX = 4  # workers that one worker offers its help to at a time
SMOOTHING = 0.3  # of the time that an answer takes
SOONER = 0.7  # of a worker's own time for a microbatch
FORGOTTEN = 0.9  # of that time remains whenever it is why nobody is asked


class Node(msgspec.Struct, frozen=True, array_like=True):
    """Microbatches that are one node of the canonical tree, and of an answer what the sum has."""

    first: Count
    count: Count
    marks: bytes = b""

    @property
    def microbatches(self) -> range:
        return range(self.first, self.first + self.count)


class Answered(NamedTuple):
    """What a helper has sent, of which step, and when it came."""

    at: tuple[int, int]
    node: Node
    payload: memoryview
    came_s: float


class Given(NamedTuple):
    """What a helper computes for this worker."""

    node: range
    at_s: float


def gifts(left: Sequence[int], shown: Collection[int], helpers: int, keeps: int = 1) -> list[range]:
    """Return what a late worker gives to each of so many helpers, from the end of what is left.

    It keeps so many of `left`, and what it has `shown` to others. Two neighbours that are one node
    of the tree go together if enough is left, because their sum takes as long to send as that of
    one.
    """
    rest, found = list(left[keeps:]), list[range]()
    for helper in range(helpers, 0, -1):
        if not rest or rest[-1] in shown:
            break
        last = rest[-1]
        pair = rest[-2:] == [last - 1, last] and last % 2 == 1 and last - 1 not in shown
        size = 2 if pair and len(rest) >= 2 * (helper + 1) else 1
        found.append(range(last + 1 - size, last + 1))
        del rest[-size:]
    return found


class Help:
    """The help that one worker gives and gets."""

    def __init__(self, crew: PeerWorker) -> None:
        self._crew = crew
        self._at = (-1, -1)  # the generation and step that all below belongs to
        self._partial: Canonical | None = None
        self._compute: Compute | None = None
        self.given: dict[str, Given] = {}
        self._answer_s = 0.0  # for each microbatch, from the question on
        self.pace_s = 0.0  # own time for a microbatch, in the newest step that had any
        # What others said last, each with its generation and step.
        self._offers: dict[str, tuple[int, int]] = {}
        self._asks: dict[str, tuple[tuple[int, int], Node]] = {}
        self._answers: dict[str, Answered] = {}
        self.waited_s = 0.0
        """For answers, in this step."""
        self.answered = 0
        """Microbatches of this step that others have computed for this worker."""

    def open(self, step: int, partial: Canonical, compute: Compute) -> None:
        """Begin a step, in which `compute` makes the sum of a node for others."""
        at = self._crew.generation, step
        if at != self._at:
            self.waited_s, self.answered = 0.0, 0
        self._at, self._partial, self._compute, self.given = at, partial, compute, {}
        with self._crew.lock:
            self._offers = {peer: when for peer, when in self._offers.items() if when >= at}
            self._asks.clear()
            self._answers.clear()

    def close(self) -> None:
        """Take part in no help until the next step is opened, and hold nothing for it."""
        self._at, self._partial, self._compute, self.given = (-1, -1), None, None, {}
        self.waited_s, self.answered = 0.0, 0
        with self._crew.lock:
            self._asks.clear()
            self._answers.clear()

    def hear(self, peer: str, part: Part, payload: memoryview) -> None:
        """Take note of what a peer says, on the thread of its connection."""
        at = part.generation, part.step
        if part.tag == OFFER:
            self._offers[peer] = at
        elif part.tag == ASK:
            self._asks[peer] = at, _node_of(peer, part)
        elif part.tag == ANSWER:
            self._answers[peer] = Answered(at, _node_of(peer, part), payload, time.monotonic())

    # --- a worker that is late --------------------------------------------------------------------

    def work(self, missing: Sequence[int], shown: Collection[int], share: range) -> "Shared":
        return Shared(self, missing, shown, share)

    def give(self, left: deque[int], shown: Collection[int]) -> None:
        """Give the end of what is left to those that offer, if this is soon enough done there.

        This worker goes on with the next one itself, unless an answer comes much sooner.
        """
        keeps = 0 if 0.0 < self._answer_s < SOONER * self.pace_s else 1
        if len(left) <= keeps:
            return
        with self._crew.lock:
            ready = [p for p, at in self._offers.items() if at == self._at and p not in self.given]
        ready = ready[: HELPERS_MAX - len(self.given)]
        if not ready:
            return
        if 0.0 < self.pace_s * len(left) <= self._answer_s:
            self._answer_s *= FORGOTTEN
            return
        for peer, node in zip(ready, gifts([*left], shown, len(ready), keeps), strict=False):
            for _ in node:
                left.pop()
            with self._crew.lock:
                self._offers.pop(peer, None)
            self.given[peer] = Given(node, time.monotonic())
            self._say(peer, ASK, Node(node.start, len(node)))
            passing("help: asked")

    def take_in(self, share: range) -> None:
        """Put the answers that have come into their places."""
        if not self.given:
            return
        with self._crew.lock:
            come = [(peer, self._answers.pop(peer)) for peer in self.given if peer in self._answers]
        for peer, (at, said, payload, came_s) in come:
            given, partial = self.given[peer], self._partial
            assert partial is not None
            fits = payload.nbytes == partial.space.total_bytes
            if at != self._at or said.microbatches != given.node or not fits:
                continue
            del self.given[peer]
            partial.place(said.microbatches, payload, said.marks, share)
            self.answered += len(given.node)
            passing("help: answered")
            took_s = (came_s - given.at_s) / len(given.node)
            before_s = self._answer_s or took_s
            self._answer_s = before_s + SMOOTHING * (took_s - before_s)

    def wait(self) -> list[int]:
        """Wait for an answer; return what is taken back, because this worker is as quick itself."""
        until_s = {peer: one.at_s + self.pace_s * len(one.node) for peer, one in self.given.items()}
        began_s = time.monotonic()
        has_come = self._crew.wait_until(self._has_answer, min(until_s.values()))
        now_s = time.monotonic()
        self.waited_s += now_s - began_s
        if has_come:
            return []
        back = [peer for peer, at_s in until_s.items() if at_s <= now_s]
        return sorted(each for peer in back for each in self.given.pop(peer).node)

    def _has_answer(self) -> bool:
        return any(peer in self._answers for peer in self.given)

    # --- a worker that is done --------------------------------------------------------------------

    def offer(self, late: Sequence[str]) -> None:
        """Offer help to those that are late, to different ones of many in each step."""
        if self._compute is None:
            return
        workers = self._crew.layout.workers
        begin = (self._at[1] + workers.index(self._crew.me)) % max(len(late), 1)
        for peer in [*late[begin:], *late[:begin]][:OFFERS_MAX]:
            self._say(peer, OFFER)

    @property
    def is_asked(self) -> bool:
        """Whether a late worker waits for an answer in this step."""
        return any(at == self._at for at, _ in self._asks.values())

    def answer(self, late: Sequence[str]) -> None:
        """Compute what one of the `late` workers has asked for, and offer the next."""
        with self._crew.lock:
            asks = self._asks.items()
            self._asks = {peer: ask for peer, ask in asks if peer in late and ask[0] == self._at}
            if not self._asks:
                return  # those who asked have done it themselves
            peer = next(iter(self._asks))
            _, node = self._asks.pop(peer)
        assert self._partial is not None
        assert self._compute is not None
        if not self._partial.is_node(node.microbatches):
            return  # no late worker gives that away
        passing("help: begun")
        with self._crew.link.stuck.aided():
            whole = self._compute(node.microbatches)
        passing("help: computed")
        said = msgspec.structs.replace(node, marks=whole.marks)
        self._say(peer, ANSWER, said, [whole.memory(0, whole.space.total_bytes)])
        self._say(peer, OFFER)

    def _say(
        self, peer: str, tag: str, node: Node | None = None, pieces: Sequence[memoryview] = ()
    ) -> None:
        generation, step = self._at
        extra = b"" if node is None else msgspec.msgpack.encode(node)
        part = Part(generation=generation, step=step, tag=tag, extra=extra)
        self._crew.send(peer, part, [*pieces])


def _node_of(peer: str, part: Part) -> Node:
    try:
        return msgspec.msgpack.decode(part.extra, type=Node)
    except ValueError as error:
        raise WireError(f"{peer} sent {part.tag!r}: {error}") from None


class Shared(Iterator[int]):
    """The microbatches of a share that this worker computes itself.

    What it shows to others comes first, so that the rest can be given away.
    """

    def __init__(
        self, help_: Help, missing: Sequence[int], shown: Collection[int], share: range
    ) -> None:
        self._help, self._shown, self._share = help_, shown, share
        self._left = deque(sorted(missing, key=lambda each: (each not in shown, each)))
        self._began_s, self._begun = time.monotonic() - help_.waited_s, 0

    @property
    def is_last(self) -> bool:
        """Whether the share is complete with the microbatch that came last."""
        return not self._left and not self._help.given

    def __next__(self) -> int:
        if self._begun:
            own_s = time.monotonic() - self._began_s - self._help.waited_s
            self._help.pace_s = own_s / self._begun
        while True:
            self._help.take_in(self._share)
            if self._left:
                self._help.give(self._left, self._shown)
            if self._left:
                self._begun += 1
                return self._left.popleft()
            if not self._help.given:
                raise StopIteration
            self._left.extend(self._help.wait())
