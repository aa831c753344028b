"""Machine code on the disk: kept between runs, and not for ever."""

import os
import subprocess
import sys
from pathlib import Path
from shutil import rmtree

import pytest

from bidding.compiled import EDITIONS_KEPT, cache_of, forget_old, machine_code


def test_machine_code_of_old_sources_goes(tmp_path):
    """The edition in use and the newest few others stay, whatever their names are."""
    for age_s in range(6):
        folder = tmp_path / f"numba-{age_s}"
        folder.mkdir()
        (folder / "f.nbc").write_bytes(b"code")
        os.utime(folder, (1000.0 - age_s, 1000.0 - age_s))
    (tmp_path / "other").mkdir()
    forget_old(str(tmp_path / "numba-5"))
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == [*(f"numba-{age_s}" for age_s in range(EDITIONS_KEPT)), "numba-5", "other"]
    forget_old(str(tmp_path / "nowhere" / "numba-0"))


ASKING = """
import sys
from bidding.compiled import machine_code

def total(values):
    return values.sum()

total = machine_code(total, sys.argv[1])
import numpy as np
print("here", flush=True)
sys.stdin.readline()
assert total(np.ones(3)) == 3.0
print(sum(total.stats.cache_misses.values()), flush=True)
"""


def test_processes_that_begin_together_compile_a_function_once(tmp_path):
    """Three ask for it at the same time: one compiles, and the others load what it made."""
    file = tmp_path / "asking.py"
    file.write_text(ASKING)
    command = [sys.executable, file, tmp_path / "numba-0"]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    asking = [subprocess.Popen(command, env=env, text=True, **pipes) for _ in range(3)]
    assert [one.stdout.readline() for one in asking] == ["here\n"] * 3
    for one in asking:
        one.stdin.write("now\n")
        one.stdin.flush()
    assert sorted(one.communicate()[0] for one in asking) == ["0\n", "0\n", "1\n"]


def test_a_process_whose_machine_code_was_removed_compiles_anew(tmp_path):
    """One that lives long: newer sources keep the newest few editions only."""

    def one_more(x):
        return x + 1

    made = machine_code(one_more, str(tmp_path / "numba-old"))
    rmtree(tmp_path / "numba-old")
    assert made(1) == 2


@pytest.mark.parametrize("home", ["home", "none"])
def test_a_package_of_somebody_else_is_compiled_all_the_same(tmp_path, monkeypatch, home):
    """Nothing can be kept beside it: machine code is kept in the user's own folder, or not at all."""
    package = tmp_path / "package"
    package.mkdir()
    (package / "__pycache__").touch()  # a file, so not even root can keep one there
    (tmp_path / "none").touch()
    monkeypatch.setenv("HOME", str(tmp_path / home))
    cache = cache_of(package, [])
    file = tmp_path / "asking.py"
    file.write_text(ASKING)
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    asked = subprocess.run(
        [sys.executable, file, cache],
        env=env,
        input="now\n",
        capture_output=True,
        text=True,
        check=False,
    )
    assert not asked.returncode, asked.stderr
    assert any((tmp_path / "home").rglob("*.nbc")) == (home == "home")
