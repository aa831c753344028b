"""Any layout, and any change of layout in the middle of a step, adds up to the same bits."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.layout import data_parallel
from agent.tensors.metrics import Numbers
from agent.tensors.sums import Contribution, Sum, SumSpace, paired
from agent.tensors.tree import Canonical, Tree


def _space() -> SumSpace:
    model = torch.nn.Linear(3, 2)
    return SumSpace({"model": model})


def _compute(
    space: SumSpace,
    partial: Canonical,
    microbatch: int,
    first: int,
    count: int,
    lends: bool = False,
    *,
    leaf: int | None = None,
) -> None:
    """Some parameters have no gradient in some microbatches, and some numbers are zeros of either sign."""
    if lends:
        partial.lend(microbatch, first, count)
    drawn = microbatch if leaf is None else leaf
    generator = torch.Generator().manual_seed(drawn)
    for index, parameter in enumerate(space.params.values()):
        found = torch.randn(parameter.shape, generator=generator)
        zeros = torch.rand(parameter.shape, generator=generator) < (0.3, 1.0)[index]
        found[zeros] = torch.copysign(torch.zeros(()), found[zeros])
        if (drawn // 2 + index) % 3 == 0 or drawn % 5 == 0:
            continue
        if parameter.grad is None:
            parameter.grad = found
        else:
            parameter.grad.add_(found)
    partial.add(microbatch, Numbers(values=(float(drawn),)), first, count)


def _compute_last(space: SumSpace, partial: Canonical, first: int, count: int, early: int) -> None:
    """Add some entries of the last microbatch before its backward is over, and the others then."""
    (microbatch,) = partial.missing(first, count)
    last, other = partial.last(microbatch, first, count), Canonical(space, 1)
    assert last is not None
    _compute(space, other, 0, 0, 1, leaf=microbatch)
    (one,) = other._held.values()
    assert isinstance(one, Contribution)
    found = {i: each for i, each in enumerate(one.found) if i != early and each is not None}
    last.add(found)
    last.end(one)


def _sum_of(space: SumSpace, partials: list[tuple[Canonical, int, int]], total: int) -> Sum:
    """What `gather` does, without any wire between the workers."""
    parts = {}
    for partial, first, count in partials:
        nodes = Tree(total).nodes_of(first, count)
        parts |= dict(zip(nodes, (s.flat for s in partial.nodes(first, count)), strict=True))
    whole = Sum(space)
    space.fold(Tree(total).fold(Tree(total).root, parts, paired), whole.flat, 0)
    return whole


def _numbers(whole: Sum) -> bytes:
    """Its bytes, but for the gaps between numbers of different types."""
    return b"".join(bytes(whole.memory(start, end)) for start, end, _ in whole.space.groups)


def _alone(space: SumSpace, total: int) -> Sum:
    partial = Canonical(space, total)
    for microbatch in range(total):
        _compute(space, partial, microbatch, 0, total)
    return _sum_of(space, [(partial, 0, total)], total)


@given(st.integers(1, 40), st.integers(1, 12), st.booleans())
@settings(max_examples=60)
def test_any_number_of_workers_gives_the_same_bits(total: int, workers: int, lends: bool) -> None:
    """However the microbatches are shared out, the sum is the one of a worker alone."""
    space = _space()
    layout = data_parallel(0, total, tuple(f"w{index}" for index in range(workers)))
    partials = []
    for replica in layout.replicas:
        partial = Canonical(space, total)
        for microbatch in range(replica.first, replica.first + replica.count):
            _compute(space, partial, microbatch, replica.first, replica.count, lends)
        partials.append((partial, replica.first, replica.count))
    shared = _sum_of(space, partials, total)
    assert _numbers(shared) == _numbers(_alone(space, total))


@given(st.integers(1, 24), st.data())
@settings(max_examples=120)
def test_a_last_microbatch_is_added_entry_by_entry_to_the_same_bits(
    total: int, data: st.DataObject
) -> None:
    """Its gradients come one by one; the microbatches before it were computed in any order."""
    space, parts = _space(), []
    cut = data.draw(st.integers(0, total))
    for first, count in ((0, cut), (cut, total - cut)):
        partial = Canonical(space, total)
        *before, _ = data.draw(st.permutations(range(first, first + count))) if count else [0]
        for microbatch in before:
            _compute(space, partial, microbatch, first, count)
        if count:
            _compute_last(space, partial, first, count, data.draw(st.integers(-1, 1)))
        parts.append((partial, first, count))
    assert _numbers(_sum_of(space, parts, total)) == _numbers(_alone(space, total))


@given(st.integers(1, 24), st.data())
@settings(max_examples=120)
def test_a_survivor_keeps_what_it_has_computed(total: int, data: st.DataObject) -> None:
    """The range of a worker changes at any microbatch, any number of times; nothing is added twice."""
    space = _space()
    partial = Canonical(space, total)
    computed: list[int] = []
    for _ in range(data.draw(st.integers(0, 3))):
        first = data.draw(st.integers(0, total - 1))
        count = data.draw(st.integers(1, total - first))
        missing = partial.missing(first, count)
        for microbatch in missing[: data.draw(st.integers(0, len(missing)))]:
            _compute(space, partial, microbatch, first, count, data.draw(st.booleans()))
            computed.append(microbatch)
    for microbatch in partial.missing(0, total):
        _compute(space, partial, microbatch, 0, total)
        computed.append(microbatch)
    assert len(set(computed)) == total
    whole = _sum_of(space, [(partial, 0, total)], total)
    assert _numbers(whole) == _numbers(_alone(space, total))


@given(st.integers(1, 64), st.data())
def test_a_range_is_a_handful_of_nodes(total: int, data: st.DataObject) -> None:
    """The nodes of a range cover it exactly, in order, and are at most two per level."""
    first = data.draw(st.integers(0, total - 1))
    count = data.draw(st.integers(1, total - first))
    nodes = Tree(total).nodes_of(first, count)
    covered = [leaf for node in nodes for leaf in Tree(total).covers(node)]
    assert covered == list(range(first, first + count))
    assert len(nodes) <= 2 * total.bit_length()


def test_a_backward_that_adds_needs_one_room_less() -> None:
    """Eight microbatches, one after the other: what was lent out is a pair already, and no sum is made for it."""
    space = _space()
    rooms = []
    for lends in (False, True):
        partial = Canonical(space, 8)
        for microbatch in range(8):
            _compute(space, partial, microbatch, 0, 8, lends)
        partial.clear()
        rooms.append(len(partial._spare))
    assert rooms == [2, 1]
    for microbatch in range(2):
        _compute(space, partial, microbatch, 0, 8, lends=True)
    assert not partial._spare, "the first pair lies there, and nowhere else"
