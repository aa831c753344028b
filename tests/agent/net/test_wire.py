"""Frames over real sockets: whole or refused, and only between those who know the secret."""

import contextlib
import math
import mmap
import re
import resource
import select
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from crews import until
from entrances import Entrance

from agent.errors import Refused, Unsound, WireError
from agent.keeper.member import Member
from agent.net import wire
from agent.net.frames import Tags
from agent.net.handshake import encode, job_secret
from agent.net.wire import FREE_BYTES, Connection, dial
from agent.protocol import (
    AnyMessage,
    Beat,
    Commit,
    Hello,
    Lines,
    PeerHello,
    Redo,
    Slice,
    Snapshot,
)
from agent.store.encoding.format import lay_out

HELLO = PeerHello(worker="w1", serial=1)


@pytest.fixture
def pair() -> Iterator[tuple[Connection, Connection]]:
    left, right = (Connection(sock) for sock in _tcp())
    yield left, right
    left.close()
    right.close()


def _tcp() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        left = socket.create_connection(server.getsockname())
        right, _ = server.accept()
    return left, right


def test_a_message_and_its_payload_arrive(pair: tuple[Connection, Connection]) -> None:
    """The payload may come in pieces and lands where the receiver wants it."""
    left, right = pair
    message = Slice(generation=3, step=7, offset=0, total=10)
    sender = threading.Thread(target=left.send, args=(message, b"hello", b"", b"world"))
    sender.start()
    place = memoryview(bytearray(10))
    received, payload = right.receive(lambda _, size: place[:size])
    sender.join()
    assert received == message
    assert payload.obj is place.obj
    assert bytes(place) == b"helloworld"


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"m": "Beat", "step": -2}, "'Beat' was refused: step is -2: expected `int` >= -1"),
        ({"m": "Beat", "hung_s": math.nan}, "'Beat' was refused: hung_s is nan: expected `float`"),
        ({"m": "Beet"}, "'Beet' was refused: m is 'Beet': invalid value 'Beet'"),
    ],
)
def test_a_value_out_of_its_range_is_its_senders_fault(
    pair: tuple[Connection, Connection], wrong: dict[str, object], said: str
) -> None:
    """It is told from a damaged frame, which is nobody's, by its tag; and the connection is whole."""
    left, right = pair
    meta = msgspec.msgpack.encode(wrong)
    left._sock.sendall(left._outgoing.frame(meta))
    left._outgoing.next_frame()
    with pytest.raises(Unsound, match=re.escape(said)):
        right.receive()
    left.send(Beat())
    assert right.receive()[0] == Beat()
    damaged_frame = bytearray(left._outgoing.frame(meta))
    damaged_frame[-1] ^= 1
    left._sock.sendall(damaged_frame)
    with pytest.raises(WireError) as damaged:
        right.receive()
    assert not isinstance(damaged.value, Unsound)


def _frame_of(message: Slice, payload: bytes) -> bytes:
    """What goes over the wire for it."""
    tap, wire = _tcp()
    recorder = Connection(tap)
    recorder.send(message, payload)
    recorder.close()
    frame = bytearray()
    while piece := wire.recv(1 << 16):
        frame += piece
    wire.close()
    return bytes(frame)


def at_hand(connection: Connection) -> object:
    """The next message, read as one reads who never waits for a connection."""
    while (found := connection.receive_some()) is None:
        assert select.select([connection], [], [], 10)[0], "nothing comes"
    return found


WAYS = pytest.mark.parametrize("read", [Connection.receive, at_hand])


@WAYS
@pytest.mark.parametrize("at", [0, 5, 12, 28, 44, -1])
def test_a_damaged_frame_is_refused(
    pair: tuple[Connection, Connection], at: int, read: Callable[[Connection], object]
) -> None:
    """One flipped bit anywhere, in lengths, message or payload, ends the connection."""
    left, right = pair
    frame = bytearray(_frame_of(Slice(generation=3, step=7, offset=0, total=10), b"0123456789"))
    frame[at] ^= 1
    left._sock.sendall(frame)
    left.close()
    with pytest.raises(WireError):
        read(right)


