"""A model that is handed over unbuilt: each worker makes the values of its own layers, and they are those of one process."""

import random
import signal
import subprocess
import sys
from pathlib import Path

import huge
import msgspec
import pytest
from crews import Crew, ends_alike, played_alone, seeds, until
from injection import Fault, Plan
from managed import Managed

from agent.messages import BackupHeld, WorkerFailed, WorkerLost

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

HERE = Path(__file__).parent
STEPS = 24
SAVE = """        scheduler.step()
        if step == steps - 1:
            state = model.state_dict()
            if session.leader:
                torch.save(state, out)
"""


def unbuilt_toy() -> str:
    """The deep toy, its model handed over unbuilt, and saved in the last step: nobody has all of it behind that."""
    script = (HERE / "deep_toy.py").read_text()
    script = script.replace("model = Tied()", "model = unbuilt(Tied)")
    script = script.replace("import Session\n", "import Session, unbuilt\n")
    script = script.replace("        scheduler.step()\n", SAVE)
    return script.replace(
        "    if session.leader:\n        torch.save(model.state_dict(), out)\n", ""
    )


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], bytes]:
    """What the very same script prints and saves alone, where its model is simply built."""
    folder = tmp_path_factory.mktemp("alone")
    (folder / "train.py").write_text(unbuilt_toy())
    return played_alone(folder / "train.py", folder / "out.pt", str(STEPS))


def begin(crew: Crew, count: int, depth: int, **options: object) -> list[str]:
    crew.depth, crew.owned = depth, True
    return crew.begin(count, unbuilt_toy(), str(STEPS), str(crew.folder / "out.pt"), **options)


def test_model_born_whole_by_each_is_that_of_one_process(
    crew: Crew, alone: tuple[list[str], bytes]
) -> None:
    """Weights and losses are those of the script alone; below, layouts begin with parts."""
    begin(crew, 2, 1)
    ends_alike(crew, alone, STEPS)
    assert crew.of(WorkerLost) == []


def test_every_shape_and_back(crew: Crew, alone: tuple[list[str], bytes]) -> None:
    """Layers go from those who made them to those who keep them next, at boundaries and in the middle of steps."""
    begin(crew, 4, 4)
    for number, depth in enumerate((2, 4, 1, 3, 2), start=1):
        crew.reach(3 * number)
        crew.shape(depth, "now" if number % 2 else "boundary")
    ends_alike(crew, alone, STEPS)


def test_the_owner_of_a_stage_is_killed_and_the_layout_changes(
    crew: Crew, alone: tuple[list[str], bytes]
) -> None:
    """Of two chains of two one loses a worker; later the rest are three in a row."""
    workers = begin(crew, 4, 2)
    crew.reach(7)
    crew.kill(workers[0])
    crew.reach(12)
    crew.shape(3)
    ends_alike(crew, alone, STEPS)


@pytest.mark.parametrize("owns", [True, False])
def test_a_worker_is_killed_before_anything_is_committed(
    crew: Crew, alone: tuple[list[str], bytes], owns: bool
) -> None:
    """Before its layers were made, or behind that in the middle of the first step: what it had is made again by the
    others, who need nobody for it."""
    point, hold = "step: slice sent" if owns else "step: share opened", crew.folder / "out.pt.hold"
    dying = Fault(point=point, passing=1, kind="kill")
    plan = Plan(who="dying", ledger=str(crew.folder / "ledger"), faults=(dying,))
    hold.write_text("0")
    crew.depth, crew.owned, crew.settle = 3, True, 3
    crew.open(unbuilt_toy(), str(STEPS), str(crew.folder / "out.pt"))
    crew.start(2)
    (victim,) = crew.start(1, faults=msgspec.json.encode(plan).decode())
    until("the layout", lambda: len(crew.ready) == 3)
    hold.unlink()
    until("the loss", lambda: victim in [lost.worker for lost in crew.of(WorkerLost)])
    ends_alike(crew, alone, STEPS)
    assert len(crew.of(WorkerLost)) == 1


def test_a_newcomer_comes_before_anything_is_committed(
    crew: Crew, alone: tuple[list[str], bytes]
) -> None:
    """Two are held in the first step when a third comes: it makes its own layers, and the backup is whole."""
    hold = crew.folder / "out.pt.hold"
    hold.write_text("0")
    begin(crew, 2, 3)
    until("the first two", lambda: len(crew.ready) == 2)
    crew.start(1)
    until("the third", lambda: len(crew.ready) == 3)
    hold.unlink()
    ends_alike(crew, alone, STEPS)
    assert min(held.step for held in crew.of(BackupHeld)) == 0


def test_who_is_left_goes_back_to_the_beginning(crew: Crew, alone: tuple[list[str], bytes]) -> None:
    """The only owner of a half is lost while the backup is still of the beginning: the other one has had steps, which
    have changed what is not born with the layers, the averages of its norms."""
    # Before the early backup, which a proof may begin with.
    (hold := crew.folder / "out.pt.hold").write_text("2")
    begin(crew, 3, 2, backup_every_steps=100)
    crew.reach(2)
    (held,) = until("the backup", lambda: crew.of(BackupHeld))
    assert held.step == 0
    crew.kill(crew.ready[1])
    hold.unlink()
    ends_alike(crew, alone, STEPS)
    assert len(crew.of(WorkerLost)) == 1


