"""However a sum is cut into blocks, and whoever owns them, it has the bits of one process."""

import threading
import weakref
from typing import Literal, NamedTuple, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.layout import Layout, Replica, data_parallel
from agent.profile import SumFormat
from agent.tensors.blocks import WINDOW
from agent.tensors.metrics import Numbers
from agent.tensors.partial_sum import Partial, partial_of
from agent.tensors.sums import Sum, SumSpace
from agent.transport.tcp import Tcp
from agent.transport.virtual import Fabric, Virtual
from agent.worker.exchange.exchange import Exchange, Exchanging
from agent.worker.exchange.promise import Preparing
from agent.worker.peers import PeerWorker

FORMATS: tuple[SumFormat, ...] = get_args(SumFormat)


def space_of(exchange: SumFormat = "float32") -> SumSpace:
    """Numbers of several types, one parameter that no microbatch uses, and gaps in between."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(37, 41), torch.nn.BatchNorm1d(41))
    model.append(torch.nn.Linear(41, 3).to(torch.bfloat16))
    model.append(torch.nn.Linear(5, 5))
    return SumSpace({"model": model}, exchange=exchange)


class Member(NamedTuple):
    name: str
    transport: Virtual
    partial: Partial
    total: Sum


def compute(partial: Partial, first: int, count: int) -> None:
    space = partial.space
    for microbatch in partial.missing(first, count):
        for index, param in enumerate(space.params.values()):
            generator = torch.Generator().manual_seed(1000 * microbatch + index)
            if index < 7:
                param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)
                param.grad[torch.rand(param.shape, generator=generator) < 0.1] = -0.0
        named = Numbers(names=("accuracy",), values=(microbatch / 3, microbatch / 7))
        partial.add(microbatch, named, first, count)


def alone(space: SumSpace, total: int, deterministic: bool) -> Sum:
    partial = partial_of(space, total, deterministic=deterministic)
    compute(partial, 0, total)
    (whole,) = partial.nodes(0, total)
    return whole


def crew(space: SumSpace, layout: Layout, fabric: Fabric, deterministic: bool) -> list[Member]:
    members = []
    for worker in layout.workers:
        partial = partial_of(space, layout.microbatches, deterministic=deterministic)
        members.append(Member(worker, Virtual(fabric, worker, lambda _: None), partial, Sum(space)))
    for one in members:
        for other in members:
            if one is not other:
                one.transport.meet(other.name, other.transport.offer())
    return members


def shares(layout: Layout, name: str) -> tuple[int, int]:
    own = layout.replica_of(name)
    return own.first, own.count


def exchanged(
    members: list[Member],
    layout: Layout,
    fabric: Fabric,
    step: int,
    block_bytes: int,
    events_max: int = 1 << 60,
) -> dict[str, Exchange]:
    """Play all workers until all have the sum, or so many things have happened."""
    running = {}
    for member in members:
        one = Exchange(
            member.transport, layout, member.name, member.partial, block_bytes=block_bytes
        )
        one.open(step)
        running[member.name] = one
    for member in members:
        compute(member.partial, *shares(layout, member.name))
        running[member.name].begin(member.partial.nodes(*shares(layout, member.name)), member.total)
        running[member.name].give()
    return played(running, fabric, events_max)


def played(
    running: dict[str, Exchange], fabric: Fabric, events_max: int = 1 << 60
) -> dict[str, Exchange]:
    for _ in range(events_max):
        while ready := [one for one in running.values() if not one.done and one.ready()]:
            for one in ready:
                one.advance()
        if all(one.done for one in running.values()):
            break
        assert fabric.go_on(), "it hangs"
    else:
        return running
    for one in running.values():
        one.end()
    return running


def check(members: list[Member], wanted: Sum, layout: Layout, exact: bool) -> None:
    first = members[0].total
    for member in members:
        assert member.total.marks == first.marks == wanted.marks
        for start, end, _ in wanted.space.groups:
            got = bytes(member.total.memory(start, end))
            assert got == bytes(first.memory(start, end))
            assert not exact or got == bytes(wanted.memory(start, end))


@st.composite
def layouts(draw: st.DrawFn, generation: int = 0) -> Layout:
    """Shares of any size, also none."""
    total = draw(st.integers(1, 12))
    cuts = sorted(draw(st.lists(st.integers(0, total), max_size=7)))
    replicas, first = list[Replica](), 0
    for number, cut in enumerate([*cuts, total]):
        replicas.append(Replica(workers=(f"w{number}",), first=first, count=cut - first))
        first = cut
    return Layout(generation=generation, microbatches=total, replicas=tuple(replicas))


@given(layouts(), st.sampled_from([128, 512, 4096, 1 << 25]), st.sampled_from(["", *FORMATS]))
@settings(max_examples=60)
def test_any_blocks_and_any_layout_give_the_same_bits(
    layout: Layout, block_bytes: int, exchange: SumFormat | Literal[""]
) -> None:
    """One to eight workers; without a format, sums are added in any order."""
    space, fabric = space_of(exchange or "float32"), Fabric(chunk_bytes=1000)
    deterministic = exchange != ""
    members = crew(space, layout, fabric, deterministic)
    for step in range(2):
        for member in members:
            member.partial.clear()
        exchanged(members, layout, fabric, step, block_bytes)
        check(members, alone(space, layout.microbatches, deterministic), layout, deterministic)


@given(
    st.integers(2, 8),
    st.integers(2, 8),
    st.integers(1, 12),
    st.integers(0, 4000),
    st.sampled_from(FORMATS),
)
@settings(max_examples=60)
def test_a_layout_that_ends_in_the_middle_leaves_nothing_behind(
    before: int, after: int, total: int, events: int, exchange: SumFormat
) -> None:
    """The step goes on in another layout with what is computed; late blocks of the old one spoil nothing."""
    names = tuple(f"w{number}" for number in range(8))
    space, fabric = space_of(exchange), Fabric(chunk_bytes=1000)
    old, new = (data_parallel(g, total, names[:n]) for g, n in ((0, before), (1, after)))
    longest = max(old.workers, new.workers, key=len)
    everybody = data_parallel(9, total, longest)
    members = crew(space, everybody, fabric, True)
    exchanged([m for m in members if m.name in old.workers], old, fabric, 0, 512, events)
    remaining = [member for member in members if member.name in new.workers]
    for member in remaining:
        member.transport.enter(1)
    exchanged(remaining, new, fabric, 0, 512)
    check(remaining, alone(space, total, True), new, True)


@pytest.mark.parametrize("exchange", FORMATS)
def test_what_crosses_is_what_a_ring_of_this_format_sends(exchange: SumFormat) -> None:
    """Bytes are counted where they come in from the sockets, with everything around blocks."""
    count, changed, names = 4, threading.Condition(), tuple("abcd")
    layout, lost = data_parallel(0, count, names), list[str]()
    space = SumSpace({"model": torch.nn.Linear(512, 512, bias=False)}, exchange=exchange)
    flows = [Tcp(name, "a secret", changed, lost.append, host="127.0.0.1") for name in names]
    running = list[Exchange]()
    try:
        for number, one in enumerate(flows):
            one.shares = False
            for name, other in zip(names, flows, strict=True):
                if other is not one:
                    one.meet(name, other.offer())
            partial = partial_of(space, count, deterministic=True)
            compute(partial, number, 1)
            exchange_ = Exchange(one, layout, names[number], partial)
            exchange_.open(0)
            exchange_.begin(partial.nodes(number, 1), Sum(space))
            exchange_.give()
            running.append(exchange_)
        while not all(each.done for each in running):
            with changed:
                assert changed.wait_for(lambda: any(each.ready() for each in running), 60), lost
            for each in running:
                if not each.done:
                    each.advance()
        peers = [peer for one in flows for peer in one._peers.values()]
        came = sum(flow.connection.bytes_in for peer in peers for flow in peer.flows)
    finally:
        for one in flows:
            one.close()
    size = 512 * 512 * (4 if exchange == "float32" else 2)
    ring = 2 * (count - 1) * size  # by all workers together
    assert ring <= came <= 1.05 * ring


def test_what_is_in_memory_is_bounded_by_blocks() -> None:
    """A sum of many blocks is exchanged in the room of a few for each peer."""
    space, fabric = space_of(), Fabric()
    layout = data_parallel(0, 4, ("a", "b", "c", "d"))
    members = crew(space, layout, fabric, True)
    found = exchanged(members, layout, fabric, 0, 128)
    for each in found.values():
        held = each.lanes.room_bytes
        assert held <= WINDOW * 3 * 128 < space.total_bytes / 4


class Lone(PeerWorker):
    """A worker with a layout of chains, as far as an exchange looks."""

    def __init__(self, layout: Layout) -> None:
        super().__init__()
        self.me, self._alone = layout.workers[0], layout

    @property
    def layout(self) -> Layout:
        return self._alone


def test_the_memory_of_a_layout_that_is_over_is_free() -> None:
    """A deep layout opens no exchange, and neither does a worker that was left out."""
    layout = data_parallel(0, 1, ("w0",))
    (member,) = crew(space_of(), layout, Fabric(), True)
    lone = Lone(layout)
    exchanging = Exchanging(lone, member.transport, Preparing(lone))
    exchanging.open(0, member.partial)
    partial = weakref.ref(member.partial)
    del member
    assert partial() is not None
    exchanging.drop()
    assert partial() is None


@pytest.mark.parametrize("flows", [1, 8])
def test_flows_of_a_fifth_of_the_link_fill_it(flows: int) -> None:
    """Two workers with eight flows see the link, where one flow sees a fifth of it."""
    link = 3e9
    fabric = Fabric(link, link / 5, latency_s=5e-5, chunk_bytes=1 << 16)
    space = SumSpace({"model": torch.nn.Linear(2048, 2048, bias=False)})
    layout = data_parallel(0, 2, ("a", "b"))
    members = []
    for worker in layout.workers:
        partial = partial_of(space, 2, deterministic=True)
        one = Virtual(fabric, worker, lambda _: None, flows=flows)
        members.append(Member(worker, one, partial, Sum(space)))
    members[0].transport.meet("b", b"b")
    members[1].transport.meet("a", b"a")
    while fabric.go_on():
        pass
    begun_s = fabric.now_s
    exchanged(members, layout, fabric, 0, 1 << 19)
    speed = space.total_bytes / (fabric.now_s - begun_s)
    if flows == 8:
        assert speed >= 0.85 * link
    else:
        assert speed <= 0.2 * link


def test_a_link_at_a_hundredth_of_its_speed_holds_an_exchange_up_and_spoils_nothing() -> None:
    """It takes what the slow link needs, within the same memory; a layout without that worker has its speed again."""
    fabric, names = Fabric(3e9, 3e9, latency_s=5e-5, chunk_bytes=1 << 16), tuple("abcd")
    slow, total = 3e7, 4
    space = SumSpace({"model": torch.nn.Linear(1024, 1024, bias=False)})
    layout = data_parallel(0, total, names)
    members = []
    for name in names:
        link = slow if name == "d" else None
        one = Virtual(fabric, name, lambda _: None, link_bytes_per_s=link)
        partial = partial_of(space, total, deterministic=True)
        members.append(Member(name, one, partial, Sum(space)))
    for one in members:
        for other in members:
            if one is not other:
                one.transport.meet(other.name, other.transport.offer())
    wanted, least_s = alone(space, total, True), 1.5 * space.total_bytes / slow
    begun_s = fabric.now_s
    found = exchanged(members, layout, fabric, 0, 1 << 16)
    check(members, wanted, layout, True)
    assert least_s <= fabric.now_s - begun_s <= 1.25 * least_s  # a ring of it, by the slow link
    held = found["a"].lanes.room_bytes
    assert held <= WINDOW * 3 * (1 << 16)
    exchanged(members, layout, fabric, 1, 1 << 16, events_max=200)
    rest, begun_s = members[:3], fabric.now_s
    for member in rest:
        member.transport.enter(1)
    exchanged(rest, data_parallel(1, total, names[:3]), fabric, 1, 1 << 16)
    check(rest, wanted, layout, True)
    assert fabric.now_s - begun_s < 0.1 * least_s


def test_an_exchange_hides_behind_a_backward_of_its_length() -> None:
    """Rounds leave one after the other while the backward runs: at its end most of the sum is there."""
    fabric = Fabric(3e9, 3e9, latency_s=5e-5, chunk_bytes=1 << 16)
    space = SumSpace({"model": torch.nn.Linear(2048, 2048, bias=False)})
    layout = data_parallel(0, 2, ("a", "b"))
    members = crew(space, layout, fabric, True)
    took_s = []
    for step in range(2):
        running = {}
        for member in members:
            member.partial.clear()
            compute(member.partial, *shares(layout, member.name))
            one = running[member.name] = Exchange(
                member.transport, layout, member.name, member.partial
            )
            one.open(step)
            one.begin(member.partial.nodes(*shares(layout, member.name)), member.total)
        begun_s = fabric.now_s
        for one in running.values():
            for turn in range(one.rounds):
                # The first exchange begins when all is computed.
                ends = took_s[0] * (turn + 1) / one.rounds if step else 0.0
                fabric.after(ends, lambda one=one, turn=turn: one.give(turn + 1))
        played(running, fabric)
        took_s.append(fabric.now_s - begun_s)
        check(members, alone(space, 2, True), layout, True)
    assert took_s[1] - took_s[0] <= 0.4 * took_s[0]
    assert took_s[1] > took_s[0], "the last round cannot be there before the backward is over"
