"""The command line: `orchestrator COMMAND`. Every mistake is one line, never a traceback.

Exit codes: 0 done · 1 it did not work · 2 the command or the settings are wrong · 3 nothing is running ·
100 the script failed · 101 the job failed for another reason · 102 the job was cancelled · 130 Ctrl-C.
"""

import inspect
import io
import logging
import os
import shutil
import sys
import traceback
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import redis
import typer
from rich.console import Console
from typer.core import TyperGroup

from cloud.errors import CloudError
from orchestrator.cli import jobs, machine, market, outputs, past, rehearse, running, trouble
from orchestrator.cli.desk import ERROR, INTERRUPTED, NOT_RUNNING, USAGE, CommandError, write_json
from orchestrator.client import NotRunning, Silent
from orchestrator.config import ConfigError
from orchestrator.errors import OrchestratorError

HELP_WIDTH_MAX = 100


class Whole(TyperGroup):
    """Lists its commands with all of their first sentence: what is too long is wrapped, not cut."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        said = [(name, self.commands[name].help or "") for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl(
                [(name, inspect.cleandoc(text).split("\n\n")[0]) for name, text in said]
            )


app = typer.Typer(
    cls=Whole,
    name="orchestrator",
    help="Trains PyTorch models on spot machines, at the lowest price for the work.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    epilog="Begin with: orchestrator demo",
)
for room in (machine, running, market, past, rehearse, jobs, outputs, trouble):
    room.add(app)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; whatever goes wrong becomes one line and an exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    sys.stdout = sys.stdout or io.StringIO()  # whoever has closed it wants none
    sys.stderr = sys.stderr or io.StringIO()
    logging.getLogger("agent").addHandler(logging.NullHandler())  # a person is told in sentences
    if not words or words[0] not in {one.name for one in app.registered_commands}:
        _open_all_rooms()
    try:
        width = min(shutil.get_terminal_size().columns, HELP_WIDTH_MAX)
        code = app(
            words or ["--help"], prog_name="orchestrator", standalone_mode=False, terminal_width=width
        ) or 0  # fmt: skip
    except (
        OrchestratorError,
        CloudError,
        redis.RedisError,
        OSError,
        typer.TyperException,
    ) as error:
        return _fail(words, *_line_and_code(error))
    except KeyboardInterrupt:
        return INTERRUPTED
    return code if words else USAGE


@cache
def _open_all_rooms() -> None:
    """Those that import the planner as well, which takes longer than all the others: for whoever asks for them, or what there is."""
    from orchestrator.cli import footprint, tracing

    for room in (tracing, footprint):
        room.add(app)


def _line_and_code(error: Exception) -> tuple[str, int]:
    match error:
        case CommandError():
            return str(error), error.code
        case NotRunning():
            return str(error), NOT_RUNNING
        case ConfigError():
            return str(error), USAGE
        case typer.TyperException():
            line = error.format_message().rstrip(".")
            return f"{line}; see: {_command_of(error)} --help", error.exit_code
        case redis.RedisError() if not isinstance(error, Silent):
            return f"Redis says {error}; look with: orchestrator check", ERROR
        case _:
            return _said(error), ERROR


def _said(error: Exception) -> str:
    """What the system refuses without a word on what it is about, comes with the place where it was asked."""
    if not isinstance(error, OSError) or error.errno is None or error.filename is not None:
        return str(error) or type(error).__name__
    *_, asked = traceback.extract_tb(error.__traceback__)
    place = f"{Path(asked.filename).name}, line {asked.lineno}, {asked.name}"
    return f"the system said: {error.strerror} ({place}); look with: orchestrator check"


def _command_of(error: typer.TyperException) -> str:
    """How far the words made sense: `orchestrator submit`."""
    context = getattr(error, "ctx", None)
    return "orchestrator" if context is None else str(context.command_path)


def _fail(words: Sequence[str], text: str, code: int) -> int:
    """One line for a person, and with --json a document for a program."""
    ours = words[: words.index("--")] if "--" in words else words
    if "--json" in ours:
        try:
            write_json({"error": text, "exit_code": code})
        except OSError:  # that may be why we are here: the line below is read by somebody
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    console = Console(stderr=True, highlight=False)
    for line in text.splitlines():
        console.print("orchestrator:", line, markup=False, soft_wrap=True)
    return code
