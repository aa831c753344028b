"""The storage of a job's output: whole files, each step of a file once, and nothing outside its folder."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from somebody import as_somebody_else

from agent.errors import Misuse
from agent.output.catalog import MARKS_MAX, Shelf, listed
from agent.output.files import Bounds, place
from agent.protocol import OutputAsked, OutputSent, OutputTaken


def sent(path: str, data: bytes, how: Any = "whole", **more: Any) -> OutputSent:
    step = more.pop("step", 1)
    said = {"serial": step, "generation": 0, "since": step, "size": len(data), **more}
    return OutputSent(path=path, how=how, step=step, **said)


def take(shelf: Shelf, message: OutputSent, payload: bytes, worker: str = "w") -> OutputTaken:
    return shelf.take(worker, message, memoryview(payload))


def put(shelf: Shelf, path: str, data: bytes, how: Any = "whole", **more: Any) -> str:
    return take(shelf, sent(path, data, how, **more), data).state


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    return Shelf(tmp_path, Bounds())


def test_a_keeper_that_is_killed_in_the_middle_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path, Bounds())
    put(shelf, "a", b"12")
    assert take(shelf, sent("b", b"x" * 9), b"x" * 4).state == "more"
    with (tmp_path / "output" / "a").open("ab") as file:
        file.write(b"half a line")
    again = Shelf(tmp_path, Bounds())
    shelf.close()
    assert [path.name for path in (tmp_path / "output").iterdir()] == ["a"]
    assert (tmp_path / "output" / "a").read_bytes() == b"12"
    assert put(again, "a", b"3", "append", step=2) == "done"
    assert (tmp_path / "output" / "a").read_bytes() == b"123"


@pytest.mark.parametrize("data", [b"newest weights", b"new", b"weight2", b""])
def test_a_keeper_that_is_killed_before_it_lists_a_file_leaves_it_whole(
    tmp_path: Path, data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is in its place, and longer, shorter or as long as the one that the list says."""
    shelf = Shelf(tmp_path, Bounds())
    put(shelf, "best.pt", b"weight1")
    put(shelf, "other", b"other")
    with monkeypatch.context() as killed:
        killed.setattr(shelf, "_note", lambda _: os._exit(0))
        if not (child := os.fork()):
            put(shelf, "best.pt", data, step=2)
        os.waitpid(child, 0)
    again = Shelf(tmp_path, Bounds())
    assert (tmp_path / "output" / "best.pt").read_bytes() == data
    assert {file.path: file.size for file in again.files} == {"best.pt": len(data), "other": 5}
    assert put(again, "best.pt", b"+", "lines", step=3) == "done"
    assert (tmp_path / "output" / "best.pt").read_bytes() == data + b"+"


def test_a_file_that_somebody_else_has_changed_is_not_gone_on_with(
    shelf: Shelf, tmp_path: Path
) -> None:
    put(shelf, "a", b"12")
    again = Shelf(tmp_path, Bounds())
    (tmp_path / "output" / "a").write_bytes(b"xx")
    assert put(again, "a", b"3", "append", step=2) == "lacks"
    assert put(again, "a", b"123", step=2) == "done"
    assert (tmp_path / "output" / "a").read_bytes() == b"123"


@pytest.mark.parametrize("harm", [Path.unlink, lambda path: path.write_bytes(b"1")])
def test_a_file_that_goes_while_the_keeper_lives_is_not_gone_on_with(
    shelf: Shelf, tmp_path: Path, harm: Any
) -> None:
    put(shelf, "a", b"12")
    harm(tmp_path / "output" / "a")
    assert put(shelf, "a", b"3", "append", step=2) == "lacks"
    assert put(shelf, "a", b"123", step=2) == "done"
    assert (tmp_path / "output" / "a").read_bytes() == b"123"


