"""Layouts of any depth, changed at any moment: the losses and the weights are those of one process."""

import random
import signal
from pathlib import Path

import msgspec
import pytest
from crews import Crew, ends_alike, played_alone, seeds, until
from injection import Fault, Plan

from agent.messages import BackupHeld, WorkerFailed, WorkerLost, WorkerReady
from orchestrator.planner.simulation import schedules

pytestmark = pytest.mark.processes

TOY = Path(__file__).with_name("deep_toy.py")
STEPS = 24


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], bytes]:
    """What the script prints and saves alone, without any manager."""
    return played_alone(TOY, tmp_path_factory.mktemp("alone") / "out.pt", str(STEPS))


def begin(
    crew: Crew, count: int, depth: int, *, owned: bool = False, **options: object
) -> list[str]:
    crew.depth, crew.owned = depth, owned
    return crew.begin(count, TOY.read_text(), str(STEPS), str(crew.folder / "out.pt"), **options)


def held(crew: Crew, step: int) -> Path:
    """The script waits at this step until what shall happen has happened, and the file is gone."""
    hold = crew.folder / "out.pt.hold"
    hold.write_text(str(step))
    return hold


@pytest.mark.parametrize("owned", [False, True])
def test_every_shape_and_back(crew: Crew, alone: tuple[list[str], bytes], owned: bool) -> None:
    """1 x 4, 2 x 2, 4 x 1, 1 x 4 again, at boundaries and in the middle of steps."""
    begin(crew, 4, 1, owned=owned)
    for number, depth in enumerate((2, 4, 1, 2, 3, 4, 2, 1), start=1):
        crew.reach(2 * number)
        crew.shape(depth, "now" if number % 2 else "boundary")
    ends_alike(crew, alone, STEPS)


@pytest.mark.parametrize(("name", "recompute"), [("varuna", True), ("interleaved", False)])
def test_the_manager_says_what_is_played(
    crew: Crew, alone: tuple[list[str], bytes], name: str, recompute: bool
) -> None:
    """Any flushing schedule, two chunks a worker or recompute; cuts of another model are chosen anew."""
    crew.options = {
        "schedule": name,
        "cuts": (10_000,),
        "recompute": (recompute, False),
        "schedules": (schedules.make(name, 2, 6, recompute=(recompute, False)),),
    }
    begin(crew, 2, 2)
    ends_alike(crew, alone, STEPS)


def test_whoever_goes_back_bears_the_rest_of_the_step(crew: Crew) -> None:
    """The last owner of a layer dies in a step. The survivors' scripts come to its end without a sum, and change
    gradients all the same: nobody else is lost by that."""
    script = TOY.read_text().replace(
        "session.clip_grad_norm_(1.0)",
        "session.clip_grad_value_(0.05)",  # which there has to be something for
    )
    (crew.folder / "train.py").write_text(script)
    alone = played_alone(crew.folder / "train.py", crew.folder / "alone" / "out.pt", str(STEPS))
    crew.depth, crew.owned = 2, True
    hold = held(crew, 13)
    workers = crew.begin(2, script, str(STEPS), str(crew.folder / "out.pt"))
    crew.start(1)
    crew.reach(10)
    crew.kill(workers[0])
    hold.unlink()
    crew.start(1)
    ends_alike(crew, alone, STEPS)
    # It is said again if a layout with it was asked for before its loss was heard of.
    assert {lost.worker for lost in crew.of(WorkerLost)} == {workers[0]}


def test_the_only_owners_of_layers_are_lost_behind_the_last_step(
    crew: Crew, alone: tuple[list[str], bytes]
) -> None:
    """Who is left has ended its loop, and goes back to the backup with
    newcomers: the job ends with all of its steps."""
    dying = Fault(point="step: commit heard", passing=STEPS, kind="kill")
    plan = Plan(who="dying", ledger=str(crew.folder / "ledger"), faults=(dying,))
    faults = msgspec.json.encode(plan).decode()
    crew.depth, crew.owned, crew.settle = 3, True, 3
    crew.open(TOY.read_text(), str(STEPS), str(crew.folder / "out.pt"), backup_every_steps=100)
    crew.start(1)
    victims = {*crew.start(1, faults=faults), *crew.start(1, faults=faults)}
    until("the losses", lambda: victims <= {lost.worker for lost in crew.of(WorkerLost)})
    assert crew.step == STEPS
    crew.start(2)
    ends_alike(crew, alone, STEPS)


TURN = """
class Turn(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("rates", torch.linspace(0.5, 1.5, width), persistent=False)

    def forward(self, x):
        return x * self.rates


class Tied("""


