"""The command line: `orchestrator COMMAND`. Every mistake is one line, never a traceback.

Exit codes: 0 done · 1 it did not work · 2 the command or the settings are wrong · 3 nothing is
running · 100 the script failed · 101 the job failed for another reason · 102 the job was cancelled
· 130 Ctrl-C.
"""

import io
import logging
import os
import shutil
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import redis
import typer
from typer.main import get_command

from bidding.errors import BiddingError
from cloud.errors import CloudError
from orchestrator.cli import (
    demo,
    init_check,
    jobs,
    logs,
    output,
    plan,
    rehearse,
    status,
    submit,
    tools,
    up_down,
)
from orchestrator.cli.command import (
    ERROR,
    INTERRUPTED,
    NOT_RUNNING,
    USAGE,
    CommandError,
    Screen,
    Whole,
    verb,
    write_json,
)
from orchestrator.cli.money import comparison, export, foresight, spending, top
from orchestrator.client import NotRunning, Silent
from orchestrator.config import ConfigError
from orchestrator.errors import OrchestratorError
from orchestrator.planner.errors import BatchError, ProfileError

HELP_WIDTH_MAX = 100
COMPLETES = "_ORCHESTRATOR_COMPLETE"  # set by the shell that asks what a word may become
ZSH_WORDS = "_TYPER_COMPLETE_ARGS"
# The errors that a person may meet, which become one line. Any other error is a mistake of ours and
# keeps its traceback.
EXPECTED = (
    OrchestratorError,
    BiddingError,
    CloudError,
    redis.RedisError,
    OSError,
    typer.TyperException,
)


def _group(name: str, text: str, epilog: str, *, completes: bool = False) -> typer.Typer:
    return typer.Typer(
        cls=Whole,
        name=name,
        help=text,
        epilog=epilog,
        add_completion=completes,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
    )


app = _group(
    "orchestrator",
    "Trains PyTorch models on spot machines, at the lowest price for the work.",
    "Begin with: orchestrator demo",
    completes=True,
)


def _say_version(asked: bool) -> None:
    if asked:
        typer.echo(f"orchestrator {version('spot-orchestrator')}")
        raise typer.Exit


@app.callback()
def _of_all(
    _: Annotated[
        bool,
        typer.Option("--version", callback=_say_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Take what is no command."""


VERBS = (
    init_check.init,
    init_check.check,
    demo.demo,
    up_down.up,
    plan.plan,
    rehearse.rehearse,
    submit.submit,
    status.status,
    top.top,
    logs.logs,
    logs.events,
    spending.cost,
    comparison.compare,
    foresight.what_if,
    export.export,
    output.metrics,
    output.output,
    jobs.cancel,
    jobs.resume,
    jobs.change,
    up_down.down,
)
for each in VERBS:
    verb(app, each.__name__.replace("_", "-"))(each)
toolbox = _group(
    "tools",
    "Try, measure and repair: drills, simulations, backtests, profiles, leftovers.",
    "See: orchestrator tools COMMAND --help",
)
app.add_typer(toolbox)


def _open_tools(asked: Sequence[str]) -> None:
    """Import the tools that are asked for, or all of them for the list.

    Not all are imported always, because some take long.
    """
    for name in asked if set(asked) & set(tools.NAMES) else tools.NAMES:
        _open_tool(name)


@cache
def _open_tool(name: str) -> None:
    verb(toolbox)(getattr(import_module(f"{tools.__name__}.{name}"), name))
    _command.cache_clear()


@cache
def _command() -> Callable[..., int | None]:
    """Return the commands, with the tools that are open."""
    return get_command(app)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; an expected error becomes one line."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    sys.stdin = sys.stdin or io.StringIO()  # the caller may have closed them
    sys.stdout = sys.stdout or io.StringIO()
    sys.stderr = sys.stderr or io.StringIO()
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="replace")  # its encoding may lack a sign of ours
    logging.getLogger("agent").addHandler(logging.NullHandler())  # no log lines among the sentences
    if words[:1] == ["tools"]:
        _open_tools(words[1:2])
    elif "tools" in _completed():
        _open_tools([])
    asked = words if words not in ([], ["tools"]) else [*words, "--help"]
    width = min(shutil.get_terminal_size().columns, HELP_WIDTH_MAX)
    try:
        code = _command()(
            asked, prog_name="orchestrator", standalone_mode=False, terminal_width=width
        )
    except EXPECTED as error:
        return _fail(words, *_line_and_code(error))
    except typer.Abort:
        return _fail(words, "interrupted at a question; nothing was done", INTERRUPTED)
    except KeyboardInterrupt:
        return INTERRUPTED
    return (code or 0) if asked == words else USAGE


def _completed() -> list[str]:
    """Return the words that a shell asks to complete, none if it does not."""
    if COMPLETES not in os.environ:
        return []
    return [*os.environ.get("COMP_WORDS", "").split(), *os.environ.get(ZSH_WORDS, "").split()]


def _line_and_code(error: Exception) -> tuple[str, int]:
    match error:
        case typer.TyperException():
            line = error.format_message().rstrip(".")
            return f"{line}; see: {_command_of(error)} --help", error.exit_code
        case redis.RedisError() if not isinstance(error, Silent):
            return f"Redis says {error}; look with: orchestrator check", ERROR
        case CommandError():
            code = error.code
        case NotRunning():
            code = NOT_RUNNING
        case ConfigError() | ProfileError() | BatchError() | BiddingError():
            code = USAGE
        case _:
            code = ERROR
    return _said(error), code


def _said(error: Exception) -> str:
    """Return the error's message; a system error without a file gets the line that failed."""
    if not isinstance(error, OSError) or error.errno is None or error.filename is not None:
        return str(error) or type(error).__name__
    *_, asked = traceback.extract_tb(error.__traceback__)
    place = f"{Path(asked.filename).name}, line {asked.lineno}, {asked.name}"
    return f"the system said: {error.strerror} ({place}); look with: orchestrator check"


def _command_of(error: typer.TyperException) -> str:
    """Return the command as far as it was understood, such as `orchestrator submit`."""
    context = getattr(error, "ctx", None)
    return "orchestrator" if context is None else str(context.command_path)


def _fail(words: Sequence[str], text: str, code: int) -> int:
    """Print one line for a person, and with --json a document for a program."""
    text = text.encode(errors="backslashreplace").decode()  # names of files need not be text
    ours = words[: words.index("--")] if "--" in words else words
    if "--json" in ours:
        try:
            write_json({"error": text, "exit_code": code})
        except OSError:  # a full disk may be why we are here; the line below still reaches a person
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    console = Screen(stderr=True, highlight=False)
    for line in text.splitlines():
        console.print("orchestrator:", line, markup=False, soft_wrap=True)
    return code
