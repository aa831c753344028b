"""What a script writes is in its job's storage, whoever wrote it and whoever was lost."""

import mmap
import os
import random
import resource
import shutil
import subprocess
import sys
import threading
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from waiting import until

from agent.keeper.output_files import WAITING_MAX
from agent.messages import OutputKept
from agent.output import sender
from agent.output.files import draft_of
from agent.output.folder import Output
from agent.protocol import OutputSent

Job = Any
Worker = Any
LINES = 12


def appends(step: int) -> Any:
    def does(worker: Worker) -> None:
        with (worker.folder / "metrics.csv").open("a") as file:
            file.write(f"{step},{step * step}\n")

    return does


def both(step: int) -> Any:
    def does(worker: Worker) -> None:
        for name in ("headed.csv", "metrics.csv"):
            with (worker.folder / name).open("a") as file:
                file.write(f"{step}\n")

    return does


def nothing(worker: Worker) -> None:
    """It does not lead, and its script asks for that."""


def expected(steps: int) -> str:
    return "".join(f"{step},{step * step}\n" for step in range(steps))


def test_what_a_step_wrote_is_stored_with_its_step(job: Job) -> None:
    one = job.worker("one")
    one.begin(0)
    one.step(0, lambda w: (w.folder / "a.txt").write_text("first"))

    def second(worker: Worker) -> None:
        (worker.folder / "plots").mkdir()
        (worker.folder / "plots" / "b c.png").write_bytes(bytes(range(256)) * 10_000)

    one.step(1, second)
    one.end(2)
    assert job.text("a.txt") == "first"
    stored = (job.home / "output" / "plots" / "b c.png").read_bytes()
    assert stored == bytes(range(256)) * 10_000
    assert job.names() == {"a.txt": 0, "plots/b c.png": 1}
    kept = job.told.newest(OutputKept)
    assert (kept.files, kept.total_bytes) == (2, 5 + 2_560_000)


def test_a_file_that_grows_is_sent_by_what_it_has_grown(job: Job) -> None:
    one = job.worker("one")
    one.begin(0)
    for step in range(LINES):
        one.step(step, appends(step))
        one.flush()
    sent = [m for m in one.sent if type(m).__name__ == "OutputSent"]
    assert [(m.how, m.size) for m in sent[1:]] == [
        ("append", len(f"{step},{step * step}\n")) for step in range(1, LINES)
    ]
    assert job.text("metrics.csv") == expected(LINES)


def test_a_file_that_is_written_anew_takes_the_place_of_the_old(job: Job) -> None:
    one = job.worker("one")
    one.begin(0)
    for step in range(5):
        one.step(step, lambda w, s=step: (w.folder / "best.json").write_text(f"{s}"))
    one.end(5)
    assert job.text("best.json") == "4"


def test_a_file_of_the_same_size_and_time_is_seen_to_have_changed(job: Job) -> None:
    """Two writes within one tick of the file system's clock look alike."""
    one = job.worker("one")
    one.begin(0)
    one.step(0, lambda w: (w.folder / "x").write_text("a"))
    one.flush()
    before = (one.folder / "x").stat()

    def again(worker: Worker) -> None:
        with (worker.folder / "x").open("r+") as file:
            file.write("b")
        os.utime(worker.folder / "x", ns=(before.st_atime_ns, before.st_mtime_ns))

    one.step(1, again)
    one.end(2)
    assert job.text("x") == "b"


def test_what_a_script_deletes_is_deleted(job: Job) -> None:
    """Only the newest checkpoints stay, where a script keeps only those."""
    one = job.worker("one")
    one.begin(0)
    for step in range(5):

        def rotate(worker: Worker, step: int = step) -> None:
            (worker.folder / f"{step}.pt").write_text("w")
            if step >= 2:
                (worker.folder / f"{step - 2}.pt").unlink()

        one.step(step, rotate)
        one.flush()
    one.end(5)
    assert sorted(job.names()) == ["3.pt", "4.pt"]
    assert sorted(p.name for p in (job.home / "output").iterdir()) == ["3.pt", "4.pt"]


