"""The storage of a job's output: whole files, nobody's overwritten, and nothing outside its folder."""

from pathlib import Path

import pytest

from agent.messages import OutputFile
from agent.output.files import Bounds, Digest
from agent.output.shelf import Shelf, listed
from agent.protocol import OutputGone, OutputSent, OutputTaken


def digest(data: bytes) -> str:
    found = Digest()
    found.add(data)
    return found.text


def sent(
    path: str, data: bytes, *, before: bytes | None = None, kept: int = 0, **more: int
) -> OutputSent:
    file = OutputFile(path=path, size=len(data), step=more.get("step", 1), digest=digest(data))
    return OutputSent(
        generation=more.get("generation", 0),
        file=file,
        before="" if before is None else digest(before),
        kept=kept,
        at=more.get("at", kept),
    )


def take(shelf: Shelf, message: OutputSent, payload: bytes, worker: str = "w") -> OutputTaken:
    return shelf.take(worker, message, memoryview(payload))


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    return Shelf(tmp_path, Bounds())


def test_a_keeper_that_is_killed_in_the_middle_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path, Bounds())
    take(shelf, sent("a", b"12"), b"12")
    assert take(shelf, sent("b", b"x" * 9), b"x" * 4).state == "more"
    with (tmp_path / "output" / "a").open("ab") as file:
        file.write(b"half a line")
    again = Shelf(tmp_path, Bounds())
    shelf.close()
    assert [path.name for path in (tmp_path / "output").iterdir()] == ["a"]
    assert (tmp_path / "output" / "a").read_bytes() == b"12"
    assert take(again, sent("a", b"123", before=b"12", kept=2), b"3").state == "done"
    assert (tmp_path / "output" / "a").read_bytes() == b"123"


def test_a_file_that_somebody_else_has_changed_is_not_gone_on_with(
    shelf: Shelf, tmp_path: Path
) -> None:
    take(shelf, sent("a", b"12"), b"12")
    again = Shelf(tmp_path, Bounds())
    (tmp_path / "output" / "a").write_bytes(b"xx")
    assert take(again, sent("a", b"123", before=b"12", kept=2), b"3").state == "other"
    assert take(again, sent("a", b"123"), b"123").state == "done"


def test_nobody_overwrites_what_it_has_not_seen(shelf: Shelf, tmp_path: Path) -> None:
    take(shelf, sent("a", b"one"), b"one")
    assert take(shelf, sent("a", b"two"), b"two").state == "other"
    assert take(shelf, sent("a", b"two", before=b"one"), b"two").state == "done"
    assert take(shelf, sent("a", b"two", generation=3), b"two").state == "done"  # heard twice
    late = sent("a", b"late", before=b"two", generation=2)
    assert take(shelf, late, b"late").state == "other"
    gone = OutputGone(generation=4, file=sent("a", b"one").file)
    assert shelf.gone(gone).state == "other"
    assert (tmp_path / "output" / "a").read_bytes() == b"two"


def test_pieces_are_put_together_in_order(shelf: Shelf, tmp_path: Path) -> None:
    whole = b"0123456789"
    assert take(shelf, sent("a", whole, at=3), whole[3:6]).state == "again"
    assert take(shelf, sent("a", whole), whole[:3]).at == 3
    assert take(shelf, sent("a", whole, at=3), whole[3:6], worker="another").state == "again"
    assert take(shelf, sent("a", whole, at=3), whole[3:6]).at == 6
    assert take(shelf, sent("a", whole, at=3), whole[3:6]).state == "again"
    assert take(shelf, sent("a", whole, at=6), whole[6:]).state == "done"
    assert (tmp_path / "output" / "a").read_bytes() == whole


def test_what_is_not_what_was_announced_is_not_stored(shelf: Shelf, tmp_path: Path) -> None:
    take(shelf, sent("a", b"12"), b"12")
    assert take(shelf, sent("a", b"123", before=b"12", kept=2), b"4").state == "again"
    assert take(shelf, sent("a", b"abc", before=b"12"), b"abd").state == "again"
    assert (tmp_path / "output" / "a").read_bytes() == b"12"
    assert [path.name for path in (tmp_path / "output").iterdir()] == ["a"]


@pytest.mark.parametrize(
    "path",
    ["../a", "/etc/a", "a/../../b", "", ".", "a//b", "a\nb", "a\\b", "x" * 241, "a/./b", "\0"],
)
def test_no_path_leads_out_of_the_folder(shelf: Shelf, tmp_path: Path, path: str) -> None:
    answer = take(shelf, sent(path, b"x"), b"x")
    assert answer.state == "refused"
    assert answer.why
    assert listed(tmp_path) == ()


def test_a_name_that_is_a_folder_already_is_refused(shelf: Shelf) -> None:
    take(shelf, sent("a", b"x"), b"x")
    assert "storage does not take it" in take(shelf, sent("a/b", b"x"), b"x").why
    take(shelf, sent("c/d", b"x"), b"x")
    assert take(shelf, sent("c", b"x"), b"x").state == "refused"


def test_an_empty_file_is_a_file(shelf: Shelf, tmp_path: Path) -> None:
    assert take(shelf, sent("a", b""), b"").state == "done"
    assert take(shelf, sent("a", b"x", before=b""), b"x").state == "done"
    assert (tmp_path / "output" / "a").read_bytes() == b"x"


def test_a_file_that_grows_remembers_how_long_it_was(shelf: Shelf) -> None:
    data = b""
    for step in range(4):
        before, data = data, data + b"line\n"
        first = {} if not step else {"before": before, "kept": len(before)}
        take(shelf, sent("a", data, step=step, **first), b"line\n")  # type: ignore[arg-type]
    (file,) = shelf.files
    assert file.marks == ((0, 5), (1, 10), (2, 15), (3, 20))


def test_a_list_that_cannot_be_read_is_no_list(tmp_path: Path) -> None:
    take(Shelf(tmp_path, Bounds()), sent("a", b"x"), b"x")
    (tmp_path / "output.json").write_text("{")
    assert listed(tmp_path) == ()
    shelf = Shelf(tmp_path, Bounds())
    assert take(shelf, sent("a", b"y"), b"y").state == "done"
