"""What the tests of the training side share: one Redis and one nursery, and a fresh crew for each."""

import runpy
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.register_assert_rewrite("crews")
sys.path.insert(0, str(Path(__file__).parents[1] / "store"))  # for its object store

import msgspec  # noqa: E402
import wide  # noqa: E402
from crews import Crew, KeeperProcess, Nursery, RedisProcess  # noqa: E402
from managed import KIND, Managed  # noqa: E402

from agent import session  # noqa: E402
from agent.keeper.storage.memory_log import root_of  # noqa: E402
from agent.world import Alone  # noqa: E402


@pytest.fixture
def by_hand(tmp_path: Path) -> Iterator[Callable[[str], None]]:
    """Runs a script of this text in this process, as `python train.py` does."""

    def run(text: str) -> None:
        script = tmp_path / "train.py"
        script.write_text(text)
        runpy.run_path(str(script), run_name="__main__")

    session._sessions.clear()
    session.join(Alone())
    yield run
    session._sessions.clear()
    session._world = None


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Path]:
    """Memory of a house on `disk` that outlives its keeper, and not the test."""
    root = root_of(tmp_path / "disk")
    yield root
    shutil.rmtree(root, ignore_errors=True)


@pytest.fixture(scope="session", autouse=True)
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    with Nursery.shared(tmp_path_factory.mktemp("disk")) as nursery:
        yield nursery
    KeeperProcess.forks.close()


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


@pytest.fixture
def mortal(redis_process: RedisProcess, nursery: Nursery, tmp_path: Path) -> Iterator[Crew]:
    """A crew whose keeper is a process of its own."""
    crew = Crew(redis_process, nursery, tmp_path, KeeperProcess(redis_process, tmp_path))
    yield crew
    crew.close()


@pytest.fixture
def tight(redis_process: RedisProcess, nursery: Nursery, tmp_path: Path) -> Iterator[Managed]:
    """A crew that the manager leads, on machines with no room for the wide model and a copy of its state."""
    crew = Managed(redis_process, nursery, tmp_path, rethink_s=3600.0)
    crew.kind = msgspec.structs.replace(KIND, memory_bytes=wide.STATE_BYTES)
    yield crew
    crew.close()
