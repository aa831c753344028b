"""What goes along with a script: what it imports, what is named, and never silently what should not."""

import os
import subprocess
import sys
from contextlib import chdir
from pathlib import Path

import pytest

from agent.source.parcel import FILES_MAX, read, unpack
from orchestrator.cli.command import CommandError
from orchestrator.cli.pack import Packed, Start, _unreadable
from orchestrator.cli.pack import pack as pack_for
from orchestrator.config import Config

CONFIG = Config()


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A project with all that may lie about in one."""
    folder = tmp_path / "project"
    for path, text in {
        "train.py": "import json, os.path\nfrom model import Net\nimport torch\nimport nets.deep as deep\n",
        "model.py": "def make():\n    from utils.layers import Layer\n    try:\n        import maybe\n    except ImportError:\n        pass\n",
        "maybe.py": "import train\n",
        "unused.py": "",
        "alone.py": "print(1)\n",
        "utils/layers.py": "import torch.nn\n",  # no __init__.py: a package all the same
        "utils/__pycache__/layers.cpython-311.pyc": "",
        "nets/__init__.py": "",
        "nets/deep.py": "from . import shallow\nfrom ..nothing import x\nimport model\n",
        "nets/shallow.py": "",
        "nets/by_name.py": "old python:\n",  # whom nobody imports
        "nets/words.txt": "",
        "torch/readme.txt": "",  # no package, and an installed one has the name
        "conf/base.yaml": "a: 1",
        "conf/more/b.yaml": "",
        "conf/notes.md": "",
        "conf/server.pem": "",
        "conf/.env": "TOKEN=1",
        "conf/.git/config": "",
        "conf/venv/pyvenv.cfg": "",
        "conf/venv/lib/python3.11/os.py": "",
        ".env": "TOKEN=1",
        "prepare.sh": "#!/bin/sh\n",
    }.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    (folder / "prepare.sh").chmod(0o700)
    (folder / "conf" / "out").symlink_to("/etc/hostname")
    (folder / "conf" / "loop").symlink_to("..")
    (folder / "conf" / "same.yaml").symlink_to("base.yaml")
    return folder


IMPORTED = [
    "maybe.py",
    "model.py",
    "nets/__init__.py",
    "nets/by_name.py",
    "nets/deep.py",
    "nets/shallow.py",
    "utils/layers.py",
]


def pack(here: Path, script: str, *words: str, argv: tuple[str, ...] = ()) -> Packed:
    with chdir(here):
        return pack_for(Start(Path(script)), CONFIG, words, argv)


@pytest.mark.parametrize("link", ["latest.py", "runs/latest.py", "../latest.py"])
def test_what_a_linked_script_imports_goes_along(home, tmp_path, link):
    """By hand Python finds it beside the file that the link leads to, and so does a worker."""
    (home / "runs").mkdir()
    (home / "nets" / "train.py").write_text("from words import said\nprint(said)\n")
    (home / "nets" / "words.py").write_text("said = 'hello'\n")
    (home / link).symlink_to(home / "nets" / "train.py")
    by_hand = subprocess.run([sys.executable, home / link], capture_output=True, check=True)
    parcel = read(pack(home, link).payload, link)
    (tmp_path / "worker").mkdir()
    there = unpack(parcel, tmp_path / "worker").path
    at_work = subprocess.run([sys.executable, there], capture_output=True, check=True)
    assert at_work.stdout == by_hand.stdout == b"hello\n"


def test_a_package_behind_a_link_in_a_package_goes_along(home):
    """As of two projects that share one; data behind a link stays, and a circle ends."""
    (home / "shared").mkdir()
    for name in ("__init__.py", "blocks.py"):
        (home / "shared" / name).touch()
    (home / "nets" / "shared").symlink_to("../shared")
    (home / "nets" / "again").symlink_to("../nets")
    (home / "nets" / "data").symlink_to("../conf")
    (home / "conf" / "large.py").touch()
    sent = [path for path in pack(home, "train.py").files if path not in IMPORTED]
    assert sent == ["nets/shared/__init__.py", "nets/shared/blocks.py"]


def test_what_is_imported_goes_along(home):
    """Through other modules, in functions, within packages; nothing that is installed, and no data."""
    packed = pack(home, "train.py")
    assert list(packed.files) == IMPORTED
    assert packed.notes == ()
    (shown,) = packed.shown()
    assert shown.plain.startswith("goes along 7 files, ")
    assert shown.plain.endswith(
        ": maybe.py, model.py, nets/__init__.py, nets/by_name.py, nets/deep.py, "
        "nets/shallow.py, utils/layers.py"
    )


def test_a_script_alone_is_what_it_is(home):
    """Its bytes are the payload, as ever: it is found again by them."""
    (home / "start").write_text("#!/usr/bin/env python3\nprint(1)\n")
    for script, text in (
        ("alone.py", b"print(1)\n"),
        ("start", b"#!/usr/bin/env python3\nprint(1)\n"),
    ):
        packed = pack(home, script)
        assert (packed.payload, packed.files, packed.shown()) == (text, {}, [])


def test_a_worker_has_it_as_it_lies_here(home, tmp_path):
    """Below the folder where the command was typed; for a script elsewhere, below its own."""
    for here, script, expected in [
        (home, "train.py", "train.py"),
        (home.parent, "project/train.py", "project/train.py"),
        (home.parent, str(home / "train.py"), "project/train.py"),
        (home / "conf", "../train.py", "train.py"),
        (Path("/"), str(home / "train.py"), str(home / "train.py")[1:]),
    ]:
        parcel = read(pack(here, script).payload, "")
        assert parcel.script == expected
        prefix = expected.removesuffix("train.py")
        assert list(parcel.files) == sorted(f"{prefix}{path}" for path in ["train.py", *IMPORTED])


def test_the_same_files_are_the_same_bytes(home):
    """Whenever they were written and however they are named; one byte of a neighbour more is another job's."""
    one = pack(home, "train.py", "conf/base.yaml", "prepare.sh").payload
    for path in home.rglob("*"):
        os.utime(path, (0, 0), follow_symlinks=False)
    assert pack(home, "./train.py", "prepare.sh", "conf/../conf/base.yaml").payload == one
    (home / "utils" / "layers.py").write_text("import torch.nn \n")
    assert pack(home, "train.py", "conf/base.yaml", "prepare.sh").payload != one


