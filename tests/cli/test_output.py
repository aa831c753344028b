"""What a job's script has written and logged, from the command line."""

import csv
import math

import msgspec
import pytest

from agent.messages import Logged, OutputFile, OutputKept
from agent.output.catalog import Shelf
from agent.output.files import Bounds
from agent.protocol import OutputSent

pytestmark = pytest.mark.processes


def put(shell, job, path, data, step):
    """As a worker's file comes to be there."""
    shelf = Shelf(shell.places.checkpoints / job, Bounds())
    said = {"serial": 1, "generation": 0, "since": step, "step": step, "size": len(data)}
    sent = OutputSent(path=path, how="whole", **said)
    assert shelf.take("w", sent, memoryview(data)).state == "done"


@pytest.fixture
def submitted(housed):
    """A job that trains until it is cancelled, and is cancelled when the test is over."""
    housed.script("long.py", "x = 'wait'\n")
    job = housed("submit", "long.py", "--json").json["id"]
    yield job
    housed("cancel", job)


def test_files_are_listed_and_copied(housed, submitted, tmp_path):
    assert housed("output", submitted).out == f"{submitted} has written nothing to session.output\n"
    put(housed, submitted, "metrics.csv", b"0,1\n", 7)
    put(housed, submitted, "plots/a b.png", b"png" * 1000, -1)
    answer = housed("output", submitted)
    assert "metrics.csv" in answer.out
    assert "before" in answer.out
    assert housed("output", submitted, "--json").json["files"] == [
        {"path": "metrics.csv", "size_bytes": 4, "step": 7},
        {"path": "plots/a b.png", "size_bytes": 3000, "step": -1},
    ]
    (tmp_path / "metrics.csv").write_text("older")
    answer = housed("output", submitted, "--to", str(tmp_path))
    assert answer.out.startswith(f"2 files of {submitted}, 2.94 KiB, copied to ")
    assert (tmp_path / "metrics.csv").read_bytes() == b"0,1\n"
    assert (tmp_path / "plots" / "a b.png").read_bytes() == b"png" * 1000
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.csv", "plots"]


def test_a_file_that_is_not_as_it_is_said_to_be_is_not_copied(housed, submitted, tmp_path):
    put(housed, submitted, "a", b"whole", 1)
    stored = housed.places.checkpoints / submitted / "output" / "a"
    stored.write_bytes(b"whole, and half a line more")
    assert housed("output", submitted, "--to", str(tmp_path)).code == 0
    assert (tmp_path / "a").read_bytes() == b"whole"
    put(housed, submitted, "b", b"x", 1)
    stored.write_bytes(b"wh0le")
    other = tmp_path / "other"
    answer = housed("output", submitted, "--to", str(other))
    assert (answer.code, answer.line) == (
        1,
        "a: changes while it is copied, or is damaged or gone; try again in a moment. "
        f"All else is in {other}",
    )
    assert [path.name for path in other.iterdir()] == ["b"]
    (tmp_path / "file").touch()
    stored.write_bytes(b"whole")
    answer = housed("output", submitted, "--to", str(tmp_path / "file"))
    assert answer.line.startswith("--to: ")


def test_files_can_be_had_while_nothing_runs(shell, tmp_path):
    put(shell, "gone-1", "a", b"x", 1)
    assert shell("output", "gone-1", "--json").json["files"][0]["path"] == "a"
    for name in ("gone", "../checkpoints/gone-1", ""):
        assert shell("output", name).code == 3


def test_numbers_are_shown_by_step(housed, submitted):
    assert "has logged nothing" in housed("metrics", submitted).out
    store = housed.client()._redis
    rows = [
        (0, {"loss": 2.0}),
        (1, {"loss": math.inf, "acc": 0.5}),
        (1, {"loss": 1.0, "acc": 0.25}),
    ]
    for step, numbers in rows:
        said = {"step": step, "numbers": msgspec.msgpack.encode(numbers)}
        store.xadd(f"orch:metrics:{submitted}", said)
    found = list(csv.reader(housed("metrics", submitted, "--csv").out.splitlines()))
    assert found == [["step", "loss", "acc"], ["0", "2.0", ""], ["1", "1.0", "0.25"]]
    assert housed("metrics", submitted, "--json").json["steps"][1] == {
        "step": 1,
        "numbers": {"loss": 1.0, "acc": 0.25},
    }
    assert "0.25" in housed("metrics", submitted).out
    assert housed("metrics", submitted, "--csv", "--json").code == 2


def test_the_newest_are_in_the_status(housed, submitted, until):
    client = housed.client()
    file = OutputFile(path="a.png", size=3, step=4)
    client.post(Logged(at_s=0.0, job=submitted, step=4, numbers={"loss": 0.5, "x": None}))
    client.post(OutputKept(at_s=0.0, job=submitted, files=1, total_bytes=3, newest=(file,)))

    def shown():
        jobs = housed("status", "--json").json["jobs"]
        return next(job for job in jobs if job["id"] == submitted)

    until(lambda: shown()["output_files"] == 1)
    assert shown()["logged"] == {"loss": 0.5, "x": None}
    assert shown()["logged_step"] == 4
    assert shown()["output"][0]["path"] == "a.png"
