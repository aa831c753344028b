"""A join door with all that it needs: certificate, store, a local cloud's papers, and guests."""

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import redis
import redis.asyncio

from agent.keys import GUESTS
from agent.machine.join.door import Door as DoorClient
from cloud import private
from cloud.clock import SystemClock
from cloud.http_server import Crowd, Listener
from cloud.identity.proof import Verifier
from cloud.local.identity import LocalIdentity, Signer
from cloud.model import Machine, Pool
from orchestrator.door import certificate
from orchestrator.door.__main__ import store_at
from orchestrator.door.admission import Desk
from orchestrator.door.app import Door
from orchestrator.door.guests import Guest, Guests

TOKEN = "the-token-of-ray-which-nobody-else-may-have"
CLAIM = "c" * 64


class Scene:
    """A door in this process, at a real address, and the papers of a local cloud."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder, self.redis = folder, redis.Redis.from_url(url)
        self._url = url
        self.verifiers: dict[str, Verifier] = {"local": LocalIdentity(folder)}
        self.signer = Signer(folder)  # the cloud begins after the door
        self.desk = Desk("ours", self.verifiers)
        self.fingerprint = certificate.make_if_missing(folder / "door.token")
        if not (folder / "boot.token").exists():
            lines = f"RAY_AUTH_TOKEN={TOKEN}\nSPOT_HEAD=127.0.40.1:1\n"
            private.write(folder / "boot.token", lines.encode())
        self.token = private.environment(folder / "boot.token")["RAY_AUTH_TOKEN"]
        self.address = ""

    @contextmanager
    def open(self, places: int = 256) -> Iterator["Scene"]:
        """Serve it from a thread until the block ends."""
        up, over = threading.Event(), asyncio.Event()
        loops: list[asyncio.AbstractEventLoop] = []

        async def serve() -> None:
            loops.append(asyncio.get_running_loop())
            store, door = self.door()
            tls = certificate.context(self.folder / "door.token")
            listener = Listener(door.app, Crowd(places), tls)
            await listener.listen("127.0.0.1")
            self.address = listener.url.removeprefix("https://")
            following = asyncio.create_task(door.follow())
            up.set()
            await over.wait()
            following.cancel()
            listener.close()
            await store.aclose()

        thread = threading.Thread(target=asyncio.run, args=(serve(),))
        thread.start()
        try:
            assert up.wait(20)
            yield self
        finally:
            loops[0].call_soon_threadsafe(over.set)
            thread.join(20)

    def door(self) -> "tuple[redis.asyncio.Redis, Door]":
        """The application itself, with a store for one event loop."""
        store = store_at(self._url)
        return store, Door(store, self.desk, self.folder / "boot.token", SystemClock())

    def expect(self, *guests: Guest) -> None:
        """What the manager publishes, which is also its sign of life."""
        said = msgspec.json.encode(Guests(time.time(), guests))
        self.redis.set(GUESTS, said)

    def client(self, source: str = "") -> DoorClient:
        return DoorClient(self.address, self.fingerprint, source)

    def machine(self, machine_id: str = "i-1", address: str = "127.0.0.1") -> Machine:
        pool = Pool("local", "east", "east-a", "small")
        return Machine(
            id=machine_id,
            token="t",
            pool=pool,
            market="spot",
            state="running",
            launched_at_s=0.0,
            tags={},
            address=address,
        )

    def application(self, machine: Machine, ticket: dict, **changed: object) -> dict:
        """What an honest machine posts, but for what is changed."""
        nonce = str(changed.pop("signed_nonce", ticket["nonce"]))
        signed_s = float(changed.pop("signed_s", time.time()))
        proof = {"signature": self.signer.sign(machine, nonce, signed_s)}
        asked = {
            "cloud": "local",
            "deployment": "ours",
            "ticket": ticket,
            "claim": CLAIM,
            "proof": proof,
        }
        return json.loads(json.dumps({**asked, **changed}))
