"""Strangers at a door: many, slow, loud, or with what they have recorded; who belongs here comes in."""

import contextlib
import logging
import os
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from crews import until
from entrances import Entrance, crowd, is_open, stranger

from agent.errors import WireError
from agent.net import front
from agent.net.frames import HEAD_BYTES, PUBLIC_KEY, Tags, lengths_of
from agent.net.handshake import encode
from agent.net.mesh import Mesh
from agent.net.wire import Connection, dial
from agent.protocol import Beat, Challenge, Part, PeerHello
from cloud.open_files import raise_limit

HELLO = PeerHello(worker="a", serial=1)
MANY = 1100


@pytest.fixture(autouse=True)
def _many_files() -> None:
    raise_limit()


@pytest.fixture
def entrance() -> Iterator[Entrance]:
    with Entrance() as entrance:
        yield entrance


def announced(payload_bytes: int, meta: bytes = encode(Beat())) -> bytes:
    """A frame without its payload, with a tag that is right as long as nothing is proved."""
    lengths = struct.pack("<IQ16s", len(meta), payload_bytes, bytes(16))
    return lengths + Tags()._of_head(lengths, meta) + meta


def test_many_idle_strangers_keep_nobody_out_of_a_mesh() -> None:
    """They are more than there are places: the oldest have lost theirs, and a peer has come in before the others did."""
    mesh = Mesh("b", "ours", "127.0.0.1", threading.Condition(), lambda _: None)
    with crowd(mesh.address, MANY) as strangers:
        dial(mesh.address, "ours", HELLO, to="b").close()
        until("the places to be given up", lambda: len(mesh._front._waiting) <= front.PLACES_MAX)
        assert not is_open(strangers[0])
        names = [thread.name for thread in threading.enumerate()]
        assert names.count("caller-b") <= 1
    mesh.close()


def test_the_newest_caller_is_never_the_one_that_has_to_go(entrance: Entrance) -> None:
    """Of one address the oldest goes as soon as its places are taken, and others keep theirs."""
    with crowd(entrance.address, 3, source="127.0.0.9") as others:
        until("them", lambda: entrance.waiting == 3)
        with crowd(entrance.address, entrance.front._places_each + 5) as strangers:
            until("the oldest to go", lambda: not is_open(strangers[4]))
            until("all to be seen", lambda: entrance.waiting == 3 + entrance.front._places_each)
            assert is_open(strangers[5]) and is_open(strangers[-1])
            assert all(is_open(other) for other in others)


