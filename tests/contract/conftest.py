"""Every provider that there is, and a running local cloud."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "cloud"))

from running_cloud import RunningCloud
from sellers import LIMITS, AwsSeller, AzureSeller, LocalSeller, Seller, SimulatedSeller


@pytest.fixture(
    params=["simulated", "aws", "azure", pytest.param("local", marks=pytest.mark.processes)]
)
def seller(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Seller]:
    if request.param != "local":
        sellers = {"simulated": SimulatedSeller, "aws": AwsSeller, "azure": AzureSeller}
        yield sellers[request.param]()
        return
    local = LocalSeller(tmp_path / "cloud")
    yield local
    local.running.stop()


@pytest.fixture
def running(tmp_path: Path) -> Iterator[RunningCloud]:
    """A local cloud with the limits of the suite."""
    cloud = RunningCloud(tmp_path / "cloud").start(*LIMITS)
    yield cloud
    cloud.stop()
