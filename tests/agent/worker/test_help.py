"""What a late worker gives away, and what it takes in of what comes back."""

import threading
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, get_args

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agent.profile import SumFormat
from agent.protocol import Part
from agent.tensors.metrics import Numbers
from agent.tensors.sums import Sum, SumSpace
from agent.tensors.tree import Canonical
from agent.worker.exchange.help import ANSWER, ASK, OFFER, Help, Node, gifts

MICROBATCHES, SHARE = 12, range(4, 8)
AT = {"generation": 3, "step": 7}


@pytest.mark.parametrize(
    ("left", "shown", "helpers", "wanted"),
    [
        ([], (), 2, []),
        ([4], (), 2, []),
        ([4, 5], (), 2, [[5]]),
        ([4, 5, 6, 7], (), 1, [[7]]),
        ([3, 4, 5, 6, 7], (), 1, [[6, 7]]),
        ([4, 5, 6, 7], (), 3, [[7], [6], [5]]),
        ([*range(16)], (), 3, [[14, 15], [12, 13], [10, 11]]),
        ([*range(15)], (), 1, [[14]]),
        ([6, 4, 5, 7], {6}, 3, [[7], [5], [4]]),
        ([7, 6], {6, 7}, 1, []),
    ],
)
def test_gifts_come_from_the_end_as_nodes_of_the_tree(
    left: list[int], shown: Any, helpers: int, wanted: list[list[int]]
) -> None:
    assert [[*node] for node in gifts(left, shown, helpers)] == wanted


class Crew:
    """A worker as its help sees it; `clock` is what a wait comes to."""

    def __init__(self) -> None:
        self.me, self.generation = "late", AT["generation"]
        self.layout = SimpleNamespace(workers=("late", "one", "two"))
        self.lock = threading.Condition()
        self.said: list[tuple[str, Part]] = []
        self.found: Callable[[], None] = lambda: None

    def send(self, peer: str, part: Part, pieces: list[memoryview]) -> None:
        self.said.append((peer, part))

    def wait_until(self, look: Callable[[], Any], until_s: float) -> Any:
        """Others do what they do, or the time is over at once."""
        self.found()
        return look()


class Late:
    """A late worker with a model of one layer, whose microbatch m has the gradient m + 1."""

    def __init__(self) -> None:
        self.crew, self.weight = Crew(), torch.nn.Linear(4, 1, bias=False)
        self.space = SumSpace({"model": self.weight})
        self.partial = Canonical(self.space, MICROBATCHES)
        self.help = Help(self.crew)  # type: ignore[arg-type]
        self.help.open(AT["step"], self.partial, lambda _: Sum(self.space))

    def compute(self, microbatch: int, into: Canonical | None = None) -> None:
        self.weight.weight.grad = torch.full((1, 4), microbatch + 1.0)
        (into or self.partial).add(microbatch, Numbers(values=(1.0,)), SHARE.start, len(SHARE))

    def offered(self, peer: str, **at: int) -> None:
        self.help.hear(peer, Part(**{**AT, **at}, tag=OFFER), memoryview(b""))

    def answered(self, peer: str, node: range, **at: int) -> None:
        """What a helper sends that has computed these."""
        aid = Canonical(self.space, MICROBATCHES)
        for microbatch in node:
            self.compute(microbatch, aid)
        (whole,) = aid.nodes(node.start, len(node))
        extra = msgspec.msgpack.encode(Node(node.start, len(node), whole.marks))
        part = Part(**{**AT, **at}, tag=ANSWER, extra=extra)
        self.help.hear(peer, part, memoryview(bytes(whole.memory(0, self.space.total_bytes))))

    def asked(self) -> list[tuple[str, list[int]]]:
        decoded = [(p, msgspec.msgpack.decode(part.extra, type=Node)) for p, part in self.crew.said]
        assert all(part.tag == ASK for _, part in self.crew.said)
        return [(peer, [*node.microbatches]) for peer, node in decoded]

    def sum(self) -> tuple[float, float]:
        """The gradient and the number of losses of the whole share."""
        (whole,) = self.partial.nodes(SHARE.start, len(SHARE))
        return float(whole.views[0][0, 0]), whole.loss


def work(late: Late) -> list[int]:
    """What it computes itself."""
    own = []
    for microbatch in late.help.work([*SHARE], set(), SHARE):
        own.append(microbatch)
        late.compute(microbatch)
    return own


def test_a_share_is_whole_with_what_helpers_answer() -> None:
    late = Late()
    late.offered("one")
    late.offered("two")

    def answer() -> None:
        for peer, node in late.asked():
            late.answered(peer, range(node[0], node[-1] + 1))

    late.crew.found = answer
    assert work(late) == [4, 5]
    assert late.asked() == [("one", [7]), ("two", [6])]
    assert late.sum() == (5 + 6 + 7 + 8, 4.0)


