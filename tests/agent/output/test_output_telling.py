"""Numbers are told once per step; a file that is not there is explained; a model is saved whole."""

import math
import re
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from waiting import until

from agent.errors import Misuse
from agent.messages import ENTRIES_MAX, KEY_CHARS_MAX, VALUE_CHARS_MAX, Logged, StateSeen
from agent.output import sender
from agent.output.metrics import KEPT_STEPS
from agent.output.missing_file import hint, no_room
from agent.output.save import save
from agent.protocol import Numbers, OutputSent, ScriptValues
from cloud.ranges import flaw_in

Job = Any


def test_numbers_are_told_once_whoever_repeats_a_step(job: Job) -> None:
    """The one that leads next tells again what the one before it may not have told."""
    one, two = job.worker("one"), job.worker("two")
    one.begin(0)
    two.begin(0, leads=False)
    for step in range(6):
        one.cut = step == 5
        for worker in (one, two):
            worker.output.log(step, {"loss": step / 2})
            worker.output.log(step, {"lr": 0.1})
            worker.output.scan(step, leads=worker is one)
        one.output.tell_numbers()
    two.output.enter(6, leads=True, fresh=False)
    assert job.told.logged == [(step, {"loss": step / 2, "lr": 0.1}) for step in range(6)]
    assert job.told.newest(Logged).step == 5


def test_a_step_that_is_done_again_counts_as_it_was_done_last(job: Job) -> None:
    one = job.worker("one")
    one.begin(0)
    for step, value in [(0, 1.0), (1, 2.0), (1, 3.0)]:
        one.output.log(step, {"loss": value})
        one.output.scan(step, leads=True)
    one.output.tell_numbers()
    assert job.told.logged == [(0, {"loss": 1.0}), (1, {"loss": 2.0}), (1, {"loss": 3.0})]


def test_numbers_of_quick_steps_leave_together_with_a_heartbeat(job: Job) -> None:
    one = job.worker("one")
    one.begin(0)
    for step in range(5):
        one.step(step, lambda worker, step=step: worker.output.log(step, {"loss": float(step)}))
    assert not job.told.logged
    one.output.tell_numbers()
    one.output.tell_numbers()
    (sent,) = [each for each in one.sent if isinstance(each, Numbers)]
    assert sent.steps == tuple((step, {"loss": float(step)}) for step in range(5))


def test_numbers_wait_for_no_more_steps_than_another_worker_has(job: Job) -> None:
    """Else some were lost with the one that leads, if its steps are quicker than its heartbeats."""
    one, two = job.worker("one"), job.worker("two")
    one.begin(0)
    two.begin(0, leads=False)
    for step in range(3 * KEPT_STEPS):
        for worker in (one, two):
            worker.output.log(step, {"loss": float(step)})
            worker.output.scan(step, leads=worker is one)
    one.cut = True
    two.output.enter(3 * KEPT_STEPS, leads=True, fresh=False)
    assert [step for step, _ in job.told.logged] == [*range(3 * KEPT_STEPS)]


def test_another_keeper_is_told_what_the_one_before_may_not_have_kept(job: Job) -> None:
    one, two = job.worker("one"), job.worker("two")
    for worker in (one, two):
        worker.output.log(0, {"loss": 1.0})
        worker.output.scan(0, leads=worker is one)
        worker.cut = True
        worker.output.tell_numbers()
        worker.cut = False
        worker.output.tell_numbers(anew=True)
    assert job.told.logged == [(0, {"loss": 1.0})]
    assert not two.sent


