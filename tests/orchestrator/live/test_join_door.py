"""The join door: the machine that a lease expects gets in once, and nobody else does at all."""

import asyncio
import random
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import msgspec
import pytest
import redis.asyncio
from door_scene import CLAIM, TOKEN, Scene

from agent.keys import INBOX, JOINED
from agent.machine.join.door import Door as DoorClient
from agent.machine.join.door import NoAnswer, TurnedAway
from cloud import http_server, private
from cloud.http_server import Crowd, Listener
from cloud.local.identity import Signer
from cloud.model import Machine
from orchestrator.door import app, certificate
from orchestrator.door.app import Door
from orchestrator.door.guests import Guest

pytestmark = pytest.mark.processes

ATTEMPTS = 1000
IDLE = 1100  # at a door with 256 places
TIMEOUT_S = 20.0
GUEST = Guest("local", "i-1", "i-1", "127.0.0.1")


@pytest.fixture
def scene(tmp_path: Path, server) -> Iterator[Scene]:
    folder = tmp_path / "door"
    folder.mkdir()
    with Scene(folder, server.url).open() as scene:
        yield scene


def ask(scene: Scene, **changed: object) -> dict:
    client = scene.client()
    ticket = client.call("GET", "/nonce", None, TIMEOUT_S)
    return client.call(
        "POST", "/join", scene.application(scene.machine(), ticket, **changed), TIMEOUT_S
    )


def events(scene: Scene) -> list[dict]:
    return [msgspec.json.decode(fields[b"e"]) for _, fields in scene.redis.xrange(INBOX)]


def test_the_expected_machine_gets_in_once(scene):
    """Its own process may ask again, since an answer may be lost; every other one is refused."""
    scene.expect(GUEST)
    answer = ask(scene, took_s=1.5)
    assert answer["machine_id"] == "i-1"
    assert answer["environment"] == {"RAY_AUTH_TOKEN": TOKEN, "SPOT_HEAD": "127.0.40.1:1"}
    assert ask(scene) == answer
    with pytest.raises(TurnedAway, match="joined before"):
        ask(scene, claim="d" * 64)
    (first,) = events(scene)
    assert (first["type"], first["phase"], first["took_s"]) == ("BootSeen", "admitted", 1.5)


class Attempts:
    """Ways in that are none, each with a word of what the door says to it."""

    def __init__(self, scene: Scene, ask: Callable[..., dict]) -> None:
        self._scene, self._ask = scene, ask
        self._ours, self._taken = scene.machine(), scene.machine("i-taken")
        stranger = scene.folder / "stranger"
        stranger.mkdir(exist_ok=True)
        self._other = Signer(stranger)
        away, elsewhere = scene.machine("i-away"), scene.machine("i-1", "127.0.0.3")
        self.kinds = {
            "nonce was used": self._replayed,
            "the nonce was used": lambda: self._of(self._ours, self._replayed()["ticket"]),
            "has joined before": self._second,
            "no lease expects": lambda: self._of(scene.machine("i-2")),
            "for another nonce": lambda: self._of(self._ours, signed_nonce="0123456789"),
            "given to this address": lambda: self._of(self._ours, self._ask("127.0.0.2")),
            "one that was given": self._of_another_time,
            "identity has expired": lambda: self._of(self._ours, signed_s=time.time() - 700),
            "of another deployment": lambda: self._of(self._ours, deployment="theirs"),
            "is listed at 127.0.0.9": lambda: self._of(away),
            "is listed at 127.0.0.3": lambda: self._of(elsewhere),
            "not signed by this": self._forged,
            "machines of aws": lambda: self._of(self._ours, cloud="aws"),
        }

    def _of(self, machine: Machine, ticket: dict | None = None, **changed: object) -> dict:
        return self._scene.application(machine, ticket or self._ask(), **changed)

    def _replayed(self) -> dict:
        """What a machine has joined with a moment ago."""
        said = self._of(self._taken)
        self._ask(join=said)
        return said

    def _second(self) -> dict:
        self._replayed()
        return self._of(self._taken, claim="d" * 64)

    def _of_another_time(self) -> dict:
        ticket = self._ask()
        return self._of(self._ours, {**ticket, "made_ms": ticket["made_ms"] + 1})

    def _forged(self) -> dict:
        ticket = self._ask()
        signed = self._other.sign(self._ours, ticket["nonce"], time.time())
        return self._of(self._ours, ticket, proof={"signature": signed})