def test_who_leads_next_goes_on_where_the_file_was(job: Job) -> None:
    """Its own file may lack what others wrote; in the storage nothing of that is lost or twice there."""
    one, two = job.worker("one"), job.worker("two")
    one.begin(0)
    two.begin(0, leads=False)
    for step in range(6):
        one.step(step, appends(step))
        two.step(step, nothing, leads=False)
    one.flush()
    one.cut = True
    two.generation = 1
    for step in range(6, LINES):
        two.step(step, appends(step))
    two.end(LINES)
    assert job.text("metrics.csv") == expected(LINES)


def test_a_handle_that_is_kept_open_goes_on_at_the_end(job: Job) -> None:
    """As `open(path, "w")` before the loop, with a header: a newcomer opens it anew, and has the header only."""
    handles = {}

    def opens(worker: Worker) -> None:
        handles[worker.worker] = (worker.folder / "log.csv").open("w")
        handles[worker.worker].write("step\n")
        handles[worker.worker].flush()

    def writes(step: int) -> Any:
        def does(worker: Worker) -> None:
            handles[worker.worker].write(f"{step}\n")
            handles[worker.worker].flush()

        return does

    one, two = job.worker("one"), job.worker("two")
    opens(one)
    one.begin(0)
    for step in range(4):
        one.step(step, writes(step))
    one.flush()
    opens(two)
    two.begin(4, leads=False)
    one.step(4, writes(4))
    two.step(4, writes(4), leads=False)
    one.flush()
    one.cut = True
    two.generation = 1
    for step in range(5, 8):
        two.step(step, writes(step))
    two.end(8)
    for handle in handles.values():
        handle.close()
    assert job.text("log.csv").split() == ["step", *map(str, range(8))]


def test_a_job_that_goes_on_later_goes_on_with_its_files(job: Job) -> None:
    one = job.worker("one")
    one.begin(0)
    for step in range(4):
        one.step(step, appends(step))
    one.end(4)
    job.outputs.close(10.0)
    job.open()
    two = job.worker("two")
    two.generation = 3
    two.begin(4)
    for step in range(4, LINES):
        two.step(step, appends(step))
    two.end(LINES)
    assert job.text("metrics.csv") == expected(LINES)


def test_steps_that_are_done_again_write_their_lines_once(job: Job) -> None:
    """The state went back to an earlier step than the files."""
    one = job.worker("one")
    one.begin(0)
    for step in range(8):
        one.step(step, appends(step))
        one.flush()
    two = job.worker("two")
    two.generation = 1
    two.begin(5)
    for step in range(5, LINES):
        two.step(step, appends(step))
    two.end(LINES)
    assert job.text("metrics.csv") == expected(LINES)


def test_what_a_step_wrote_that_counts_for_nothing_begins_no_file(job: Job) -> None:
    """The first one is lost with what it wrote; the next one has done a step before it got its state."""
    worker = job.worker("two")
    (worker.folder / "headed.csv").write_text("step\n")
    worker.output.begin()
    for name in ("headed.csv", "metrics.csv"):
        with (worker.folder / name).open("a") as file:
            file.write("nan\n")
    (worker.folder / "nan.txt").write_text("nan")
    worker.output.forget()
    worker.begin(0)
    for step in range(2):
        worker.step(step, both(step))
    worker.end(2)
    assert job.text("headed.csv") == "step\n0\n1\n"
    assert job.text("metrics.csv") == "0\n1\n"
    assert "nan.txt" not in job.names()


def test_what_is_written_in_the_step_in_flight_is_there_once(job: Job) -> None:
    """The one that leads is lost in the middle of a step in which the others have written already."""
    one, two = job.worker("one"), job.worker("two")
    one.begin(0)
    two.begin(0, leads=False)
    for step in range(3):
        one.step(step, appends(step))
        two.step(step, appends(step), leads=False)
    one.flush()
    one.cut = True
    two.output.enter(3, leads=False, fresh=False)
    appends(3)(two)
    two.generation = 1
    two.output.enter(3, leads=True, fresh=False)
    two.output.scan(3, leads=True)
    two.end(4)
    assert job.text("metrics.csv") == expected(4)