def test_a_file_is_sent_again_to_another_keeper_at_once(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A snapshot waits for it, and has little time."""
    monkeypatch.setattr(sender, "ASK_AGAIN_S", 3600.0)
    worker = job.worker("w")
    worker.begin(0)
    worker.cut = True
    worker.step(0, lambda one: (one.folder / "a.txt").write_text("a"))
    until("it to be sent", lambda: any(isinstance(one, OutputSent) for one in worker.sent))
    worker.cut = False
    worker.output.tell_numbers(anew=True)
    worker.flush()
    assert job.text("a.txt") == "a"


def test_who_leads_no_more_tells_what_waits(job: Job) -> None:
    one = job.worker("one")
    one.step(0, lambda worker: worker.output.log(0, {"loss": 1.0}))
    one.output.enter(1, leads=False, fresh=False)
    assert job.told.logged == [(0, {"loss": 1.0})]


def test_what_is_logged_in_a_step_that_counts_for_nothing_is_not_told(job: Job) -> None:
    one = job.worker("one")
    one.begin(0)
    one.output.log(0, {"loss": 1.0})
    one.begin(3)
    one.output.log(3, {"other": 1.0})
    one.output.scan(3, leads=True)
    one.output.tell_numbers()
    assert job.told.logged == [(3, {"other": 1.0})]


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (1, 1.0),
        (True, 1.0),
        (torch.tensor(2.5), 2.5),
        (torch.tensor([3]), 3.0),
        (np.float32(0.5), 0.5),
        (np.int64(4), 4.0),
        (np.array([5.0]), 5.0),
        (10**400, math.inf),
        (-math.inf, -math.inf),
    ],
)
def test_a_number_is_anybodys_number(job: Job, value: object, number: float) -> None:
    one = job.worker("one")
    one.begin(0)
    one.output.log(0, {"x": value})
    one.output.scan(0, leads=True)
    one.output.tell_numbers()
    assert job.told.logged == [(0, {"x": number})]
    assert job.told.newest(Logged).numbers == {"x": number if math.isfinite(number) else None}


def test_what_a_script_keeps_is_told_in_words_when_it_has_changed(job: Job) -> None:
    """The leader tells it; the next leader tells it again; the last values are told in any case."""
    one, two = job.worker("one"), job.worker("two")
    one.begin(0)
    two.begin(0, leads=False)
    state = {"best": 0.25, 3: [1, 2], "rates": torch.zeros(2, 3), "rows": np.zeros(4)}
    for worker in (one, two):
        worker.output.tell(0, state)
        worker.output.tell(0, state, last=True)
    (said,) = [report for report in job.told.reports if isinstance(report, StateSeen)]
    assert (said.step, said.count) == (0, 4)
    assert said.entries == (
        ("best", "0.25"),
        ("3", "[1, 2]"),
        ("rates", "tensor 2x3, float32"),
        ("rows", "array 4, float64"),
    )
    state["best"] = 0.125
    one.output.tell(1, state, last=True)
    assert job.told.newest(StateSeen).entries[0] == ("best", "0.125")
    two.output.enter(2, leads=True, fresh=False)
    two.output.tell(2, state)
    assert job.told.newest(StateSeen).step == 2


def test_what_is_no_text_is_told_all_the_same(job: Job) -> None:
    """A name that the system gave, with bytes that are none of UTF-8; it is saved as well."""

    class Odd:
        def __repr__(self) -> str:
            return "caf\udce9"

    one = job.worker("one")
    one.begin(0)
    one.output.tell(0, {"caf\udce9": 1, "odd": Odd()})
    said = job.told.newest(StateSeen).entries
    assert said == (("caf\\udce9", "1"), ("odd", "caf\\udce9"))


def test_what_a_script_keeps_is_bounded_and_cannot_harm(job: Job) -> None:
    """Whatever it is, and whoever sends it: few entries, short, and without controls."""
    one = job.worker("one")
    one.begin(0)
    deep: list[Any] = []
    deep.append(deep)
    state = {
        "\x1b[2J\x1b]0;x\x07<b>": "\x1b[31mred\u202e",
        "long": "x" * 100_000,
        "large": 10**10_000,
        "deep": deep,
        **{f"{at}-{'n' * 200}": at for at in range(50)},
    }
    one.output.tell(0, state)
    said = job.told.newest(StateSeen)
    assert (len(said.entries), said.count) == (ENTRIES_MAX, 54)
    assert all(
        len(name) <= KEY_CHARS_MAX and len(value) <= VALUE_CHARS_MAX for name, value in said.entries
    )
    assert all((name + value).isprintable() for name, value in said.entries)
    assert said.entries[0][0].endswith("<b>")
    assert said.entries[2][1] == "a number of 33,220 bits"
    for entries in (((("n" * 41), ""),), (("n", "v" * 121),), (("n", "v"),) * (ENTRIES_MAX + 1)):
        sent = ScriptValues(step=0, entries=entries, count=1)
        assert flaw_in(sent, ScriptValues)


@pytest.mark.parametrize("value", ["0.1", None, torch.zeros(2), np.zeros((2, 2)), [1.0], 1j])
def test_what_is_no_number_is_refused_with_its_name(job: Job, value: object) -> None:
    with pytest.raises(
        Misuse, match=r"session.log\(accuracy=...\): one number is expected in step 7"
    ) as error:
        job.worker("one").output.log(7, {"accuracy": value})
    assert "\n" not in str(error.value)


def test_too_many_names_are_refused(job: Job) -> None:
    with pytest.raises(Misuse, match="101 names in step 0"):
        job.worker("one").output.log(0, {f"n{at}": at for at in range(101)})
    with pytest.raises(Misuse, match="is no name for a number"):
        job.worker("two").output.log(0, {"a\nb": 1})


def test_a_file_that_is_not_there_is_explained(tmp_path: Path) -> None:
    for name, words in [
        (
            "data/x.txt",
            "data/x.txt is not on this machine: .*`--with data/x.txt`.*wrote.*session.state",
        ),
        (
            "/home/somebody/x.txt",
            "/home/somebody/x.txt is not on this machine: .*`--with PATH`.*wrote.*session.state",
        ),
        (str(tmp_path / "metrics.csv"), "metrics.csv is not in session.output on this worker"),
    ]:
        with pytest.raises(FileNotFoundError) as caught, open(name):  # noqa: PTH123
            pass
        line = hint(caught.value, tmp_path)
        assert "\n" not in line
        assert re.search(words, line), line


def test_a_file_that_lies_beside_the_script_is_found_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It went along, and the script opens it as if it had been started in its own folder."""
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "x.txt").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["src/train.py"])
    with pytest.raises(FileNotFoundError) as caught, open("x.txt"):  # noqa: PTH123
        pass
    line = hint(caught.value, None)
    assert line.startswith("x.txt lies beside the script, at src/x.txt, ")
    assert "--with" not in line


