"""What the benchmarks of the running parts share: a crew of worker processes with keeper and Redis, and its commits.

There is no house around it, and no Ray: this process plays the manager, as the tests of the training side do.
"""

import itertools
import os
import platform
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch

from agent.keys import commit_key

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests" / "agent"), str(ROOT / "tests")]

from crews import Crew, KeeperProcess, Nursery, RedisProcess, until  # noqa: E402

__all__ = ["KEEPER", "Commits", "Crew", "crew_of", "machine", "until"]

KEPT_MAX = 100_000
KEEPER = "keeper"


class Commit(NamedTuple):
    at_s: float
    generation: int
    step: int
    had_s: dict[str, float]


def processor_s(pid: int) -> float | None:
    """Of a process, with all of its threads; None if it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Commits:
    """When each commit was written down, as Redis tells it: nobody polls meanwhile.

    If they are `clocked`, so is the processor time that each process of the crew had had by then.
    """

    def __init__(self, crew: Crew, *, clocked: bool = False) -> None:
        self._crew, self._clocked = crew, clocked
        self._client = crew.client
        self._key = commit_key(crew.job)
        self._client.config_set("notify-keyspace-events", "Kh")
        self._told = self._client.pubsub(ignore_subscribe_messages=True)
        self._told.subscribe(f"__keyspace@0__:{self._key}")
        self._over = threading.Event()
        self.seen: list[Commit] = []
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        while not self._over.is_set():
            if self._told.get_message(timeout=0.2) is None:
                continue
            at_s = time.monotonic()
            generation, step = self._client.hmget(self._key, "generation", "step")
            if step is None or (self.seen and self.seen[-1].step == int(step)):
                continue  # another field
            if len(self.seen) < KEPT_MAX:
                had_s = self._had_s() if self._clocked else {}
                self.seen.append(Commit(at_s, int(generation), int(step), had_s))

    def _had_s(self) -> dict[str, float]:
        pids = {**self._crew.pids, KEEPER: self._crew.keeper.process.pid}
        return {who: had_s for who, pid in pids.items() if (had_s := processor_s(pid)) is not None}

    def after(self, generation: int) -> Commit | None:
        """The first one under a newer generation."""
        newer = itertools.takewhile(lambda one: one.generation > generation, reversed(self.seen))
        return next(reversed(list(newer)), None)

    def step_s(self, newest: int) -> float:
        """The median over the newest so many."""
        at_s = [one.at_s for one in self.seen[-newest:]]
        return statistics.median(b - a for a, b in itertools.pairwise(at_s))

    def close(self) -> None:
        self._over.set()
        self._thread.join(5.0)
        self._told.close()


@contextmanager
def crew_of(within: Sequence[str] = (), host: str = "127.0.0.1") -> Iterator[Crew]:
    """A keeper in a process of its own, which listens at `host`, and workers that start warm, `within` somewhere else."""
    with tempfile.TemporaryDirectory(prefix="crew-") as name:
        folder = Path(name)
        (folder / "disk").mkdir()
        server, nursery = RedisProcess(folder), Nursery(folder / "disk", within)
        try:
            keeper = KeeperProcess(server, folder, lasting=True, host=host)
            crew = Crew(server, nursery, folder, keeper)
            try:
                yield crew
            finally:
                crew.close()
        finally:
            nursery.close()
            server.kill()


def machine() -> str:
    load = os.getloadavg()[0]
    return (
        f"{os.cpu_count()} cores {platform.machine()}, load {load:.1f}, Python "
        f"{platform.python_version()}, torch {torch.__version__}"
    )


def spread(values: Sequence[float], unit: float = 1e3) -> str:
    """Median, and the 10th to the 90th percentile; in thousandths if nothing else is said."""
    ordered = sorted(values)
    low, high = ordered[len(ordered) // 10], ordered[-1 - len(ordered) // 10]
    return f"{statistics.median(ordered) * unit:.3g} ({low * unit:.3g} .. {high * unit:.3g})"