def test_two_that_write_over_each_other_lose_no_line(job: Job) -> None:
    """The one that led before is not lost, and its last line comes when the next one has looked already."""
    one, two = job.worker("one"), job.worker("two")
    one.begin(0)
    two.begin(0, leads=False)
    for step in range(3):
        one.step(step, appends(step))
        one.flush()
        two.step(step, nothing, leads=False)
    two.output.enter(3, leads=False, fresh=False)
    one.output.enter(3, leads=True, fresh=False)
    appends(3)(one)
    two.output.scan(3, leads=False)
    two.generation = 1
    two.output.enter(4, leads=True, fresh=False)
    one.output.scan(3, leads=True)
    one.flush()
    appends(4)(two)
    two.output.scan(4, leads=True)
    two.end(5)
    assert job.text("metrics.csv") == expected(5)


def test_a_picture_of_another_worker_is_replaced_and_not_prolonged(job: Job) -> None:
    one, two = job.worker("one"), job.worker("two")
    one.begin(0)
    one.step(0, lambda w: (w.folder / "x.png").write_bytes(b"\x89PNG\0" + b"1" * 50))
    one.flush()
    two.begin(1, leads=False)
    two.step(1, lambda w: (w.folder / "x.png").write_bytes(b"\x89PNG\0" + b"22"), leads=False)
    two.generation = 1
    two.step(2, lambda w: (w.folder / "x.png").write_bytes(b"\x89PNG\0" + b"333"))
    two.end(3)
    assert (job.home / "output" / "x.png").read_bytes() == b"\x89PNG\0" + b"333"


def test_what_cannot_lie_in_the_folder_is_left_out_and_said(job: Job, tmp_path: Path) -> None:
    """A link that leads out of it, a pipe, a name that nobody can print."""
    secret = tmp_path / "secret"
    secret.write_text("not the script's")
    one = job.worker("one")
    one.begin(0)

    def does(worker: Worker) -> None:
        (worker.folder / "link").symlink_to(secret)
        (worker.folder / "folder").symlink_to(tmp_path)
        os.mkfifo(worker.folder / "pipe")
        (worker.folder / "a\nb").write_text("x")
        (worker.folder / "fine").write_text("x")

    one.step(0, does)
    one.end(1)
    assert job.names() == {"fine": 0}
    name, link = sorted(one.said, key=lambda line: "link" in line)
    assert name == "session.output: 'a\\nb': its name cannot be printed; it is not kept"
    assert link.endswith(": it is a link, and what it leads to may lie elsewhere; it is not kept")


def test_a_folder_that_cannot_be_read_is_no_empty_one(job: Job) -> None:
    """A script that has every file open that it may takes nothing out of the storage by that."""
    one, most = job.worker("one"), resource.getrlimit(resource.RLIMIT_NOFILE)
    one.begin(0)
    one.step(0, lambda w: (w.folder / "best.pt").write_text("w"))
    one.flush()
    with ExitStack() as held:

        def opens(worker: Worker) -> None:
            few = len([*Path("/dev/fd").iterdir()]) + 3
            resource.setrlimit(resource.RLIMIT_NOFILE, (few, most[1]))
            held.callback(resource.setrlimit, resource.RLIMIT_NOFILE, most)
            with suppress(OSError):
                while True:
                    held.enter_context(Path(os.devnull).open())

        one.step(1, opens)
    assert one.said == ["session.output: '.': it cannot be read now; it is not kept"]
    one.step(2, lambda w: (w.folder / "last.pt").write_text("w"))
    one.end(3)
    assert job.names() == {"best.pt": 0, "last.pt": 2}


def test_folders_in_folders_without_end_are_left_out_and_said(job: Job) -> None:
    """Names that are too long, and more folders than calls can be nested in Python."""
    one = job.worker("one")
    one.begin(0)

    def does(worker: Worker) -> None:
        (worker.folder / "fine").write_text("x")
        at = os.open(worker.folder, os.O_RDONLY)
        for _ in range(sys.getrecursionlimit() + 1):
            os.mkdir("d", dir_fd=at)
            at, before = os.open("d", os.O_RDONLY, dir_fd=at), at
            os.close(before)
        os.close(at)

    one.step(0, does)
    one.end(1)
    subprocess.run(["rm", "-r", one.folder / "d"], check=True)
    assert job.names() == {"fine": 0}
    (line,) = one.said
    assert line.endswith("d': its name is longer than 240 bytes; it is not kept")


def test_a_storage_that_was_removed_gets_what_is_still_written(job: Job) -> None:
    one = job.worker("one")
    one.begin(0)
    for step in range(LINES):
        if step == LINES // 2:
            shutil.rmtree(job.home)
        one.step(step, appends(step))
        one.flush()
    one.end(LINES)
    assert job.text("metrics.csv") == expected(LINES)


