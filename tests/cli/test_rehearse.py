"""`orchestrator rehearse`: what holds, what does not and why, and that nothing of it stays behind."""

import signal
import tempfile
from pathlib import Path

import pytest
from shells import wait_until

from agent.messages import WorkerReady
from orchestrator.cli.rehearse import was_rehearsed
from orchestrator.rehearsal.rehearsed_job import more_steps

pytestmark = pytest.mark.processes

SCRIPT = """
import torch
from torch import nn
from orchestrator import Session
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scaler = torch.amp.GradScaler("cpu")
session = Session(model, optimizer, scaler)
count = 0
def loss_of(x):
    global count
    LOSS
for step in session.steps(STEPS):
    data = list(torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(step)))
    result = session.backward(loss_of, data)
    scaler.unscale_(optimizer)
    session.clip_grad_norm_(1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    session.state["least"] = min(session.state.get("least", 9e9), result.loss)
    BEHIND
print("seen by nobody")
"""
GOOD = "return model(x).square().mean()"


def script(loss: str = GOOD, steps: int = 400, behind: str = "pass") -> str:
    return SCRIPT.replace("LOSS", loss).replace("STEPS", str(steps)).replace("BEHIND", behind)


def left_behind() -> list[Path]:
    return [*Path(tempfile.gettempdir()).glob("spot-rehearsal-*")]


@pytest.fixture(autouse=True)
def _own_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others rehearse on this machine, too."""
    disk = tmp_path / "disk"
    disk.mkdir()
    monkeypatch.setenv("TMPDIR", str(disk))
    monkeypatch.setattr(tempfile, "tempdir", None)


def test_a_script_that_keeps_nothing_holds(shell):
    """Whole and in stages; it stops after a few of its steps, and nothing is left behind but that it was tried."""
    answer = shell("rehearse", shell.script("train.py", script()), "--json")
    assert (answer.code, answer.json["passed"], answer.json["steps"]) == (0, True, 10)
    played = [(one["name"], one["depth"]) for one in answer.json["scenes"] if one["passed"]]
    assert len(played) == 11
    assert {depth for _, depth in played} == {1, 2}
    assert not left_behind()
    (sha,) = shell.places.rehearsed.read_text().split()
    assert was_rehearsed(shell.places.state_dir, sha)


WATCHED = """
import math, sys, torch
from orchestrator import Session
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
session = Session(model, optimizer)
for step in session.steps(40):
    data = list(torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(step)))
    loss = session.backward(lambda x: model(x).square().mean(), data)
    if not math.isfinite(loss.item()):
        sys.exit(1)
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_script_that_ends_where_its_loss_is_no_number_can_be_resumed(shell):
    """Its first call says how many microbatches a step has: who resumes the job begins with the state, and has each loss."""
    answer = shell("rehearse", shell.script("train.py", WATCHED))
    assert answer.code == 0, answer.out


def test_what_depends_on_the_order_of_a_set_is_named(shell):
    """On another machine it has another order, and so it has for the joining worker of a rehearsal."""
    order = "sum(at * ord(each) for at, each in enumerate({*'abcdefghijkl'})) / 1e4"
    unlike = script(f"return model(x).square().mean() * ({order})")
    answer = shell("rehearse", shell.script("train.py", unlike))
    assert answer.code == 1
    assert "the loss is another on w2 than on w1" in answer.out


SERVED = """
import numpy as np
from agent.paramserver.api import Application, Stop
from agent.paramserver.tables import Table
from agent.served import ParamServerJob
class Count(Application):
    items, stop = 24, Stop(clocks=100_000)
    tables = (Table("seen", 4, 1),)
    def process_item(self, item, params):
        WHAT
        params.update("seen", [item % 4], [[1.0]])
ParamServerJob(Count(), blocks=4, grains=2).run()
"""


def test_an_application_of_tables_is_tried_alone_and_by_two(shell):
    """Its clocks are not held, so what comes in between is no scene; and it does a few of them."""
    script = SERVED.replace("WHAT", "pass")
    answer = shell("rehearse", shell.script("count.py", script), "--json")
    assert (answer.code, answer.json["passed"], answer.json["steps"]) == (0, True, 10)
    played = [one["name"] for one in answer.json["scenes"] if one["passed"]]
    assert played == ["alone", "two workers share its blocks"]
    assert not left_behind()


def test_what_an_application_of_tables_raises_is_shown_with_its_line(shell):
    script = SERVED.replace("WHAT", "params.clock == 2 and params.no_such_thing")
    answer = shell("rehearse", shell.script("count.py", script))
    assert answer.code == 1
    assert "in process_item" in answer.out
    assert "raised AttributeError: 'Params' object has no attribute" in answer.out


