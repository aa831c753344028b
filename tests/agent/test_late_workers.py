"""A late worker is helped within its step: others compute its microbatches, and no bit changes."""

from pathlib import Path

import msgspec
import pytest
from crews import Crew, ends_alike, played_alone
from injection import HELP, Fault, Plan

from agent.messages import Progress

pytestmark = pytest.mark.processes

TOY = Path(__file__).with_name("late_toy.py")
STEPS, PAUSE_S = 16, 0.01


def by_itself(folder: Path) -> tuple[list[str], bytes]:
    return played_alone(TOY, folder / "alone" / "out.pt", str(STEPS), "0")


def begin(crew: Crew, count: int, *late: int, faults: dict[int, str] | None = None) -> list[str]:
    """Start so many workers, of which those with these numbers are late from the first step on."""
    out = crew.folder / "out.pt"
    crew.settle = count
    crew.open(TOY.read_text(), str(STEPS), str(PAUSE_S), str(out))
    names = [crew.start(1, (faults or {}).get(number, ""))[0] for number in range(count)]
    pids = " ".join(str(crew.pids[names[number]]) for number in late)
    out.with_name("out.pt.late").write_text(pids)
    return names


def dying(crew: Crew, who: str, point: str, passing: int) -> str:
    fault = Fault(point=point, passing=passing, kind="kill")
    plan = Plan(who=who, ledger=str(crew.folder / "ledger"), faults=(fault,))
    return msgspec.json.encode(plan).decode()


def by_whom(crew: Crew) -> dict[tuple[int, int], set[int]]:
    """Who has computed each microbatch of each step."""
    found: dict[tuple[int, int], set[int]] = {}
    for line in (crew.folder / "out.pt.who").read_text().splitlines():
        step, microbatch, pid = map(int, line.split())
        found.setdefault((step, microbatch), set()).add(pid)
    return found


def share_of(crew: Crew, worker: str) -> range:
    """Its microbatches in a layout of three workers."""
    first = 4 * crew.ready.index(worker)
    return range(first, first + 4)


def test_microbatches_of_a_late_worker_are_computed_by_others(crew: Crew, tmp_path: Path) -> None:
    alone = by_itself(tmp_path)
    names = begin(crew, 3, 1)
    ends_alike(crew, alone, STEPS)
    late, share, found = crew.pids[names[1]], share_of(crew, names[1]), by_whom(crew)
    for step in range(5, STEPS):
        shared = [m for m in share if late not in found[step, m]]
        assert shared, f"step {step}: nobody has helped {late}: {found}"
        assert len(shared) < len(share), "it does the first one itself"
    said = crew.of(Progress)[-1]
    shares = {crew.pids[name]: share_of(crew, name) for name in names}
    given = [at for at, pids in found.items() if not any(at[1] in shares[pid] for pid in pids)]
    assert (said.given, said.computed) == (len(given), 12 * STEPS)


def test_two_late_workers_are_helped_by_the_third(crew: Crew, tmp_path: Path) -> None:
    alone = by_itself(tmp_path)
    names = begin(crew, 3, 0, 2)
    ends_alike(crew, alone, STEPS)
    found, quick = by_whom(crew), crew.pids[names[1]]
    helped = {m for (step, m), pids in found.items() if step > 5 and quick in pids}
    assert helped & {*share_of(crew, names[0])}
    assert helped & {*share_of(crew, names[2])}


@pytest.mark.parametrize("point", HELP)
def test_a_loss_in_the_middle_of_help_changes_no_bit(
    crew: Crew, tmp_path: Path, point: str
) -> None:
    """The late worker or its helper is killed there; another one takes its place."""
    alone = by_itself(tmp_path)
    number = 1 if point in ("help: asked", "help: answered") else 2
    names = begin(crew, 3, 1, faults={number: dying(crew, str(number), point, 4)})
    crew._until("a loss", lambda: names[number] not in crew.ready and len(crew.ready) >= 1)
    crew.start(1)
    ends_alike(crew, alone, STEPS)
