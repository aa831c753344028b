"""Whether manager and keeper still do anything. Ray sees that a process has ended, and not that it hangs.

Both leave a sign of life in Redis again and again. What has left none for so long, while Redis answered, is ended,
and Ray starts the next one: both may be killed at any moment.
"""

import contextlib
import math
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import redis

from agent.keys import PULSE, VIEW
from cloud.local.processes import MARKER
from orchestrator.house import processes

LOOK_S = 5.0
LOOKS_MAX = 36  # not seconds: whoever looks may have been asleep together with those it looks at
ANSWER_S_MAX = 1.0
SIGNS = {"Manager": VIEW, "KeeperActor": PULSE}  # Ray's names for them begin so
UNNAMED = "ray::IDLE"


class Pulse:
    def __init__(self, redis_url: str, identity: str, period_s: float = 0.0) -> None:
        """`period_s` is how seldom a manager that has nothing to do looks around, and shows what it sees."""
        self._redis = redis.Redis.from_url(redis_url, socket_timeout=ANSWER_S_MAX)
        self._identity = identity
        self._looks_max = dict.fromkeys(SIGNS, LOOKS_MAX)
        self._looks_max["Manager"] += math.ceil(period_s / LOOK_S)
        self._seen: dict[str, tuple[object, int]] = {}  # the sign, and how often it was the same

    def look(self) -> list[str]:
        """Once every `LOOK_S`. Whoever has been silent for too long is ended; who that was."""
        try:
            signs = {name: self._redis.get(key) for name, key in SIGNS.items()}
        except redis.RedisError:
            self._seen.clear()  # nobody can leave a sign
            return []
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
        """Where a manager or a keeper is killed while the disk is full, Ray starts a process that it takes for the next
        one for ever, and that has never become it: it has no name."""
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
