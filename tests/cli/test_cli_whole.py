"""The whole product from the command line: a real house, real Ray nodes, a real script, real ends."""

import tempfile
from pathlib import Path

import pytest
from shells import Shell

from orchestrator.supervisor import processes

pytestmark = [pytest.mark.processes, pytest.mark.timeout(400)]

SCRIPT = """
import torch
from orchestrator import Session
from wide import WIDTH

WIDTH()
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
session = Session(model, optimizer, microbatches=2)
for step in session.steps(20):
    session.backward(lambda x: (model(x) - 1).square().mean(), [torch.ones(3, 4), torch.zeros(3, 4)])
    optimizer.step()
print("this was all")
"""
ABORTS = """
import os

import torch

from orchestrator import Session

model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
session = Session(model, optimizer, microbatches=4)


def loss_of(x):
    return model(x).square().mean()


for step in session.steps(10):
    print(f"begins {step}")
    if step == 3:
        os.abort()
    session.backward(loss_of, [torch.full((1, 4), float(number)) for number in range(4)])
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture(scope="module")
def folder():
    """With a space and a letter that Ray does not take, and so short that only that is in the way."""
    with tempfile.TemporaryDirectory(prefix="\N{GREEK SMALL LETTER MU} ", dir="/tmp") as made:
        yield Path(made)


@pytest.fixture(scope="module")
def real(folder):
    """`up`, and after the tests `down`: then nothing carries our mark any more."""
    shell = Shell(folder)
    (folder / "lib").mkdir()
    shell.script("lib/train.py", SCRIPT)
    try:
        assert shell.ended(shell.start("up", "--json")).json["was_up"] is False
        yield shell
        down = shell("down", "--json")
        assert (down.code, down.json["was_up"]) == (0, True)
        assert processes.marked(shell.places.identity) == []
        assert not shell.places.run.is_symlink()
        past = shell("cost", "--by", "cause", "--json").json  # of a house that is gone
        assert past["spent_usd"] == pytest.approx(down.json["cost"]["spent_usd"], abs=1e-6)
    finally:
        processes.sweep(shell.places.identity)
        shell.close()


def test_a_real_script_of_several_files_is_trained_to_its_end(real):
    """Bought, booted, trained, given back: exit code 0, every step committed, the words in the log. Its modules go along,
    and what is named; the manager's own modules of such names are in nobody's way.
    """
    real.script("cloud.py")  # whatever lies beside the script
    real.script("lib/wide.py", "def WIDTH():\n    assert open('conf.txt').read() == '7'\n")
    real.script("conf.txt", "7")
    answer = real("submit", "lib/train.py", "--with", "conf.*", "--follow", "--slots-max", "2")
    assert answer.code == 0, answer.out
    assert "goes along 2 files, " in answer.out
    (job,) = (job for job in real.client().view().jobs if job.id in answer.out)
    assert (job.status, job.step, job.steps_lost) == ("SUCCEEDED", 20, 0)
    assert "this was all" in real("logs", job.id).out
    assert real("cost", "--json").json["cost"]["spent_usd"] > 0


@pytest.mark.parametrize("word", ["status", "down"])
def test_in_a_folder_without_a_manager_the_one_that_runs_is_named(real, shell, word):
    """Else who stands in another folder takes all for ended, and machines go on costing money."""
    answer = shell(word)
    said = answer.out + answer.err
    assert f"nothing is running in {shell.folder}" in said
    assert str(real.folder) in said
    assert real("status").code == 0


def test_a_real_script_that_raises_shows_its_own_traceback(real, until):
    """With the line of the file that raised, by its name, and none of ours, and exit code 100; no machine is kept."""
    real.script("lib/wide.py", 'def WIDTH():\n    raise ValueError("on purpose")\n')
    answer = real("submit", "lib/train.py", "--follow", "--slots-max", "1")
    assert answer.code == 100, answer.out
    assert 'raise ValueError("on purpose")\nValueError: on purpose\n' in answer.out
    assert 'File "lib/wide.py", line 2, in WIDTH' in answer.out
    assert "Traceback (most recent call last):" in answer.out
    assert "agent/" not in answer.out
    kept = real("logs", answer.out.split("submitted ")[1].split()[0]).out
    assert 'File "lib/wide.py", line 2, in WIDTH' in kept
    assert "ValueError: on purpose" in kept
    until(lambda: all(one.ended_at_s is not None for one in real.client().view().machines))
    assert real.client().view().cost.now_usd_per_h == 0


def test_a_real_script_that_aborts_in_a_step_fails_with_its_signal_and_last_lines(real):
    """Two machines show that it is the script: its failures are counted, and no pool is left alone."""
    real.script("abort.py", ABORTS)
    words = ("--follow", "--json", "--slots-max", "1", "--max-failures", "0")
    answer = real("submit", "abort.py", *words)
    job, view = answer.json["job"], real.client().view()
    assert (answer.code, job["status"]) == (100, "FAILED")
    assert "SIGABRT near step 3 on 2 machines at abort.py, line 20 in <module>" in job["because"]
    assert "begins 3 (the 1st failure, and max_failures allows 0)" in job["because"]
    assert len({one.id for one in view.machines if one.job == job["id"]}) == 2
    assert not [pool for pool in view.pools if "workers" in pool.blocked_because]
