"""Moments that are hard to meet by chance: the script, or a fault, holds a worker or ends it just there."""

import signal
from pathlib import Path

import msgspec
import pytest
from crews import Crew, ends_alike, played_alone, until
from injection import Fault, Plan

from agent.checksum import seal, unseal
from agent.keeper.keeper import OpenJob
from agent.keys import OPEN_JOBS
from agent.messages import CheckpointWritten, Recalled, Rewound, WorkerLost, WorkerReady

pytestmark = pytest.mark.processes

TOY = Path(__file__).with_name("deep_toy.py")
STEPS = 30
BLOCKS = (10, 26)  # behind the first block, and behind the third: no layer is on two stages
MADE = "microbatches=MICROBATCHES)\n"


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], bytes]:
    """What the script prints and saves alone, without any manager."""
    return played_alone(TOY, tmp_path_factory.mktemp("alone") / "out.pt", str(STEPS))


def script_with(wrapped: str) -> str:
    """The script, in which something of its session's world is wrapped."""
    return TOY.read_text().replace(MADE, MADE + wrapped)


def lay_out(crew: Crew, workers: list[str], depth: int) -> None:
    """Just these from now on, in this depth."""
    with crew._lock:
        crew.ready[:], crew.depth = workers, depth
        crew.regroup("now")


def test_the_first_leader_dies_while_it_hands_over_what_all_begin_with(
    crew: Crew, alone: tuple[list[str], bytes]
) -> None:
    """Before there is a backup, and before any other has the state: somebody else's beginning is as good."""
    dying = Fault(point="morph: hand-over begun", passing=1, kind="kill")
    plan = Plan(who="first", ledger=str(crew.folder / "ledger"), faults=(dying,))
    crew.settle = crew.depth = 3
    crew.open(TOY.read_text(), str(STEPS), str(crew.folder / "out.pt"))
    (first,) = crew.start(1, msgspec.json.encode(plan).decode())
    until("the first", lambda: first in crew.ready)
    crew.start(2)
    ends_alike(crew, alone, STEPS)
    assert [lost.worker for lost in crew.of(WorkerLost)] == [first]


PREPARES = """
    world = session._world
    promise = world._preparing.promise

    def prepared(step, summed, held, given):
        while held is not None and not session.leader:
            time.sleep(0.01)
        promise(step, summed, held, given)
        told, connects = Path(f"{out}.prepared"), world.link.connects
        if held is not None and not told.exists():
            told.touch()
            while world.link.connects == connects:
                time.sleep(0.01)

    world._preparing.promise = prepared
"""


def test_what_is_promised_for_the_next_version_is_not_what_is_held_of_this_one(
    mortal: Crew, alone: tuple[list[str], bytes]
) -> None:
    """One is prepared for the first step in which it keeps half of what it has, and the other one, who is not, goes with
    the keeper: the next keeper hears of a worker that has everything, and loses no step."""
    hold = mortal.folder / "out.pt.hold"
    hold.write_text("10")
    mortal.owned, mortal.depth, mortal.options = True, 2, {"cuts": BLOCKS[:1]}
    script = script_with(PREPARES)
    (first,) = mortal.begin(1, script, str(STEPS), str(mortal.folder / "out.pt"))
    mortal.reach(10)
    (second,) = mortal.start(1)
    mortal.let_in(hold, second)
    hold.unlink()
    until("the step", (mortal.folder / "out.pt.prepared").exists)
    mortal.keeper.kill()
    mortal.kill(second)
    mortal.keeper.start()
    ends_alike(mortal, alone, STEPS)
    assert {lost.worker for lost in mortal.of(WorkerLost)} == {second}
    assert mortal.of(Recalled) == []
    assert first in mortal.ready


SAYS = """
    world = session._world
    say_held = world._handover.say_held

    def said():
        say_held()
        stuck = Path(f"{out}.stuck")
        while world.me == "w1" and session.replica.holdings.here is None and stuck.exists():
            Path(f"{out}.said").touch()
            time.sleep(0.01)

    world._handover.say_held = said
"""


