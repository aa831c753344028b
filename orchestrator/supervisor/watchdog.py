"""Find out what hangs: Ray and the house notice by themselves only processes that have ended.

Both renew a sign of life in Redis, a manager also while it compiles. If the sign stays the same for
`LOOKS_MAX` looks while Redis answers, the process is killed and Ray starts the next one. Both may
be killed at any moment, and so may Redis, which has written all that it has acknowledged.
"""

import contextlib
import math
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from agent.keys import COMPILES, PULSE, VIEW
from cloud.local.processes import MARKER
from orchestrator.supervisor import processes

LOOK_S = 5.0
LOOKS_MAX = 36  # not seconds: this process may have been suspended together with the actors
ANSWER_S_MAX = 1.0
# Ray's process titles begin with these names.
SIGNS = {"Manager": (VIEW, COMPILES), "KeeperActor": (PULSE,)}
UNNAMED = "ray::IDLE"


class Pulse:
    def __init__(self, redis_url: str, identity: str, period_s: float = 0.0) -> None:
        """Watch the actors of a house; an idle manager may publish nothing for `period_s`."""
        once = Retry(NoBackoff(), 0)  # the house has more to look after
        self._redis = redis.Redis.from_url(redis_url, socket_timeout=ANSWER_S_MAX, retry=once)
        self._identity = identity
        self._looks_max = dict.fromkeys(SIGNS, LOOKS_MAX)
        self._looks_max["Manager"] += math.ceil(period_s / LOOK_S)
        self._seen: dict[str, tuple[object, int]] = {}  # the sign, and how often it was the same
        self.unanswered = 0  # looks since Redis answered, if its process takes questions

    def look(self) -> list[str]:
        """Kill actors that have been silent for too long and return their names.

        To be called every `LOOK_S`.
        """
        try:
            signs = {name: self._redis.mget(keys) for name, keys in SIGNS.items()}
        except redis.RedisError as error:
            self._seen.clear()  # without Redis no actor can leave a sign
            self.unanswered += isinstance(error, redis.TimeoutError)
            return []
        self.unanswered = 0
        return [
            name for name, sign in signs.items() if self._is_silent(name, sign) and self._end(name)
        ]

    def _is_silent(self, name: str, sign: object) -> bool:
        seen, times = self._seen.get(name, (None, 0))
        times = times + 1 if seen == sign else 0
        self._seen[name] = sign, times % self._looks_max[name]
        return times == self._looks_max[name]

    def _end(self, name: str) -> bool:
        pids = list(self._pids(f"ray::{name}")) or list(self._nobody())
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return bool(pids)

    def _nobody(self) -> Iterator[int]:
        """Yield the pids of Ray processes that never became an actor.

        If a manager or keeper is killed while the disk is full, Ray starts a process that never
        gets the actor's title, and waits for it for ever.
        """
        mark = f"{MARKER}=head-{self._identity}".encode()
        for pid in self._pids(UNNAMED):
            with contextlib.suppress(OSError):
                if mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    yield pid

    def _pids(self, title: str) -> Iterator[int]:
        for pid in processes.marked(self._identity):
            with contextlib.suppress(OSError):
                if Path(f"/proc/{pid}/cmdline").read_text().startswith(title):
                    yield pid