@pytest.mark.parametrize("seed", seeds(1))
def test_chaos(crew: Crew, alone: tuple[list[str], bytes], seed: int) -> None:
    """Kills, joins and other depths, drawn from a seed, from before the first commit on."""
    dice = random.Random(seed)
    # Whoever leads and is killed behind the last step's commit saves nothing, and nobody does so again.
    (hold := crew.folder / "out.pt.hold").write_text(str(STEPS - 1))
    workers = begin(crew, 4, dice.randint(1, 4), backup_every_steps=dice.randint(2, 12))
    at = 0
    while at < STEPS - 2:
        crew.reach(at)
        crew.settle = 1
        what, inside = dice.choice(["kill", "join", "shape", "all"]), set(crew.ready) & set(workers)
        if what == "all":
            crew.kill(*workers)
            workers = crew.start(dice.randint(1, 4))
        elif what == "join" or len(inside) < 2:
            workers += crew.start(1)
        elif what == "kill":
            victim = dice.choice(sorted(inside))
            crew.kill(victim, how=signal.SIGKILL)
            workers.remove(victim)
        else:
            crew.shape(dice.randint(1, 4), dice.choice(["now", "boundary"]))
        at = max(at, crew.step) + dice.randint(1, 5)
    hold.unlink()
    ends_alike(crew, alone, STEPS)


REFUSED = {
    "another seed": ("torch.manual_seed(0)", "torch.seed()", "call torch.manual_seed"),
    "its own state": ("optim.AdamW(model", "optim.Adagrad(model", "Adagrad makes its state before"),
    "changed": (
        "model = unbuilt(Tied)",
        "model = unbuilt(Tied).double()",
        "was changed after unbuilt",
    ),
    "used early": (
        "    for step in session.steps(steps):",
        "    model.state_dict()\n    for step in session.steps(steps):",
        "no worker has all of it",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_is_refused_in_one_line(crew: Crew, what: str) -> None:
    """Before the first step, with what to do."""
    line, other, says = REFUSED[what]
    script = unbuilt_toy()
    assert line in script
    crew.depth, crew.owned = 2, True
    crew.begin(2, script.replace(line, other), str(STEPS), str(crew.folder / "out.pt"))
    failed = until("the refusal", lambda: crew.of(WorkerFailed))[0]
    assert says in failed.detail.splitlines()[-1]


def test_the_manager_asks_for_a_layout_that_fits_from_the_start(
    tight: Managed, tmp_path: Path
) -> None:
    """The very first layout is a chain in which each builds and keeps its own; it is measured in it, section by
    section, and the weights are those of one process."""
    script = (HERE / "wide.py").read_text()
    script = script.replace(
        "model = nn.Sequential(*layers)", "model = unbuilt(lambda: nn.Sequential(*layers()))"
    )
    script = script.replace("    layers = [", "    layers = lambda: [")
    script = script.replace("import Session\n", "import Session, unbuilt\n")
    script = script.replace(
        "    if session.leader:\n        torch.save(model.state_dict(), out)\n", ""
    )
    script = script.replace(
        "        if session.leader:\n", SAVE.partition("\n")[2] + "        if session.leader:\n"
    )
    (tmp_path / "train.py").write_text(script)
    alone = played_alone(tmp_path / "train.py", tmp_path / "alone" / "out.pt", "20")
    out = tmp_path / "out.pt"
    tight.submit(script, "20", str(out), slots_min=2, slots_max=2)
    until("the end", lambda: tight.managed_job.status == "SUCCEEDED", 120.0)
    first = tight.layouts[0]
    assert first.layout.owned
    assert first.layout.depth == 2
    assert "each builds and keeps its own stages only" in first.because
    assert tight.managed_job.layouts.profile is not None
    assert tight.printed() == alone[0]
    assert out.read_bytes() == alone[1]


HUGE = HERE / "huge.py"


@pytest.fixture(scope="module")
def whole() -> tuple[list[str], int]:
    """What the script prints alone, and the memory that it takes, in MB."""
    command = [sys.executable, str(HUGE), "built"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout.splitlines(), int(done.stderr.split()[1])


def peaks(crew: Crew, count: int) -> list[int]:
    """What each of them says it took, when all have: who is not the first may come to it behind the job's end."""

    def said() -> list[int]:
        return [int(line.split()[1]) for line in crew.printed() if line.startswith("took")]

    until("what each of them took", lambda: len(said()) == count)
    return said()


def test_nobody_needs_room_for_the_whole(crew: Crew, whole: tuple[list[str], int]) -> None:
    """Each of four processes takes less than half of what one takes for all of it, and the losses are the same."""
    lines, took = whole
    crew.depth, crew.owned, crew.options = 4, True, {"cuts": (8, 16, 24)}
    crew.begin(4, HUGE.read_text(), "unbuilt")
    crew.completed()
    printed = crew.printed()
    assert [line for line in printed if line.startswith("step")] == lines
    assert max(peaks(crew, 4)) < took // 2


def test_nobody_needs_room_for_the_whole_when_all_were_lost(
    crew: Crew, whole: tuple[list[str], int], tmp_path: Path
) -> None:
    """Others in another layout begin with the backup and the logged sums, each with its own layers of them, and take no more
    than those before."""
    lines, took = whole
    (hold := tmp_path / "hold").touch()
    crew.depth, crew.owned, crew.options = 4, True, {"cuts": (8, 16, 24)}
    first = crew.begin(4, HUGE.read_text(), "unbuilt", str(hold), backup_every_steps=100)
    crew.reach(huge.STEPS - 1)
    crew.kill(*first)
    crew.depth, crew.settle, crew.options = 5, 5, {"cuts": (6, 12, 18, 24)}
    crew.start(5)
    until("the others", lambda: len(crew.ready) == 5 and not set(first) & set(crew.ready))
    hold.unlink()
    crew.completed()
    printed = crew.printed()
    assert {line for line in printed if line.startswith("step")} <= set(lines)
    assert lines[-1] in printed
    assert max(peaks(crew, 5)) < took // 2