def test_what_is_in_no_state_is_no_layer(crew: Crew, tmp_path: Path) -> None:
    """A table that a module of its own computes is kept by every stage that uses it, and nobody is asked for it."""
    script = TOY.read_text().replace("class Tied(", TURN.lstrip())
    script = script.replace("self.embed(x)", "self.turn(self.embed(x))")
    script = script.replace(
        "        self.embed = ", "        self.turn = Turn(width)\n        self.embed = "
    )
    (tmp_path / "train.py").write_text(script)
    alone = played_alone(tmp_path / "train.py", tmp_path / "alone" / "out.pt", str(STEPS))
    crew.depth, crew.owned = 3, True
    crew.begin(3, script, str(STEPS), str(crew.folder / "out.pt"))
    for number, depth in enumerate((2, 3), start=1):
        crew.reach(4 * number)
        crew.shape(depth, "now" if number % 2 else "boundary")
    ends_alike(crew, alone, STEPS)


def test_all_are_killed_at_once(crew: Crew, alone: tuple[list[str], bytes]) -> None:
    """Newcomers load the backup, apply the logged sums again as one, and go on as a chain."""
    hold = held(crew, 14)
    workers = begin(crew, 4, 2, backup_every_steps=6, owned=True)
    crew.reach(11)
    crew.kill(*workers)
    hold.unlink()
    crew.settle = 3
    crew.depth = 3
    crew.start(3)
    ends_alike(crew, alone, STEPS)


@pytest.mark.parametrize("seed", seeds(2, 5))
def test_chaos(crew: Crew, alone: tuple[list[str], bytes], seed: int) -> None:
    """Kills, stops, joins, leaves and other depths, drawn from a seed, at any moment of a step."""
    dice = random.Random(seed)
    owned, depth, backup_every_steps = dice.random() < 0.6, dice.randint(1, 4), dice.randint(2, 12)
    # Whoever leads and is killed behind the last step's commit saves nothing, and nobody does so again.
    (hold := crew.folder / "out.pt.hold").write_text(str(STEPS - 1))
    workers = begin(crew, 4, depth, owned=owned, backup_every_steps=backup_every_steps)
    at = 0
    while (at := max(at, crew.step) + dice.randint(1, 5)) < STEPS - 2:
        crew.reach(at)
        crew.settle = 1
        what = dice.choice(["kill", "stop", "join", "join", "leave", "shape", "shape", "all"])
        inside = [w for w in crew.ready if w in workers]
        if what == "shape":
            crew.shape(dice.randint(1, 4), dice.choice(["now", "boundary"]))
        elif what == "all":
            crew.kill(*workers)
            workers = crew.start(dice.randint(1, 4))
        elif what == "join" or len(inside) < 2:
            workers += crew.start(1)
        elif what == "leave":
            crew.leave(inside[0])
            workers.remove(inside[0])
        else:
            victim = dice.choice(inside)
            crew.kill(victim, how=signal.SIGKILL if what == "kill" else signal.SIGSTOP)
            workers.remove(victim)
    hold.unlink()
    ends_alike(crew, alone, STEPS)


def test_a_script_that_cannot_be_cut_says_so(crew: Crew) -> None:
    """Before anything deep is asked for; and whoever asks for it all the same reads why it fails."""
    asks = "        if float(logits.detach().sum()) > 1e9:\n            logits = -logits\n"
    behind = '        logits = model(batch["x"])\n'
    script = TOY.read_text().replace(behind, behind + asks)
    line = 1 + script[: script.index(asks)].count("\n")
    crew.begin(2, script, "400", str(crew.folder / "out.pt"))

    def told() -> list[str]:
        whys = [ready.uncuttable for ready in crew.of(WorkerReady)]
        return [why for why in whys if "cannot be recorded" in why]

    (why,) = until("the reason", told)
    assert why.startswith(f"train.py:{line} in loss_of: ")
    crew.shape(2, "now")
    failed = until("the failure", lambda: crew.of(WorkerFailed))[0]
    assert why in failed.detail.splitlines()[-1]


def test_a_number_that_is_in_no_graph_leaves_the_stages_alone(crew: Crew) -> None:
    """The loss reads the step, and computes the same whatever it is: the stages are built once."""
    asked = 'logits = model(batch["x"])'
    script = TOY.read_text().replace(asked, f"{asked} if step >= 0 else None")
    script = script.replace(
        "        if session.leader:\n            print",
        "        for found in session._world._deep._chains:\n"
        "            chains[id(found)] = found\n"
        "        if session.leader:\n            print",
    )
    script = script.replace(
        "        torch.save(", '        print(f"{len(chains)} chains")\n        torch.save('
    )
    script = script.replace(
        "    torch.manual_seed(0)\n    model",
        "    chains = {}\n    torch.manual_seed(0)\n    model",
    )
    crew.depth = 2
    crew.begin(2, script, "12", str(crew.folder / "out.pt"))
    crew.completed()
    assert crew.printed()[-1] == "1 chains"