def test_a_full_disk_is_not_filled_further(
    shelf: Shelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(shelf, "a", b"1")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    for step in range(2, 5):
        assert put(shelf, "a", b"2", "append", step=step) == "refused"
        assert put(shelf, "b", b"3", step=step) == "refused"
    assert {path.name for path in tmp_path.iterdir()} == {"output", "output.json"}


def test_what_can_only_be_read_is_kept_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a disk that has become read-only a keeper begins, and a worker gets its files."""
    monkeypatch.chdir(tmp_path)  # so that nobody need be let into the folders above
    put(Shelf(Path("job"), Bounds()), "a", b"12")
    (tmp_path / "job" / ".0123abcd.draft").touch()
    with (tmp_path / "job" / "output" / "a").open("ab") as file:
        file.write(b"half a line")
    for path in (tmp_path, *(tmp_path / "job").rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    with as_somebody_else():
        shelf = Shelf(Path("job"), Bounds())
        given, _ = shelf.give(OutputAsked(serial=1, step=1))
        _, piece = shelf.give(OutputAsked(serial=2, step=1, path="a"))
    assert [(file.path, file.size) for file in given.files] == [("a", 2)]
    assert piece == b"12"


def test_who_led_before_comes_too_late(shelf: Shelf, tmp_path: Path) -> None:
    put(shelf, "a", b"one")
    assert put(shelf, "a", b"two", step=2, generation=3) == "done"
    assert put(shelf, "a", b"late", step=3, generation=2) == "done"
    assert put(shelf, "a", b"", "gone", step=3, generation=2) == "done"
    assert (tmp_path / "output" / "a").read_bytes() == b"two"


def test_who_leads_next_fills_what_is_lacking(shelf: Shelf, tmp_path: Path) -> None:
    put(shelf, "a", b"0\n", "lines", step=0)
    put(shelf, "a", b"1\n", "append", step=1)
    had = take(shelf, sent("a", b"1\n2\n", "append", since=1, step=2, again=True), b"1\n2\n")
    assert (had.state, had.at) == ("has", 1)
    assert put(shelf, "a", b"2\n", "append", step=2, again=True) == "done"
    assert put(shelf, "a", b"header\n", "begun", step=2) == "done"
    assert (tmp_path / "output" / "a").read_bytes() == b"0\n1\n2\n"
    assert put(shelf, "b", b"x", "append", step=2) == "lacks"


def test_a_step_that_is_repeated_cuts_off_what_was_of_it(shelf: Shelf, tmp_path: Path) -> None:
    for step in range(5):
        put(shelf, "a", f"{step}\n".encode(), "append" if step else "lines", step=step)
    (file,) = shelf.files
    assert [(step, size) for step, size, _ in file.marks] == [(n, 2 * n + 2) for n in range(5)]
    assert put(shelf, "a", b"3\n", "append", step=3) == "done"
    assert put(shelf, "a", b"3\n", "append", step=3) == "done"  # its answer was lost
    assert put(shelf, "a", b"4\n", "lines", step=4) == "done"  # by a newcomer
    assert (tmp_path / "output" / "a").read_bytes() == b"0\n1\n2\n3\n4\n"


def test_a_job_that_goes_far_back_repeats_no_line(shelf: Shelf, tmp_path: Path) -> None:
    """It has lost its machines, and resumes from a checkpoint of hundreds of deliveries ago."""
    lines = [f"{step:04}\n".encode() for step in range(1200)]
    for step, line in enumerate(lines):
        put(shelf, "log", line, "lines" if not step else "append", step=step)
    assert len(listed(tmp_path)[0].marks) <= MARKS_MAX
    for step in (1190, 1000, 700, 10, 0):
        put(shelf, "log", lines[step], "lines", step=step, generation=1)
        for at in range(step + 1, 1200):
            put(shelf, "log", lines[at], "append", step=at, generation=1)
        found = (tmp_path / "output" / "log").read_bytes().splitlines(keepends=True)
        assert found == sorted({*found}), "none is there twice"
        assert len(lines) - len(found) <= (1200 - step) // 32
    assert found == lines


def test_pieces_are_put_together_in_order(shelf: Shelf, tmp_path: Path) -> None:
    whole = b"0123456789"
    assert take(shelf, sent("a", whole, at=3), whole[3:6]).state == "again"
    assert take(shelf, sent("a", whole), whole[:3]).at == 3
    assert take(shelf, sent("a", whole, at=3), whole[3:6], worker="another").state == "again"
    assert take(shelf, sent("a", whole, at=3), whole[3:6]).at == 6
    assert take(shelf, sent("a", whole, at=3), whole[3:6]).state == "again"
    assert take(shelf, sent("a", whole, at=6), whole[6:]).state == "done"
    assert (tmp_path / "output" / "a").read_bytes() == whole


def test_what_came_in_part_is_taken_back(shelf: Shelf, tmp_path: Path) -> None:
    put(shelf, "a", b"12")
    assert take(shelf, sent("a", b"3456", "append", step=2), b"34").state == "more"
    assert put(shelf, "b", b"x") == "done"
    assert (tmp_path / "output" / "a").read_bytes() == b"12"
    assert put(shelf, "a", b"3456", "append", step=2) == "done"
    assert (tmp_path / "output" / "a").read_bytes() == b"123456"


@pytest.mark.parametrize("path", [".0123abcd.draft/x", ".0123abcd.draft", "a/.0123abcd.draft"])
def test_a_name_like_that_of_a_draft_is_a_name(tmp_path: Path, path: str) -> None:
    """Also for the next keeper, which removes what the one before was writing."""
    put(Shelf(tmp_path, Bounds()), path, b"12")
    assert put(Shelf(tmp_path, Bounds()), path, b"3", "append", step=2) == "done"
    assert (tmp_path / "output" / path).read_bytes() == b"123"


def test_what_a_killed_keeper_was_writing_is_removed(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path, Bounds())
    assert take(shelf, sent("b/c", b"x" * 9), b"x" * 4).state == "more"
    assert put(Shelf(tmp_path, Bounds()), "a", b"1") == "done"
    files = sorted(path.name for path in tmp_path.rglob("*") if path.is_file())
    shelf.close()
    assert files == ["a", "output.json"]


@pytest.mark.parametrize(
    "path",
    ["../a", "/etc/a", "a/../../b", "", ".", "a//b", "a\nb", "a\\b", "x" * 241, "a/./b", "\0"],
)
def test_no_path_leads_out_of_the_folder(shelf: Shelf, tmp_path: Path, path: str) -> None:
    answer = take(shelf, sent(path, b"x"), b"x")
    assert answer.state == "refused"
    assert answer.why
    assert listed(tmp_path) == ()


def test_a_name_that_was_a_folder_is_that_of_a_file(shelf: Shelf, tmp_path: Path) -> None:
    """And the other way: whichever of the two is said first, the older one is gone."""
    for step, path in enumerate(("a", "a/b/c", "a/b", "a/b/c", "a"), 1):
        assert put(shelf, path, b"x", step=step) == "done"
        assert [file.path for file in shelf.files] == [path]
        found = [file for file in (tmp_path / "output").rglob("*") if file.is_file()]
        assert found == [tmp_path / "output" / path]
    assert put(shelf, "a/b/c", b"", "gone", step=5) == "done"
    assert [file.path for file in shelf.files] == ["a"]


def test_a_folder_with_the_files_of_others_stays(shelf: Shelf, tmp_path: Path) -> None:
    put(shelf, "a/b", b"x")
    (tmp_path / "output" / "a" / "notes.txt").write_text("a person's")
    assert "storage does not take it" in take(shelf, sent("a", b"x"), b"x").why


def test_an_empty_file_is_a_file(shelf: Shelf, tmp_path: Path) -> None:
    assert put(shelf, "a", b"") == "done"
    assert put(shelf, "a", b"x", "append", step=2) == "done"
    assert (tmp_path / "output" / "a").read_bytes() == b"x"


def test_a_list_that_cannot_be_read_is_no_list(tmp_path: Path) -> None:
    put(Shelf(tmp_path, Bounds()), "a", b"x")
    (tmp_path / "output.json").write_text("{")
    assert listed(tmp_path) == ()
    assert put(Shelf(tmp_path, Bounds()), "a", b"y") == "done"


def test_a_path_from_here_on_lies_in_the_folder(tmp_path: Path) -> None:
    """People write "./checkpoint/best.pt" as often as without the dot."""
    assert place(tmp_path, "./kept/best.pt", "save") == tmp_path / "kept" / "best.pt"
    with pytest.raises(Misuse, match=r"'./../x' cannot lie"):
        place(tmp_path, "./../x", "save")


def test_a_job_that_goes_back_is_whole_only_as_far_as_it_has_come_again(tmp_path: Path) -> None:
    """What it wrote in later steps is not what it writes there now."""
    shelf = Shelf(tmp_path, Bounds())
    put(shelf, "best.pt", b"3", step=3)
    shelf.mark(20)
    shelf.mark(3)
    for step, whole in ((3, True), (4, False)):
        given, _ = shelf.give(OutputAsked(serial=1, step=step))
        assert given.whole is whole