def test_a_second_run_in_one_script_is_refused(shell):
    """As for two rates of learning; nothing would answer it, as its tables are those of a job that is over."""
    run = "ParamServerJob(Count(), blocks=4, grains=2).run()\n"
    answer = shell("rehearse", shell.script("count.py", SERVED.replace("WHAT", "pass") + run))
    assert answer.code == 1
    assert "the script ran a second ParamServerJob" in answer.out
    assert not left_behind()


def test_what_a_script_counts_in_its_loss_is_named(shell):
    """A count of the calls, gone by from the second step on."""
    loss = "count += 1\n    return model(x).square().mean() * (1 + 0.01 * (count > 6) * count)"
    answer = shell("rehearse", shell.script("train.py", script(loss)))
    assert answer.code == 1
    said = answer.out.splitlines()
    assert said[-1].startswith("train.py: it does not hold: ")
    assert "loss" in said[-1] and "session.state" in said[-1]
    assert not left_behind()


def test_what_a_script_counts_behind_backward_is_named(shell):
    """The worker that joins is refused, by the sentence of its proof."""
    behind = "count += 1; optimizer.param_groups[0]['lr'] = 0.1 / (1 + count)"
    answer = shell("rehearse", shell.script("train.py", script(behind=behind)), "--json")
    assert answer.code == 1
    assert "the state of layer" in answer.json["line"] and "w2 than on w1" in answer.json["line"]
    (failed,) = (one for one in answer.json["scenes"] if not one["passed"])
    assert (failed["name"], failed["depth"]) == ("a second worker joins", 1)


def test_a_count_that_only_one_worker_comes_far_enough_with_is_named(shell):
    """All others are lost before it acts, so nobody differs but from the run alone."""
    behind = "count += 1; count > 8 and model[0].weight.data.mul_(0.9)"
    answer = shell("rehearse", shell.script("train.py", script(behind=behind)), "--json")
    assert answer.code == 1
    assert "came out otherwise than alone" in answer.json["line"]
    assert "the session does not keep them: count." in answer.json["line"]


@pytest.mark.parametrize("steps", [10, 24])
def test_what_a_script_first_does_in_the_middle_has_losses_behind_it(shell, steps):
    """However many steps are tried: a new worker begins its count at 0 and comes past that place no more."""
    behind = f"count += step == {steps // 2}; optimizer.param_groups[0]['lr'] = 0.1 / (1 + count)"
    answer = shell(
        "rehearse", shell.script("train.py", script(behind=behind)), "--json", "--steps", str(steps)
    )
    assert answer.code == 1
    assert "the state of layer" in answer.json["line"]
    assert "the session does not keep them: count." in answer.json["line"]


def test_an_average_of_the_weights_that_was_not_given_is_named(shell):
    """The job's weights are right, and so is what a job of one worker writes after its loop."""
    with_average = script(behind="[a.data.lerp_(p.data, 0.1) for a, p in pairs]").replace(
        "count = 0",
        "import copy\naverage = copy.deepcopy(model)\n"
        "pairs = tuple(zip(average.parameters(), model.parameters()))\ncount = 0",
    )
    answer = shell("rehearse", shell.script("train.py", with_average), "--json")
    assert (answer.code, answer.json["aside"]) == (0, ["average"])


SUMS = """
import torch
from orchestrator import Session
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
session = Session(model, optimizer, scheduler)
rows = torch.utils.data.TensorDataset(torch.randn(4000, 4))
data = session.data(rows, batch_size=4, microbatches=2)
for epoch in session.epochs(3):
    total = 0.0
    for microbatches in data:
        total += session.backward(lambda rows: model(rows[0]).square().mean(), microbatches).loss
        optimizer.step()
        optimizer.zero_grad()
    scheduler.step(total / len(data))
    session.log(mean=total / len(data))
session.log(weight=model.weight.norm())
"""


def test_what_goes_wrong_at_an_epochs_end_is_found_in_ten_steps(shell):
    """Its sum lacks the steps before a worker came; the epoch has 500 steps, and ends in a rehearsal all the same."""
    answer = shell("rehearse", shell.script("train.py", SUMS), "--json")
    assert answer.code == 1
    assert "the state of ReduceLROnPlateau" in answer.json["line"]


WRITES = """
import torch
from orchestrator import Session
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
session = Session(model, optimizer, microbatches=2)
data = session.data(torch.utils.data.TensorDataset(torch.randn(8, 4)), batch_size=4)
for epoch in session.epochs(6, data):
    for (x,) in data:
        loss = session.backward(lambda x: model(x).square().mean(), x)
        optimizer.step()
        optimizer.zero_grad()
        if epoch:
            session.state["log"] = open("log.csv").read()
    WRITES
"""


