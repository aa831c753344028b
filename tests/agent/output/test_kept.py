"""A worker that comes later finds the files that the job has kept, as of its step, or none."""

import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from agent.keeper.output_files import Outputs
from agent.output import earlier, kept
from agent.output import folder as output_folder

Job = Any
Worker = Any


def writes(text: str, name: str = "best.pt") -> Any:
    return lambda worker: (worker.folder / name).write_text(text)


def strays(text: str, name: str = "best.pt") -> Any:
    return lambda worker: (worker.folder.parent / name).write_text(text)


def read(worker: Worker, name: str = "best.pt") -> str:
    return (worker.folder / name).read_text()


def nothing(worker: Worker) -> None:
    """Its step writes nothing."""


def saved(job: Job, steps: int, at: int, does: Any) -> Worker:
    """A worker that has done so many steps, and has saved the state with which step `at` begins."""
    one = job.worker("one")
    one.begin(0)
    for step in range(steps):
        if step == at:
            one.save(step)
        one.step(step, does(step))
    one.flush()
    return one


def test_files_come_as_of_the_state_that_a_worker_begins_with(job: Job) -> None:
    """They were replaced, deleted, made and prolonged since."""

    def does(step: int) -> Any:
        def one_step(worker: Worker) -> None:
            (worker.folder / "best.pt").write_text(f"{step}")
            with (worker.folder / "log.csv").open("a") as file:
                file.write(f"{step}\n")
            if step == 2:
                (worker.folder / "old.pt").write_text("old")
            if step == 5:
                (worker.folder / "old.pt").unlink()
                (worker.folder / "new.pt").write_text("new")

        return one_step

    saved(job, 8, 4, does)
    two = job.worker("two")
    two.begin(4)
    found = {path.name: path.read_text() for path in two.folder.iterdir()}
    assert found == {"best.pt": "3", "log.csv": "0\n1\n2\n3\n", "old.pt": "old"}
    for step in range(4, 8):
        two.step(step, does(step))
    two.end(8)
    assert job.text("log.csv") == "".join(f"{step}\n" for step in range(8))
    assert sorted(job.names()) == ["best.pt", "log.csv", "new.pt"]


def test_the_next_keeper_has_the_earlier_files_as_well(job: Job) -> None:
    saved(job, 6, 3, lambda step: writes(f"{step}"))
    job.outputs.close(10.0)
    job.open()
    two = job.worker("two")
    two.begin(3)
    assert read(two) == "2"


def test_files_of_another_step_are_not_put_there(job: Job) -> None:
    """Nobody has said that all of that step is stored, as if its last worker had died before."""
    saved(job, 6, 3, lambda step: writes(f"{step}"))
    two = job.worker("two")
    two.begin(6)
    assert not list(two.folder.iterdir())


def test_a_worker_that_joins_waits_for_what_the_leader_has_not_sent(job: Job) -> None:
    one, two = job.worker("one"), job.worker("two")
    one.begin(0)
    one.step(0, writes("x" * 100_000))
    one.generation = two.generation = 1
    one.output.enter(1, leads=True, fresh=False)
    two.begin(1, leads=False, beside=True)
    assert read(two) == "x" * 100_000


def test_a_file_of_the_working_folder_comes_there(job: Job) -> None:
    """Also in place of one that came with the script; what lies in both places stays one file."""
    saved(job, 6, 3, lambda step: strays(f"{step}", "deep.pt"))
    two = job.worker("two")
    (two.folder.parent / "deep.pt").write_text("came with the script")
    two.begin(3)
    assert (two.folder.parent / "deep.pt").read_text() == read(two, "deep.pt") == "2"
    two.step(3, strays("mine", "deep.pt"))
    assert read(two, "deep.pt") == "mine"


def test_a_file_of_the_output_folder_comes_only_there(job: Job) -> None:
    saved(job, 6, 3, lambda step: writes(f"{step}", "config.txt"))
    two = job.worker("two")
    (two.folder.parent / "config.txt").write_text("came with the script")
    two.begin(3)
    assert (two.folder.parent / "config.txt").read_text() == "came with the script"
    assert read(two, "config.txt") == "2"


def test_what_the_script_holds_open_is_left_to_it(job: Job) -> None:
    saved(job, 6, 3, lambda step: writes(f"{step}", "train.log"))
    two = job.worker("two")
    with (two.folder / "train.log").open("w") as held:
        two.begin(3)
        held.write("goes on")
    assert read(two, "train.log") == "goes on"


