"""A script reads back what it wrote in its loop, and every worker finds it, whenever it joined."""

from functools import partial
from pathlib import Path

import pytest
from crews import Crew, ends_alike, played_alone

from agent.keeper.admission import WITHOUT_FILES
from agent.messages import JobCompleted, Progress
from agent.output.missing_file import LACKED

pytestmark = pytest.mark.processes

STEPS, LAST_BEST = 40, 9
SCRIPT = f"""
import sys, time
import torch
from orchestrator import Session

pause_s, out = float(sys.argv[1]), sys.argv[2]
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
session = Session(model, optimizer)


def loss_of(x):
    time.sleep(pause_s)
    return model(x).square().mean()


for step in session.steps({STEPS}):
    result = session.backward(loss_of, [torch.full((2, 4), 1.0 + i) for i in range(4)])
    optimizer.step()
    optimizer.zero_grad()
    with open("log.csv", "a") as file:
        file.write(f"{{step}},{{result.loss!r}}\\n")
    BODY
AFTER
if session.leader:
    torch.save(model.state_dict(), out)
"""
SAVES = f"""if step <= {LAST_BEST}:
        torch.save(model.state_dict(), "best.pt")"""
TESTS = """
model.load_state_dict(torch.load("best.pt"))
rows = [int(line.split(",")[0]) for line in open("log.csv")]
assert rows == [*range(40)], rows
if session.leader:
    print("tested", len(rows))
"""
AFTER_LOOP = SCRIPT.replace("BODY", SAVES).replace("AFTER", TESTS)
RESTORES = """if step % 3 == 0:
        torch.save(model.state_dict(), "best.pt")
    if step % 3 == 2:
        model.load_state_dict(torch.load("best.pt"))"""
IN_LOOP = SCRIPT.replace("BODY", RESTORES).replace("AFTER", TESTS)
COUNTS = """if step == 0:
        for number in range(60):
            open(session.output / f"{number}.txt", "w").close()
    else:
        assert int(open("n.txt").read()) == step
    open("n.tmp", "w").write(str(step + 1))
    __import__("os").replace("n.tmp", "n.txt")"""
# On busy cores many files may be stored too late for a newcomer, whose place another one takes.
WITHOUT = (LACKED.partition("{}")[0], WITHOUT_FILES)
AMONG_MANY = SCRIPT.replace("BODY", COUNTS).replace("AFTER", "")
LEADERS = """if session.leader:
        torch.save(model.state_dict(), session.output / "best.pt")"""
LEADER_ONLY = SCRIPT.replace("BODY", LEADERS).replace(
    "AFTER", 'model.load_state_dict(torch.load(session.output / "best.pt"))'
)


def alone(script: str, folder: Path) -> tuple[list[str], bytes]:
    folder.mkdir()
    (folder / "train.py").write_text(script)
    return played_alone(folder / "train.py", folder / "out.pt", "0", cwd=folder)


def begin(
    crew: Crew, count: int, script: str, pause_s: float = 0.005, **options: object
) -> list[str]:
    return crew.begin(count, script, str(pause_s), str(crew.folder / "out.pt"), **options)


def has_done_a_step(crew: Crew, generation: int) -> bool:
    """Return whether this layout, or a later one, has committed a step, or the job has ended before."""
    newest = max((told.generation for told in crew.of(Progress)), default=0)
    return newest >= generation or bool(crew.of(JobCompleted))


@pytest.mark.parametrize(
    "script",
    [AFTER_LOOP, IN_LOOP, AMONG_MANY],
    ids=["after the loop", "in the loop", "among many files"],
)
def test_newcomers_read_the_best_checkpoint(crew: Crew, script: str) -> None:
    """In the end nobody is left of those that wrote the first ones."""
    expected = alone(script, crew.folder / "alone")
    workers = begin(crew, 2, script, pause_s=0.03)  # newcomers shall come before its end
    for step in (12, 19, 27):
        crew.reach(step)
        newcomers = crew.start(1)
        crew._until("it", lambda one=newcomers[0]: one in crew.ready or crew.of(JobCompleted))
        crew.kill(workers.pop(0))
        workers += newcomers
        # Until it has done a step its files are on their way to it, and are lost with the worker that has them.
        crew._until("a step with it", partial(has_done_a_step, crew, crew.generation))
    ends_alike(crew, expected, STEPS, besides=WITHOUT)


@pytest.mark.parametrize("script", [AFTER_LOOP, IN_LOOP], ids=["after the loop", "in the loop"])
def test_after_a_loss_of_all_the_best_checkpoint_is_read(crew: Crew, script: str) -> None:
    """Files are then as the state is that the job goes on from, and steps after it are repeated."""
    expected = alone(script, crew.folder / "alone")
    workers = begin(crew, 2, script, backup_every_steps=4)
    for step in (11, 18, 26):
        crew.reach(step)
        crew.kill(*workers)
        workers = crew.start(2)
    ends_alike(crew, expected, STEPS)


@pytest.mark.parametrize("script", [AFTER_LOOP, IN_LOOP], ids=["after the loop", "in the loop"])
def test_a_resumed_job_reads_the_best_checkpoint(crew: Crew, script: str) -> None:
    expected = alone(script, crew.folder / "alone")
    begin(crew, 2, script)
    crew.reach(15)
    crew.close_job()
    begin(crew, 2, script)
    ends_alike(crew, expected, STEPS)


def test_what_only_the_leader_wrote_is_read_by_all(crew: Crew) -> None:
    expected = alone(LEADER_ONLY, crew.folder / "alone")
    begin(crew, 3, LEADER_ONLY)
    ends_alike(crew, expected, STEPS)
