"""The local cloud and the fake accounts of the tests are beside these."""

import sys
from pathlib import Path

TESTS = Path(__file__).parents[2]
sys.path[:0] = [str(TESTS), str(TESTS / "cloud")]