@WAYS
def test_what_is_out_of_range_is_told_from_what_is_damaged(
    pair: tuple[Connection, Connection], read: Callable[[Connection], object]
) -> None:
    """Both ways of reading tell it, and read on after it."""
    left, right = pair
    left._sock.sendall(left._outgoing.frame(msgspec.msgpack.encode({"type": "Nonsense"})))
    left._outgoing.next_frame()
    left.send(Beat())
    with pytest.raises(Unsound):
        read(right)
    assert read(right) == (Beat(), b"")


def test_what_changes_while_it_is_sent_is_refused(pair: tuple[Connection, Connection]) -> None:
    """It is summed before the first byte goes: a state that somebody changed halfway is no state."""
    left, right = pair
    payload = bytearray(1 << 26)
    message = Slice(generation=3, step=7, offset=0, total=len(payload))

    def send() -> None:
        with contextlib.suppress(WireError):  # the other side hangs up
            left.send(message, payload)

    sender = threading.Thread(target=send)
    sender.start()

    def change(_: AnyMessage, __: int) -> None:
        payload[-1] = 1  # far behind what fits into the buffers between

    with pytest.raises(WireError, match="damaged"):
        right.receive(change)
    sender.join(10)
    assert not sender.is_alive()


def test_both_sides_prove_that_they_know_the_secret() -> None:
    """With the same secret they understand each other; with another one, the caller is turned away."""
    with Entrance() as entrance:
        dial(entrance.address, "ours", HELLO).close()
        connection, hello = entrance.let_in()
        connection.close()
        assert hello == HELLO
        with pytest.raises(WireError):
            dial(entrance.address, "theirs", HELLO)
        assert entrance.came.empty()


def test_who_is_called_by_another_name_does_not_answer_for_it() -> None:
    """A caller that was led to another door of the same job, or back to its own, finds that out."""
    with Entrance(name="w2") as entrance, pytest.raises(WireError):
        dial(entrance.address, "ours", HELLO, to="w3")


def test_who_is_not_expected_hears_so() -> None:
    """A worker of a job that nobody knows is refused in words, and does not try again; a stranger hears nothing of it."""
    with Entrance(refusal="nobody here knows that job") as entrance:
        with pytest.raises(Refused, match="nobody here knows that job"):
            dial(entrance.address, "ours", HELLO)
        with pytest.raises(WireError) as caught:
            dial(entrance.address, "theirs", HELLO)
        assert not isinstance(caught.value, Refused)
        assert entrance.came.empty()


def test_who_knows_the_secret_of_one_job_does_not_come_in_for_another() -> None:
    """Its hello is of the job that it has proved to know: a worker of one job takes part in no other."""
    other = Hello(job="b", worker="w", machine_id="m", mesh_address="")
    with Entrance() as entrance, pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire, "job_of", lambda _: "a")
        caller = dial(entrance.address, "ours", other)
        with pytest.raises(WireError):
            caller.receive()
        caller.close()
        assert entrance.came.empty()


def test_each_job_has_a_secret_of_its_own() -> None:
    """From the secret of one job neither that of another nor the deployment's can be told."""
    assert job_secret("s", "a") != job_secret("s", "b")
    assert job_secret("s", "a") != "s"


def test_a_closed_connection_wakes_who_receives(pair: tuple[Connection, Connection]) -> None:
    """Closing one's own end from another thread ends the wait."""
    left, right = pair
    errors: list[WireError] = []

    def wait() -> None:
        try:
            left.receive()
        except WireError as error:
            errors.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    right.send(Beat())
    left.close()
    waiting.join(10)
    assert not waiting.is_alive()


