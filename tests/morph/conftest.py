"""What the planner's tests share: the measured profiles beside the checkout."""

from pathlib import Path

import pytest

SHARED = Path(__file__).parents[3] / "shared" / "data" / "profiles" / "pipedream"


@pytest.fixture
def pipedream_profiles() -> Path:
    if not SHARED.is_dir():
        pytest.skip(f"the measured profiles are not here: {SHARED}")
    return SHARED
