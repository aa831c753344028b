"""Steps that do not wait until the keeper has their sums: what is lost then, and what is not."""

import time
from functools import partial
from pathlib import Path

import msgspec
import pytest
from crews import Crew, ends_alike, held_back, played_alone, until
from injection import Fault, Plan

from agent.keeper import job
from agent.keeper.storage.vault import Vault
from agent.messages import BackupHeld, CheckpointWritten, Rewound, SumsKept, When, WorkerLost

pytestmark = pytest.mark.processes

TOY, DEEP = (Path(__file__).with_name(name) for name in ("toy.py", "deep_toy.py"))
STEPS = 36


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], bytes]:
    return played_alone(TOY, tmp_path_factory.mktemp("alone") / "out.pt", str(STEPS), "0")


def begin(crew: Crew, count: int, every: int = 10) -> list[str]:
    arguments = (str(STEPS), "0.008", str(crew.folder / "out.pt"))
    options = {"backup_every_steps": every, "sums": "never"}
    return crew.begin(count, TOY.read_text(), *arguments, **options)


def held(crew: Crew, step: int) -> None:
    until(f"a backup from {step} on", lambda: [b for b in crew.of(BackupHeld) if b.step >= step])


def only(crew: Crew, worker: str, when: When = "boundary") -> None:
    """The layout is one worker's from then on."""
    with crew._lock:
        crew.ready[:] = [worker]
        crew.regroup(when)


def sums_stay_away(crew: Crew) -> None:
    until("steps without sums", lambda: not ([s.kept for s in crew.of(SumsKept)] or [True])[-1])


def _none_on_its_way(vault: Vault, held_at: int) -> bool:
    """A layout that begins there is held in its first step, and sends no state before it."""
    return vault._assembly is None or vault._assembly.version >= held_at


def _all_are_held(hold: Path, step: int, count: int) -> bool:
    """They have passed the boundary of this step, where they might still give their state."""
    return len([*hold.parent.glob(f"{hold.stem}.held.{step}.*")]) == count


def held_behind(crew: Crew, hold: Path, step: int, count: int) -> tuple[int, int]:
    """Held at this step, or one soon behind it, whose state nobody has asked for; and how far the keeper's memory leads."""
    job = crew.keeper._jobs["job"]
    vault = job.vault
    while True:
        hold.write_text(str(step))
        crew.reach(step)
        until("all to be held", partial(_all_are_held, hold, step, count))
        until("no state on its way", partial(_none_on_its_way, vault, step))
        with job._lock:  # a state that is taken in is neither on its way nor reached yet
            if vault._assembly is None and vault.reached < step:
                return step, vault.reached
        step += 1


def test_whoever_is_left_has_every_step(crew: Crew, alone: tuple[list[str], bytes]) -> None:
    """Two of four are killed, one after the other, and others come."""
    first, second, *_ = begin(crew, 4)
    for step, gone in ((8, first), (21, second)):
        crew.reach(step)
        crew.kill(gone)
    crew.start(1)
    ends_alike(crew, alone, STEPS)
    assert len(crew.of(WorkerLost)) == 2


def test_when_all_go_at_once_the_newest_state_is_gone_back_to(crew: Crew, tmp_path: Path) -> None:
    lines, weights = played_alone(DEEP, tmp_path / "alone" / "out.pt", "30")
    out, hold = tmp_path / "out.pt", tmp_path / "out.pt.hold"
    hold.write_text("20")
    options = {"backup_every_steps": 8, "sums": "never"}
    workers = crew.begin(3, DEEP.read_text(), "30", str(out), **options)
    held(crew, 8)
    step, newest = held_behind(crew, hold, 20, len(workers))
    crew.kill(*workers)
    hold.unlink()
    crew.settle = 2
    crew.start(2)
    assert crew.completed().step == 30
    assert set(crew.printed()) <= set(lines)
    assert out.read_bytes() == weights  # what was done twice was done alike
    assert newest >= 8
    assert [(back.from_step, back.to_step) for back in crew.of(Rewound)] == [(step, newest)]


def test_a_lone_worker_that_sums_would_hold_up_goes_back_to_the_newest_state(
    crew: Crew, tmp_path: Path
) -> None:
    """Over a slow network a step would wait for longer than it takes; what is done twice is done alike."""
    script = tmp_path / "wide.py"
    script.write_text(DEEP.read_text().replace("width: int = 16", "width: int = 160"))
    out, hold = tmp_path / "out.pt", tmp_path / "out.pt.hold"
    lines, weights = played_alone(script, tmp_path / "alone" / "out.pt", "30")
    options = {"backup_every_steps": 6, "sums": "auto"}
    workers = crew.begin(1, script.read_text(), "30", str(out), **options)
    crew.keeper._jobs["job"].vault.sharding.keeper_bytes_s = 1e6
    sums_stay_away(crew)
    step, newest = held_behind(crew, hold, crew.step + 2, len(workers))
    crew.kill(*workers)
    hold.unlink()
    crew.start(1)
    assert crew.completed().step == 30
    assert set(crew.printed()) <= set(lines)
    assert out.read_bytes() == weights
    assert [(back.from_step, back.to_step) for back in crew.of(Rewound)] == [(step, newest)]


