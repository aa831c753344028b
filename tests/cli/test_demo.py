"""How long the demo waits: while anything goes on, as long as it takes."""

import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console
from test_watch import JOB, Told, seen

from agent.keeper.storage.memory_log import root_of
from orchestrator.cli.command import CommandError
from orchestrator.cli.demo import (
    DRILLS,
    FOLDER,
    STILL_S_MAX,
    TABLES,
    DemoFailed,
    Director,
    Passing,
    Taken,
    Undisturbed,
    _folder,
    _summary,
    play_tables,
)
from orchestrator.paths import Places


def test_a_job_that_progresses_is_waited_for_and_one_that_does_not_is_named():
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
def test_an_undisturbed_run_that_stands_still_is_named(tmp_path):
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


def test_ctrl_c_leaves_nothing_behind(tmp_path):
    """As its own end does, neither on the disk nor in the machine's memory; of a demo that failed the logs may be wanted."""
    with pytest.raises(KeyboardInterrupt), _folder(tmp_path) as folder:
        kept = root_of(Places(folder / "state").checkpoints)
        kept.mkdir()
        raise KeyboardInterrupt
    assert not (tmp_path / FOLDER).exists()
    assert not kept.exists()
    with pytest.raises(DemoFailed, match="logs: "), _folder(tmp_path):
        raise DemoFailed("no")
    assert (tmp_path / FOLDER).exists()


def test_a_folder_that_takes_no_files_is_named_with_what_to_do(tmp_path):
    """As of a checkout that is mounted to be read only."""
    said = (
        r"not_there/\.demo cannot be made \(No such file or directory\): run the demo in a folder"
    )
    with pytest.raises(CommandError, match=said), _folder(tmp_path / "not_there"):
        pass


def test_the_place_of_a_model_that_goes_with_the_demo_is_not_shown():
    """All else is as the house shows it."""
    view = seen(step=100, export_uri="file:///.demo/state/checkpoints/gpt/model.safetensors")
    assert Passing(Told(view)).view() == seen(step=100)


def test_a_job_that_was_over_before_a_machine_was_taken_has_its_summary():
    """On a machine where one worker is quickest and quick, no drill may have come."""
    out = io.StringIO()
    unused: Any = None
    view = seen(recoveries_s=(1.63,), preemptions=1)
    director = Director(unused, Console(file=out))
    _summary(Console(file=out, width=120), view, view.jobs[0], director, ("1.5", "1.5"))
    assert "the job was over before a machine was taken" in out.getvalue()
    assert "1 machine more" in out.getvalue()  # of the market's own


def test_the_summary_says_what_each_loss_cost():
    """One row a loss: with a notice no pause, without one the pause that came after it."""
    out = io.StringIO()
    unused: Any = None
    director = Director(unused, Console(file=out))
    director.done = [Taken(DRILLS[0], 1, 0), Taken(DRILLS[1], 1, 0), Taken(DRILLS[2], 3, 1)]
    view = seen(recoveries_s=(1.63, 14.2), preemptions=5)
    _summary(Console(file=out, width=120), view, view.jobs[0], director, ("1.5", "1.5"))
    rows = [[cell.strip() for cell in line.split("│")[1:3]] for line in out.getvalue().split("\n")]
    calm = "one machine, with a notice of 8 s; pause: none, it left between two steps"
    assert ["1st loss", calm] in rows
    assert ["2nd loss", "one machine, SIGKILL without notice; pause: 1.6 s"] in rows
    assert ["3rd loss", "all machines at once, SIGKILL (3 machines); pause: 14.2 s"] in rows
    assert "the market" not in out.getvalue()


def test_the_demo_of_tables_is_the_example_and_ends_as_it_does(tmp_path):
    console = Console(file=io.StringIO(), width=200)
    assert play_tables(console, tmp_path) == 2
    assert "run the demo in the project's folder" in console.file.getvalue()
    script = tmp_path / TABLES
    script.parent.mkdir(parents=True)
    script.write_text("raise SystemExit(3)")
    assert play_tables(console, tmp_path) == 3
    assert (Path(__file__).parents[2] / TABLES).exists()