EXPECTED = (
    GUEST,
    Guest("local", "i-taken", "i-taken", "127.0.0.1"),
    Guest("local", "i-away", "i-away", "127.0.0.9"),
)


def test_there_are_many_ways_in_that_are_none(scene):
    """Each over a connection as a machine makes it; after them all, the genuine one gets in."""
    scene.expect(*EXPECTED)

    def call(source: str = "127.0.0.1", join: dict | None = None) -> dict:
        if join is None:
            return scene.client(source).call("GET", "/nonce", None, TIMEOUT_S)
        return scene.client(source).call("POST", "/join", join, TIMEOUT_S)

    for word, attempt in Attempts(scene, call).kinds.items():
        with pytest.raises(TurnedAway, match=word):
            call(join=attempt())
    assert call(join=scene.application(scene.machine(), call()))["machine_id"] == "i-1"


def test_of_a_thousand_others_none_gets_in(scene):
    """Drawn from the same ways, at the application itself, which is faster."""
    scene.expect(*EXPECTED)
    draw = random.Random(7)
    with asyncio.Runner() as runner:
        store, door = runner.run(made(scene))

        def call(source: str = "127.0.0.1", join: dict | None = None) -> dict:
            return msgspec.json.decode(runner.run(answer(door, source, join)).content)

        attempts = Attempts(scene, call).kinds
        let_in = 0
        for _ in range(ATTEMPTS):
            word = draw.choice(list(attempts))
            said = runner.run(answer(door, "127.0.0.1", attempts[word]()))
            let_in += said.status_code != 403
            assert word in said.json()["why"]
        runner.run(store.aclose())
    assert let_in == 0


async def made(scene: Scene) -> "tuple[redis.asyncio.Redis, Door]":
    return scene.door()


async def answer(door: Door, source: str, join: dict | None) -> httpx.Response:
    transport = httpx.ASGITransport(app=door.app, client=(source, 1))
    async with httpx.AsyncClient(transport=transport, base_url="https://door") as client:
        return await (client.get("/nonce") if join is None else client.post("/join", json=join))


def test_a_nonce_expires(scene):
    """A minute after it was given, by the door's own clock."""
    now_s = time.time()
    made = scene.desk.ticket("127.0.0.1", now_s - 61)
    ticket = msgspec.to_builtins(made)
    scene.expect(GUEST)
    with pytest.raises(TurnedAway, match="nonce has expired"):
        scene.client().call("POST", "/join", scene.application(scene.machine(), ticket), TIMEOUT_S)


@pytest.mark.parametrize(
    "said", [None, [], {"cloud": "local"}, {"ticket": {"seal": "é"}}, "x" * 300_000]
)
def test_nonsense_is_answered_without_a_line_in_the_log(scene, said, capfd):
    with pytest.raises(NoAnswer):
        scene.client().call("POST", "/join", said, TIMEOUT_S)
    with pytest.raises(NoAnswer):
        scene.client().call("POST", "/word", said, TIMEOUT_S)
    assert capfd.readouterr() == ("", "")


def test_a_machine_that_is_in_hears_when_the_manager_was_last_alive(scene):
    """Only news of the manager is a word: what it wrote before the door began is none.

    Nor is there one for a machine that it does not expect any more, and perhaps cannot end.
    """
    scene.expect(GUEST)
    ask(scene)
    client, sign = scene.client(), {"machine_id": "i-1", "claim": CLAIM}
    silent_s = client.call("POST", "/word", sign, TIMEOUT_S)["silent_s"]
    scene.expect(GUEST)
    deadline_s = time.monotonic() + TIMEOUT_S
    while silent_s > TIMEOUT_S and time.monotonic() < deadline_s:
        silent_s = client.call("POST", "/word", {**sign, "phase": "node"}, TIMEOUT_S)["silent_s"]
    assert silent_s < TIMEOUT_S
    assert events(scene)[-1]["phase"] == "node"
    scene.expect()
    assert client.call("POST", "/word", sign, TIMEOUT_S)["silent_s"] > 1e6
    scene.expect(GUEST)
    assert client.call("POST", "/word", sign, TIMEOUT_S)["silent_s"] < TIMEOUT_S
    with pytest.raises(TurnedAway, match="no machine that has joined"):
        client.call("POST", "/word", {**sign, "claim": "d" * 64}, TIMEOUT_S)


