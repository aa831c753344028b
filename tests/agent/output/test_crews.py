"""What a script writes and logs in a job of real processes, of which some are lost."""

from pathlib import Path

import msgspec
import pytest
from crews import Crew, played_alone, until
from injection import Fault, Plan

from agent.messages import JobCompleted, OutputKept, WorkerFailed, WorkerLost
from agent.output.catalog import listed

pytestmark = pytest.mark.processes

STEPS = 60
WRITES = """
import time
import torch
from orchestrator import Session

torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
session = Session(model, optimizer)
held = (session.output / "config.txt").open("w")
held.write("begun\\n")
held.flush()


def loss_of(x):
    time.sleep(0.005)
    return model(x).square().mean()


for step in session.steps(60):
    result = session.backward(loss_of, [torch.ones(2, 4) for _ in range(4)])
    optimizer.step()
    optimizer.zero_grad()
    session.log(twice=2 * step)
    with (session.output / "metrics.csv").open("a") as file:
        file.write(f"{step},{result.loss!r}\\n")
    held.write(f"{step}\\n")
    held.flush()
    if step % 20 == 19:
        session.save(f"{step}.pt")
    if step == 30:
        open("astray.txt", "w").close()
session.log(final=7.0)
session.save("last.pt")
"""
READS = """
import torch
from orchestrator import Session

model = torch.nn.Linear(4, 1)
session = Session(model)
for step in session.steps(3):
    session.backward(lambda x: model(x).mean(), [torch.ones(2, 4)])
    if step == 1:
        open("data/missing.txt")
"""


def numbers(crew: Crew) -> dict[int, dict[str, float]]:
    rows = crew.client.xrange(f"orch:metrics:{crew.job}")
    found = dict[int, dict[str, float]]()
    for _, row in rows:
        found.setdefault(int(row[b"step"]), {}).update(msgspec.msgpack.decode(row[b"numbers"]))
    return found


def test_every_line_is_there_once_whoever_was_lost(crew: Crew) -> None:
    """The one that leads is killed again and again, and its place is taken by newcomers."""
    workers = crew.begin(3, WRITES)
    for step in (10, 25, 40):
        crew.reach(step)
        crew.kill(workers.pop(0))
        workers += crew.start(1)
    assert crew.completed().step == STEPS
    home = crew.folder / "checkpoints" / crew.job
    metrics = (home / "output" / "metrics.csv").read_text().splitlines()
    assert [int(line.partition(",")[0]) for line in metrics] == list(range(STEPS))
    held = (home / "output" / "config.txt").read_text().splitlines()
    assert held == ["begun", *map(str, range(STEPS))]
    logged = numbers(crew)
    assert sorted(logged) == list(range(STEPS))
    assert logged[STEPS - 1].pop("final") == 7.0, "what is logged after the loop is there as well"
    for line in metrics:
        step, loss = line.split(",")
        assert logged[int(step)] == {"loss": float(loss), "twice": 2.0 * int(step)}
    assert {"last.pt", "astray.txt"} <= {file.path for file in listed(home)}
    assert crew.of(OutputKept)[-1].files == len(listed(home))
    strays = [line for line in crew.noted() if "astray.txt was written" in line]
    assert len(strays) == 1


def lose_all_again_and_again(crew: Crew, script: str) -> None:
    workers = crew.begin(2, script, backup_every_steps=3)
    for step in (7, 18, 29, 40, 51):
        crew.reach(step)
        crew.kill(*workers)
        workers = crew.start(2)
    assert crew.completed().step == STEPS


def test_no_number_is_lost_with_all_workers(crew: Crew) -> None:
    """What had not left is logged again by whoever goes on, from the snapshot that it begins with."""
    lose_all_again_and_again(crew, WRITES)
    assert sorted(numbers(crew)) == list(range(STEPS))


def test_no_line_is_lost_with_all_workers(crew: Crew) -> None:
    """Lines leave in a script's own time, here in half a minute; those before a snapshot leave before it."""
    rests = WRITES.replace(
        "import time\n", "import time\nfrom agent.output import sender\n"
    ).replace("torch.manual_seed", "sender.RESTS = 10**9\ntorch.manual_seed")
    lose_all_again_and_again(crew, rests)
    metrics = crew.folder / "checkpoints" / crew.job / "output" / "metrics.csv"
    lines = metrics.read_text().splitlines()
    assert [int(line.partition(",")[0]) for line in lines] == list(range(STEPS))


def test_no_number_is_lost_with_the_one_that_has_handed_its_state_over(crew: Crew) -> None:
    """The newcomer goes on from behind steps whose numbers it has not got, and nobody else lives."""
    crew.settle = 1
    crew.open(WRITES)
    last = Fault(point="morph: part sent", passing=1, kind="kill")
    plan = Plan(who="leader", ledger=str(crew.folder / "ledger"), faults=(last,))
    crew.start(1, faults=msgspec.json.encode(plan).decode())
    crew.reach(10)
    crew.start(1)
    assert crew.completed().step == STEPS
    assert crew.of(WorkerLost)
    assert sorted(numbers(crew)) == list(range(STEPS))


SAVES = """
import os, pathlib, sys, time
import torch
from agent.output import sender
from orchestrator import Session

phases, folder = int(sys.argv[1]), pathlib.Path(sys.argv[2]).parent
deliver = sender.Sending._deliver


def delivered_late(self, path, changes):
    while not (folder / "go").exists():
        time.sleep(0.01)
    deliver(self, path, changes)


sender.Sending._deliver = delivered_late
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
session = Session(model, optimizer)
for step in session.steps(24):
    if step == 21:
        (folder / f"there.{os.getpid()}").touch()
        while not (folder / "go").exists():
            time.sleep(0.01)
    for _ in range(phases):
        session.backward(lambda x: model(x).square().mean(), [torch.ones(2, 4)] * 4)
    optimizer.step()
    optimizer.zero_grad()
    if step == 20:
        session.save("best.pt")
torch.save(model.state_dict(), sys.argv[2])
"""