def test_what_is_named_goes_along(home, tmp_path):
    """A file, a folder, a pattern as in a shell; a program stays one."""
    more = set(pack(home, "train.py", "conf/*.yaml", "prepare.sh", "nets").files) - set(IMPORTED)
    assert more == {"conf/base.yaml", "conf/same.yaml", "prepare.sh", "nets/words.txt"}
    deep = set(pack(home, "train.py", "conf/**/*.yaml").files) - set(IMPORTED)
    assert deep == {"conf/base.yaml", "conf/same.yaml", "conf/more/b.yaml"}
    folder = tmp_path / "there"
    folder.mkdir()
    unpack(read(pack(home, "train.py", "prepare.sh", "conf/same.yaml").payload, ""), folder)
    assert os.access(folder / "prepare.sh", os.X_OK)
    assert not os.access(folder / "train.py", os.X_OK)
    assert not (folder / "conf" / "same.yaml").is_symlink()
    assert (folder / "conf" / "same.yaml").read_text() == "a: 1"


def test_what_should_not_go_along_is_left_out_and_said(home):
    """Secrets, histories, installations, and links that lead out of what was named."""
    packed = pack(home, "train.py", "conf")
    assert set(packed.files) - set(IMPORTED) == {
        "conf/base.yaml",
        "conf/more/b.yaml",
        "conf/notes.md",
        "conf/same.yaml",
    }
    (note,) = packed.notes
    for name in ("conf/.git", "conf/.env", "conf/server.pem", "conf/venv", "conf/out", "conf/loop"):
        assert name in note
    assert packed.shown()[1].plain == note
    assert ".pem" in pack(home, "train.py", "conf/*").notes[0]


