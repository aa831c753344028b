"""A real Redis for journals that a simulated deployment writes."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.house import processes
from orchestrator.house.redis_server import RedisServer
from orchestrator.places import Places


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    places = Places(tmp_path / "redis-house")
    places.make()
    server = RedisServer(places, {**os.environ, processes.MARK: places.identity})
    server.start()
    yield server
    server.stop()
    places.remove_link()
