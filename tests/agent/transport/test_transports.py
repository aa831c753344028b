"""The contract of a transport, as scenes that are played on every kind of it."""

import os
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from networks import CHUNK, KINDS, PATIENCE_S, Network, Sockets, as_on_other_hosts

from agent.transport.segment import Own
from agent.transport.tcp import Tcp
from agent.transport.transport import Slot, Ticket, Transport

LONG = 96 * CHUNK  # longer than what sockets and segments hold


class Scene(NamedTuple):
    """Three workers that have met."""

    net: Network
    a: Transport
    b: Transport
    c: Transport

    def over(self, *tickets: Ticket) -> None:
        self.net.until(lambda: all(each.done for each in tickets))


def met(net: Network, *names: str) -> list[Transport]:
    made = [net.make(name) for name in names]
    for one, me in zip(made, names, strict=True):
        for other, peer in zip(made, names, strict=True):
            if me != peer:
                one.meet(peer, other.offer())
    return made


@pytest.fixture(params=KINDS)
def net(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Network]:
    # A process that gets no processor for seconds is no peer that is broken.
    monkeypatch.setattr("agent.transport.tcp.DIAL_S", PATIENCE_S)
    if request.param == "nixl":
        as_on_other_hosts(monkeypatch)
    network = KINDS[request.param]()
    yield network
    network.close()


@pytest.fixture
def scene(net: Network) -> Scene:
    return Scene(net, *met(net, "a", "b", "c"))


def slot(block: int = 0, kind: str = "part", generation: int = 0, step: int = 0) -> Slot:
    return Slot(generation, step, kind, block)


