"""What closed jobs leave behind is bounded by their number."""

import threading
from pathlib import Path

import pytest
from backups import disk, saved
from crews import SECRET, RedisProcess

from agent.keeper.keeper import Keeper, connect
from agent.keeper.storage import retention
from agent.keeper.storage.retention import note_closed, note_open
from agent.keeper.storage.vault import Place
from agent.keeper.storage.versions import save
from agent.keys import CLOSED_JOBS, log_key, metrics_key
from agent.messages import JobOrder

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


def test_a_clock_that_was_set_back_makes_no_job_old(
    redis_process: RedisProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine has started again with a clock that is a year behind: the order of closing counts."""
    monkeypatch.setattr(retention, "CLOSED_MAX", 2)
    client = connect(redis_process.url)
    for at_s, job in ((2e9, "b"), (2e9, "a"), (1.9e9, "d"), (1.9e9, "c")):
        save(disk(tmp_path / job), 1, saved(3))
        note_closed(client, tmp_path, job, at_s)
        assert (tmp_path / job / "manifests").is_dir()
    assert sorted(folder.parent.name for folder in tmp_path.glob("*/manifests")) == ["c", "d"]
    client.close()


def test_lines_and_numbers_of_closed_jobs_take_so_much_memory_at_most(
    redis_process: RedisProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the jobs closed longest ago go, also from one that alone is over the bound once it is not the newest."""
    monkeypatch.setattr(retention, "SAID_BYTES_MAX", 300_000)
    client = connect(redis_process.url)

    def left_after_closing(job: str, lines: int) -> set[str]:
        for key in (log_key(job), metrics_key(job)):
            for _ in range(lines):
                client.xadd(key, {"line": b"x" * 1000})
        client.hset(f"orch:commit:{job}", "step", 3)
        note_closed(client, tmp_path, job, 0.0)
        return {
            key.decode() for key in (*client.keys("orch:log:*"), *client.keys("orch:metrics:*"))
        }

    assert left_after_closing("a", 50) == {log_key("a"), metrics_key("a")}
    assert left_after_closing("b", 50) == {log_key(x) for x in "ab"} | {
        metrics_key(x) for x in "ab"
    }
    assert left_after_closing("c", 400) == {log_key("c"), metrics_key("c")}
    assert left_after_closing("d", 1) == {log_key("d"), metrics_key("d")}
    assert len(client.keys("orch:commit:*")) == 4
    client.close()


def test_what_an_open_job_began_from_is_not_forgotten(
    redis_process: RedisProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may not have begun yet, or lose all of its own. Once it is closed as well, that is as old as it is."""
    monkeypatch.setattr(retention, "CLOSED_MAX", 1)
    client = connect(redis_process.url)
    keeper = Keeper(client, Place(checkpoints=tmp_path), "127.0.0.1", SECRET)

    def left_after_closing(job: str) -> list[str]:
        keeper.close_job(job)
        for thread in threading.enumerate():
            if thread.name == "close":
                thread.join()
        return sorted(folder.parent.name for folder in tmp_path.glob("*/manifests"))

    try:
        for at_s, (job, step) in enumerate((("a", "#3"), ("b", ""), ("c", ""))):
            save(disk(tmp_path / job), 1, saved(3))
            client.zadd(CLOSED_JOBS, {job: at_s})
            url = f"{(tmp_path / job).as_uri()}{step}" if job != "c" else ""
            order = JobOrder(job=f"of {job}", script="t.py", script_sha="", from_url=url)
            keeper.open_job(order, b"")
        assert left_after_closing("of c") == ["a", "b"]
        assert left_after_closing("of a") == ["b"]
        assert left_after_closing("of b") == []
    finally:
        keeper.close()
        client.close()