def test_who_sends_now_waits_for_nobody(pair: tuple[Connection, Connection]) -> None:
    """While something of before has not been taken, nothing is sent; and nothing that may be too much at once."""
    left, right = pair
    assert left.send_now(Beat())
    assert right.receive()[0] == Beat()
    assert not left.send_now(Lines(lines=("a" * FREE_BYTES,)))
    left._sock.setblocking(False)
    filled = 0
    with pytest.raises(BlockingIOError):
        while True:
            filled += left._sock.send(bytes(1 << 16))
    left._sock.setblocking(True)
    assert not left.send_now(Beat())
    while not select.select([], [left._sock], [], 0)[1]:
        filled -= len(right._sock.recv(1 << 16))
    assert not left.send_now(Beat())  # there is room, for how much of it is not known
    while filled:
        filled -= len(right._sock.recv(min(filled, 1 << 20)))
    until("what has come to be confirmed", lambda: left.send_now(Beat()))
    assert right.receive()[0] == Beat()


def test_who_sends_now_does_not_pass_whoever_is_sending(
    pair: tuple[Connection, Connection],
) -> None:
    """Half of its message may be on its way."""
    left, _ = pair
    with left._sending:
        assert not left.send_now(Beat())
    left.close()
    assert not left.send_now(Beat())


def test_what_is_posted_comes_in_its_order(pair: tuple[Connection, Connection]) -> None:
    """Whether it is sent at once or waits for what is before it."""
    left, right = pair
    member = Member(left, Hello(job="job", worker="w", machine_id="m", mesh_address=""))
    for step in range(300):
        member.post(Redo(generation=1, step=step, present=b""), b"payload")
        member.post(Commit(generation=1, version=step))
    found = [right.receive()[0] for _ in range(600)]
    assert [one.step for one in found if isinstance(one, Redo)] == [*range(300)]
    assert [type(one) for one in found] == [Redo, Commit] * 300
    member.close()


def test_a_connection_that_another_thread_closed_is_known_by_one_error(
    pair: tuple[Connection, Connection],
) -> None:
    """Whatever is asked of it: a thread that turns a caller away does not end by surprise."""
    left, _ = pair
    left.close()
    left.close()
    for ask in (lambda: left.send(Beat()), left.receive, lambda: left.patience(2.0)):
        with pytest.raises(WireError):
            ask()


def test_a_payload_that_there_is_no_memory_for_ends_the_connection(
    pair: tuple[Connection, Connection],
) -> None:
    """Not the thread that receives: whoever is deaf and goes on beating would be waited for for ever."""
    left, right = pair
    message = Slice(generation=3, step=8, offset=0, total=10)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    outgoing, meta = Tags(), encode(message)
    lengths = struct.pack("<IQ16s", len(meta), 1 << 33, bytes(16))
    left._sock.sendall(lengths + outgoing._of_head(lengths, meta) + meta)
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30), hard))
    try:
        with pytest.raises(WireError, match=f"no memory for {1 << 33} bytes of Slice"):
            right.receive()
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def test_a_tensor_of_more_bytes_than_a_call_takes_has_the_tag_of_its_pieces() -> None:
    """A sender has it in one piece, and a receiver takes it in as it comes."""
    whole = memoryview(mmap.mmap(-1, (1 << 31) + 3))
    received = Tags().payload()
    for start in range(0, whole.nbytes, 1 << 28):
        received.add(whole[start : start + (1 << 28)])
    assert Tags().of_pieces([whole]) == received.result()


def test_forms_of_a_model_of_many_tensors_come(pair: tuple[Connection, Connection]) -> None:
    """Each of 100,000 parameters, as many experts have, has a name, a type and a shape, and so have its moments."""
    left, right = pair
    kinds = ("model/{}", "optimizer/{}/state/exp_avg", "optimizer/{}/state/exp_avg_sq")
    forms = tuple(
        lay_out(
            f"layers.{layer}",
            [
                (kind.format(f"layers.{layer}.experts.{expert}.down_proj.weight"), "F32", (4, 4))
                for expert in range(1000)
                for kind in kinds
            ],
        )
        for layer in range(100)
    )
    said = Snapshot(generation=1, version=1, forms=forms, extents=(), last=False)
    sender = threading.Thread(target=left.send, args=(said,), daemon=True)
    sender.start()
    found, _ = right.receive()
    sender.join()
    assert found == said
