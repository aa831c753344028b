"""The door's answers: a nonce, the admission of a machine, and a word for those that are in.

    GET  /nonce  -> Ticket
    POST /join   Application -> {"environment": {...}}   what a machine starts its node with
    POST /word   Sign -> {"silent_s": ..., "cluster": ...}
                 how long ago the manager was last seen alive, and which cluster it has, if any

A caller that is turned away gets 403 and one sentence. Without Redis nobody is let in (503). A
machine is admitted once: its id and the digest of its claim are in Redis before it is answered. The
same claim is answered again, because an answer may be lost, and because a head that was started
again hands out what belongs to a new cluster.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Literal

import msgspec
import redis.asyncio
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from agent.boot.node import CLUSTER_VARIABLE
from agent.keys import GUESTS, INBOX, JOINED, JOINED_AT
from cloud import private
from cloud.clock import Clock
from cloud.ranges import Amount, Name
from orchestrator.door.admission import Application, Claim, Desk, Turned, digest_of
from orchestrator.door.guests import Guest, Guests
from orchestrator.events import BootSeen
from orchestrator.redis_client import INBOX_MAX

LOOK_S = 0.5
JOINED_MAX = 10_000
SILENT_S_MAX = 1e9  # what is answered while no manager was seen alive that expects the machine


class Sign(msgspec.Struct, frozen=True, kw_only=True):
    """A machine that is in asks for a word, and may say that its node is up, or why it has none."""

    machine_id: Name
    claim: Claim
    phase: Literal["", "node", "unlike"] = ""
    took_s: Amount = 0.0
    why: Name = ""


class Admitted(msgspec.Struct, frozen=True, kw_only=True):
    machine_id: str
    environment: dict[str, str]


class Door:
    """The application. `handed_out` is the file with what a machine that was let in gets."""

    def __init__(
        self, store: "redis.asyncio.Redis", desk: Desk, handed_out: Path, clock: Clock
    ) -> None:
        self._store = store
        self._desk = desk
        self._handed_out = handed_out
        self._clock = clock
        self._said: bytes | None = None
        self._told: dict[tuple[str, str], None] = {}  # phases of machines, the oldest first
        self._alive_s: float | None = None  # when the manager was last seen alive, monotonic
        handlers: list[tuple[str, str, Callable[[Request], Awaitable[Any]]]] = [
            ("GET", "/nonce", self._nonce),
            ("POST", "/join", self._join),
            ("POST", "/word", self._word),
        ]
        self.app = Starlette(
            routes=[Route(path, _endpoint(act), methods=[verb]) for verb, path, act in handlers]
        )

    async def follow(self) -> None:
        """Look for the manager's sign of life until cancelled.

        Only a change is one: what was written before this door began says nothing.
        """
        while True:
            with contextlib.suppress(redis.RedisError):
                await self._guests()
            await asyncio.sleep(LOOK_S)

    async def _guests(self) -> Guests:
        said: Any = await self._store.get(GUESTS)
        if said != self._said:
            known = said and self._said is not None
            self._alive_s = time.monotonic() if known else self._alive_s
            self._said = said or b""
        return msgspec.json.decode(said, type=Guests) if said else Guests()

    async def _nonce(self, request: Request) -> Any:
        return self._desk.ticket(_address(request), self._clock.now_s())

    async def _join(self, request: Request) -> Any:
        asked = msgspec.json.decode(await request.body(), type=Application)
        now_s = self._clock.now_s()
        guests = await self._guests()
        found = self._desk.judge(asked, _address(request), guests, now_s)
        if isinstance(found, Turned):
            return found
        # Read first: a machine that is noted as joined has to get what it joined for.
        environment = private.environment(self._handed_out)
        if not await self._enter(found, digest_of(asked.claim), guests, now_s):
            return Turned(f"{found.machine_id} has joined before")
        await self._tell(
            BootSeen(at_s=now_s, machine_id=found.machine_id, phase="admitted", took_s=asked.took_s)
        )
        return Admitted(machine_id=found.machine_id, environment=environment)

    async def _enter(self, guest: Guest, digest: str, guests: Guests, now_s: float) -> bool:
        """Note that a machine has joined; return whether it is the first, or the same process.

        Of the many that have joined, the oldest are forgotten, but none that a lease expects.
        """
        name = guest.machine_id
        new: Any = self._store.hsetnx(JOINED, name, digest)
        if not await new:
            return await self._is_claim(guest.machine_id, digest)
        await self._store.zadd(JOINED_AT, {name: now_s})
        expected = {other.machine_id.encode() for other in guests.machines}
        old: Any
        for old in await self._store.zrange(JOINED_AT, 0, -JOINED_MAX - 1):
            if old in expected:
                continue
            removed: Any = self._store.hdel(JOINED, old)
            await removed
            await self._store.zrem(JOINED_AT, old)
        return True

    async def _is_claim(self, machine_id: str, digest: str) -> bool:
        known: Any = self._store.hget(JOINED, machine_id)
        return bool((await known or b"").decode() == digest)

    async def _word(self, request: Request) -> Any:
        """Say how long ago a manager was seen alive that expects this machine.

        One that no lease holds any more hears of none, so it ends its own bill if its cloud is not
        to be reached, or does not let us end it.
        """
        sign = msgspec.json.decode(await request.body(), type=Sign)
        if not await self._is_claim(sign.machine_id, digest_of(sign.claim)):
            return Turned("this is no machine that has joined")
        if sign.phase:
            await self._tell(
                BootSeen(
                    at_s=self._clock.now_s(),
                    machine_id=sign.machine_id,
                    phase=sign.phase,
                    took_s=sign.took_s,
                    why=sign.why,
                )
            )
        guests = await self._guests()
        expected = any(guest.machine_id == sign.machine_id for guest in guests.machines)
        alive_s = self._alive_s if expected else None
        silent_s = SILENT_S_MAX if alive_s is None else time.monotonic() - alive_s
        return {"silent_s": silent_s, "cluster": self._cluster()}

    def _cluster(self) -> str:
        """Return which cluster there is; empty while a head starts, before it hands anything out."""
        try:
            return private.environment(self._handed_out)[CLUSTER_VARIABLE]
        except (OSError, ValueError, KeyError):
            return ""

    async def _tell(self, event: BootSeen) -> None:
        """Tell the manager of a phase once, if there is room in its inbox."""
        phase = event.machine_id, event.phase
        if phase in self._told or await self._store.xlen(INBOX) >= INBOX_MAX:
            return
        fields: Any = {"e": msgspec.json.encode(event)}
        await self._store.xadd(INBOX, fields)
        self._told[phase] = None
        while len(self._told) > JOINED_MAX:
            del self._told[next(iter(self._told))]


def _endpoint(act: Callable[[Request], Awaitable[Any]]) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        try:
            said, status = await act(request), 200
        except (msgspec.DecodeError, UnicodeDecodeError):
            said, status = Turned("this is not what is asked here"), 400
        except (redis.RedisError, OSError, ValueError):
            said, status = Turned("the door cannot look anything up now; ask again"), 503
        if isinstance(said, Turned) and status == 200:
            status = 403
        return Response(msgspec.json.encode(said), status, media_type="application/json")

    return answer


def _address(request: Request) -> str:
    return request.client.host if request.client else ""
