"""What closed jobs leave behind is bounded by their number."""

from pathlib import Path

import pytest
from backups import disk, saved
from crews import RedisProcess

from agent.keeper.keeper import connect
from agent.keeper.storage import retention
from agent.keeper.storage.retention import note_closed, note_open
from agent.keeper.storage.versions import save

pytestmark = pytest.mark.processes


def test_the_jobs_that_were_closed_longest_ago_are_forgotten(
    redis_process: RedisProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their versions and keys go, their models stay; a job that was opened again is no old one."""
    monkeypatch.setattr(retention, "CLOSED_MAX", 2)
    client = connect(redis_process.url)
    for at, job in enumerate(["../d", "a", "b", "c", "b", "d"]):
        note_open(client, job)
        (tmp_path / "checkpoints").mkdir(exist_ok=True)
        save(disk(tmp_path / "checkpoints" / job), 1, saved(3))
        (tmp_path / "checkpoints" / job / "model.safetensors").write_bytes(b"weights")
        client.hset(f"orch:commit:{job}", "step", 3)
        note_closed(client, tmp_path / "checkpoints", job, float(at))
    left = {key.decode() for key in client.keys("orch:commit:*")}
    assert left == {"orch:commit:b", "orch:commit:d"}
    for job in ("a", "c"):
        folder = tmp_path / "checkpoints" / job
        assert [path.name for path in folder.iterdir()] == ["model.safetensors"]
    for folder in ("checkpoints/b", "checkpoints/d", "d"):  # and nothing outside the folder goes
        assert (tmp_path / folder / "manifests").is_dir()
    client.close()
