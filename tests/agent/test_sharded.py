"""States that workers write straight into the store: what a loss of everything costs then, and what is left over."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from crews import SECRET, Crew, Nursery, RedisProcess, played_alone, until

from agent.keeper.keeper import Keeper, connect
from agent.keeper.storage import sharding
from agent.keeper.storage.offsite import Storage
from agent.keeper.storage.vault import Place, Vault
from agent.messages import BackupHeld, Rewound

pytestmark = pytest.mark.processes

TOY, DEEP = (Path(__file__).with_name(name) for name in ("toy.py", "deep_toy.py"))
STEPS = 60


@pytest.fixture(autouse=True)
def costly(monkeypatch: pytest.MonkeyPatch) -> None:
    """A keeper that costs too much for the smallest state, before and after a step was timed."""
    for name in ("SMALL_STATE_BYTES", "LARGE_STATE_BYTES"):
        monkeypatch.setattr(sharding, name, 0)
    monkeypatch.setattr(sharding, "TOLL", 1e-9)


@pytest.fixture
def stored(redis_process: RedisProcess, nursery: Nursery, tmp_path: Path) -> Iterator[Crew]:
    crew = Crew(redis_process, nursery, tmp_path, keeper_of(redis_process, tmp_path))
    yield crew
    crew.close()


def keeper_of(redis_process: RedisProcess, folder: Path) -> Keeper:
    storage = Storage(url=(folder / "elsewhere").as_uri(), every_s=0.5)
    place = Place(checkpoints=folder / "checkpoints", storage=storage)
    return Keeper(connect(redis_process.url), place, "127.0.0.1", SECRET)


def vault_of(crew: Crew) -> Vault:
    return crew.keeper._jobs["job"].vault


def begin(crew: Crew, count: int, **options: object) -> list[str]:
    arguments = (str(STEPS), "0.008", str(crew.folder / "out.pt"))
    options = {"sums": "auto", "max_replay_s": 0.4, **options}
    return crew.begin(count, TOY.read_text(), *arguments, **options)


def held(crew: Crew, step: int) -> None:
    until(f"a snapshot from {step} on", lambda: [b for b in crew.of(BackupHeld) if b.step >= step])


def ends(crew: Crew, alone: tuple[list[str], bytes]) -> None:
    """The job ends with the same bits, and what was done twice was done alike."""
    lines, weights = alone
    assert crew.completed().step == STEPS
    assert set(crew.printed()) <= set(lines)
    assert (crew.folder / "out.pt").read_bytes() == weights


def test_all_are_killed_again_and_again(stored: Crew) -> None:
    """At random moments, with snapshots half written: the newest whole one is gone on from, to the same bits."""
    crew, dice = stored, random.Random(7)
    alone = played_alone(TOY, crew.folder / "alone" / "out.pt", str(STEPS), "0")
    workers = begin(crew, 2)
    for at in (8, 20, 32):
        held(crew, at)
        crew.reach(crew.step + dice.randint(1, 4))
        newest = vault_of(crew)
        assert newest.backup.stored is not None, "it went through the keeper"
        assert not newest.backup.bodies
        crew.kill(*workers)
        crew.settle = 2
        workers = crew.start(2)
        crew.reach(at + 2)
    ends(crew, alone)
    for back in crew.of(Rewound):
        assert back.to_step > 0


def test_the_keeper_goes_with_them(stored: Crew, redis_process: RedisProcess) -> None:
    """The next keeper finds the manifest in the store. With the job nothing is left but its last state."""
    crew = stored
    alone = played_alone(TOY, crew.folder / "alone" / "out.pt", str(STEPS), "0")
    workers = begin(crew, 2)
    held(crew, 10)
    crew.kill(*workers)
    crew.keeper.close()
    crew.keeper = keeper_of(redis_process, crew.folder)
    crew.settle = 2
    crew.start(2)
    ends(crew, alone)
    (back, *_) = crew.of(Rewound)
    assert back.to_step >= 10