BROKEN = """
from orchestrator import Session
from agent.calibration import network_probe


def broken(profile, near, far, crew, step):
    if near or far:
        raise ZeroDivisionError("nobody thought of this")
    return profile


network_probe.probed = broken
"""


def test_a_network_that_cannot_be_measured_fails_no_job(
    crew: Crew, alone: tuple[list[str], bytes]
) -> None:
    """The model is measured by the first worker alone, and its network when there is a second: what goes wrong
    then is said, and the job trains on."""
    script = TOY.read_text().replace("from orchestrator import Session\n", BROKEN)
    out = crew.folder / "out.pt"
    Path(f"{out}.hold").write_text("5")
    crew.begin(1, script, str(STEPS), str(out))
    crew.reach(5)
    crew.let_in(Path(f"{out}.hold"), *crew.start(1))
    Path(f"{out}.hold").unlink()
    assert crew.completed().step == STEPS
    assert crew.of(WorkerLost) == crew.of(WorkerFailed) == []
    assert out.read_bytes() == alone[1]


def test_a_recording_that_kills_is_not_asked_of_everyone(crew: Crew) -> None:
    """Two leaders die of it, for lack of memory as it were; the third trains on in one piece."""
    script = TOY.read_text().replace(
        'logits = model(batch["x"])',
        'logits = model(batch["x"]) if type(batch["x"]) is torch.Tensor else __import__("os").kill(__import__("os").getpid(), 9)',
    )
    workers = crew.begin(4, script, "12", str(crew.folder / "out.pt"))
    assert crew.completed().step == 12
    lost = {each.worker for each in crew.of(WorkerLost)}
    assert len(lost) == 2
    assert set(workers) - lost <= set(crew.ready)


def test_who_is_lost_before_it_records_does_not_count(crew: Crew) -> None:
    """Two leaders are taken away while the first batch is still awaited: the third finds out where the script
    can be cut."""
    (crew.folder / "out.pt.hold").write_text("0")
    begin(crew, 3, 1)
    until("the backup", lambda: crew.of(BackupHeld))
    for left in (3, 2):
        until("the layout", lambda left=left: len(crew.ready) == left and _runs(crew), 15.0)
        crew.kill(crew.ready[0])
    until("the last layout", lambda: len(crew.ready) == 1 and _runs(crew), 15.0)
    (crew.folder / "out.pt.hold").unlink()
    crew.completed()
    assert any(ready.stages_max > 1 for ready in crew.of(WorkerReady))


def _runs(crew: Crew) -> bool:
    job = crew.keeper._jobs["job"]
    return job.roster.started and job.roster.layout.generation == crew.generation


def test_a_restarted_keeper_gets_its_backup_though_a_layer_lies_outside(
    mortal: Crew, alone: tuple[list[str], bytes]
) -> None:
    """Each of four keeps its own layers, the keeper forgets all, and the next layout has room for three: what the
    fourth has is fetched, so that there is a backup and something can be committed again."""
    hold = held(mortal, 12)
    workers = begin(mortal, 4, 4, owned=True)
    mortal.reach(9)
    mortal.kill(workers[0], how=signal.SIGSTOP)  # so that the others wait for it to come back
    hold.unlink()
    mortal.keeper.kill()
    mortal.keeper.start()
    mortal.shape(3, "now")
    mortal.kill(workers[0], how=signal.SIGCONT)
    ends_alike(mortal, alone, STEPS)
    assert mortal.of(WorkerLost) == []


def test_what_was_promised_for_a_step_that_was_not_committed_is_forgotten(
    mortal: Crew, alone: tuple[list[str], bytes]
) -> None:
    """The first step in which each of two keeps its own layers is interrupted, and from then on the survivor has
    all of them: a restarted keeper hears of all, though the other who had them dies with it."""
    hold = mortal.folder / "out.pt.hold"
    dying = Fault(point="step: slice sent", passing=1, kind="kill")
    plan = Plan(who="second", ledger=str(mortal.folder / "ledger"), faults=(dying,))
    mortal.depth, mortal.owned, mortal.settle = 2, True, 2
    mortal.open(TOY.read_text(), str(STEPS), str(mortal.folder / "out.pt"))
    mortal.start(1)
    (second,) = mortal.start(1, faults=msgspec.json.encode(plan).decode())
    until("the loss", lambda: second in [lost.worker for lost in mortal.of(WorkerLost)])
    mortal.depth = 1
    hold.write_text("8")
    (third,) = mortal.start(1)
    mortal.let_in(hold, third)
    mortal.reach(int(hold.read_text()))
    mortal.keeper.kill()
    mortal.kill(third)
    mortal.keeper.start()
    hold.unlink()
    ends_alike(mortal, alone, STEPS)
