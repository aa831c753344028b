"""A real Redis."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.paths import Places
from orchestrator.supervisor import processes
from orchestrator.supervisor.redis_server import RedisServer


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    places = Places(tmp_path / "redis-house")
    places.make()
    server = RedisServer(places, {**os.environ, processes.MARK: places.identity})
    server.start()
    yield server
    server.stop()
    places.remove_link()
