"""Connections between workers that break, or never come about, are told of at once."""

import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from crews import Crew, played_alone, until

from agent.errors import WireError
from agent.messages import Rewound, WorkerLost
from agent.net import mesh, wire
from agent.net.handshake import Talk
from agent.net.mesh import Mesh
from agent.net.wire import dial
from agent.protocol import Part, PeerHello

TOY = Path(__file__).parents[1].joinpath("toy.py")


def test_who_cannot_be_reached_is_complained_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody listens at a peer's address: when the dialling ends, that is a broken connection."""
    monkeypatch.setattr(mesh, "DIAL_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = f"127.0.0.1:{closed.getsockname()[1]}"
    broken: list[str] = []
    ours = Mesh("a", "secret", "127.0.0.1", threading.Condition(), broken.append)
    ours.want({"b": address})
    until("the complaint", lambda: broken == ["b"])
    ours.close()


class Insistent(threading.Condition):
    """Whenever a thread that dials lets go of it, somebody wants the same peer again."""

    def __init__(self) -> None:
        super().__init__()
        self.wants: Callable[[], None] = lambda: None
        self.dialing: list[int] = []
        self._insists = False

    def __exit__(self, *args: Any) -> None:
        super().__exit__(*args)
        if threading.current_thread().name == "dial-b" and not self._insists:
            self._insists = True
            self.wants()
            self.dialing.append(sum(thread.name == "dial-b" for thread in threading.enumerate()))
            self._insists = False


def test_who_is_wanted_again_while_a_connection_comes_about_is_dialled_once() -> None:
    """Two connections would replace each other, on the two sides in either order: both could be closed."""
    changed = Insistent()
    ours = Mesh("a", "secret", "127.0.0.1", changed, lambda _: None)
    theirs = Mesh("b", "secret", "127.0.0.1", threading.Condition(), lambda _: None)
    changed.wants = lambda: ours.want({"b": theirs.address})
    changed.wants()
    until("the connection", lambda: ours.connection("b") and theirs.connection("a"))
    assert set(changed.dialing) == {1}
    ours.close()
    theirs.close()


def test_a_dial_that_was_given_up_takes_no_place_of_a_newer_one() -> None:
    """Whoever was busy for longer than a handshake waits for comes to two dials of the same peer at once, and to the
    one that is over last: the connection that the peer has stays."""
    broken: list[str] = []
    ours = Mesh("b", "secret", "127.0.0.1", threading.Condition(), broken.append)
    newer = dial(ours.address, "secret", PeerHello(worker="a", serial=2), to="b")
    known = until("the connection", lambda: ours.connection("a"))
    given_up = dial(ours.address, "secret", PeerHello(worker="a", serial=1), to="b")
    with pytest.raises(WireError):
        given_up.receive()
    given_up.close()
    newer.send(Part(generation=0, step=0, tag="still here"))
    until("what is sent by it", lambda: ("a", 0, 0, "still here") in ours.mailbox)
    assert ours.connection("a") is known
    assert broken == []
    ours.close()
    newer.close()


def test_a_dial_that_was_given_up_as_it_is_accepted_is_no_broken_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Who dials has waited for long enough just before its proof is answered, and dials again: nobody complains of it, and
    whoever had complained would never have taken that back."""
    given_up, prove = threading.Event(), Talk.mac

    def late(talk: Talk, role: str, *more: str) -> bytes:
        if threading.current_thread().name == "front-b" and role == "called":
            given_up.wait(60)
        return prove(talk, role, *more)

    monkeypatch.setattr(Talk, "mac", late)
    broken: list[str] = []
    ours = Mesh("b", "secret", "127.0.0.1", threading.Condition(), broken.append)
    with pytest.raises(WireError):
        dial(ours.address, "secret", PeerHello(worker="a", serial=1), to="b", wait_s=0.2)
    given_up.set()
    until("its end", lambda: not ours._front._waiting)
    again = dial(ours.address, "secret", PeerHello(worker="a", serial=2), to="b")
    until("the connection", lambda: ours.connection("a"))
    assert broken == []
    ours.close()
    again.close()


def test_who_acknowledges_nothing_is_complained_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a connection on which the same bytes are sent again and again the system knows: it is told, though nobody reset
    anything, and whoever is blocked in sending wakes up."""
    broken: list[str] = []
    ours = Mesh("a", "secret", "127.0.0.1", threading.Condition(), broken.append)
    theirs = Mesh("b", "secret", "127.0.0.1", threading.Condition(), lambda _: None)
    ours.want({"b": theirs.address})
    connection = until("the connection", lambda: ours.connection("b"))
    assert not connection.unheard
    monkeypatch.setattr(wire, "UNHEARD_MAX", 0)  # as if there had been as many tries
    until("the complaint", lambda: broken == ["b"])
    with pytest.raises(WireError):
        connection.send(Part(generation=0, step=0, tag="in vain"))
    ours.close()
    theirs.close()


BREAK = """
        world = session._world
        Path(f"{out}.held.{getattr(world, 'me', '')}").touch()
        if getattr(world, "superseded", bool)():
            Path(f"{out}.heard.{world.me}").touch()
            broken = Path(out + ".broken")
            if world.me == "w1" and Path(out + ".heard.w2").exists() and not broken.exists():
                world._mesh.connection("w2").close()
                broken.touch()
"""


@pytest.mark.processes
def test_what_breaks_before_a_layout_is_entered_is_lacking_in_it(
    crew: Crew, tmp_path: Path
) -> None:
    """Two workers have heard of a new layout, compute on in the old one, and lose their connection: one of them
    is given up as soon as the keeper hears of it, and not when nothing has been committed for long."""
    script = TOY.read_text()
    loop = "        time.sleep(0.01)\n    return"
    assert loop in script
    script = script.replace(loop, "        time.sleep(0.01)" + BREAK + "    return")
    _, weights = played_alone(TOY, tmp_path / "alone" / "out.pt", "20", "0")
    out = crew.folder / "out.pt"
    Path(f"{out}.hold").write_text("6")
    crew.begin(2, script, "20", "0", str(out))
    until("both to wait in step 6", lambda: len(list(crew.folder.glob("out.pt.held.w*"))) == 2)
    with crew._lock:
        crew.regroup("now")
    until("the break", Path(f"{out}.broken").exists)
    Path(f"{out}.hold").unlink()
    until("the loss", lambda: crew.of(WorkerLost))
    crew.start(1)
    crew.completed()
    assert out.read_bytes() == weights
    assert crew.of(Rewound) == []