def test_what_is_too_much_is_refused_in_a_line_and_the_rest_is_kept(small: Job) -> None:
    one = small.worker("one")
    one.begin(0)
    one.step(0, lambda w: (w.folder / "a").write_text("x" * 600))
    one.flush()
    one.step(1, lambda w: (w.folder / "b").write_text("x" * 600))
    one.step(2, lambda w: (w.folder / "c").write_text("x" * 100))
    one.end(3)
    assert sorted(small.names()) == ["a", "c"]
    (line,) = small.told.said
    assert line.startswith("b of session.output is not kept: it has 600 bytes")
    assert "job.output_bytes" in line


@pytest.mark.parametrize("anew", [False, True])
def test_what_follows_a_refused_change_is_not_kept_without_it(small: Job, anew: bool) -> None:
    """A line that is too much, or a new content, and then a short line that would fit alone."""
    one = small.worker("one")
    one.begin(0)

    def adds(step: int, text: str, mode: str = "a") -> None:
        def does(worker: Worker) -> None:
            with (worker.folder / "log").open(mode) as file:
                file.write(text)

        one.step(step, does)
        one.flush()

    first = "0" * 900 + "\n"
    adds(0, first)
    adds(1, "1" * (1200 if anew else 200) + "\n", "w" if anew else "a")
    adds(2, "2\n")
    assert small.text("log") == first
    adds(3, "short\n", "w")
    adds(4, "4\n")
    one.end(5)
    assert small.text("log") == "short\n4\n"
    (line,) = small.told.said
    assert line.startswith("log of session.output is not kept: it has")


def test_what_was_refused_is_kept_if_there_is_room_at_the_end(small: Job) -> None:
    """As weights that come while the disk is full, and are not written again."""
    one = small.worker("one")
    one.begin(0)
    one.step(0, lambda w: (w.folder / "a").write_text("x" * 600))
    one.flush()
    one.step(1, lambda w: (w.folder / "best.pt").write_text("w" * 600))
    one.flush()
    assert small.names() == {"a": 0}
    one.step(2, lambda w: (w.folder / "a").unlink())
    one.flush()
    one.end(3)
    assert small.names() == {"best.pt": 1}
    assert small.text("best.pt") == "w" * 600


def test_what_is_written_through_a_mapping_is_stored_at_the_end(job: Job) -> None:
    """As `numpy.memmap` writes: the file keeps its size, and for half a minute its time."""
    one = job.worker("one")
    one.begin(0)
    (one.folder / "losses").write_bytes(bytes(3 * 4096))
    with (
        (one.folder / "losses").open("r+b") as file,
        mmap.mmap(file.fileno(), 0) as losses,
    ):
        for step in range(5):
            one.step(step, lambda _, step=step: losses.__setitem__(step, step + 1))
            one.flush()
        one.end(5)
    stored = (job.home / "output" / "losses").read_bytes()
    assert stored == bytes([1, 2, 3, 4, 5]) + bytes(3 * 4096 - 5)


def test_too_many_files_are_said_once(small: Job) -> None:
    one = small.worker("one")
    one.begin(0)
    for step in range(6):
        one.step(step, lambda w, s=step: (w.folder / f"{s}").write_text("x"))
    one.end(6)
    assert len(small.names()) == 3
    assert len(one.said) == 1


def test_a_file_too_many_takes_the_place_of_no_file_that_is_kept(small: Job) -> None:
    """A script writes one picture a step, and there come to be more than are kept."""
    one = small.worker("one")
    one.begin(0)
    for step in range(8):
        one.step(step, lambda w, s=step: (w.folder / f"{s}.png").write_text("x"))
        one.flush()
    assert small.names() == {"0.png": 0, "1.png": 1, "2.png": 2}
    one.step(8, lambda w: (w.folder / "1.png").unlink())
    one.end(9)
    assert len(small.names()) == 3
    assert "1.png" not in small.names()


def test_alone_the_folder_is_made_when_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    output = Output(Path("output"))
    output.enter(0, leads=True, fresh=True)
    assert not (tmp_path / "output").exists()
    assert output.folder == tmp_path / "output"
    (output.folder / "x").write_text("kept as it is")
    assert output.scan(0, leads=True) == []
    assert output.finish(1, leads=True)