def block(size: int) -> memoryview:
    some = os.urandom(min(size, 65521))  # a prime, so that no two chunks are alike
    return memoryview(bytearray((some * (size // 65521 + 1))[:size]))


def room(size: int) -> memoryview:
    return memoryview(bytearray(size))


# --- what arrives ---------------------------------------------------------------------------------

SIZES = [1, 63, 4096, CHUNK - 1, CHUNK, CHUNK + 1, 5 * CHUNK + 17]


@pytest.mark.parametrize("size", SIZES)
def test_a_block_arrives_whole_and_unchanged(scene: Scene, size: int) -> None:
    data, into = block(size), room(size)
    landed = scene.b.land("a", slot(), into)
    pushed = scene.a.push("b", slot(), [data])
    scene.over(landed, pushed)
    assert into == data


def test_pieces_arrive_as_one_block(scene: Scene) -> None:
    pieces = [block(size) for size in (64, 0, CHUNK, 3, 2 * CHUNK)]
    into = room(sum(each.nbytes for each in pieces))
    landed = scene.b.land("a", slot(), into)
    scene.over(landed, scene.a.push("b", slot(), pieces))
    assert bytes(into) == b"".join(pieces)


def test_numbers_are_sent_as_their_bytes(scene: Scene) -> None:
    """Memory of any type may be pushed, and landed in."""
    into = room(64)
    landed = scene.b.land("a", slot(), into.cast("d"))
    scene.a.push("b", slot(), [memoryview(bytes(range(64))).cast("f")])
    scene.over(landed)
    assert bytes(into) == bytes(range(64))


def test_a_block_of_nothing_arrives(scene: Scene) -> None:
    landed = scene.b.land("a", slot(), room(0))
    scene.over(landed, scene.a.push("b", slot(), [], b"said"))
    assert landed.extra == b"said"


def test_what_is_said_with_a_block_is_heard(scene: Scene) -> None:
    landed = scene.b.land("a", slot(), room(3 * CHUNK))
    scene.a.push("b", slot(), [block(3 * CHUNK)], b"said")
    scene.over(landed)
    assert landed.extra == b"said"


def test_who_pushes_first_is_held_back(scene: Scene) -> None:
    """A sender that is far ahead takes no memory here, and its block comes when it is expected."""
    data, into = block(LONG), room(LONG)
    pushed = scene.a.push("b", slot(), [data])
    scene.net.still()
    assert not pushed.done
    landed = scene.b.land("a", slot(), into)
    scene.over(landed, pushed)
    assert into == data


def test_both_directions_at_once(scene: Scene) -> None:
    there, back = block(9 * CHUNK), block(9 * CHUNK)
    into = [room(9 * CHUNK), room(9 * CHUNK)]
    tickets = [
        scene.b.land("a", slot(), into[0]),
        scene.a.land("b", slot(), into[1]),
        scene.a.push("b", slot(), [there]),
        scene.b.push("a", slot(), [back]),
    ]
    scene.over(*tickets)
    assert into == [there, back]


def test_blocks_land_in_their_own_places(scene: Scene) -> None:
    """They are expected in another order, and differ in one part of their slot each."""
    slots = [
        slot(0),
        slot(1),
        slot(0, kind="sum"),
        slot(0, step=1),
        slot(0, generation=1),
    ]
    data = [block(1000 + index) for index in range(len(slots))]
    rooms = [room(each.nbytes) for each in data]
    landed = [
        scene.b.land("a", each, into)
        for each, into in reversed(list(zip(slots, rooms, strict=True)))
    ]
    for each, given_ in zip(slots, data, strict=True):
        scene.a.push("b", each, [given_])
    scene.over(*landed)
    assert rooms == data


def test_peers_that_push_the_same_block_are_kept_apart(scene: Scene) -> None:
    data, rooms = [block(CHUNK), block(CHUNK)], [room(CHUNK), room(CHUNK)]
    landed = [scene.c.land("a", slot(), rooms[0]), scene.c.land("b", slot(), rooms[1])]
    scene.b.push("c", slot(), [data[1]])
    scene.a.push("c", slot(), [data[0]])
    scene.over(*landed)
    assert rooms == data


def test_who_is_held_back_holds_up_nobody_else(scene: Scene) -> None:
    scene.a.push("c", slot(), [block(32 * CHUNK)])
    into, data = room(3 * CHUNK), block(3 * CHUNK)
    landed = scene.c.land("b", slot(), into)
    scene.over(landed, scene.b.push("c", slot(), [data]))
    assert into == data


@given(st.data())
@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_traffic_arrives(scene: Scene, data: st.DataObject) -> None:
    """Whatever three workers send each other, in whatever order it is expected."""
    generation = data.draw(st.integers(1 << 10, 1 << 40))
    workers = {"a": scene.a, "b": scene.b, "c": scene.c}
    pairs = st.sampled_from([(x, y) for x in "abc" for y in "abc" if x != y])
    sizes = st.sampled_from([0, 1, 100, 65536, CHUNK, 2 * CHUNK + 5])
    sent = data.draw(st.lists(st.tuples(pairs, sizes), min_size=1, max_size=12))
    # Of one sender's blocks to one peer any may be first, but one that is held back may hold the rest.
    order = data.draw(st.permutations(range(len(sent))))
    blocks = [block(size) for _, size in sent]
    rooms = [room(size) for _, size in sent]
    tickets: list[Ticket] = []
    for what, numbers in (("push", range(len(sent))), ("land", order)):
        for number in numbers:
            (x, y), _ = sent[number]
            where = slot(number, generation=generation)
            if what == "push":
                tickets.append(workers[x].push(y, where, [blocks[number]]))
            else:
                tickets.append(workers[y].land(x, where, rooms[number]))
    scene.over(*tickets)
    assert rooms == blocks


# --- meeting --------------------------------------------------------------------------------------


def test_what_is_pushed_before_the_meeting_is_sent_after_it(net: Network) -> None:
    a, b = net.make("a"), net.make("b")
    data, into = block(2 * CHUNK), room(2 * CHUNK)
    pushed, landed = a.push("b", slot(), [data]), b.land("a", slot(), into)
    a.meet("b", b.offer())
    b.meet("a", a.offer())
    net.until(lambda: pushed.done and landed.done)
    assert into == data


def test_to_meet_again_changes_nothing(scene: Scene) -> None:
    landed = scene.b.land("a", slot(), into := room(CHUNK))
    scene.over(landed, scene.a.push("b", slot(), [block(CHUNK)]))
    scene.a.meet("b", scene.b.offer())
    scene.b.meet("a", scene.a.offer())
    landed = scene.b.land("a", slot(1), into)
    scene.over(landed, scene.a.push("b", slot(1), [data := block(CHUNK)]))
    assert into == data
    assert not any(scene.net.broken.values())


def test_who_is_not_there_is_broken(net: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agent.transport.tcp.DIAL_S", 0.2)
    a, gone = net.make("a"), net.make("b")
    offered = gone.offer()
    gone.close()
    pushed = a.push("b", slot(), [block(10)])
    a.meet("b", offered)
    net.until(lambda: net.broken["a"] == ["b"])
    assert "b is gone" in pushed.failed


def test_who_was_forgotten_can_be_met_again(scene: Scene) -> None:
    scene.over(
        scene.b.land("a", slot(), room(10)), scene.a.push("b", slot(), [block(10)])
    )  # they have met
    scene.a.forget("b")
    scene.net.until(lambda: scene.net.broken["b"] == ["a"])
    landed = scene.b.land("a", slot(1), into := room(3 * CHUNK))
    pushed = scene.a.push("b", slot(1), [data := block(3 * CHUNK)])
    scene.b.meet("a", scene.a.offer())
    scene.a.meet("b", scene.b.offer())
    scene.over(landed, pushed)
    assert into == data
    assert scene.net.broken["a"] == []


# --- generations ----------------------------------------------------------------------------------


def test_a_new_generation_ends_what_is_older(scene: Scene) -> None:
    landed = scene.b.land("a", slot(), room(10))
    newer = scene.b.land("a", slot(generation=1), room(10))
    scene.b.enter(1)
    assert "generation 1 has begun" in landed.failed
    assert not newer.failed
    scene.over(newer, scene.a.push("b", slot(generation=1), [block(10)]))


def test_a_push_of_an_older_generation_ends(scene: Scene) -> None:
    pushed = scene.a.push("b", slot(), [block(LONG)])
    newer = scene.a.push("b", slot(generation=1), [block(10)])
    scene.net.still()
    scene.a.enter(1)
    assert "generation 1 has begun" in pushed.failed
    scene.b.enter(1)
    scene.over(newer, scene.b.land("a", slot(generation=1), room(10)))


def test_memory_is_free_after_a_new_generation(scene: Scene) -> None:
    """What a sender overwrites then is neither a damaged frame nor part of a newer block."""
    data = block(LONG)
    scene.a.push("b", slot(), [data])
    scene.net.still()
    scene.a.enter(1)
    data[:] = bytes(data.nbytes)
    scene.b.enter(1)
    landed = scene.b.land("a", slot(generation=1), into := room(3 * CHUNK))
    scene.a.push("b", slot(generation=1), [newer := block(3 * CHUNK)])
    scene.over(landed)
    assert into == newer
    assert not any(scene.net.broken.values())


def test_nothing_lands_after_a_new_generation(scene: Scene) -> None:
    """The receiver goes over in the middle of a block; its memory is its own at once."""
    into = room(LONG)
    landed = scene.b.land("a", slot(), into)
    scene.a.push("b", slot(), [block(LONG)])
    scene.net.until(lambda: any(into[:: CHUNK // 2]))
    scene.b.enter(1)
    assert landed.failed or landed.done
    into[:] = bytes(into.nbytes)
    scene.net.still()
    assert bytes(into) == bytes(into.nbytes)
    newer = scene.b.land("a", slot(generation=1), room(10))
    scene.over(newer, scene.a.push("b", slot(generation=1), [block(10)]))


def test_a_block_of_an_older_generation_is_dropped(scene: Scene) -> None:
    scene.b.enter(1)
    pushed = scene.a.push("b", slot(), [block(8 * CHUNK)])
    scene.over(pushed)
    newer = scene.b.land("a", slot(generation=1), into := room(10))
    scene.over(newer, scene.a.push("b", slot(generation=1), [data := block(10)]))
    assert into == data


def test_a_block_of_a_newer_generation_waits_for_it(scene: Scene) -> None:
    scene.a.enter(1)
    scene.a.push("b", slot(generation=1), [data := block(CHUNK)])
    scene.net.still()
    scene.b.enter(1)
    landed = scene.b.land("a", slot(generation=1), into := room(CHUNK))
    scene.over(landed)
    assert into == data


def test_who_comes_too_late_is_told(scene: Scene) -> None:
    scene.a.enter(2)
    assert "generation 2 has begun" in scene.a.push("b", slot(generation=1), [block(1)]).failed
    assert "generation 2 has begun" in scene.a.land("b", slot(generation=1), room(1)).failed
    scene.a.enter(1)  # an order that came late
    assert "generation 2 has begun" in scene.a.land("b", slot(generation=1), room(1)).failed


# --- losses ---------------------------------------------------------------------------------------


def test_what_is_forgotten_fails_and_nothing_else(scene: Scene) -> None:
    theirs = scene.a.land("b", slot(), room(10)), scene.a.push("b", slot(), [block(LONG)])
    other = scene.a.land("c", slot(), into := room(3 * CHUNK))
    scene.a.forget("b")
    assert all("b is gone" in ticket.failed for ticket in theirs)
    scene.over(other, scene.c.push("a", slot(), [data := block(3 * CHUNK)]))
    assert into == data
    assert scene.net.broken["a"] == []


class Interrupted:
    """A lock; after its release number `at` in a thread of a connection, something happens."""

    def __init__(self, lock: Any, at: int, act: Callable[[], object]) -> None:
        self._lock, self._left, self._act = lock, at, act

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
        if threading.current_thread().name.startswith("flow-"):
            self._left -= 1
            if not self._left:
                self._act()


@pytest.mark.parametrize("at", [1, 2])
def test_who_is_forgotten_while_it_connects_stays_forgotten(at: int) -> None:
    """It is not reported as broken when the rest of its connections end."""
    net = Sockets()
    a, b = net.make("a"), net.make("b")
    assert isinstance(a, Tcp)
    forgotten = threading.Event()

    def forget() -> None:
        a.forget("b")
        forgotten.set()

    a._lock = Interrupted(a._lock, at, forget)  # type: ignore[assignment]
    a.meet("b", b.offer())
    b.meet("a", a.offer())
    a.push("b", slot(), [block(LONG)])
    assert forgotten.wait(PATIENCE_S)
    b.close()
    net.until(lambda: not any(each.name == "flow-b" for each in threading.enumerate()))
    assert net.broken["a"] == []
    net.close()


def test_a_stranger_may_be_forgotten(scene: Scene) -> None:
    scene.a.forget("nobody")
    scene.over(scene.b.land("a", slot(), room(1)), scene.a.push("b", slot(), [block(1)]))


def test_who_goes_in_the_middle_of_a_block_is_broken(scene: Scene) -> None:
    """Its tickets fail, all others are done, and it is told of once."""
    into = room(LONG)
    landed, pushed = scene.b.land("a", slot(), into), scene.b.push("a", slot(), [block(LONG)])
    scene.a.push("b", slot(), [block(LONG)])
    kept = scene.b.land("c", slot(), room(8 * CHUNK)), scene.b.push("c", slot(), [block(8 * CHUNK)])
    kept += (
        scene.c.land("b", slot(), room(8 * CHUNK)),
        scene.c.push("b", slot(), [block(8 * CHUNK)]),
    )
    scene.net.until(lambda: any(into[:: CHUNK // 2]))
    scene.a.close()
    scene.net.until(lambda: scene.net.broken["b"])
    assert "a is gone" in pushed.failed
    assert landed.failed or landed.done
    scene.over(*kept)
    scene.net.still()
    assert scene.net.broken["b"] == ["a"]


def test_a_broken_send_wakes_who_waits_for_a_place() -> None:
    """The thread that receives reads nothing meanwhile, so it does not see the end itself."""
    net = Sockets(flows=1)
    a, b = met(net, "a", "b")
    first = b.land("a", slot(), room(1)), a.push("b", slot(), [block(1)])
    net.until(lambda: all(each.done for each in first))
    a.push("b", slot(1), [block(10)])
    net.still()
    a.forget("b")
    b.push("a", slot(), [block(LONG)])
    net.until(lambda: net.broken["b"] == ["a"])
    net.close()


def test_nothing_lands_after_a_loss(scene: Scene) -> None:
    into = room(LONG)
    landed = scene.b.land("a", slot(), into)
    scene.a.push("b", slot(), [block(LONG)])
    scene.net.until(lambda: any(into[:: CHUNK // 2]))
    scene.b.forget("a")
    assert landed.failed or landed.done
    into[:] = bytes(into.nbytes)
    scene.net.still()
    assert bytes(into) == bytes(into.nbytes)


def test_a_block_of_another_size_breaks_the_connection(net: Network) -> None:
    """A peer that has other sizes computes something else, and is not waited for."""
    a, b = met(net, "a", "b")
    landed = b.land("a", slot(), room(10))
    a.push("b", slot(), [block(11)])
    net.until(lambda: net.broken["b"] == ["a"] and net.broken["a"] == ["b"])
    assert landed.failed


def test_who_closes_fails_its_own_tickets(scene: Scene) -> None:
    landed, pushed = scene.a.land("b", slot(), room(9)), scene.a.push("b", slot(), [block(LONG)])
    scene.net.still()
    scene.a.close()
    assert landed.failed
    assert pushed.failed
    assert scene.net.broken["a"] == []


def test_a_place_is_given_once(scene: Scene) -> None:
    scene.b.land("a", slot(), room(10))
    with pytest.raises(ValueError, match="expected already"):
        scene.b.land("a", slot(), room(10))


def test_a_segment_that_is_closed_twice_closes_no_file_of_others() -> None:
    """Its number is given to the next file that is opened, of whatever kind."""
    segment = Own()
    segment.close()
    reader, writer = os.pipe()
    try:
        assert segment.said.file in {reader, writer}
        segment.close()
        assert os.write(writer, b"here") == 4
        assert os.read(reader, 4) == b"here"
    finally:
        os.close(reader)
        os.close(writer)