@pytest.mark.parametrize("phases", [1, 2])
@pytest.mark.parametrize("lost", [1, 2], ids=["the leader", "all"])
def test_no_saved_file_is_lost_between_its_commit_and_the_storage(
    crew: Crew, tmp_path: Path, lost: int, phases: int
) -> None:
    """A step that is committed is never led again, so whoever is left has to have its file."""
    alone = tmp_path / "alone"
    alone.mkdir()
    (alone / "train.py").write_text(SAVES)
    (alone / "go").touch()
    played_alone(alone / "train.py", alone / "out.pt", str(phases), cwd=alone)
    crew.begin(2, SAVES, str(phases), str(crew.folder / "out.pt"), backup_every_steps=1000)
    crew._until("both to stand behind it", lambda: len([*crew.folder.glob("there.*")]) == 2)
    output = crew.folder / "checkpoints" / crew.job / "output"
    assert not (output / "best.pt").exists()
    killed = crew.ready[:lost]
    crew.kill(*killed)
    crew._until("the loss", lambda: {told.worker for told in crew.of(WorkerLost)} == {*killed})
    (crew.folder / "go").touch()
    crew.start(lost)
    assert crew.completed().step == 24
    assert (output / "best.pt").read_bytes() == (alone / "output" / "best.pt").read_bytes()


def test_no_number_is_lost_with_the_keeper(mortal: Crew) -> None:
    mortal.begin(2, WRITES)
    for step in (10, 20, 30, 40, 50):
        mortal.reach(step)
        mortal.keeper.kill()
        mortal.keeper.start()
    assert mortal.completed().step == STEPS
    assert sorted(numbers(mortal)) == list(range(STEPS))


def test_a_file_that_is_not_there_is_explained_with_its_traceback(crew: Crew) -> None:
    crew.open(READS)
    crew.settle = 1
    crew.start(1)
    failed = until("the failure", lambda: crew.of(WorkerFailed))[0]
    last = failed.detail.splitlines()[-1]
    assert last.startswith("data/missing.txt is not on this machine: ")
    assert "FileNotFoundError" in failed.detail


FILLS = """
import torch
from orchestrator import Session

model = torch.nn.Linear(4, 1)
session = Session(model)
for step in session.steps(3):
    session.backward(lambda x: model(x).mean(), [torch.ones(2, 4)])
    with open("/dev/full", "w") as full:
        full.write("x")
"""


def test_a_full_disk_is_named_with_its_machine_behind_the_traceback(crew: Crew) -> None:
    """One machine of many may be full, so the last line, which is the reason of the failure, says which."""
    crew.open(FILLS)
    crew.settle = 1
    crew.start(1)
    failed = until("the failure", lambda: crew.of(WorkerFailed))[0]
    assert "OSError: [Errno 28]" in failed.detail
    assert failed.detail.splitlines()[-1].startswith("the disk of m1 is full, ")


GOES_ON = """
import pathlib, sys, time
import torch
from orchestrator import Session

model = torch.nn.Linear(4, 1)
session = Session(model)
for step in session.steps(3):
    session.backward(lambda x: model(x).mean(), [torch.ones(2, 4)])
while not pathlib.Path(sys.argv[1]).exists():
    time.sleep(0.02)
session.log(tested=1.0)
"""


def test_what_a_script_does_after_its_loop_is_waited_for(crew: Crew) -> None:
    """A test of the trained model may take longer than all of a small training."""
    go = crew.folder / "go"
    crew.begin(1, GOES_ON, str(go), tail_s=1000.0)
    crew.reach(3)
    assert not crew.of(JobCompleted)
    go.touch()
    assert crew.completed().step == 3
    assert numbers(crew)[2]["tested"] == 1.0


def test_a_script_that_does_not_end_is_named_and_ended(crew: Crew) -> None:
    crew.begin(1, GOES_ON, str(crew.folder / "never"), tail_s=0.2)
    assert crew.completed().step == 3
    (said,) = [line for line in crew.noted() if "after its loop" in line]
    assert said.startswith("the script of w1 has not ended 0.2 s after its loop (job.tail_s)")


def test_the_end_of_a_script_that_no_worker_came_to_is_named_and_made_up_for(crew: Crew) -> None:
    """The model is there, and a test of it is not: who reads only that all steps are done would look for it in vain."""
    go = crew.folder / "go"
    workers = crew.begin(1, GOES_ON, str(go), tail_s=1000.0)
    roster = crew.keeper._jobs[crew.job].roster
    until("the end to begin", lambda: roster.finishing == {*workers})
    crew.kill(*workers)
    done = crew.completed()
    assert done.step == 3
    assert done.why.startswith("no worker came to the end of the script")
    assert done.why in crew.noted()
    assert "--from 3" in done.why
    assert numbers(crew)[2].keys() == {"loss"}
    crew.job = "other"
    go.touch()
    crew.begin(1, GOES_ON, str(go), from_url=f"{(crew.folder / 'checkpoints' / 'job').as_uri()}#3")
    until("the end", lambda: len(crew.of(JobCompleted)) == 2)
    assert crew.of(JobCompleted)[1].why == ""
    assert numbers(crew)[2]["tested"] == 1.0