def test_only_what_is_being_saved_is_passed_over(job: Job) -> None:
    """By what it is and not by its name, which a person may have chosen as well."""
    one = job.worker("one")
    one.begin(0)

    def writes(worker: Worker) -> None:
        (worker.folder / ".0123abcd.draft").write_text("kept")
        with draft_of(worker.folder / "best.pt") as draft:
            draft.write_text("half")
            one.output.scan(0, leads=True)
            draft.replace(worker.folder / "best.pt")

    one.step(1, writes)
    one.end(2)
    assert job.names() == {".0123abcd.draft": 0, "best.pt": 1}
    assert not [sent for sent in one.sent if getattr(sent, "how", "") == "gone"]


def beside(worker: Worker, path: str) -> Path:
    """A path in the script's working folder, in which the output folder lies."""
    home: Path = worker.folder.parent
    (home / path).parent.mkdir(parents=True, exist_ok=True)
    return home / path


def test_a_file_in_the_working_folder_is_kept_and_said_once(job: Job) -> None:
    one, two = job.worker("one"), job.worker("two")
    for worker in (one, two):
        beside(worker, "data/images.bin").write_text("fetched before the loop")
        worker.begin(0)
        worker.step(0, lambda w: (w.folder / "fine").write_text("x"))
        worker.step(1, lambda w: beside(w, "metrics.csv").write_text("x"))
        worker.step(2, lambda w: beside(w, "runs/a/more.csv").write_text("y"))
    one.end(3)
    (line,) = job.told.said
    assert line.startswith("metrics.csv was written to the script's working folder")
    assert job.names() == {"fine": 0, "metrics.csv": 1, "runs/a/more.csv": 2}
    assert (job.text("metrics.csv"), job.text("runs/a/more.csv")) == ("x", "y")


def test_what_becomes_of_a_file_in_the_working_folder_becomes_of_the_kept_one(job: Job) -> None:
    """It is written on, replaced by another, deleted, and made again, as a script does with checkpoints."""
    one = job.worker("one")
    one.begin(0)
    one.step(0, lambda w: [beside(w, f"{n}.pt").write_text(n) for n in ("on", "by", "rid", "rot")])

    def goes_on(worker: Worker) -> None:
        with beside(worker, "on.pt").open("a") as file:
            file.write(" and on")
        beside(worker, "draft").write_text("another")
        beside(worker, "draft").replace(beside(worker, "by.pt"))
        beside(worker, "rid.pt").unlink()
        beside(worker, "rot.pt").unlink()

    one.step(1, goes_on)
    one.step(2, lambda w: beside(w, "rot.pt").write_text("new"))
    one.end(3)
    assert job.names() == {"on.pt": 1, "by.pt": 1, "rot.pt": 2}
    assert [job.text(f"{name}.pt") for name in ("on", "by", "rot")] == [
        "on and on",
        "another",
        "new",
    ]


def test_a_file_of_the_output_folder_is_never_replaced_by_a_stray_one(job: Job) -> None:
    one = job.worker("one")
    one.begin(0)

    def both(worker: Worker) -> None:
        (worker.folder / "best.pt").write_text("kept")
        beside(worker, "best.pt").write_text("beside")

    one.step(0, both)
    one.step(1, lambda w: beside(w, "best.pt").unlink())
    one.end(2)
    assert job.text("best.pt") == "kept"


def test_a_log_that_was_opened_before_the_loop_is_kept_at_its_end(job: Job) -> None:
    one = job.worker("one")
    with beside(one, "log.txt").open("w") as file:
        (one.folder.parent / "untouched.txt").write_text("what the script has fetched")
        os.utime(one.folder.parent / "untouched.txt", ns=(2**62, 2**62))  # by no time of its own
        one.begin(0)
        one.step(0, nothing)
        one.step(1, lambda w: print("a line", file=file, flush=True))
    one.end(2)
    assert job.names() == {"log.txt": 2}


