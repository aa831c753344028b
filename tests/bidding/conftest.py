"""Where the real series lie: measured against, never shipped."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def data():
    """The folder of real series beside the repository; tests that need it skip without it."""
    folder = Path(__file__).parents[3] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"{folder} is absent: this test measures against real series")
    return folder