def test_who_has_fetched_layers_gives_them_in_a_layout_that_it_has_not_entered(
    crew: Crew, alone: tuple[list[str], bytes]
) -> None:
    """One fetches all layers, says so, and is held up. The next layout is of two newcomers who have nothing: they
    get even those layers from it that it did not have when it entered its own."""
    out = crew.folder / "out.pt"
    crew.depth, crew.owned = 2, True
    workers = crew.begin(2, script_with(SAYS), str(STEPS), str(out))
    assert workers == ["w1", "w2"]
    crew.reach(9)
    newcomers = crew.start(2)
    until("the newcomers", lambda: set(newcomers) <= set(crew.ready))
    Path(f"{out}.stuck").touch()
    lay_out(crew, ["w1"], 1)
    until("all layers to be with the first", lambda: Path(f"{out}.said").exists())
    lay_out(crew, newcomers, 2)
    crew.reach(crew.step + 3)
    assert crew.of(WorkerLost) == []
    Path(f"{out}.stuck").unlink()
    ends_alike(crew, alone, STEPS)


HESITATES = """
    world = session._world
    pull = world._handover.pull

    def hesitate(layers):
        while world.me == "w3" and Path(f"{out}.late").exists():
            Path(f"{out}.lacking").touch()
            time.sleep(0.01)
        pull(layers)

    world._handover.pull = hesitate
"""


def left_out(crew: Crew, out: Path) -> str:
    """One of two that each keep their own, and a newcomer in its place lacks its layers until `late` is gone."""
    crew.depth, crew.owned, crew.options = 2, True, {"cuts": BLOCKS[:1]}
    first, second = crew.begin(2, script_with(HESITATES), str(STEPS), str(out))
    crew.reach(9)
    (third,) = crew.start(1)
    until("the newcomer", lambda: third in crew.ready)
    Path(f"{out}.late").touch()
    lay_out(crew, [first, third], 2)
    until("the newcomer to lack its layers", Path(f"{out}.lacking").exists)
    return second


def test_who_is_left_out_is_lost_before_its_layers_were_asked_for(
    crew: Crew, alone: tuple[list[str], bytes]
) -> None:
    """One of two that each keep their own makes room for a newcomer, which has said that it has the version, if none
    of those layers: the manager hears that somebody waits for what is lost."""
    out = crew.folder / "out.pt"
    second = left_out(crew, out)
    crew.kill(second)
    until("the loss", lambda: crew.of(WorkerLost))
    Path(f"{out}.late").unlink()
    ends_alike(crew, alone, STEPS)
    assert [(lost.worker, lost.owed_state) for lost in crew.of(WorkerLost)] == [(second, True)]


@pytest.mark.parametrize("asked", [False, True])
def test_the_keeper_goes_with_who_is_left_out_before_its_layers_were_fetched(
    mortal: Crew, alone: tuple[list[str], bytes], asked: bool
) -> None:
    """The next keeper knows the layout and not whom it told to hand over layers: who waits for some complains of that
    one, and the manager hears of it. The layers went with both, so the job goes back to the disk."""
    out = mortal.folder / "out.pt"
    second = left_out(mortal, out)
    mortal.keeper.write_checkpoint("job")
    until("the checkpoint", lambda: mortal.of(CheckpointWritten))
    if asked:
        mortal.kill(second, how=signal.SIGSTOP)
        Path(f"{out}.late").unlink()
    mortal.keeper.kill()
    mortal.kill(second)
    mortal.keeper.start()
    Path(f"{out}.late").unlink(missing_ok=True)
    assert mortal.completed().step == STEPS
    assert out.read_bytes() == alone[1]