def test_a_folder_that_the_script_names_as_the_output_folder_is_kept(job: Job) -> None:
    """It never asks for session.output; its folder has that name by chance, as timm's has."""

    def writes(step: int) -> Any:
        def does(worker: Worker) -> None:
            folder = worker.home / "output"
            folder.mkdir(exist_ok=True)
            with (folder / "summary.csv").open("a") as file:
                file.write(f"{step}\n")
            (folder / f"{step}.pt").write_text("weights")

        return does

    one = job.worker("one")
    one.begin(0)
    one.step(0, writes(0))
    one.save(1)
    one.step(1, writes(1))
    one.flush()
    assert job.names() == {"summary.csv": 1, "0.pt": 0, "1.pt": 1}
    # For its proof another one does step 1 once more; then it begins at step 1, and has it to do.
    two = job.worker("two")
    two.begin(1)
    two.step(1, writes(1), leads=False)
    two.begin(1)
    found = {path.name: path.read_text() for path in (two.home / "output").iterdir()}
    assert found == {"summary.csv": "0\n", "0.pt": "weights"}


def test_a_file_that_cannot_be_linked_is_said(job: Job) -> None:
    """As where its folder has the name of a file in the output folder."""
    one = job.worker("one")
    one.begin(0)
    one.step(0, lambda w: (w.folder / "sub").write_text("a file"))
    one.step(1, lambda w: beside(w, "sub/a.txt").write_text("x"))
    one.end(2)
    (line,) = one.said
    assert line.startswith("session.output: 'sub/a.txt': ")
    assert job.text("sub") == "a file"


def test_a_stray_file_whose_name_is_no_text_is_said_and_fails_no_script(job: Job) -> None:
    """As one that comes out of an old archive."""
    worker = job.worker("a")
    worker.begin(0)
    worker.step(0, lambda w: (w.folder.parent / os.fsdecode(b"caf\xe9.csv")).write_text("x"))
    (line,) = job.told.said
    assert line.startswith("caf\\xe9.csv was written to the script's working folder")


