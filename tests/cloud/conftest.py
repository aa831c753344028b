"""Fixtures that end every cloud that a test started, whatever the test left it in."""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from running_cloud import SLEEPING, RunningCloud


@pytest.fixture
def new_cloud(tmp_path: Path) -> Iterator[Callable[..., RunningCloud]]:
    """Makes local clouds that are gone when the test is over."""
    clouds: list[RunningCloud] = []

    def make(name: str = "cloud", boot: str = SLEEPING) -> RunningCloud:
        clouds.append(RunningCloud(tmp_path / name, boot))
        return clouds[-1]

    yield make
    for cloud in clouds:
        cloud.stop(signal.SIGTERM)
    for link in Path("/tmp").glob("sc-*"):
        if link.is_symlink() and link.readlink().is_relative_to(tmp_path):
            link.unlink()


@pytest.fixture(scope="session")
def fuzz_cases() -> int:
    """How many damaged answers are read; more on demand."""
    return int(os.environ.get("FUZZ_CASES", "1000"))
