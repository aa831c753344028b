"""States that workers write straight into the store: what a loss of everything costs then, and what is left over."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from crews import SECRET, Crew, Nursery, RedisProcess, held_back, played_alone, until

from agent.keeper.keeper import Keeper, connect
from agent.keeper.storage import sharding
from agent.keeper.storage.offsite import Storage
from agent.keeper.storage.vault import Place, Vault
from agent.messages import BackupHeld, Rewound
from agent.store.encoding.format import PARTS

pytestmark = pytest.mark.processes

TOY, DEEP = (Path(__file__).with_name(name) for name in ("toy.py", "deep_toy.py"))
STEPS = 60


@pytest.fixture(autouse=True)
def costly(monkeypatch: pytest.MonkeyPatch) -> None:
    """A keeper that costs too much for the smallest state, before and after a step was timed."""
    for name in ("SMALL_STATE_BYTES", "LARGE_STATE_BYTES"):
        monkeypatch.setattr(sharding, name, 0)
    monkeypatch.setattr(sharding, "TOLL", 1e-4)


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


def orphans(crew: Crew) -> set[str]:
    """What no manifest names."""
    archive = Storage(url=(crew.folder / "elsewhere").as_uri(), every_s=0.5).archive("job")
    named = {part.key for mark in archive.marks() for part in archive.read(mark).parts}
    return archive.sink.sizes(PARTS).keys() - named


def test_all_are_killed_again_and_again(stored: Crew) -> None:
    """At random moments, with snapshots half written: the newest whole one is gone on from, to the same bits."""
    crew, dice = stored, random.Random(7)
    alone = played_alone(TOY, crew.folder / "alone" / "out.pt", str(STEPS), "0")
    with held_back(crew, STEPS - 2):
        workers = begin(crew, 2)
        for at in (8, 20, 32):
            held(crew, at)
            crew.reach(min(crew.step + dice.randint(1, 4), STEPS - 2))
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
    until("nothing left that nobody needs", lambda: not orphans(crew))


def test_the_keeper_goes_with_them(
    stored: Crew, redis_process: RedisProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next keeper finds the manifest in the store. Here not even the sums of single steps pass the keeper."""
    monkeypatch.setattr(sharding, "TOLL", 1e-9)
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


def test_damage_sends_the_job_back_to_the_snapshot_before(stored: Crew) -> None:
    """Those who read it find it out, and are lost; the next ones read the one before."""
    crew = stored
    alone = played_alone(TOY, crew.folder / "alone" / "out.pt", str(STEPS), "0")
    hold = crew.folder / "out.pt.hold"
    hold.write_text("24")
    workers = begin(crew, 2)
    crew.reach(24)
    held(crew, 12)
    crew.kill(*workers)
    until("nothing under way", lambda: not vault_of(crew).landing)
    newest = vault_of(crew).backup
    stored_at = newest.stored
    for part in stored_at.parts:
        path = Path(stored_at.place.removeprefix("file://")) / part.key
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    hold.unlink()
    crew.settle = 1
    crew.start(1)
    until("damage", lambda: any("is damaged" in line for line in crew.noted()))
    crew.start(2)
    ends(crew, alone)
    assert crew.of(Rewound)[-1].to_step < newest.version


def test_both_owners_of_a_stage_are_lost(stored: Crew) -> None:
    """Each worker writes and reads the layers of its own stage."""
    crew, steps = stored, 40
    out = crew.folder / "out.pt"
    lines, weights = played_alone(DEEP, crew.folder / "alone" / "out.pt", str(steps))
    crew.depth, crew.owned = 2, True
    options = {"sums": "auto", "max_replay_s": 0.3}
    with held_back(crew, steps - 2):
        crew.begin(2, DEEP.read_text(), str(steps), str(out), **options)
        held(crew, 12)
        crew.reach(min(crew.step + 2, steps - 2))
        layout, before = crew.keeper._jobs["job"].roster.layout, vault_of(crew).backup
        assert layout.owned
        assert before.stored is not None
        crew.kill(*layout.workers)
    crew.settle = 2
    crew.start(2)
    assert crew.completed().step == steps
    assert set(crew.printed()) <= set(lines)
    assert out.read_bytes() == weights
    assert all(back.to_step >= before.version for back in crew.of(Rewound))
