"""A job of one worker proves its script in a second process on the same machine."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from crews import Crew, ends_alike, played_alone, until
from players import House, Player, straight

from agent.messages import WorkerFailed, WorkerReady
from agent.protocol import Dismissal, Failed, ProofWanted, Prove, Untried
from agent.worker.proof import second_process

# Its low priority leaves it a hundredth of a core beside eight busy processes.
LATEST_S = 500.0

PROVER = "a-proof"


@pytest.fixture
def house(tmp_path: Path) -> House:
    """One worker, some steps behind the beginning."""
    return begun(House(tmp_path, begins_with=1))


def begun(house: House, *others: str) -> House:
    for name in ("a", *others):
        house.joins(name)
    house.lay_out("a", when="now")
    house.settles()
    house.commits(6)
    return house


def wanted(house: House, name: str = "a") -> int:
    return len(heard(house.players[name], ProofWanted))


def heard(player: Player, kind: type) -> list[Any]:
    return [message for message, _ in player.line.came if isinstance(message, kind)]


def proves(house: House, twist: Callable[[str, int, int], int] | None = None) -> Player:
    """The second process comes to its loop, and answers what it is asked."""
    return house.joins(PROVER, twist or straight, prover=True)


def ends(house: House, why: str = "it ended", *, final: bool = False) -> None:
    if PROVER in house.players:
        house.dies(PROVER)
    house.players["a"].say(Untried(why=why, final=final))
    house.settles()


def test_the_only_worker_is_asked_for_a_second_process(house: House) -> None:
    """As soon as there is a step to prove, and once."""
    assert wanted(house) == 1
    house.commits(3)
    assert wanted(house) == 1


def test_a_prover_proves_and_is_dismissed(house: House) -> None:
    """Nobody else hears of it, and nothing is said."""
    prover = proves(house)
    (question,) = heard(prover, Prove)
    assert question.version >= 1 and prover.proved == 1
    until("the dismissal", lambda: heard(prover, Dismissal))
    ends(house)
    house.commits(3)
    assert house.ready == ["a"] and house.job.roster.members.keys() == {"a"}
    assert (wanted(house), house.failed, house.said.said) == (1, [], [])


def test_what_a_prover_does_otherwise_fails_the_job(house: House) -> None:
    """The manager, which knows of no prover, is told of the worker. Whatever it is: see `keeper/test_entrance.py`."""
    proves(house, lambda of, version, steps: steps - version if of == "loss" else 0)
    (failed,) = (one for one in house.said.reports if isinstance(one, WorkerFailed))
    assert (failed.worker, failed.kind) == ("a", "refused")
    assert f"is another on {PROVER} than on a" in failed.detail and "\n" not in failed.detail


def test_a_prover_that_dies_is_started_once_more(house: House) -> None:
    """Then the log says in one line that the script was not tried, and why; the job trains on."""
    ends(house)
    assert wanted(house) == 2 and not house.said.said
    ends(house, "it ended with status 9")
    (said,) = house.said.said
    assert "was not tried in a second process, because it ended with status 9" in said
    house.commits(3)
    assert wanted(house) == 2 and not house.failed


def test_what_a_script_says_in_a_second_process_is_the_reason(house: House) -> None:
    """A port that is taken is no fault of the script's."""
    for _ in range(2):
        prover = proves_nothing(house)
        prover.say(Failed(kind="exception", detail="Traceback\nOSError: port 80 is in use"))
        ends(house)
    (said,) = house.said.said
    assert "it failed there: OSError: port 80 is in use" in said
    assert not house.failed


def proves_nothing(house: House) -> Player:
    house.players[PROVER] = prover = Player(house, PROVER, straight, prover=True)
    prover.answers = False
    prover.come()
    return prover


def test_where_there_is_no_memory_nobody_is_asked_again(house: House) -> None:
    """One line says so."""
    ends(house, "this machine has 1.00 GB free, and it would take 2.00 GB", final=True)
    (said,) = house.said.said
    assert "this machine has 1.00 GB free" in said
    house.commits(3)
    assert wanted(house) == 1


@pytest.mark.parametrize(("order", "others"), [({}, ()), ({"begins_with": 1}, ("b",))])
def test_nobody_is_asked_where_it_is_not_needed(
    tmp_path: Path, order: dict[str, int], others: tuple[str, ...]
) -> None:
    """Neither by a keeper that was not told to, nor where another worker is there to join."""
    assert wanted(begun(House(tmp_path, **order), *others)) == 0


def test_a_second_process_is_not_started_without_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes as much as the first one has, twice over."""
    monkeypatch.setattr(second_process, "resident_bytes", lambda: 3_000_000_000)
    for free, says in ((5_000_000_000, "would take 6.00 GB"), (7_000_000_000, "")):
        monkeypatch.setattr(second_process, "_free_bytes", lambda free=free: free)
        why = second_process.lacking(torch.device("cpu"))
        assert says in why and bool(says) == bool(why)


SCRIPT = """
import pathlib, sys, time, torch
from orchestrator import Session
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
session = Session(model, optimizer, microbatches=2)
tried, mine = pathlib.Path(sys.argv[1]), 0
def loss_of(x):
    return model(x).square().mean() * (1 + 0.01 * FACTOR)
for step in session.steps(12):
    data = torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(step))
    while step >= 8 and not tried.exists():
        time.sleep(0.01)
    result = session.backward(loss_of, list(data))
    optimizer.step()
    optimizer.zero_grad()
    mine += 1
    print("step", step)
if session.leader:
    torch.save(model.state_dict(), sys.argv[2])
"""


@pytest.mark.processes
def test_a_good_script_is_tried_and_ends_as_alone(crew: Crew, tmp_path: Path) -> None:
    """Each line is printed once, and the manager hears of one worker."""
    tried, text = tmp_path / "tried", SCRIPT.replace("FACTOR", "0")
    (tmp_path / "train.py").write_text(text)
    tried.touch()
    alone = played_alone(tmp_path / "train.py", tmp_path / "alone" / "out.pt", str(tried))
    tried.unlink()
    crew.begin(1, text, str(tried), str(tmp_path / "out.pt"), begins_with=1)
    crew.reach(8)
    entrance = crew.keeper._jobs["job"]._entrance
    until("the trial", lambda: entrance.tried, LATEST_S)
    tried.touch()
    ends_alike(crew, alone, 12)
    assert {one.worker for one in crew.of(WorkerReady)} == {"w1"}


@pytest.mark.processes
def test_a_script_that_counts_fails_though_nobody_joins(crew: Crew, tmp_path: Path) -> None:
    """In its first steps."""
    text = SCRIPT.replace("FACTOR", "mine")
    crew.begin(1, text, str(tmp_path / "tried"), str(tmp_path / "out.pt"), begins_with=1)
    (failed,) = until("the refusal", lambda: crew.of(WorkerFailed), LATEST_S)
    assert (failed.worker, failed.kind) == ("w1", "refused")
    assert "the loss is another on w1-proof than on w1" in failed.detail
    assert crew.step <= 8
