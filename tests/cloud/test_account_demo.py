"""The demos of the fake accounts find the project and its tests, as the Makefile starts them."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_each_process_of_a_demo_finds_the_project_before_its_tests(tmp_path: Path):
    """The house starts with `-P`, so the folder `tests/agent` would hide the package `agent`."""
    line = re.search(r'PYTHONPATH="?([^" ]+)"? \S+ -m cloudfake', (ROOT / "Makefile").read_text())
    assert line is not None
    path = line[1].replace("$(CURDIR)", str(ROOT))
    for folder in (ROOT, tmp_path):
        words = [sys.executable, "-P", "-c", "import agent.keeper.storage, cloudfake.account"]
        env = {**os.environ, "PYTHONPATH": path}
        found = subprocess.run(
            words, cwd=folder, env=env, capture_output=True, text=True, timeout=60
        )
        assert found.returncode == 0, found.stderr
