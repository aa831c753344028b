"""The accelerator that torch finds on this machine; else one that is simulated, if there is a compiler to build it."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytest.register_assert_rewrite("crews")
sys.path.insert(0, str(Path(__file__).parents[1] / "agent"))

import late  # noqa: E402
from births import Accelerator, Births  # noqa: E402
from compiler import compiler  # noqa: E402
from crews import Crew, RedisProcess  # noqa: E402


@pytest.fixture(scope="session")
def accelerator(tmp_path_factory: pytest.TempPathFactory) -> Accelerator:
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is not None:
        return Accelerator(found.type, {})
    if compiler() is None:
        pytest.skip(
            "NOT RUN, what a worker does on an accelerator: torch finds none on this machine, and there is no C++ "
            "compiler (apt install g++) for the one that these tests can simulate"
        )
    return Accelerator("late", late.plugged_in(tmp_path_factory.mktemp("late")))


@pytest.fixture(scope="session")
def births(accelerator: Accelerator, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Births]:
    births = Births(tmp_path_factory.mktemp("births"), accelerator)
    yield births
    births.close()


@pytest.fixture
def crew(
    births: Births, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> Iterator[Crew]:
    server = RedisProcess(tmp_path_factory.mktemp("redis"))
    crew = Crew(server, births, tmp_path)
    yield crew
    crew.close()
    server.kill()