def test_a_machine_that_is_in_hears_which_cluster_there_is(scene):
    """None while a head starts: what an earlier one handed out is gone then."""
    scene.expect(GUEST)
    ask(scene)
    client, sign = scene.client(), {"machine_id": "i-1", "claim": CLAIM}
    handed_out = scene.folder / "boot.token"
    assert client.call("POST", "/word", sign, TIMEOUT_S)["cluster"] == ""
    private.write(handed_out, b"SPOT_CLUSTER=id/session/versions\n")
    assert client.call("POST", "/word", sign, TIMEOUT_S)["cluster"] == "id/session/versions"
    handed_out.unlink()
    assert client.call("POST", "/word", sign, TIMEOUT_S)["cluster"] == ""


def test_what_a_machine_says_again_and_again_fills_no_inbox(scene):
    """The inbox keeps so many entries, and forgets what others have said for a newer one."""
    scene.expect(GUEST)
    ask(scene)
    client, sign = scene.client(), {"machine_id": "i-1", "claim": CLAIM, "phase": "node"}
    for _ in range(20):
        client.call("POST", "/word", sign, TIMEOUT_S)
    assert [event["phase"] for event in events(scene)] == ["admitted", "node"]
    client.call("POST", "/word", {**sign, "phase": "unlike", "why": "old"}, TIMEOUT_S)
    assert (events(scene)[-1]["phase"], events(scene)[-1]["why"]) == ("unlike", "old")


def test_no_machine_that_lives_is_forgotten(scene, monkeypatch):
    """However many have joined since; those that no lease expects any more are forgotten."""
    monkeypatch.setattr(app, "JOINED_MAX", 1)
    ids = ["i-gone", "i-old", "i-1"]
    guests = [Guest("local", name, name, "127.0.0.1") for name in ids]
    for known, name in ((guests[:2], ids[0]), (guests[:2], ids[1]), (guests[1:], ids[2])):
        scene.expect(*known)
        ticket = scene.client().call("GET", "/nonce", None, TIMEOUT_S)
        asked = scene.application(scene.machine(name), ticket)
        scene.client().call("POST", "/join", asked, TIMEOUT_S)
    for name in ids[1:]:
        sign = {"machine_id": name, "claim": CLAIM}
        assert "silent_s" in scene.client().call("POST", "/word", sign, TIMEOUT_S)
    assert scene.redis.hlen(JOINED) == 2


def test_without_its_store_the_door_lets_nobody_in(scene, server):
    """Redis is where it would note who has joined; the machine asks again."""
    scene.expect(GUEST)
    server.stop()
    with pytest.raises(NoAnswer, match="503"):
        ask(scene)


def test_a_machine_tells_its_door_from_another(scene, tmp_path):
    """It sends nothing to a door that has not the certificate that its user data names."""
    scene.expect(GUEST)
    other = certificate.make_if_missing(tmp_path / "other.token")
    client = DoorClient(scene.address, other)
    with pytest.raises(NoAnswer, match="has not the certificate"):
        client.call("GET", "/nonce", None, TIMEOUT_S)


def test_door_that_closes_hangs_up_on_handshakes(scene, monkeypatch):
    """They are no connections yet, and would otherwise outlive the door."""
    monkeypatch.setattr(http_server, "REQUEST_S_MAX", 600.0)

    async def act() -> None:
        store, door = scene.door()
        listener = Listener(door.app, Crowd(8), certificate.context(scene.folder / "door.token"))
        await listener.listen("127.0.0.1")
        host, _, port = listener.url.removeprefix("https://").rpartition(":")
        strangers = [await asyncio.open_connection(host, int(port)) for _ in range(3)]
        while len(listener._entering) < len(strangers):
            await asyncio.sleep(0.01)
        listener.close()
        for reader, writer in strangers:
            assert await asyncio.wait_for(reader.read(1), TIMEOUT_S) == b""
            writer.close()
        await store.aclose()

    asyncio.run(act())


@pytest.mark.parametrize(
    ("said", "count"), [(b"", IDLE), (b"\x16\x03\x01", 300), (b"GET / HTTP/1.1\r\n\r\n", 300)]
)
def test_idle_strangers_keep_no_machine_out(scene, said, count, monkeypatch):
    """However many connect and say nothing, half a handshake, or no handshake at all.

    None of them is late yet, so the machine gets in because the oldest of them goes.
    """
    monkeypatch.setattr(http_server, "REQUEST_S_MAX", 600.0)
    scene.expect(GUEST)
    host, _, port = scene.address.rpartition(":")
    with ExitStack() as strangers:
        for _ in range(count):
            one = strangers.enter_context(socket.create_connection((host, int(port)), TIMEOUT_S))
            one.sendall(said)
        assert ask(scene)["machine_id"] == "i-1"