def test_a_byte_now_and_then_holds_no_place(
    entrance: Entrance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole handshake has one end: whoever sends a byte whenever it might be given up is given up all the same."""
    monkeypatch.setattr(front, "HANDSHAKE_S", 0.3)
    slow = stranger(entrance.address)
    for byte in announced(0, bytes(1000)):
        if not is_open(slow):
            break
        with contextlib.suppress(OSError):
            slow.send(bytes([byte]))
        threading.Event().wait(0.02)
    else:
        pytest.fail("it could send more than a thousand bytes, one after the other")
    slow.close()


@pytest.mark.parametrize(
    "said",
    [
        announced(1 << 36)[:HEAD_BYTES],
        announced(0, bytes(1 << 11))[:HEAD_BYTES],
        announced(0, b""),
        announced(0),
        os.urandom(4096),
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n".ljust(HEAD_BYTES),
    ],
    ids=["64 GiB", "a long message", "no message", "no proof", "noise", "HTTP"],
)
def test_who_has_proved_nothing_is_heard_to_its_first_head(
    entrance: Entrance, said: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it announces is neither waited for nor made room for, and who belongs here comes in after it."""
    monkeypatch.setattr(front, "HANDSHAKE_S", 3600.0)
    loud = stranger(entrance.address)
    loud.sendall(said)
    until("its end", lambda: not is_open(loud))
    loud.close()
    dial(entrance.address, "ours", HELLO).close()
    entrance.let_in()[0].close()


def test_what_listens_at_an_address_is_not_believed_either() -> None:
    """A caller takes no memory for what the other side announces before its proof."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"

        def lie() -> None:
            liar, _ = server.accept()
            with liar:
                liar.sendall(announced(1 << 36, encode(Challenge(nonce=bytes(16)))))
                liar.recv(1)

        lying = threading.Thread(target=lie)
        lying.start()
        with pytest.raises(WireError, match="beyond the bounds"):
            dial(address, "ours", HELLO)
        lying.join(10)


class Relay:
    """It stands between a caller and a door, sees all frames, and does with each what it likes."""

    def __init__(self, address: str, twist: Callable[[str, int, bytes], list[bytes]]) -> None:
        self.seen: dict[str, list[bytes]] = {"up": [], "down": []}
        self._twist, self._server = twist, socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._server.getsockname()[1]}"
        self._inner = stranger(address)
        self._threads = [threading.Thread(target=self._run)]
        self._threads[0].start()

    def _run(self) -> None:
        self._outer, _ = self._server.accept()
        down = threading.Thread(target=self._pass, args=("down", self._inner, self._outer))
        self._threads.append(down)
        down.start()
        self._pass("up", self._outer, self._inner)

    def _pass(self, way: str, source: socket.socket, sink: socket.socket) -> None:
        source.settimeout(30)
        with contextlib.suppress(OSError, EOFError):
            while True:
                head = _exactly(source, HEAD_BYTES)
                meta_bytes, payload_bytes, _ = lengths_of(head)
                frame = head + _exactly(source, meta_bytes + payload_bytes)
                number = len(self.seen[way])
                self.seen[way].append(frame)
                for piece in self._twist(way, number, frame):
                    sink.sendall(piece)
        for sock in (source, sink):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._server.close()
        for thread in self._threads:
            thread.join(30)
        self._inner.close()
        self._outer.close()


def _exactly(source: socket.socket, count: int) -> bytes:
    found = b""
    while len(found) < count:
        if not (piece := source.recv(count - len(found))):
            raise EOFError
        found += piece
    return found


def flipped(frame: bytes, at: int) -> bytes:
    return frame[:at] + bytes([frame[at] ^ 1]) + frame[at + 1 :]


def public() -> bytes:
    """A frame that anybody can make, with the number that is due."""
    return Tags(PUBLIC_KEY, frame=2).frame(encode(Part(generation=0, step=0, tag="injected")))


SECOND = 3  # the caller's frames are its proof, its hello, the first, the second
TWISTS: dict[str, Callable[[list[bytes], bytes], list[bytes]]] = {
    "a flipped bit of the message": lambda _, f: [flipped(f, HEAD_BYTES)],
    "a flipped bit of the payload": lambda _, f: [flipped(f, -1 % len(f))],
    "a flipped bit of a length": lambda _, f: [flipped(f, 4)],
    "repeated": lambda before, f: [before[-2], f],
    "repeated later": lambda _, f: [f, f],
    "left out": lambda _, f: [],
    "injected": lambda _, f: [public(), f],
    "64 GiB": lambda _, f: [announced(1 << 36), f],
}


@pytest.mark.parametrize("twist", TWISTS)
def test_a_relay_that_touches_a_frame_breaks_the_connection(entrance: Entrance, twist: str) -> None:
    """And nothing of what it made is taken in; without it the same caller comes through."""
    relay: Relay

    def touch(way: str, number: int, frame: bytes) -> list[bytes]:
        if way == "down" or number != SECOND:
            return [frame]
        return TWISTS[twist](relay.seen["up"], frame)

    relay = Relay(entrance.address, touch)
    caller = dial(relay.address, "ours", HELLO)
    called, hello = entrance.let_in()
    assert hello == HELLO
    heard: list[str] = []
    with contextlib.suppress(WireError):  # it may hear of the end while it sends
        for tag in ("first", "second", "third"):
            caller.send(Part(generation=0, step=0, tag=tag), b"payload")
    called.patience(30)
    with pytest.raises(WireError, match=r"damaged|forged|bounds"):
        while True:
            heard.append(called.receive()[0].tag)
    assert heard in (["first"], ["first", "second"])
    assert (heard == ["first"]) == (twist != "repeated later")
    called.close()
    with pytest.raises(WireError):
        while True:
            caller.receive()
    caller.close()
    relay.close()


def test_what_one_side_sent_is_not_believed_when_it_comes_back(entrance: Entrance) -> None:
    """Each direction has a key: a frame that is reflected is like an invented one."""
    relay: Relay

    def reflect(way: str, number: int, frame: bytes) -> list[bytes]:
        return [relay.seen["up"][2]] if (way, number) == ("down", 2) else [frame]

    relay = Relay(entrance.address, reflect)
    caller = dial(relay.address, "ours", HELLO)
    called, _ = entrance.let_in()
    caller.send(Beat())
    assert called.receive()[0] == Beat()
    called.send(Beat())
    with pytest.raises(WireError, match="forged"):
        caller.receive()
    caller.close()
    called.close()
    relay.close()


def test_a_recorded_caller_is_nobody(entrance: Entrance) -> None:
    """All that it sent is played again to the same door, whose challenge is another one."""
    relay = Relay(entrance.address, lambda _, __, frame: [frame])
    dial(relay.address, "ours", HELLO).close()
    entrance.let_in()[0].close()
    relay.close()
    again = stranger(entrance.address)
    with contextlib.suppress(OSError):
        again.sendall(b"".join(relay.seen["up"]))
    until("its end", lambda: not is_open(again))
    again.close()
    assert entrance.came.empty()


def test_strangers_are_counted_and_not_each_written_down(
    entrance: Entrance, caplog: pytest.LogCaptureFixture
) -> None:
    """A line at first, and none for the next minute: a flood of callers is none of lines."""
    with caplog.at_level(logging.WARNING, "agent.net.front"):
        for _ in range(50):
            loud = stranger(entrance.address)
            loud.sendall(announced(1 << 36))
            until("its end", lambda sock=loud: not is_open(sock))
            loud.close()
    assert len(caplog.records) == 1


SCARCE = """
import logging, os, resource, sys
sys.path.insert(0, sys.argv[1])
from entrances import Entrance
logging.basicConfig(level="WARNING")
with Entrance() as entrance:
    print(entrance.address, flush=True)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 40, 1 << 12))
    taken = []
    try:
        while True:
            taken.append(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        pass
    print("no file is left", flush=True)
    came = []
    for _ in sys.stdin:
        came.append(entrance.let_in())
        print("in", came[-1][1].serial, flush=True)
    for connection, _ in came:
        connection.close()
"""


def test_who_belongs_here_comes_in_when_no_file_is_left() -> None:
    """First with one that is held in reserve, then for strangers that hold the rest; what is wrong is one line."""
    full = subprocess.Popen(
        [sys.executable, "-c", SCARCE, str(Path(__file__).parents[1])],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        address = full.stdout.readline().strip()
        assert full.stdout.readline() == "no file is left\n", full.communicate()[1]
        ours = []

        def comes_in(serial: int) -> None:
            ours.append(dial(address, "ours", PeerHello(worker="a", serial=serial)))
            full.stdin.write("next\n")
            full.stdin.flush()
            assert full.stdout.readline() == f"in {serial}\n"

        comes_in(1)
        with crowd(address, 2 * front.RESERVED_FILES):
            comes_in(2)
        for end in ours:
            end.close()
        _, said = full.communicate(timeout=60)
    finally:
        full.kill()
        full.wait()
    assert len(said.splitlines()) <= 2, said
    assert "Traceback" not in said
    assert "no file is left" in said
    assert "have to wait" not in said


def test_a_forked_process_listens_no_more(entrance: Entrance) -> None:
    """What a script has forked may live for long, and would keep the port and everybody's place."""
    fd = entrance.front._listener.fileno()
    pid = os.fork()
    if not pid:
        try:
            os.fstat(fd)
        except OSError:
            os._exit(0)
        os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0
    dial(entrance.address, "ours", HELLO).close()
    entrance.let_in()[0].close()


def test_connections_differ_in_their_keys() -> None:
    """The same frame of two connections has two tags, because both nonces are in the keys."""
    seen = []
    for _ in range(2):
        with Entrance() as entrance:
            relay = Relay(entrance.address, lambda _, __, frame: [frame])
            caller = dial(relay.address, "ours", HELLO)
            called, _ = entrance.let_in()
            for connection in (caller, called):
                assert isinstance(connection, Connection)
                connection.close()
            relay.close()
            seen.append(relay.seen["up"][1])
    assert seen[0] != seen[1]
