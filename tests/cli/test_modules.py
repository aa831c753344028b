"""`submit -m package.module`, and modules of a person's own that lie elsewhere below the folder."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from agent.source.parcel import read, taken_names
from orchestrator.cli import imports
from orchestrator.cli.command import CommandError
from orchestrator.cli.pack import Packed, pack, start_of
from orchestrator.config import Config
from orchestrator.wishes import job_id

SAYS = "import sys\nprint(sys.argv[1:], __package__ or None, __name__, sizes)\n"
FILES = {
    "net/__init__.py": "from tools.layers import deep\n",
    "net/sizes.py": "sizes = 3\n",
    "net/train.py": "from . import deep\nfrom .sizes import sizes\n" + SAYS,
    "net/__main__.py": "from .sizes import sizes\n" + SAYS,
    "net/inner/fine.py": "from ..sizes import sizes\n" + SAYS,
    "tools/layers.py": "deep = 12\n",
    "src/lib/__init__.py": "",
    "src/lib/sizes.py": "from tools.layers import deep as sizes\n",
    "src/lib/train.py": "from .sizes import sizes\nfrom more import more\n" + SAYS,
    "src/more.py": "more = 1\n",
    "scripts/fit.py": "from lib.sizes import sizes\n" + SAYS,
    "flat.py": "from net.sizes import sizes\n" + SAYS,
    "plain.py": "sizes = 1\n" + SAYS,
    "twin.py": "sizes = 'the file'\n" + SAYS,
    "twin/__init__.py": "",
    "twin/__main__.py": "sizes = 'the package'\n" + SAYS,
    "my-own/fit.py": "from .part import sizes\n" + SAYS,
    "my-own/part.py": "sizes = 5\n",
    "split/fit.py": "from split.part import sizes\n" + SAYS,
    "src/split/part.py": "sizes = 6\n",
    "../far/__init__.py": "",
    "../far/fit.py": "from .part import sizes\n" + SAYS,
    "../far/part.py": "sizes = 7\n",
}
AS_A_WORKER = """
import sys
from pathlib import Path
from agent.source.parcel import at_home, read, unpack
payload, folder = Path(sys.argv[1]).read_bytes(), Path(sys.argv[2])
script = unpack(read(payload, "plain.py"), folder)
sys.argv = [str(script.path), "--lr", "1"]
with at_home(folder, script):
    script.run()
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with a package and a namespace package; it and its folder `src` are on PYTHONPATH."""
    folder = tmp_path / "project"
    for path, text in FILES.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    (folder / "linked").symlink_to(tmp_path / "far")
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.syspath_prepend(str(folder / "src"))
    return folder


def packed(script: str, *, as_module: bool = True) -> Packed:
    return pack(start_of(Path(script), as_module=as_module), Config())


@pytest.mark.parametrize(
    ("name", "as_module"),
    [
        ("net.train", True),
        ("net", True),
        ("net.inner.fine", True),
        ("lib.train", True),
        ("flat", True),
        ("plain", True),
        ("twin", True),
        ("my-own.fit", True),
        ("split.fit", True),
        ("split/fit.py", False),
        ("linked.fit", True),
        ("flat.py", False),
        ("scripts/fit.py", False),
    ],
)
def test_a_worker_runs_it_as_python_does_here(project, tmp_path, name, as_module):
    """From the files that are sent alone: a worker has no PYTHONPATH of the person's."""
    paths = os.pathsep.join([str(project / "src"), str(project)])
    words = [*(["-m"] if as_module else []), name, "--lr", "1"]
    by_hand = subprocess.run(
        [sys.executable, *words],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        check=True,
        text=True,
    )
    payload, there = tmp_path / "payload", tmp_path / "worker"
    payload.write_bytes(packed(name, as_module=as_module).payload)
    there.mkdir()
    at_work = subprocess.run(
        [sys.executable, "-c", AS_A_WORKER, str(payload), str(there)],
        cwd=Path(__file__).parents[2],
        env={key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
        capture_output=True,
        check=False,
        text=True,
    )
    assert (at_work.stdout, at_work.returncode) == (by_hand.stdout, 0), at_work.stderr
    assert "['--lr', '1']" in by_hand.stdout


def test_a_module_takes_the_packages_around_it_along(project):
    """Whole, because their __init__ runs before it; and nothing that it does not import."""
    files = ["net/__init__.py", "net/__main__.py", "net/inner/fine.py", "net/sizes.py"]
    assert list(packed("net.train").files) == [*files, "tools/layers.py"]


def test_a_job_of_a_package_has_its_name(project):
    """Each package has a `__main__`."""
    assert job_id(start_of(Path("net"), as_module=True).script).startswith("net-")
    assert job_id(start_of(Path("net.train"), as_module=True).script).startswith("train-")


def test_a_script_and_a_module_of_one_file_are_different_jobs(project):
    """What was measured of one says nothing about the other."""
    assert packed("flat").sha != packed("flat.py", as_module=False).sha


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nothing", "-m nothing: neither a module nor a package with __main__.py in "),
        ("net.nothing", "-m net.nothing: neither a module nor a package"),
        ("tools", "-m tools: neither a module nor a package with __main__.py"),
        ("net/train.py", "net.train would be one, or leave -m out"),
        ("train.py", "-m train.py: not the name of a module; train would be one"),
        ("os.path", "-m os.path: neither a module"),
        ("net..train", "-m net..train: not the name of a module, or leave -m out"),
    ],
)
def test_what_is_no_module_is_refused(project, name, said):
    """Before anything is sent, and with what to type."""
    with pytest.raises(CommandError, match=re.escape(said)):
        packed(name)