@pytest.mark.parametrize(
    "writes",
    [
        'open("log.csv", "a").write(f"{epoch}\\n")',
        'open("log.csv", "w").write(str(float(loss)))',
        'open(f"{epoch}.pt", "x"); open("log.csv", "w").write(str(epoch))',
    ],
    ids=["adds", "replaces", "makes"],
)
def test_what_a_script_writes_at_an_epochs_end_that_others_have_ended_does_not_count(writes, shell):
    """A worker that proves an epoch's last step joins behind it; it ends its epoch on that later state."""
    answer = shell("rehearse", shell.script("train.py", WRITES.replace("WRITES", writes)))
    assert answer.code == 0, answer.out


def test_what_a_script_writes_at_an_epochs_begin_that_others_have_begun_does_not_count(shell):
    """A worker that joins in the middle of an epoch begins it like the others, on the later state."""
    text = WRITES.replace("randn(8, 4)", "randn(16, 4)").replace("WRITES", "pass")
    text = text.replace(
        "    for (x,)", '    open("log.csv", "a").write(f"{epoch}\\n")\n    for (x,)'
    )
    reads = 'optimizer.param_groups[0]["lr"] = 0.1 / len(open("log.csv").read())'
    text = text.replace("        optimizer.step()", f"        {reads}\n        optimizer.step()")
    answer = shell("rehearse", shell.script("train.py", text))
    assert answer.code == 0, answer.out


ENDS = """
import os
from pathlib import Path
first = Path("BESIDE")
mine = os.getpid()
def left_alone():
    \"\"\"Whether the second worker is without the first one, for the first time.\"\"\"
    names = first.read_text().split()
    if len(names) != 3 or names[2] != str(mine):
        return False
    try:
        return not Path(f"/proc/{names[1]}/cmdline").read_bytes()
    except OSError:
        return True
with first.open("a") as file:
    file.write(f"{mine}\\n")
"""


def test_a_worker_that_ends_by_itself_after_another_was_killed_is_replaced(shell, tmp_path):
    """The new worker is not kept waiting for the one that was killed."""
    beside = tmp_path / "pids"
    beside.touch()
    text = ENDS.replace("BESIDE", str(beside)) + script(
        "os.kill(mine, 9) if left_alone() else None; " + GOOD
    )
    answer = shell("rehearse", shell.script("train.py", text))
    assert answer.code == 0, answer.out


def test_a_script_without_a_session_is_told_how_to_make_one(shell):
    """In one line, and no traceback."""
    answer = shell("rehearse", shell.script("train.py", "x = 1\n"))
    assert answer.code == 1
    assert answer.out.splitlines()[-1].startswith("train.py: it does not hold: ")
    assert "make one with Session(model, optimizer, ...)" in answer.out
    assert "Traceback" not in answer.out


def test_a_script_of_a_free_order_that_cannot_be_cut_is_tried_whole(shell):
    """Why it was not cut stands in the table, and is no fault. Nor are other bits, because a free order of additions was
    asked for.
    """
    loss = "y = model(x).square().mean()\n    return y if float(y.detach()) < 1e9 else 2 * y"
    given = "Session(model, optimizer, scaler"
    text = script(loss).replace(given, f"{given}, deterministic=False")
    answer = shell("rehearse", shell.script("train.py", text), "--json")
    assert (answer.code, answer.json["passed"]) == (0, True)
    *_, cut = answer.json["scenes"]
    assert cut["left_out"] and "cannot be recorded" in cut["why"]
    assert [one["depth"] for one in answer.json["scenes"][:-1]] == [1] * 6


def test_a_script_of_too_few_steps_is_told_so(shell):
    """What happens to a job takes some steps."""
    answer = shell("rehearse", shell.script("train.py", script(steps=3)))
    assert answer.code == 1
    assert "the script trains in 3 steps, and 8 are needed" in answer.out
    assert answer.out.splitlines()[-1].startswith("train.py: it was not tried: ")


def test_ctrl_c_leaves_nothing_behind(shell):
    """In the middle of a scene."""
    process = shell.start("rehearse", shell.script("train.py", script()))
    wait_until(lambda: [path for each in left_behind() for path in each.glob("work/worker-*")])
    process.send_signal(signal.SIGINT)
    answer = shell.ended(process)
    assert (answer.code, answer.err) == (130, "")
    assert not left_behind()


@pytest.mark.parametrize(
    ("has", "asked", "said"),
    [
        (20, 20, "give it more, --steps 40"),
        (9, 20, "the script has 9 steps: let it do more"),
    ],
)
def test_more_steps_are_asked_of_whom_they_depend_on(has: int, asked: int, said: str) -> None:
    """Of a script that ends by itself, no --steps gets more."""
    facts = WorkerReady(
        at_s=0.0,
        job="job",
        worker="w1",
        machine_id="m1",
        microbatches=1,
        steps_total=has,
        state_bytes=1,
    )
    assert more_steps(facts, asked) == said
