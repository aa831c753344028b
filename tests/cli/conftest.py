"""Where commands are typed: a folder where nothing runs, or one with a house to speak with."""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from orchestrator.supervisor import processes

pytest.register_assert_rewrite("shells")

from shells import Shell, wait_until  # noqa: E402

sys.path.insert(0, str(Path(__file__).parents[1] / "store"))  # for its object store


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    """Where nothing is running."""
    made = Shell(tmp_path)
    yield made
    made.close()


@pytest.fixture(scope="module")
def housed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    """Where a small house is running, shared by the tests of a file, which end what they begin there.

    It looks around five times in a second, and so would take a twentieth of a core until the run ends.
    """
    yield from _house(Shell(tmp_path_factory.mktemp("housed")))


@pytest.fixture
def own_house(tmp_path: Path) -> Iterator[Shell]:
    """Where a small house is running that the test may end."""
    yield from _house(Shell(tmp_path))


@pytest.fixture
def late_house(tmp_path: Path) -> Iterator[Shell]:
    """Where the manager begins when the file `hold` is gone."""
    (tmp_path / "hold").touch()
    yield from _house(Shell(tmp_path), str(tmp_path / "hold"))


def _house(shell: Shell, *words: str) -> Iterator[Shell]:
    places = shell.places
    log = shell.folder / "house.log"
    program = Path(__file__).with_name("small_house.py")
    env = {**os.environ, processes.MARK: places.identity}
    command = [sys.executable, str(program), str(places.state_dir), *words]
    house = processes.start(command, env=env, log=log)
    try:
        wait_until(lambda: places.house.exists() or house.poll() is not None)
        assert house.poll() is None, log.read_text()
        yield shell
    finally:
        shell.close()
        house.send_signal(signal.SIGINT)
        processes.end(house, 10.0)
        processes.sweep(places.identity)
        places.remove_links()


@pytest.fixture
def until() -> Callable[..., None]:
    return wait_until
