"""What travels with a script is put where it belongs and nowhere else, and forgotten with the job."""

import importlib
import linecache
import runpy
import sys
from pathlib import Path

import msgspec
import pytest

from agent.errors import ParcelError
from agent.source.parcel import MARK, File, Parcel, at_home, pack, read, unpack

EMPTY = File(b"")


def raw(script: str, *paths: str) -> bytes:
    """What somebody else might send."""
    return MARK + msgspec.msgpack.encode(Parcel(script, dict.fromkeys((script, *paths), EMPTY)))


def test_what_is_packed_is_unpacked(tmp_path: Path) -> None:
    """Files in folders, whatever is in them."""
    files = {"a/train.py": File(b"1"), "a/b/c.bin": File(bytes(range(256))), "run": File(b"", True)}
    parcel = read(pack("a/train.py", files), "train.py")
    assert unpack(parcel, tmp_path).path == tmp_path / "a" / "train.py"
    found = {
        str(path.relative_to(tmp_path)): path for path in tmp_path.rglob("*") if path.is_file()
    }
    assert {path: file.read_bytes() for path, file in found.items()} == {
        path: file.data for path, file in files.items()
    }
    assert [path for path, file in found.items() if file.stat().st_mode & 0o100] == ["run"]


def test_a_script_alone_has_the_name_that_it_is_given(tmp_path: Path) -> None:
    """Its bytes are the payload."""
    assert unpack(read(b"print(1)\n", "train.py"), tmp_path).path.read_bytes() == b"print(1)\n"


@pytest.mark.parametrize(
    "path",
    ["../x", "/x", "a/../../x", "a//x", "./x", "a/", "", "..", "a\0b", "train.py/x"],
)
def test_a_path_leads_nowhere_but_down(path: str) -> None:
    """Neither packed, nor believed when it arrives."""
    with pytest.raises(ParcelError):
        pack("train.py", {"train.py": EMPTY, path: EMPTY})
    with pytest.raises(ParcelError):
        read(raw("train.py", path), "train.py")


@pytest.mark.parametrize(
    "payload",
    [MARK, MARK + b"\xc1", MARK + b"\x92\xa1a\x80", MARK + b"\x90", raw("train.py")[:-1]],
    ids=["nothing", "nonsense", "no script", "an empty list", "cut off"],
)
def test_what_makes_no_sense_is_refused(payload: bytes) -> None:
    """With an error of ours."""
    with pytest.raises(ParcelError):
        read(payload, "train.py")


def test_nothing_is_written_over_and_no_link_is_followed(tmp_path: Path) -> None:
    """Whoever has put a link into the folder first does not lead us out of it."""
    target, folder = tmp_path / "target", tmp_path / "folder"
    folder.mkdir()
    (folder / "train.py").symlink_to(target)
    with pytest.raises(FileExistsError):
        unpack(read(b"", "train.py"), folder)
    assert not target.exists()


def test_the_next_job_in_a_process_has_its_own_modules(tmp_path: Path) -> None:
    """Of two jobs whose files have the same names each sees its own; nothing of either is left behind."""
    before = list(sys.path), Path.cwd()
    for number in (1, 2):
        folder = tmp_path / str(number)
        folder.mkdir()
        files = {
            "train.py": File(
                b"import mine, mine_too.deep\nfrom pathlib import Path\nx = (mine.x, mine_too.deep.x, Path('data').read_text())\n"
            ),
            "mine.py": File(f"x = {number}\n".encode()),
            "mine_too/deep.py": File(f"x = {number}\n".encode()),
            "data": File(str(number).encode()),
        }
        script = unpack(read(pack("train.py", files), ""), folder)
        with at_home(folder, script):
            assert runpy.run_path(str(script.path))["x"] == (number, number, str(number))
            assert linecache.getline(str(folder / "mine.py"), 1) == f"x = {number}\n"
    assert (list(sys.path), Path.cwd()) == before
    assert not {"mine", "mine_too", "mine_too.deep"} & set(sys.modules)
    assert not [file for file in linecache.cache if file.startswith(str(tmp_path))]
    assert importlib.util.find_spec("mine") is None
