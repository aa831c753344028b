"""What is looked for in the person's own code is looked for in all of its files, and nobody is woken by it."""

import importlib.util
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from agent.errors import Misuse
from agent.source import own, parcel

NORM = """
def clipped(model):
    total = sum(p.grad.norm() for p in model.parameters())
    return total
"""
LOOKS = """
import sys
from agent.owned import coupling
from agent.source import own
from agent.source.found import Caller

def look(frame):
    own.names(frame)
    coupling.refuse([], Caller(frame, frame.f_lasti))
"""
SCRIPT = """
{imports}
import loop_of_this
{code}
loop_of_this.train()
"""
LOOP = (
    LOOKS
    + """
def train():
    look(sys._getframe())
"""
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(str(tmp_path))
    known = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - known:
        if str(parcel.contents(sys.modules[name]).get("__file__")).startswith(str(tmp_path)):
            del sys.modules[name]


def run(folder: Path, *, imports: str = "", code: str = "") -> None:
    (folder / "norms_of_this.py").write_text(NORM)
    (folder / "loop_of_this.py").write_text(LOOP)
    (folder / "train.py").write_text(SCRIPT.format(imports=imports, code=code))
    runpy.run_path(str(folder / "train.py"), run_name="__main__")


@pytest.mark.parametrize(
    ("given", "where"),
    [({"imports": "import norms_of_this"}, "norms_of_this"), ({"code": NORM}, "train")],
    ids=["in a module", "in the script"],
)
def test_gradients_that_another_file_reads_are_found(
    folder: Path, given: dict[str, str], where: str
) -> None:
    """A norm in a module that is imported, or in the script whose loop lies in a module."""
    with pytest.raises(Misuse, match=rf"{where}\.py:\d+: `p\.grad` is read here"):
        run(folder, **given)


def test_gradients_that_nobody_reads_are_not_found(folder: Path) -> None:
    """Nor is what lies there and is not imported."""
    run(folder)


def test_a_module_that_is_loaded_when_it_is_asked_is_not_asked(folder: Path) -> None:
    """It may fail when it is loaded, and nobody has wanted it yet."""
    (folder / "lazy_of_this.py").write_text("raise RuntimeError('nobody wanted this')")
    spec = importlib.util.find_spec("lazy_of_this")
    assert spec is not None
    assert spec.loader is not None
    lazy = importlib.util.LazyLoader(spec.loader)
    module = importlib.util.module_from_spec(spec)
    sys.modules["lazy_of_this"] = module
    lazy.exec_module(module)
    run(folder)
    assert "__file__" in parcel.contents(module)
    with pytest.raises(RuntimeError, match="nobody wanted"):
        _ = module.anything


def test_a_module_that_takes_the_name_of_a_library_is_looked_at(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Libraries are known by their names, and the person's own may come in the place of one."""
    library = ModuleType("norms_of_this")
    library.__file__ = "/usr/lib/site-packages/norms_of_this.py"
    monkeypatch.setitem(sys.modules, "norms_of_this", library)
    own.unknown_modules()
    assert "norms_of_this" not in [name for _, name, _ in own.unknown_modules()]
    del sys.modules["norms_of_this"]
    with pytest.raises(Misuse, match=r"norms_of_this\.py:\d+: `p\.grad` is read here"):
        run(folder, imports="import norms_of_this")
