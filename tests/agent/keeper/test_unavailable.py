"""An object store that answers 503, over HTTP: at every request of a copy, and while a job is trained."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from backups import disk, same, saved
from crews import SECRET, Crew, Nursery, RedisProcess, played_alone, until
from s3_server import S3Server, s3_sink

from agent.keeper import keeper as keepers
from agent.keeper.keeper import Keeper, connect
from agent.keeper.storage import offsite
from agent.keeper.storage.offsite import Offsite, Storage
from agent.keeper.storage.recovery import OBJECT, Shelf, newest
from agent.keeper.storage.vault import Place
from agent.keeper.storage.versions import save
from agent.messages import CheckpointCopied, CheckpointWritten, CopyFailed, Report, Rewound
from agent.store.archive import Archive
from agent.store.places import objects
from agent.store.places.objects import Retries

TOY = Path(__file__).parents[1].joinpath("toy.py")
ENDLESS = 10**9


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retries that do not wait long."""
    monkeypatch.setattr(Retries, "pause_s", 0.001)
    monkeypatch.setattr(Retries, "pause_s_max", 0.002)
    monkeypatch.setattr(offsite, "PAUSE_S", 0.01)


def archive_in(server: S3Server) -> Archive:
    return Archive(s3_sink(server), "job")


def copied(folder: Path, prepare: Callable[[S3Server], None]) -> tuple[int, bool]:
    """A version on its way into a store that is in trouble: how many requests it took, and whether it was reported.

    In the end the whole version is there, and can be read.
    """
    said: list[Report] = []
    with S3Server() as server:
        prepare(server)
        copies = Offsite("job", disk(folder), lambda: archive_in(server), 0.0, said.append)
        copies.offer(save(disk(folder), 1, saved(4, redo=1)), 0, last=False)

        def of(kind: type) -> list[Report]:
            return [report for report in said if isinstance(report, kind)]

        until("the copy, or its failure", lambda: of(CheckpointCopied) or of(CopyFailed))
        server.refuse = 0
        until("the copy", lambda: of(CheckpointCopied))
        took = server.requests
        found = newest([Shelf(OBJECT, archive_in(server))], 4).saved
        assert same(found, saved(4))
        return took, bool(of(CopyFailed))


def test_a_store_answers_503_at_every_request_of_a_copy(tmp_path: Path) -> None:
    """A few times, and nobody hears of it; or until it is given up, which is reported, and tried again."""
    count, reported = copied(tmp_path, lambda _: None)
    assert not reported

    def refuse(server: S3Server, refuse: int, spare: int) -> None:
        server.refuse, server.spare = refuse, spare

    for spare in range(count):
        _, reported = copied(tmp_path, lambda s, n=spare: refuse(s, 3, n))
        assert not reported
        _, reported = copied(tmp_path, lambda s, n=spare: refuse(s, ENDLESS, n))
        assert reported


@pytest.mark.processes
def test_a_job_trains_on_while_its_store_answers_503(
    redis_process: RedisProcess,
    nursery: Nursery,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Steps are committed and versions written to the disk; when the store answers again, the newest is copied."""
    lines, weights = played_alone(TOY, tmp_path / "alone" / "out.pt", "60", "0")
    with S3Server() as server:
        monkeypatch.setattr(objects, "open_sink", lambda _: s3_sink(server))
        server.refuse = ENDLESS
        place = Place(
            checkpoints=tmp_path / "checkpoints", storage=Storage(url="s3://bucket", every_s=0.05)
        )
        keeper = Keeper(connect(redis_process.url), place, "127.0.0.1", SECRET)
        crew = Crew(redis_process, nursery, tmp_path, keeper)
        try:
            out = tmp_path / "out.pt"
            Path(f"{out}.hold").write_text("40")
            arguments = ("60", "0.004", str(out))
            crew.begin(2, TOY.read_text(), *arguments, checkpoint_every_s=0.1)
            failed = until("the failure", lambda: crew.of(CopyFailed))[0]
            assert "503" in failed.error
            assert "\n" not in failed.error
            crew.reach(40)
            assert crew.of(CheckpointWritten)
            assert crew.of(CheckpointCopied) == []
            server.refuse = 0
            until("a copy", lambda: crew.of(CheckpointCopied))
            Path(f"{out}.hold").unlink()
            assert crew.completed().step == 60
            until("the last copy", lambda: crew.of(CheckpointCopied)[-1].step == 60)
            assert set(crew.printed()) <= set(lines)
            assert out.read_bytes() == weights
            assert crew.of(Rewound) == []
        finally:
            crew.close()


@pytest.mark.processes
def test_the_last_copy_of_a_job_is_made_when_its_store_answers_again(
    redis_process: RedisProcess,
    nursery: Nursery,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No version comes behind it that could be copied instead; what failed is said once."""
    monkeypatch.setattr(keepers, "KEPT_S", 0.1)
    with S3Server() as server:
        monkeypatch.setattr(objects, "open_sink", lambda _: s3_sink(server))
        storage = Storage(url="s3://bucket", every_s=300.0)
        place = Place(checkpoints=tmp_path / "checkpoints", storage=storage)
        crew = Crew(
            redis_process,
            nursery,
            tmp_path,
            Keeper(connect(redis_process.url), place, "127.0.0.1", SECRET),
        )
        try:
            server.refuse = ENDLESS
            crew.begin(1, TOY.read_text(), "20", "0", str(tmp_path / "out.pt"))
            assert crew.completed().step == 20
            crew.keeper.close_job("job")
            until("the failure", lambda: crew.of(CopyFailed)[-1:] and not copying())
            server.refuse = 0
            until("the last copy", lambda: crew.of(CheckpointCopied))
            assert crew.of(CheckpointCopied)[-1].step == 20
            failed = [report.step for report in crew.of(CopyFailed)]
            assert len(set(failed)) == len(failed)
        finally:
            crew.close()


def copying() -> bool:
    return any(thread.name == "copy" for thread in threading.enumerate())
