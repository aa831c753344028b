"""What every command shares: settings, the connection to the manager, answers and errors.

A command answers once. With --json the answer is one JSON document on the standard output and
nothing else; otherwise it is text for a person, with the next useful command at the end.
"""

import inspect
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import msgspec
import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.markup import escape
from rich.segment import Segment
from rich.text import Text
from typer.core import TyperGroup

from agent.output.controls import harmless, harmless_json
from cloud.plain_file import is_there
from orchestrator.client import Between, Client, Killed, NotRunning
from orchestrator.config import FILE_NAME, Config, load
from orchestrator.errors import OrchestratorError
from orchestrator.formatting import plural
from orchestrator.paths import Places
from orchestrator.supervisor import processes

ERROR = 1
USAGE = 2
NOT_RUNNING = 3
SCRIPT_FAILED = 100
JOB_FAILED = 101
JOB_CANCELLED = 102
INTERRUPTED = 130

PIPE_WIDTH = 160

ConfigPath = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", help=f"Settings. Default: ./{FILE_NAME} if there."),
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="One setting, e.g. budget.total_usd=5."),
]
Json = Annotated[bool, typer.Option("--json", help="Answer with one JSON document.")]


class CommandError(OrchestratorError):
    """A mistake that a person can correct, as one line with an exit code."""

    def __init__(self, line: str, code: int = ERROR) -> None:
        super().__init__(line)
        self.code = code


class Screen(Console):
    """A terminal to which no text but our own markup gives orders.

    What a script has printed, or named its files and errors, is part of many lines.
    """

    @property
    def is_terminal(self) -> bool:
        """Return whether lines can be redrawn; a dumb terminal gets them as a file does."""
        return super().is_terminal and self._environ.get("TERM") not in ("dumb", "unknown")

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=harmless(segment.text))


class Command:
    """One call of a command: its settings, and its only way to answer."""

    def __init__(self, config_path: Path | None, flags: dict[str, str], *, json: bool) -> None:
        self.json = json
        self.flags = flags
        self.options: dict[str, str] = {}  # settings from options of the command itself
        self.out = Screen(highlight=False, width=None if sys.stdout.isatty() else PIPE_WIDTH)
        self.given_path = config_path
        self._config: Config | None = None

    @property
    def config_path(self) -> Path | None:
        """Return the file with the settings, if there is one."""
        if self.given_path is not None:
            return self.given_path.absolute()
        found = Path(FILE_NAME).absolute()
        return found if found.exists() else None

    @property
    def config(self) -> Config:
        if self._config is None:
            self._config = load(self.given_path, os.environ, self.flags, self.options)
        return self._config

    def client(self) -> Client:
        """Connect to the running manager; raise `NotRunning` if there is none."""
        try:
            return Client.connect(self.config.state_dir)
        except (Between, Killed):
            raise
        except NotRunning as error:
            left = processes.marked(Places(self.config.state_dir).identity)
            if left:
                still = "runs: end it" if len(left) == 1 else "run: end them"
                raise NotRunning(
                    f"nothing answers in {self.config.state_dir}, but {plural(len(left), 'process')} of its manager still "
                    f"{still} with: orchestrator down"
                ) from error
            if folders := processes.homes():
                raise NotRunning(
                    f"{error}. A manager of yours runs in {', '.join(folders)}: to ask that one, type this there"
                ) from error
            raise

    def say(self, text: RenderableType) -> None:
        """Print something before the answer, only for a person."""
        if not self.json:
            self._print(text)

    def line(self, value: Any, text: Text) -> None:
        """Print one of many lines: JSON for programs, text for a person."""
        if self.json:
            write(harmless_json(msgspec.json.encode(value).decode()) + "\n")
        else:
            self.out.print(text, soft_wrap=True)

    def answer(self, value: Any, *texts: RenderableType, then: tuple[str, ...] = ()) -> None:
        """Print the answer: a value for programs, texts for a person, and what to do next."""
        if self.json:
            write_json(value)
            return
        for text in texts:
            self._print(text)
        for number, line in enumerate(then):
            word = "Next:" if number == 0 else "     "
            self.out.print(f"[dim]{word}[/] [bold]{escape(line)}[/]", soft_wrap=True)

    def _print(self, text: RenderableType) -> None:
        """Print a text; do not wrap sentences in a file or a pipe, so that they can be searched.

        What is not to be wrapped, an address, stays whole on a terminal, too, where it is copied.
        """
        is_piped = not self.out.is_terminal and isinstance(text, str | Text)
        is_whole = isinstance(text, Text) and bool(text.no_wrap)
        self.out.print(text, soft_wrap=is_piped or is_whole)

    @contextmanager
    def busy(self, what: str) -> Iterator[Callable[[str], None]]:
        """Show that something takes a while; the yielded function changes the text."""
        if self.json or not self.out.is_terminal:
            yield lambda _: None
            return
        with self.out.status(f"{what} ...") as status:
            yield lambda words: status.update(f"{words} ...")