@pytest.mark.parametrize("notes", [4, sender.NOTES_MAX])
@pytest.mark.parametrize("seed", range(12))
def test_any_history_of_losses_leaves_every_line_once(
    job: Job, seed: int, notes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers come and are lost at any moment, and what they wrote is stored late; everyone writes."""
    monkeypatch.setattr(sender, "NOTES_MAX", notes)
    dice, steps = random.Random(seed), 60
    crew = [job.worker("w0"), job.worker("w1")]
    for number, worker in enumerate(crew):
        worker.begin(0, leads=number == 0)
    serial = 2
    for step in range(steps):
        for number, worker in enumerate(crew):
            worker.step(step, appends(step), leads=number == 0)
        if dice.random() < 0.3:
            crew[0].flush()
        lost = dice.random() < 0.2 and len(crew) > 1
        comes = len(crew) - lost < 2 or dice.random() < 0.1
        if lost:
            crew.pop(0).cut = True
        if lost or comes:
            for number, worker in enumerate(crew):
                worker.generation += 1
                worker.output.enter(step + 1, leads=number == 0, fresh=False)
        if comes:
            crew.append(job.worker(f"w{serial}"))
            crew[-1].generation = crew[0].generation
            crew[-1].begin(step + 1, leads=False)
            serial += 1
    crew[0].end(steps)
    assert job.text("metrics.csv") == expected(steps)


@pytest.mark.parametrize("leader_lost", [False, True])
def test_more_steps_than_notes_leave_every_line_once(job: Job, leader_lost: bool) -> None:
    """The storage answers nothing for as long as hundreds of short steps take."""
    one, two = job.worker("one"), job.worker("two")
    one.begin(0)
    two.begin(0, leads=False)
    steps = 3 * sender.NOTES_MAX
    for step in range(steps):
        if step == 5:
            one.flush()
            one.cut = True
        one.step(step, appends(step))
        two.step(step, appends(step), leads=False)
    one.cut, two.generation = leader_lost, 1
    leader = two if leader_lost else one
    leader.step(steps, appends(steps))
    leader.end(steps + 1)
    assert job.text("metrics.csv") == expected(steps + 1)


@pytest.mark.parametrize("seed", range(2))
def test_many_files_are_looked_at_less_often_and_no_line_is_lost(job: Job, seed: int) -> None:
    """Behind the same steps everywhere, so that who leads next knows what the storage has."""
    dice, steps = random.Random(seed), 40

    def begins(worker: Worker) -> None:
        for number in range(250):
            (worker.folder / f"{number}.txt").write_text("always the same")
        appends(0)(worker)

    crew = [job.worker(f"w{number}") for number in range(4)]
    for number, worker in enumerate(crew):
        worker.begin(0, leads=number == 0)
        worker.step(0, begins, leads=number == 0)
    for step in range(1, steps):
        for number, worker in enumerate(crew):
            worker.step(step, appends(step), leads=number == 0)
        if dice.random() < 0.3:
            crew[0].flush()
        if dice.random() < 0.15 and len(crew) > 1:
            crew.pop(0).cut = True
            for worker in crew:
                worker.generation += 1
    assert crew[0].output.scan(steps, leads=True) == []  # it is no step of those
    crew[0].end(steps)
    assert job.text("metrics.csv") == expected(steps)
    assert len(job.names()) == 251


def test_a_file_that_is_changed_in_its_middle_and_grows_is_sent_whole(job: Job) -> None:
    """As a data base does, whose last bytes stay as they were."""
    one = job.worker("one")
    one.begin(0)
    pages = bytearray(b"\0page" * 4000)
    for step in range(4):

        def writes(worker: Worker, pages: bytes) -> None:
            at = worker.folder / "runs.db"
            with at.open("r+b" if at.exists() else "wb") as file:
                file.write(pages)

        pages[step] = 1
        pages += b"\0page" * 1000
        one.step(step, partial(writes, pages=bytes(pages)))
        one.flush()
    assert (job.home / "output" / "runs.db").read_bytes() == pages


def test_a_value_that_a_newcomer_writes_takes_the_place_of_the_old(job: Job) -> None:
    """It is no line, so nothing goes on with it."""
    one, two = job.worker("one"), job.worker("two")
    one.begin(0)
    one.step(0, lambda w: (w.folder / "best.json").write_text('{"loss": 2}'))
    one.flush()
    two.begin(1, leads=False)
    two.generation = 1
    two.step(1, lambda w: (w.folder / "best.json").write_text('{"loss": 1}'))
    two.end(2)
    assert job.text("best.json") == '{"loss": 1}'


def test_storage_that_cannot_be_changed_is_said_and_tried_again(job: Job) -> None:
    """What is in its way is removed by a person later, and nothing has to be started again."""
    in_the_way = job.home / "earlier"
    in_the_way.parent.mkdir()
    in_the_way.touch()
    one, two = job.worker("one"), job.worker("two")
    one.begin(0)
    one.step(0, appends(0))
    one.save(1)
    until("it to be said", lambda: bool(job.told.said))
    assert "session.output cannot be kept now" in job.told.said[0]
    in_the_way.unlink()
    one.step(1, appends(1))
    one.save(2)
    two.begin(2)
    assert (two.folder / "metrics.csv").read_text() == expected(2)
    assert len(job.told.said) == 1


def test_a_job_that_is_closed_and_opened_again_has_one_writer(job: Job) -> None:
    """The one from before still works through what had come, on a slow disk; two would forget each other's files."""

    class Slow:
        worker = "a"

        def __init__(self) -> None:
            self.goes_on = threading.Event()

        def post(self, message: Any, *payload: Any) -> None:
            assert self.goes_on.wait(20.0)

    def writers() -> list[threading.Thread]:
        return [each for each in threading.enumerate() if each.name == "output"]

    slow, earlier = Slow(), writers()
    for serial in range(WAITING_MAX + 2):
        sent = OutputSent(
            serial=serial, generation=0, path=f"{serial}", how="whole", since=0, step=0
        )
        job.outputs.hear(slow, sent, memoryview(b""))
        if serial == WAITING_MAX:
            job.outputs.close()
    assert len(writers()) == len(earlier) + 1
    slow.goes_on.set()


def test_a_job_that_is_closed_twice_and_opened_again_answers_at_once(job: Job) -> None:
    """As one that was resumed, and ended before it wrote anything."""

    class Told:
        worker = "a"

        def __init__(self) -> None:
            self.answered = threading.Event()

        def post(self, message: Any, *payload: Any) -> None:
            self.answered.set()

    for closings in (2, 1):
        told = Told()
        sent = OutputSent(serial=0, generation=0, path="p", how="whole", since=0, step=0)
        job.outputs.hear(told, sent, memoryview(b""))
        assert told.answered.wait(10.0)
        for _ in range(closings):
            job.outputs.close(10.0)
