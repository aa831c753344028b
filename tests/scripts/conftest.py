"""One process that plays scripts alone, and the crew of the tests of the training side."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.register_assert_rewrite("crews")
sys.path[:0] = [str(Path(__file__).parents[1] / "agent"), str(Path(__file__).parent)]

from crews import Crew, Nursery, RedisProcess  # noqa: E402
from kinds import Player  # noqa: E402


@pytest.fixture(scope="session")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    with Nursery.shared(tmp_path_factory.mktemp("disk")) as nursery:
        yield nursery


@pytest.fixture
def player(nursery: Nursery) -> Player:
    return Player(nursery)


@pytest.fixture
def redis_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisProcess]:
    server = RedisProcess(tmp_path_factory.mktemp("redis"))
    yield server
    server.kill()


@pytest.fixture
def crew(redis_process: RedisProcess, nursery: Nursery, tmp_path: Path) -> Iterator[Crew]:
    crew = Crew(redis_process, nursery, tmp_path)
    yield crew
    crew.close()