def write_json(value: Any) -> None:
    """Write one JSON document to the standard output."""
    document = msgspec.json.format(msgspec.json.encode(value), indent=2).decode()
    write(harmless_json(document) + "\n")


def write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


class Whole(TyperGroup):
    """A group that lists its commands with their whole first sentence, wrapped instead of cut."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        said = [(name, self.commands[name].help or "") for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl([(name, _first_sentence(text)) for name, text in said])


def _first_sentence(text: str) -> str:
    return re.split(r"(?<=\.)\s", " ".join(text.split()), maxsplit=1)[0]


def verb(app: typer.Typer, name: str | None = None) -> Callable[[Callable[..., None]], None]:
    """Add a function as a command of `app`, with --config, --set and --json."""

    def add(function: Callable[..., None]) -> None:
        def run(
            *, config_path: Path | None, settings: list[str] | None, json: bool, **values: Any
        ) -> None:
            function(Command(config_path, _pairs(settings or []), json=json), **values)

        keyword = inspect.Parameter.KEYWORD_ONLY
        shared = [
            inspect.Parameter(key, keyword, default=default, annotation=kind)
            for key, default, kind in (
                ("config_path", None, ConfigPath),
                ("settings", None, Settings),
                ("json", False, Json),
            )
        ]
        _, *own = inspect.signature(function).parameters.values()
        parameters = [each.replace(kind=keyword) for each in own] + shared
        hints = get_type_hints(function, include_extras=True)
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {
            each.name: hints.get(each.name, each.annotation) for each in parameters
        }
        run.__doc__ = function.__doc__
        app.command(name or function.__name__)(run)

    return add


def _pairs(settings: list[str]) -> dict[str, str]:
    pairs = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals:
            raise CommandError(
                f"--set {setting}: write it as KEY=VALUE, e.g. job.slots_max=8", USAGE
            )
        pairs[key.strip()] = value.strip()
    return pairs


def expanded(option: str, word: str) -> Path:
    """Return the path that a word means; if it means none, the error names the option."""
    try:
        path = Path(word).expanduser()
        is_there(path)
    except RuntimeError:
        who = Path(word).parts[0]
        raise CommandError(f"{option}: {who} is nobody's home folder here", USAGE) from None
    except OSError as error:
        raise CommandError(f"{option}: {error.strerror}", USAGE) from None
    except ValueError as error:
        raise CommandError(f"{option}: {error}", USAGE) from None
    return path


def refuse_options(given: Mapping[str, bool], to: str) -> None:
    """Refuse options that would change nothing without those that they belong to."""
    for option, is_given in given.items():
        if is_given:
            raise CommandError(f"{option}: belongs to {to}; without that, leave it out", USAGE)


def write_file(file: Path, text: str, option: str) -> None:
    """Write the file that an option names; if that fails, the error names the option."""
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise CommandError(f"{option} {file}: {error.strerror}", USAGE) from None
