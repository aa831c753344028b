"""A real Redis; and the local cloud, the Ray head and the fake accounts of the tests beside these."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.paths import Places
from orchestrator.supervisor import processes
from orchestrator.supervisor.redis_server import RedisServer

TESTS = Path(__file__).parents[2]
sys.path[:0] = [str(TESTS), str(TESTS / "cloud")]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    places = Places(tmp_path / "redis-house")
    places.make()
    server = RedisServer(places, {**os.environ, processes.MARK: places.identity})
    server.start()
    yield server
    server.stop()
    places.remove_link()
