"""What a process that crashes leaves for the agent of its machine."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from agent.machine.crashes import DISK_VARIABLE, LINES_MAX, crash_of
from agent.messages import WorkerOrder

ORDER = WorkerOrder(job="j", worker="w1", machine_id="m", slot=0, keeper_address="", secret="")
PLAYS = """
import runpy, sys
from pathlib import Path
from agent.machine.crashes import Record
from test_crash_records import ORDER

folder = Path(sys.argv[1])
record = Record(ORDER, folder)
for n in range(int(sys.argv[2])):
    record.add(f"line {n} " + 300 * "x")
record.add("Fatal Python error: Aborted")
runpy.run_path(str(folder / "train.py"))
record.close()
"""


def play(tmp_path: Path, script: str, lines: int = 3) -> int:
    (tmp_path / "train.py").write_text(script)
    return subprocess.run(
        [sys.executable, "-c", PLAYS, str(tmp_path), str(lines)],
        env={
            **os.environ,
            DISK_VARIABLE: str(tmp_path),
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path]),
        },
        stderr=subprocess.DEVNULL,
        timeout=60,
    ).returncode


@pytest.fixture(autouse=True)
def _on_this_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DISK_VARIABLE, str(tmp_path))


@pytest.mark.parametrize(
    ("ends", "name"),
    [
        ("import os\n\nos.abort()", "SIGABRT"),
        ("import ctypes\n\nctypes.string_at(0)", "SIGSEGV"),
    ],
)
@pytest.mark.parametrize("lines", [3, 1000])
def test_crash_is_told_with_signal_line_and_last_words(
    tmp_path: Path, ends: str, name: str, lines: int
) -> None:
    """However much was printed before, and once only: the record is gone after it was read."""
    code = play(tmp_path, ends, lines)
    assert code == -signal.Signals[name]
    crash = crash_of(ORDER)
    assert crash is not None
    assert (crash.signal, crash.where) == (name, "train.py, line 3 in <module>")
    assert len(crash.printed) == min(lines + 1, LINES_MAX)
    assert crash.printed[-1] == "Fatal Python error: Aborted"
    assert crash.printed[-2].startswith(f"line {lines - 1} x")
    assert crash_of(ORDER) is None


@pytest.mark.parametrize(
    "ends",
    [
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
        "import os\nif os.fork() == 0:\n    os.abort()\nos.wait()\nos.kill(os.getpid(), 9)",
    ],
)
def test_process_that_is_killed_has_not_crashed(tmp_path: Path, ends: str) -> None:
    """Nor is the crash of a process that the script has forked its own."""
    assert play(tmp_path, ends) == -signal.SIGKILL
    assert crash_of(ORDER) is None


def test_script_that_ends_leaves_nothing(tmp_path: Path) -> None:
    """Its record is gone with it."""
    assert play(tmp_path, "") == 0
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]
    assert crash_of(ORDER) is None