def test_who_is_alone_sends_them_again(crew: Crew, alone: tuple[list[str], bytes]) -> None:
    """When the last of three goes, the state that was asked for when it was alone is there, and all sums since."""
    with held_back(crew, STEPS - 2):
        first, second, last = begin(crew, 3, every=1000)
        crew.reach(8)
        crew.kill(first, second)
        until("the last one alone", lambda: [s.kept for s in crew.of(SumsKept)] == [False, True])
        held(crew, 8)
        crew.reach(min(crew.step + 3, STEPS - 2))
        crew.kill(last)
    crew.settle = 2
    crew.start(2)
    ends_alike(crew, alone, STEPS)


@pytest.mark.parametrize("when", ["boundary", "now"])
def test_a_newcomer_that_takes_over_and_dies_leaves_every_step_with_those_it_came_for(
    crew: Crew, alone: tuple[list[str], bytes], when: When
) -> None:
    """The layout is the newcomer's alone, between two steps or in the middle of one, and it is killed before it
    has the state: one of those that are left out, who have it, goes on, and no step is lost."""
    hold = crew.folder / "out.pt.hold"
    first, _ = begin(crew, 2, every=1000)
    dying = Fault(point="morph: state received", passing=1, kind="kill")
    plan = Plan(who="first", ledger=str(crew.folder / "ledger"), faults=(dying,))
    crew.reach(8)
    sums_stay_away(crew)
    crew.hold(hold, 20)
    (newcomer,) = crew.start(1, msgspec.json.encode(plan).decode())
    crew.let_in(hold, newcomer)
    only(crew, newcomer, when)
    hold.unlink()
    until("its death", lambda: crew.of(WorkerLost))
    only(crew, first)
    ends_alike(crew, alone, STEPS)
    assert crew.of(Rewound) == []
    assert [lost.worker for lost in crew.of(WorkerLost)] == [newcomer]


def test_a_checkpoint_that_is_asked_for_has_every_step(
    crew: Crew, alone: tuple[list[str], bytes]
) -> None:
    """Whoever closes the job behind it loses nothing either."""
    begin(crew, 2, every=1000)
    crew.reach(13)
    crew.keeper.write_checkpoint("job")
    (written,) = until("the checkpoint", lambda: crew.of(CheckpointWritten))
    assert written.step >= 13
    crew.reach(written.step + 3)
    committed = crew.close_job()
    begin(crew, 2)
    crew.reach(committed + 1)
    ends_alike(crew, alone, STEPS)


def test_a_checkpoint_that_is_asked_for_waits_as_long_as_it_takes(
    crew: Crew, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a step that takes longer than whoever asks is thought to need, and for another version that is being written."""
    monkeypatch.setattr(job, "WHOLE_S", 0.5)
    out, hold = tmp_path / "out.pt", tmp_path / "out.pt.hold"
    hold.write_text("8")
    options = {"backup_every_steps": 1000, "sums": "never"}
    crew.begin(2, DEEP.read_text(), "30", str(out), **options)
    crew.reach(8)
    sums_stay_away(crew)
    with crew.keeper._jobs["job"].vault._writing:
        crew.keeper.write_checkpoint("job")
        asked_s = time.monotonic()
        until("longer than that", lambda: time.monotonic() > asked_s + job.WHOLE_S)
        crew.hold(hold, 20)
        crew.reach(20)
        held(crew, 8)
    until("the checkpoint", lambda: [w for w in crew.of(CheckpointWritten) if w.step >= 20])
    hold.unlink()
    assert crew.completed().step == 30


def test_the_keeper_is_killed_and_those_who_are_left_go_on(
    mortal: Crew, alone: tuple[list[str], bytes]
) -> None:
    """And with one of them, again: the next keeper asks for a state, and nothing is lost meanwhile."""
    workers = begin(mortal, 3)
    mortal.reach(9)
    mortal.keeper.kill()
    mortal.keeper.start()
    mortal.reach(20)
    mortal.kill(workers[1])
    mortal.keeper.kill()
    mortal.keeper.start()
    ends_alike(mortal, alone, STEPS)


def test_a_keeper_that_was_restarted_says_whether_it_gets_them(mortal: Crew) -> None:
    """It does not know what the one before it has said. A job that begins gets them, and that is no news."""
    arguments = (str(STEPS), "0.008", str(mortal.folder / "out.pt"))
    mortal.begin(2, TOY.read_text(), *arguments, sums="auto")
    mortal.reach(8)
    mortal.keeper.kill()
    assert mortal.of(SumsKept) == []
    mortal.keeper.start()
    (said,) = until("what it gets", lambda: mortal.of(SumsKept))
    assert said.kept


def test_chains_that_keep_their_own_layers(crew: Crew, tmp_path: Path) -> None:
    """Two of each stage: one is lost, then both of a stage."""
    steps = 150  # two losses and two newcomers lie between the first and the last, on a busy machine too
    lines, weights = played_alone(DEEP, tmp_path / "alone" / "out.pt", str(steps))
    crew.depth, crew.owned = 2, True
    options = {"backup_every_steps": 5, "sums": "never"}
    out = tmp_path / "out.pt"
    workers = crew.begin(4, DEEP.read_text(), str(steps), str(out), **options)
    sums_stay_away(crew)
    crew.reach(crew.step + 4)
    crew.kill(workers[1])
    crew.start(1)
    until("them again", lambda: [s.kept for s in crew.of(SumsKept)][-2:] == [True, False])
    assert crew.of(Rewound) == []
    layout = crew.keeper._jobs["job"].roster.layout
    crew.kill(*(replica.workers[0] for replica in layout.replicas))
    crew.start(2)
    assert crew.completed().step == steps
    assert set(crew.printed()) <= set(lines)
    assert out.read_bytes() == weights
