"""What killed processes leave behind, and who clears it up."""

import os
import subprocess
import sys
from pathlib import Path

from crews import until

from agent.machine.scratch import YOUNG_S, scratch, sweep

HOLDS = """
import sys, threading
from pathlib import Path
from agent.machine.scratch import scratch

with scratch("worker-", Path(sys.argv[1])) as folder:
    (folder / "script.py").write_text("")
    threading.Event().wait()
"""


def age(path: Path) -> None:
    old_s = path.stat().st_mtime - 2 * YOUNG_S
    os.utime(path, (old_s, old_s))


def test_what_a_killed_process_left_goes_with_the_next_one(tmp_path: Path) -> None:
    """As long as its process lives a folder stays, however old; after SIGKILL the next one throws it away, and
    leaves alone what is not of its kind or so young that it may belong to somebody."""
    process = subprocess.Popen([sys.executable, "-c", HOLDS, str(tmp_path)])
    try:
        until("the folder", lambda: list(tmp_path.glob("*/script.py")))
        (theirs,) = tmp_path.iterdir()
        age(theirs)
        sweep("worker-", tmp_path)
        assert theirs.exists()
    finally:
        process.kill()
        process.wait()
    foreign, young = tmp_path / "other-1", tmp_path / "worker-young"
    foreign.mkdir()
    age(foreign)
    young.mkdir()
    with scratch("worker-", tmp_path) as ours:
        assert {path.name for path in tmp_path.iterdir()} == {ours.name, "other-1", "worker-young"}
    assert not ours.exists()