def test_a_module_that_lies_elsewhere_is_submitted_from_there(project, tmp_path, monkeypatch):
    """A worker has the files below this folder only."""
    other = tmp_path / "elsewhere"
    (other / "far").mkdir(parents=True)
    (other / "far" / "train.py").write_text("x = 1\n")
    monkeypatch.syspath_prepend(str(other))
    with pytest.raises(CommandError, match=f"-m far.train: lies in {other}; submit it from there"):
        packed("far.train")
    (project / "uses.py").write_text("import far.train\nprint(far.train.x)\n")
    (note,) = packed("uses.py", as_module=False).notes
    assert note.startswith(
        f"uses.py imports what lies on this machine only: far (line 1) from {other}"
    )


def test_a_script_that_imports_from_its_own_package_is_told_to_be_a_module(project):
    """Python would refuse it on the worker, after a machine was bought."""
    (note,) = packed("net/train.py", as_module=False).notes
    assert note.startswith("net/train.py imports from its own package (line 1)")
    assert "-m net.train starts it" in note


@pytest.mark.parametrize(
    ("path", "whose"),
    [
        ("code.py", "Python's own"),
        ("agent.py", "this product's"),
        ("agent/code.py", "this product's"),
    ],
)
def test_a_module_whose_name_a_worker_has_in_use_is_refused(project, path, whose):
    """A worker would run the other one."""
    (project / path).parent.mkdir(exist_ok=True)
    (project / path).write_text("x = 1\n")
    name = path.removesuffix(".py").replace("/", ".")
    said = f"-m {name}: {name.partition('.')[0]} is the name of a module of {whose}"
    with pytest.raises(CommandError, match=said):
        packed(name)


def test_a_module_that_a_worker_has_loaded_is_named_there(project):
    """It is not known here what else is installed there."""
    (project / "msgspec.py").write_text("print(1)\n")
    assert taken_names(read(packed("msgspec").payload, "")) == ["msgspec.py"]


def test_a_package_is_looked_through_once(project, monkeypatch):
    """However often its modules import each other, because it may have thousands."""
    looked = []
    monkeypatch.setattr(
        imports,
        "_modules",
        lambda folder, real=imports._modules: looked.append(folder) or real(folder),
    )
    for number in range(20):
        lines = [f"import net.m{other}\n" for other in range(20)]
        (project / "net" / f"m{number}.py").write_text("".join(lines))
    assert len(packed("net.train").files) == 25
    assert looked == [project / "net", project / "tools"]