def test_a_file_that_a_library_did_not_find_is_explained_as_well() -> None:
    def reads() -> None:
        try:
            open("settings.yaml")  # noqa: PTH123, SIM115
        except OSError as error:
            raise RuntimeError("no settings") from error

    with pytest.raises(RuntimeError) as caught:
        reads()
    assert hint(caught.value, None).startswith("settings.yaml is not on this machine")
    assert hint(PermissionError(13, "denied", "/data/x"), None).startswith("/data/x may not be")
    assert not hint(ValueError("of something else"), None)
    assert not hint(FileNotFoundError("without a name"), None)


def test_a_disk_that_is_full_is_named_whatever_a_library_says(tmp_path: Path) -> None:
    """torch.save says "unexpected pos" then. What says nothing of a disk may have another cause."""
    assert not no_room(ValueError("of something else"), tmp_path, "m1")
    line = no_room(RuntimeError("unexpected pos 576 vs 534"), Path("/proc"), "m1")
    assert line.startswith("the disk of m1 is full, /proc: ")
    assert line.endswith("; that may be the cause of RuntimeError: unexpected pos 576 vs 534")
    with pytest.raises(OSError, match="No space left") as caught, open("/dev/full", "w") as full:  # noqa: PTH123
        full.write("x" * 100_000)
    line = no_room(caught.value, tmp_path, "m1")
    assert line.startswith(f"the disk of m1 is full, {tmp_path}: ")
    assert line.endswith("(aws.disk_gib, azure.disk_gb)")


def test_a_module_that_is_not_there_is_explained() -> None:
    """By the name that is missing, which may be that of a package in which another one is."""
    with pytest.raises(ModuleNotFoundError) as caught:
        import_module("nowhere_at_all.deeper")
    line = hint(caught.value, None)
    assert line.startswith("nowhere_at_all is not on this machine")
    assert "`--with`" in line
    assert "install" in line
    assert not hint(ModuleNotFoundError("without a name"), None)


class Stub:
    """The part of a session that saving needs."""

    def __init__(self, folder: Path) -> None:
        self.output = folder
        self.objects = {"model": torch.nn.Linear(2, 1)}


def test_a_model_is_saved_whole(tmp_path: Path) -> None:
    session: Any = Stub(tmp_path)
    path = save(session, "deep/er/best.pt")
    assert path == tmp_path / "deep/er/best.pt"
    found = torch.load(path, weights_only=True)
    assert torch.equal(found["weight"], session.objects["model"].weight)
    save(session, "other.pt", {"step": 3})
    assert torch.load(tmp_path / "other.pt") == {"step": 3}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["deep", "other.pt"]


def test_what_cannot_be_saved_leaves_what_was_there(tmp_path: Path) -> None:
    session: Any = Stub(tmp_path)
    save(session, "x.pt", {"step": 3})
    with pytest.raises(Misuse, match=r"session.save\(path\): x.pt cannot be written"):
        save(session, "x.pt", lambda: None)
    assert torch.load(tmp_path / "x.pt") == {"step": 3}
    assert [p.name for p in tmp_path.iterdir()] == ["x.pt"]


@pytest.mark.parametrize("path", ["../x.pt", "/tmp/x.pt", "", "a/../../x", 3, "link/x.pt"])
def test_a_model_is_saved_nowhere_else(tmp_path: Path, path: Any) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "link").symlink_to(tmp_path)
    session: Any = Stub(tmp_path / "out")
    with pytest.raises(Misuse, match=r"session.save\(path\): "):
        save(session, path)
    assert not (tmp_path / "x.pt").exists()
