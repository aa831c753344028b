"""The program itself, as a person runs it in a folder."""

import contextlib
import io
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import waiting

from agent.keeper.storage.memory_log import root_of
from orchestrator.cli import main
from orchestrator.client import Client
from orchestrator.paths import Places
from orchestrator.supervisor import processes

PROGRAM = Path(sys.executable).with_name("orchestrator")
CALL_S_MAX = 120
START_S_MAX = 60.0


class Answer:
    """What one command said."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def line(self) -> str:
        """The one line of an error: never more, never a traceback."""
        lines = self.err.splitlines()
        assert len(lines) == 1, self.err
        assert lines[0].startswith("orchestrator: ")
        return lines[0].removeprefix("orchestrator: ")


class Shell:
    """A folder with a state directory, where commands are typed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.places = Places(folder / ".orchestrator")
        self._started: list[subprocess.Popen[str]] = []

    def __call__(self, *words: str) -> Answer:
        """A command in this process: what it prints, and the exit code."""
        out, err = io.StringIO(), io.StringIO()
        with contextlib.chdir(self.folder), redirect_stdout(out), redirect_stderr(err):
            code = main(words)
        return Answer(code, out.getvalue(), err.getvalue())

    def start(self, *words: str) -> "subprocess.Popen[str]":
        """The installed program as a process of its own, as a terminal would start it."""
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
            # Whoever runs the tests behind an `&` gives them no Ctrl-C, and they would hand that on.
            signal.signal(signal.SIGINT, signal.default_int_handler)
        process = subprocess.Popen(
            [PROGRAM, *words],
            cwd=self.folder,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self._started.append(process)
        return process

    def close(self) -> None:
        """End what a failed test left running."""
        for process in self._started:
            process.kill()
            process.communicate()
        processes.sweep(self.places.identity)
        self.places.remove_links()
        shutil.rmtree(root_of(self.places.checkpoints), ignore_errors=True)

    def ended(self, process: "subprocess.Popen[str]") -> Answer:
        out, err = process.communicate(timeout=CALL_S_MAX)
        return Answer(process.returncode, out, err)

    def script(self, name: str, text: str = "print(1)\n") -> str:
        (self.folder / name).write_text(text)
        return name

    def client(self) -> Client:
        return Client.connect(self.places.state_dir)


def wait_until(true: Callable[[], bool], at_most_s: float = START_S_MAX) -> None:
    """Look again and again; fail when it does not become true."""
    waiting.until("it to become true", true, at_most_s)