def test_no_file_is_written_through_a_link(job: Job, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()

    def makes(worker: Worker) -> None:
        (worker.folder / "data").mkdir(exist_ok=True)
        (worker.folder / "data" / "x.pt").write_text("x")

    saved(job, 2, 1, lambda _: makes)
    two = job.worker("two")
    (two.folder / "data").symlink_to(tmp_path / "elsewhere")
    two.begin(1)
    assert not list((tmp_path / "elsewhere").iterdir())


def test_a_file_that_the_job_has_deleted_since_the_proof_goes(job: Job) -> None:
    one = saved(job, 4, 2, lambda step: strays("x", "old.pt") if step < 2 else nothing)
    two = job.worker("two")
    two.begin(2, leads=False)
    assert read(two, "old.pt") == "x"
    one.step(4, lambda worker: (worker.folder.parent / "old.pt").unlink())
    one.step(16, nothing)
    one.save(17)
    two.begin(17, leads=False)
    assert not (two.folder / "old.pt").exists()
    assert not (two.folder.parent / "old.pt").exists()


def test_after_the_loop_every_worker_has_what_the_leader_wrote(job: Job) -> None:
    one, two = job.worker("one"), job.worker("two")
    one.begin(0)
    two.begin(0, leads=False)
    one.step(0, strays("best"))
    two.step(0, nothing, leads=False)
    one.leave(1, leads=True)
    two.leave(1, leads=False)
    two.output.gather(1)
    assert (two.folder.parent / "best.pt").read_text() == "best"


def test_after_the_loop_a_newer_file_that_was_not_kept_stays(small: Job) -> None:
    """As one that has become too large for the storage, which has it as it was before."""
    one = small.worker("one")
    one.begin(0)
    one.step(0, writes("small"))
    one.step(1, writes("x" * 2000))
    one.leave(2, leads=True)
    one.output.gather(2)
    assert read(one) == "x" * 2000


@pytest.mark.parametrize("answers", [True, False], ids=["damaged", "silent"])
def test_what_does_not_come_whole_is_left_out(
    job: Job, answers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The script goes on without it."""
    monkeypatch.setattr("agent.output.kept.ASK_AGAIN_S", 0.01)
    saved(job, 4, 2, lambda step: writes(f"{step}"))
    if answers:
        (job.home / "output" / "best.pt").write_text("?")
    two = job.worker("two")
    two.cut = not answers
    two.begin(4 if answers else 2)
    assert not list(two.folder.iterdir())


@contextmanager
def full() -> Iterator[None]:
    """Meanwhile no file takes a byte."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_file_comes_into_the_place_of_a_folder(job: Job) -> None:
    """In one step the name is that of a file, in the next that of a folder with a file."""

    def does(step: int) -> Any:
        def one_step(worker: Worker) -> None:
            at = worker.folder / "latest"
            if step % 2:
                at.unlink()
                at.mkdir()
                (at / "best.pt").write_text(f"{step}")
            else:
                shutil.rmtree(at, ignore_errors=True)
                at.write_text(f"{step}")

        return one_step

    one, two = job.worker("one"), job.worker("two")
    one.begin(0)
    for step in range(5):
        one.save(step)
        one.step(step, does(step))
    one.save(5)
    two.begin(3, leads=False)
    assert read(two, "latest") == "2"
    two.step(3, does(3), leads=False)
    two.begin(5, leads=False)
    assert read(two, "latest") == "4"
    assert not two.output.lacks


def test_what_the_storage_had_no_room_for_is_not_taken_for_stored(job: Job) -> None:
    """A worker that comes meanwhile gets none, and not an older file; with room again it gets this one."""
    one = saved(job, 2, 1, lambda step: writes(f"{step}"))
    one.step(2, writes("2"))
    one.step(3, nothing)
    (one.folder / "best.pt").write_text("4")
    with full():
        one.step(4, nothing)
        one.flush()
        one.save(5)
        one.flush()
    two = job.worker("two")
    two.begin(5)
    assert not list(two.folder.iterdir())
    one.save(5)
    three = job.worker("three")
    three.begin(5)
    assert read(three) == "4"


def test_what_is_kept_aside_is_bounded(small: Job) -> None:
    """By the states that a worker may begin with, and by bytes."""
    one = small.worker("one")
    one.begin(0)
    aside = small.home / earlier.FOLDER
    for step in range(12):
        one.save(step)
        one.step(step, writes(f"{step}" * 20))
    one.flush()
    kept = [path for path in aside.iterdir() if path.name != earlier.LIST]
    assert len(kept) == earlier.STATES_MAX
    for step in range(12, 15):
        one.save(step)
        one.step(step, writes(f"{step}" * 240))
    one.flush()
    sizes = [path.stat().st_size for path in aside.iterdir() if path.name != earlier.LIST]
    assert sum(sizes) <= small.bounds.total_bytes


def test_a_leftover_of_a_killed_keeper_goes(job: Job) -> None:
    saved(job, 6, 3, lambda step: writes(f"{step}"))
    job.outputs.close(10.0)
    (job.home / earlier.FOLDER / "left").write_text("?")
    job.open()
    assert isinstance(job.outputs, Outputs)
    two = job.worker("two")
    two.begin(3)
    assert not (job.home / earlier.FOLDER / "left").exists()


@pytest.mark.parametrize("first", [0, 3])
def test_what_a_worker_wrote_in_a_step_of_its_proof_goes(job: Job, first: int) -> None:
    """Else it would be there twice, once the worker does that step, or another one, for the job."""

    def does(step: int) -> Any:
        def logs(worker: Worker) -> None:
            for folder in (worker.folder, worker.folder.parent):
                with (folder / f"{folder.name == 'output'}.csv").open("a") as file:
                    file.write(f"{step}\n")
            (worker.folder.parent / "counter.txt").write_text(f"{step}")

        return logs

    saved(job, 6, first, lambda step: does(step) if step >= 3 else nothing)
    two = job.worker("two")
    (two.folder / "begun.txt").write_text("before the loop")
    (two.folder.parent / "counter.txt").write_text("came with the script")
    two.begin(first, leads=False)
    does(3)(two)  # it counts for nothing, and is not looked at
    two.begin(first)
    assert {path.name for path in two.folder.iterdir()} == {"begun.txt", "counter.txt"}
    assert (two.folder.parent / "counter.txt").exists()
    for step in range(first, 6):
        two.step(step, does(step) if step >= 3 else nothing)
    two.end(6)
    assert job.text("True.csv") == job.text("False.csv") == "3\n4\n5\n"


def test_what_a_worker_wrote_for_its_proof_is_not_sent_while_its_files_are_still_to_come(
    job: Job,
) -> None:
    """It leads at once, and first ends its epoch on the later state; its files come after that."""
    one = saved(job, 3, 2, lambda step: writes(f"{step}"))
    two = job.worker("two")
    two.begin(2)
    two.step(2, writes("2", "proof.pt"), leads=False)
    two.output.within = range(3)
    one.save(3)
    two.begin(3)
    writes("after the end of the epoch")(two)
    two.flush()
    assert job.names() == {"best.pt": 2}
    two.output.take_up()
    assert read(two) == "2"
    assert not (two.folder / "proof.pt").exists()
    two.step(3, writes("3"))
    two.flush()
    assert (job.text("best.pt"), job.names()) == ("3", {"best.pt": 3})


def test_what_a_worker_wrote_for_its_proof_goes_if_nothing_else_is_known(job: Job) -> None:
    """The leader was lost before it had said that all is stored."""
    two = job.worker("two")
    two.begin(3, leads=False)
    (two.folder / "log.csv").write_text("3\n")
    two.begin(3)
    assert not list(two.folder.iterdir())


def test_the_next_keeper_knows_that_nothing_was_written(job: Job) -> None:
    job.home.mkdir()  # as for its first checkpoint
    saved(job, 4, 3, lambda _: nothing)
    job.outputs.close(10.0)
    job.open()
    two = job.worker("two")
    two.begin(3, leads=False)
    two.step(3, strays("x"))
    two.begin(3, leads=False)
    assert not (two.folder.parent / "best.pt").exists()


def many(step: int) -> Any:
    """Too many files to look at them in each step."""

    def does(worker: Worker) -> None:
        for number in range(60 if step == 0 else 0):
            (worker.folder / f"{number}").write_text("x")
        (worker.folder / "best.pt").write_text(f"{step}")

    return does


def anew(step: int) -> Any:
    """As a library does that writes beside a file and renames."""

    def does(worker: Worker) -> None:
        draft = worker.folder.parent / "draft"
        draft.write_text(f"{step}")
        draft.replace(worker.folder.parent / "best.pt")
        for number in range(60 if step == 0 else 0):
            (worker.folder.parent / f"{number}").mkdir()

    return does


def in_place(step: int) -> Any:
    """A file that was there before the loop: its folder does not show that it is written to."""
    return strays(f"{step}")


@pytest.mark.parametrize("does", [many, anew, in_place])
@pytest.mark.parametrize("saved", [True, False])
def test_a_file_is_of_its_step_between_two_looks_as_well(
    job: Job, does: Any, saved: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look at the end of a step whose state is saved finds all; else nothing is said of it."""
    monkeypatch.setattr(
        output_folder, "SETTLE_S", 60.0
    )  # whatever else runs here, all comes to be stored
    one = job.worker("one")
    in_place("came with the script")(one)
    one.begin(0)
    for step in range(9):
        one.step(step, does(step), saved=saved)
        one.save(step + 1)
        two = job.worker(f"two{step}")
        in_place("came with the script")(two)
        two.begin(step + 1, leads=False)
        found = (two.folder if does is many else two.folder.parent) / "best.pt"
        text = found.read_text() if found.exists() else ""
        assert text == f"{step}" or (not saved and text in ("", "came with the script"))


def test_who_joins_between_two_looks_has_what_was_written(job: Job) -> None:
    one, two = job.worker("one"), job.worker("two")
    one.begin(0)
    for step in range(9):
        one.step(step, many(step))
    one.generation = two.generation = 1
    one.output.enter(9, leads=True, fresh=False)
    two.begin(9, leads=False, beside=True)
    assert read(two) == "8"


@pytest.mark.parametrize("how", ["anew", "prolonged"])
def test_a_file_that_has_become_too_large_does_not_come_as_it_was_before(
    small: Job, how: str
) -> None:
    """Also by the next keeper, until it is stored again; and as of before, as long as one may begin."""

    def prolongs(worker: Worker) -> None:
        with (worker.folder / "best.pt").open("w" if how == "anew" else "a") as file:
            file.write("x" * 2000)

    one = small.worker("one")
    one.begin(0)
    one.step(0, writes("small"))
    one.save(1)
    one.step(1, prolongs)
    one.save(2)
    two = small.worker("two")
    two.begin(2, leads=False)
    assert not (two.folder / "best.pt").exists()
    small.outputs.close(10.0)
    small.open()
    two.begin(2, leads=False)
    assert not (two.folder / "best.pt").exists()
    two.begin(1, leads=False)
    assert read(two) == "small"
    one.step(2, writes("small again"))
    one.save(3)
    two.begin(3, leads=False)
    assert read(two) == "small again"


def test_a_file_that_was_deleted_before_it_was_sent_is_of_no_step(job: Job) -> None:
    """The next step has deleted it, so it cannot come as it was between the two."""
    one = job.worker("one")
    one.begin(0)
    one.step(0, writes("0"))
    one.save(1)
    sending = one.output._sending
    assert sending is not None
    with sending._changed:
        one.step(1, writes("1"))
        (one.folder / "best.pt").unlink()
    one.save(2)
    two = job.worker("two")
    two.begin(2, leads=False)
    assert not (two.folder / "best.pt").exists()
    one.step(2, nothing)
    one.save(3)
    two.begin(3, leads=False)
    assert not (two.folder / "best.pt").exists()
    one.step(3, writes("3"))
    one.save(4)
    two.begin(4, leads=False)
    assert read(two) == "3"


def test_nothing_stays_in_the_place_of_what_does_not_come(job: Job) -> None:
    """What is there is of the step that the worker has proved; a link of the script's is its own."""
    one = saved(job, 2, 1, lambda step: writes(f"{step}"))
    two = job.worker("two")
    two.begin(1, leads=False)
    assert read(two) == "0"
    one.save(2)
    (job.home / "output" / "best.pt").write_text("?")
    two.begin(2, leads=False)
    assert not (two.folder / "best.pt").exists()
    (two.folder / "best.pt").symlink_to(one.folder / "best.pt")
    two.begin(2, leads=False)
    assert (two.folder / "best.pt").is_symlink()
    assert read(one) == "1"


def test_a_keeper_that_falls_silent_is_waited_for_once(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not with each of a thousand files; what is here already stays."""

    def does(worker: Worker) -> None:
        for number in range(8):
            (worker.folder / f"{number}.pt").write_text(f"{number}")

    monkeypatch.setattr(kept, "ASK_AGAIN_S", 0.01)
    saved(job, 2, 1, lambda _: does)
    two = job.worker("two")
    (two.folder / "7.pt").write_text("7")
    of_two, asked = two.output._kept, []
    assert of_two is not None
    answered = of_two._send
    of_two._send = lambda message: asked.append(message) if message.path else answered(message)
    two.begin(1)
    assert len(asked) == kept.ASKED_MAX
    assert [path.name for path in two.folder.iterdir()] == ["7.pt"]


def test_what_is_kept_aside_is_looked_through_once_for_a_state(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not with each file that is replaced, because there may be thousands."""
    swept, real = [], earlier.Earlier._sweep
    monkeypatch.setattr(earlier.Earlier, "_sweep", lambda self: swept.append(self) or real(self))

    def does(worker: Worker) -> None:
        for number in range(10):
            (worker.folder / f"{number}.pt").write_text("x")

    saved(job, 3, 1, lambda _: does)
    assert len(swept) == 2  # as the storage is opened, and with the state
