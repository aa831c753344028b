"""Scenes on a real account: only where SPOT_LIVE asks for it, within SPOT_LIVE_USD."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS / "cloud"), str(TESTS / "contract"), str(TESTS / "live"), str(TESTS)]
ASKED = bool(os.environ.get("SPOT_LIVE"))
collect_ignore_glob = [] if ASKED else ["test_*.py"]


@pytest.fixture(scope="session")
def account() -> object:
    from live_seller import Order, seller_of

    return seller_of(Order(os.environ), _say)


@pytest.fixture
def seller(account: object) -> Iterator[object]:
    """One account for all scenes, so that the cap is one."""
    yield account


def _say(line: str) -> None:
    sys.__stdout__.write(f"live: {line}\n")
    sys.__stdout__.flush()
