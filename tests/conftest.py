"""What holds for every run of the tests: one thread of torch, and nothing is left of it when it ends."""

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

import hypothesis
import pytest
from receiver import Receiver
from remains import remains

if TYPE_CHECKING:
    from orchestrator.supervisor.redis_server import RedisServer

MARK = "SPOT_TEST_RUN"
END_S_MAX = 20.0
RUN_BYTES = 3 << 30  # what one run of tests takes at most, with its houses

# How long an example takes says nothing on busy cores.
hypothesis.settings.register_profile("any machine", deadline=None)
hypothesis.settings.load_profile("any machine")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Return how many tests run at once with `-n auto`: twice the cores, as far as memory goes.

    Tests of real processes wait for one another about as long as they compute.
    """
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(2, min(2 * len(os.sched_getaffinity(0)), there // RUN_BYTES))


def pytest_collection_finish() -> None:
    """Threads that share an operation wait for one another on a processor, as long as a test takes."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def leaves_nothing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No process that the tests started, and so no socket, no link in /tmp, no folder in memory.

    A process is of this run if it inherited its mark, or if its words or its environment name the
    folder of this run: machines of the local cloud inherit nothing.
    """
    mark, folder = f"{MARK}={uuid4().hex}", tmp_path_factory.getbasetemp()
    before = os.environ.get(MARK)
    os.environ[MARK] = mark.partition("=")[2]
    try:
        yield
    finally:
        os.environ.pop(MARK)
        if before is not None:
            os.environ[MARK] = before
    deadline_s = time.monotonic() + END_S_MAX
    while (left := remains(mark, folder)) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    assert not left, "\n".join(["these are left of the tests:", *left])


@pytest.fixture
def server(tmp_path: Path) -> Iterator["RedisServer"]:
    """A Redis of our own, as a house starts it."""
    from orchestrator.paths import Places
    from orchestrator.supervisor import processes
    from orchestrator.supervisor.redis_server import RedisServer

    places = Places(tmp_path / "redis-house")
    places.make()
    server = RedisServer(places, {**os.environ, processes.MARK: places.identity})
    server.start()
    yield server
    server.stop()
    places.remove_links()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    made = Receiver()
    yield made
    made.close()
