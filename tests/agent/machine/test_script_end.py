"""A script that ends in a worker leaves what it leaves as a process of its own."""

import atexit
import os
import subprocess
import sys
from pathlib import Path

import pytest

from agent.errors import WireError
from agent.machine import worker_process
from agent.machine.console import Stream
from agent.machine.script_end import PastPython, ended_like_a_process
from agent.source.parcel import Unpacked

# A function of the script keeps what it has, so its files are not closed as rubbish.
SCRIPT = """
import atexit, os, sys, threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

here = Path(__file__).parent
log, numbers = open(here / "log.txt", "w"), open(here / "numbers.bin", "wb")

def loss_of(batch):
    return log, numbers

def last(name, text="ended"):
    print(name, file=log)
    saved = [each for each in ("pooled.txt", "pooled_too.txt", "saved.txt") if (here / each).exists()]
    (here / name).write_text(f"{text} after {saved}")

def never():
    (here / "never.txt").touch()

def fails():
    raise ValueError("an end that fails")

atexit.register(last, "first.txt")
atexit.register(fails)
atexit.register(last, "second.txt", text=str(os.getpid() > 0))
atexit.register(never)
atexit.unregister(never)
def late(name):
    ended.wait()
    (here / name).write_text("saved late")

ended = threading.Event()
pool = ThreadPoolExecutor(1)
for name in ("pooled.txt", "pooled_too.txt"):
    pool.submit(late, name)
threading.Thread(target=late, args=("saved.txt",)).start()
threading.Thread(target=threading.Event().wait, daemon=True).start()
print("a line", file=log)
numbers.write(bytes(100))
"""
ENDS = {
    "its end": "ended.set()",
    "an exit": "ended.set()\nsys.exit(3)",
    "an error": "ended.set()\nraise KeyError('the script')",
    "a fork that ends before it": "ended.set()\nif (child := os.fork()) == 0: os._exit(0)\nos.waitpid(child, 0)",
    "os._exit": "os._exit(0)",
}


def _files(folder: Path) -> dict[str, bytes]:
    return {each.name: each.read_bytes() for each in folder.iterdir() if each.suffix != ".py"}


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
def test_script_leaves_the_files_of_a_process(tmp_path: Path, end: str) -> None:
    alone, inside = tmp_path / "alone", tmp_path / "inside"
    for folder in (alone, inside):
        folder.mkdir()
        (folder / "train.py").write_text(SCRIPT + end)
    subprocess.run([sys.executable, alone / "train.py"], check=False, stderr=subprocess.DEVNULL)
    if (worker := os.fork()) == 0:
        try:
            worker_process._run(Unpacked(inside / "train.py", [inside], ""))
        finally:
            worker_process.END(0)
    os.waitpid(worker, 0)
    assert _files(inside) == _files(alone)


def test_worker_that_is_lost_calls_nothing() -> None:
    called = list[int]()
    for lost in (WireError("gone"), PastPython(0)):
        with pytest.raises(type(lost)), ended_like_a_process():
            atexit.register(called.append, 1)
            raise lost
    assert not called


@pytest.mark.parametrize(
    ("code", "written", "said"),
    [
        ("no data", "", "1: no data"),
        (2, "usage: train.py\ntrain.py: error: no --ephocs\n", "2: train.py: error: no --ephocs"),
        (3, "| no --ephocs |\n+---+", "3: | no --ephocs |"),
        (3, "", "3"),
    ],
)
def test_exit_is_told_with_the_last_words(code: object, written: str, said: str) -> None:
    """Of its errors the last line that has a word in it: around others a library may draw a frame."""
    errors = Stream(lambda _: None)
    errors.write(written)
    found = worker_process._of_exit(SystemExit(code), errors)
    assert (found.kind, found.detail) == ("exit", f"the script ended itself with {said}")