def test_a_secret_that_is_named_goes_along_and_is_said(home):
    """In so many words; a pattern that matches it does not name it."""
    packed = pack(home, "train.py", ".env")
    assert ".env" in packed.files
    assert packed.notes == ("sent, though it looks like a secret: .env",)
    (home / "credentials.py").write_text("")
    (home / "unused.py").write_text("import credentials")
    assert pack(home, "unused.py").notes == ("sent, though it looks like a secret: credentials.py",)
    packed = pack(home, "train.py", "*", ".e*")
    assert ".env" not in packed.files
    assert ".env" in packed.notes[0]


@pytest.mark.parametrize("pattern", ["*", "**/*", "./**", "conf/*", "conf/**/*", "../project/con*"])
def test_a_pattern_sends_no_more_than_the_folder_before_it_does(home, pattern):
    """Neither what is in a folder that would be left out, nor what lies behind a link."""
    (home / "conf" / "secrets").mkdir()
    (home / "conf" / "secrets" / "a.txt").write_text("TOKEN=1")
    (home / "conf" / "venv" / "a.txt").write_text("")
    sent = {path for path in pack(home, "train.py", pattern).files if path.startswith("conf/")}
    assert sent == {"conf/base.yaml", "conf/more/b.yaml", "conf/notes.md", "conf/same.yaml"}


def test_an_argument_that_is_a_file_here_and_stays_here_is_said(home):
    """As when a shell has made several words of a pattern."""
    words = ("conf/base.yaml", "conf/notes.md", "train.py", "no.yaml", "3")
    (note,) = pack(home, "train.py", "conf/base.yaml", argv=words).notes
    assert note.startswith("conf/notes.md is an argument of the script's and lies here")


@pytest.mark.parametrize("word", ["conf", "--data=conf", "data.path=conf/more"])
def test_a_folder_in_an_argument_that_stays_here_is_said(home, word):
    """The job would find nothing there, after machines have been bought for it."""
    place = word.rpartition("=")[2]
    (note,) = pack(home, "train.py", argv=(word, "--lr=3", "--steps", "10")).notes
    assert note.startswith(f"{place} is an argument") and note.endswith(f"--with {place}")
    notes = pack(home, "train.py", "conf", argv=(word,)).notes
    assert not any("is an argument" in note for note in notes)


def test_an_import_that_no_worker_has_is_said(home):
    """Not one that is guarded, beside the script, installed, or in a file that goes along."""
    (home / "lib").mkdir()
    (home / "lib" / "along.py").write_text("")
    (home / "lacks.py").write_text(
        "import sys, model, torch\ntry:\n    import guarded_one\nexcept ImportError:\n    pass\n"
        "def late():\n    import late_one\nsys.path.insert(0, 'lib')\nimport along\nfrom nowhere.deep import x\nimport nor_here\n"
    )
    (note,) = pack(home, "lacks.py", "lib").notes
    assert note.startswith("lacks.py imports what is neither beside it nor installed here")
    assert ": nowhere (line 10), nor_here (line 11); install" in note
    assert f"{sys.executable} -m pip install" in note


def test_a_folder_that_cannot_be_read_is_no_empty_folder(home):
    """Root reads everything, so it is a file in the place of one here, as in a race."""
    with pytest.raises(CommandError, match="cannot be read"):
        _unreadable(OSError(13, "Permission denied", "conf"))


def test_too_many_files_are_refused(home):
    """However small they are."""
    (home / "many").mkdir()
    for number in range(FILES_MAX):
        (home / "many" / str(number)).touch()
    with pytest.raises(CommandError, match=f"at most {FILES_MAX:,} with 33,554,432 can"):
        pack(home, "train.py", "many")
