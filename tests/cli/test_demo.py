"""How long the demo waits: while anything goes on, as long as it takes."""

import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console
from test_live_table import JOB

from orchestrator.demo import STILL_S_MAX, DemoFailed, Director, Undisturbed


def test_a_job_that_progresses_is_waited_for_and_one_that_does_not_is_named() -> None:
    """Each new step gives it the whole time again; then the last step, the status and its reason are said."""
    now_s = 0.0
    unused: Any = None
    director = Director(unused, Console(file=io.StringIO()), lambda: now_s)
    for step in range(1, 20):  # the first drill is due later
        job = msgspec.structs.replace(JOB, step=step, steps_total=1000)
        now_s += STILL_S_MAX - 1
        assert not director.watch(job)
    now_s += STILL_S_MAX + 1
    still = msgspec.structs.replace(job, status="PROVISIONING", because="machines boot")
    with pytest.raises(
        DemoFailed, match=r"after step 19 of 1000 for .*; the job is PROVISIONING: machines boot"
    ):
        director.watch(still)


@pytest.mark.processes
def test_an_undisturbed_run_that_stands_still_is_named(tmp_path: Path) -> None:
    """With what it said last."""
    log = tmp_path / "log"
    words = [sys.executable, "-c", "print('step 3', flush=True); input()"]
    with (
        log.open("wb") as sink,
        subprocess.Popen(words, stdin=subprocess.PIPE, stdout=sink) as process,
    ):
        assert process.stdin is not None
        try:
            while not log.read_text():
                assert process.poll() is None
            with pytest.raises(DemoFailed, match="come no further for 0 s; it said last: step 3"):
                Undisturbed(process, log).wait_for_text(0.0)
        finally:
            process.stdin.close()
