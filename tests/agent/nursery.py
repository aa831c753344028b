"""Starts workers, and scripts alone, in milliseconds: one process has imported everything, and forks.

python nursery.py < lines of JSON: a `Birth` or a `Play` > lines with the pid of a worker, or the exit status of a script
"""

import gc
import os
import runpy
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import explain
import injection
import msgspec

from agent.machine import worker_process
from agent.messages import WorkerOrder


class Birth(msgspec.Struct, tag=True):
    """A worker."""

    order: WorkerOrder
    host: str
    faults: str  # an encoded plan, or nothing


class Play(msgspec.Struct, tag=True):
    """A script with its arguments, as `python train.py` plays it in a folder; what it prints goes into two files."""

    argv: list[str]
    folder: str
    printed: str
    complained: str


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    worker_process.warm_up()
    gc.collect()
    gc.freeze()  # as the fork server does: what is never collected stays in common
    for line in sys.stdin.buffer:
        asked = msgspec.json.decode(line, type=Birth | Play)
        if isinstance(asked, Birth):
            told = _fork(lambda asked=asked: _live(asked))
        else:
            told = _played(asked)
        sys.stdout.write(f"{told}\n")
        sys.stdout.flush()
    os._exit(0)  # there is nothing to be put away, and torch takes long for it


def _fork(live: Callable[[], int]) -> int:
    pid = os.fork()
    if pid == 0:
        _end_with(live)
    return pid


def _end_with(live: Callable[[], int]) -> NoReturn:
    code = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        code = live()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        sys.stderr.write(f"it ended with {ended.code}\n" * bool(code))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _live(birth: Birth) -> int:
    explain.listen()
    if birth.faults:
        injection.arm(birth.faults)
    try:
        worker_process.run(birth.order, birth.host)
    except Exception as error:
        sys.stderr.write(f"{birth.order.worker}: {error}\n")
        return 1
    return 0


def _played(play: Play) -> int:
    """Workers that end meanwhile have to be waited for as well."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = _fork(lambda: _play(play))
    _, status = os.waitpid(pid, 0)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass
    return os.waitstatus_to_exitcode(status)


def _play(play: Play) -> int:
    for path, descriptor in ((play.printed, 1), (play.complained, 2)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(file, descriptor)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir(play.folder)
    sys.argv = play.argv
    sys.path[0] = str(Path(play.argv[0]).parent.absolute())
    runpy.run_path(play.argv[0], run_name="__main__")
    return 0


if __name__ == "__main__":
    main()