def test_an_answer_of_another_step_or_of_something_else_is_not_taken() -> None:
    late = Late()
    late.offered("one")

    def answer() -> None:
        late.answered("one", range(7, 8), step=6)
        late.help.take_in(SHARE)
        late.answered("one", range(6, 7))
        late.help.take_in(SHARE)
        late.answered("two", range(7, 8))

    late.crew.found = answer
    assert work(late) == [4, 5, 6, 7]
    assert late.sum() == (5 + 6 + 7 + 8, 4.0)


def test_what_no_helper_answers_is_taken_back_and_counts_once() -> None:
    late = Late()
    late.offered("one")
    assert work(late) == [4, 5, 6, 7]
    assert late.asked() == [("one", [7])]
    late.answered("one", range(7, 8))
    late.help.take_in(SHARE)
    assert late.sum() == (5 + 6 + 7 + 8, 4.0)


def test_an_offer_of_an_older_step_or_layout_is_not_used() -> None:
    late = Late()
    late.offered("one", step=6)
    late.offered("two", generation=2)
    assert work(late) == [4, 5, 6, 7]
    assert late.asked() == []


def test_nothing_is_given_where_an_answer_takes_longer_than_the_work() -> None:
    late = Late()
    late.help._answer_s = 1.0
    late.offered("one")
    left = deque(SHARE)
    late.help.pace_s = 0.2
    late.help.give(left, set())
    assert left == deque(SHARE)
    late.help.pace_s = 0.3
    late.help.give(left, set())
    assert left == deque([4, 5, 6])


def test_the_next_one_is_given_as_well_where_an_answer_comes_sooner() -> None:
    late, left = Late(), deque([7])
    late.help._answer_s, late.help.pace_s = 0.1, 0.12
    late.offered("one")
    late.help.give(left, set())
    assert left == deque([7])
    late.help.pace_s = 0.2
    late.help.give(left, set())
    assert not left
    assert late.asked() == [("one", [7])]


@given(data=st.data(), exchange=st.sampled_from(get_args(SumFormat)))
def test_sums_of_others_in_their_places_change_no_bit(
    data: st.DataObject, exchange: SumFormat
) -> None:
    """Whoever computes which nodes of a share, in any order, some entries by nobody, and -0.0 among them."""
    total = data.draw(st.integers(1, 12))
    share = range(data.draw(st.integers(0, total - 1)), total)
    model = torch.nn.ParameterList([torch.zeros(3), torch.zeros(2)])
    space = SumSpace({"model": model}, exchange=exchange)
    numbers = torch.randn(total, 5, generator=torch.Generator().manual_seed(total))
    numbers[::3, :2] = -0.0

    def add(partial: Canonical, microbatch: int, within: range) -> None:
        row = numbers[microbatch].clone()
        model[0].grad = row[:3] if microbatch % 4 else None
        model[1].grad = row[3:]
        partial.add(microbatch, Numbers(values=(float(row[0]),)), within.start, len(within))

    def sums(partial: Canonical) -> list[tuple[bytes, bytes]]:
        found = partial.nodes(share.start, len(share))
        return [(one.marks, bytes(one.memory(0, space.total_bytes))) for one in found]

    alone, helped = Canonical(space, total), Canonical(space, total)
    for microbatch in share:
        add(alone, microbatch, share)
    left = [range(m, m + 1) for m in share]
    for first in data.draw(st.lists(st.sampled_from(share), unique=True)):
        pair = [range(first, first + 1), range(first + 1, first + 2)]
        if first % 2 == 0 and all(one in left for one in pair):
            left = [one for one in left if one not in pair] + [range(first, first + 2)]
    for node in data.draw(st.permutations(left)):
        if len(node) == 1 and data.draw(st.booleans()):
            add(helped, node.start, share)
            continue
        aid = Canonical(space, total)
        for microbatch in node:
            add(aid, microbatch, node)
        (whole,) = aid.nodes(node.start, len(node))
        payload = memoryview(bytes(whole.memory(0, space.total_bytes)))
        helped.place(node, payload, whole.marks, share)
    assert sums(helped) == sums(alone)


def test_a_worker_offers_its_help_to_different_ones_of_many() -> None:
    late = Late()
    many = [f"w{number}" for number in range(9)]
    asked = set[str]()
    for step in range(9):
        late.crew.said.clear()
        late.help.open(step, late.partial, lambda _: Sum(late.space))
        late.help.offer(many)
        assert len(late.crew.said) == 4
        asked |= {peer for peer, _ in late.crew.said}
    assert asked == {*many}