def test_keeper_and_sole_owner_killed_at_once_end_with_the_same_bits(
    mortal: Crew, alone: tuple[list[str], bytes]
) -> None:
    """Each of three keeps the layers of its stage, and the keeper's memory goes with it: the job goes back to what is on
    the disk, says so, computes the steps since again, and ends with the same bits."""
    mortal.owned, mortal.depth, mortal.options = True, 3, {"cuts": BLOCKS}
    out = mortal.folder / "out.pt"
    Path(f"{out}.hold").write_text("12")
    workers = mortal.begin(3, TOY.read_text(), str(STEPS), str(out), backup_every_steps=5)
    mortal.reach(12)
    mortal.keeper.write_checkpoint("job")
    saved = until("the checkpoint", lambda: mortal.of(CheckpointWritten))[0]
    Crew.hold(Path(f"{out}.hold"), 17)
    mortal.reach(17)
    mortal.keeper.kill()
    mortal.kill(workers[0])  # who leads, too
    mortal.keeper.start()
    Path(f"{out}.hold").unlink()
    assert mortal.completed().step == STEPS
    (rewound,) = mortal.of(Rewound)
    assert (rewound.from_step, rewound.to_step) == (17, saved.step)
    assert out.read_bytes() == alone[1]


def test_a_layout_was_written_down_and_told_to_nobody(
    mortal: Crew, alone: tuple[list[str], bytes]
) -> None:
    """The keeper goes in between, where two each have their own layers. The next keeper tells of the layout."""
    mortal.owned, mortal.depth, mortal.options = True, 2, {"cuts": BLOCKS[:1]}
    out = mortal.folder / "out.pt"
    Path(f"{out}.hold").write_text("12")
    first, _ = mortal.begin(2, TOY.read_text(), str(STEPS), str(out))
    mortal.reach(12)
    mortal.keeper.kill()
    with mortal._lock:
        mortal.ready[:], mortal.generation = [first], mortal.generation + 1
        record = msgspec.json.decode(unseal("", mortal.client.hget(OPEN_JOBS, "job")), type=OpenJob)
        record = msgspec.structs.replace(record, layout=mortal._layout())
        mortal.client.hset(OPEN_JOBS, "job", seal(msgspec.json.encode(record)))
    mortal.keeper.start()
    Path(f"{out}.hold").unlink()
    ends_alike(mortal, alone, STEPS)
    assert mortal.of(WorkerLost) == []


def test_who_slept_through_steps_of_others_does_not_do_them_again(
    mortal: Crew, alone: tuple[list[str], bytes]
) -> None:
    """A worker that trains alone is stopped in a step and given up; another one goes on, and then the keeper is restarted,
    which knows of no ghosts. The first wakes up and is prepared for its step: it does not hear that it was committed,
    or it would lead through all that the other has done, and print and save it once more."""
    out = mortal.folder / "out.pt"
    Path(f"{out}.hold").write_text("6")
    (ghost,) = mortal.begin(1, TOY.read_text(), str(STEPS), str(out))
    mortal.reach(6)
    mortal.kill(ghost, how=signal.SIGSTOP)
    mortal.start(1)
    until("the loss", lambda: mortal.of(WorkerLost))
    Crew.hold(Path(f"{out}.hold"), 12)
    mortal.reach(12)
    with mortal.on_hold():
        mortal.keeper.kill()
        mortal.keeper.start()
        Crew.hold(Path(f"{out}.hold"), 20)
        mortal.reach(20)
        came = len(mortal.of(WorkerReady))
        mortal.kill(ghost, how=signal.SIGCONT)
        until("the ghost", lambda: ghost in [r.worker for r in mortal.of(WorkerReady)[came:]])
        Path(f"{out}.hold").unlink()
        mortal.reach(STEPS - 1)
    ends_alike(mortal, alone, STEPS)


def test_memory_runs_out_while_the_last_state_is_sent(
    crew: Crew, alone: tuple[list[str], bytes]
) -> None:
    """Nobody asks for it again: the worker is lost, and another one brings the job to its end."""
    # Behind the first backup, and the one by which newcomers prove themselves.
    failing = Fault(point="save: share sent", passing=3, kind="memory")
    plan = Plan(who="first", ledger=str(crew.folder / "ledger"), faults=(failing,))
    crew.settle = 1
    out = crew.folder / "out.pt"
    crew.open(TOY.read_text(), str(STEPS), str(out), backup_every_steps=1000)
    (first,) = crew.start(1, msgspec.json.encode(plan).decode())
    until("the loss", lambda: first in [lost.worker for lost in crew.of(WorkerLost)])
    crew.start(1)
    assert crew.completed().step == STEPS
    assert out.read_bytes() == alone[1]
    assert crew.of(Rewound) == []
