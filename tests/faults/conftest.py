"""Fixtures that end what they started, whatever the test left it in."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis
from houses import RunningHouse

from orchestrator.supervisor.redis_server import RedisServer


@pytest.fixture
def new_house(tmp_path: Path) -> Iterator[Callable[..., RunningHouse]]:
    """Makes houses that are torn down with the test, whatever it left them in."""
    houses: list[RunningHouse] = []

    def make(settings: str = "", name: str = "house") -> RunningHouse:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        houses.append(RunningHouse(folder, settings))
        return houses[-1]

    yield make
    for house in houses:
        house.close()


@pytest.fixture
def store(server: RedisServer) -> Iterator["redis.Redis"]:
    client = redis.Redis.from_url(server.url)
    yield client
    client.close()
