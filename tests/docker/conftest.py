"""The local cloud and the Ray head of tests/cloud, for scripts that are run on machines."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "cloud"))
