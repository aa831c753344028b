"""A terminal obeys nothing that a script has printed, whatever command shows it."""

import io

import msgspec
from rich.console import Group
from rich.table import Table
from rich.text import Text

from agent.output.controls import harmless
from orchestrator.cli import tables
from orchestrator.cli.command import Command, Screen
from orchestrator.view import Sentence

EVIL = "\x1b]52;c;ZXZpbA==\x1b\\ \x00 \x9b2J \u202e"
SHOWN = "\\x1b]52;c;ZXZpbA==\\x1b\\ \\x00 \\x9b2J \\u202e"


def seen(*parts: object) -> str:
    screen = Screen(file=io.StringIO(), force_terminal=True, width=200, highlight=False)
    screen.print(*parts)
    return screen.file.getvalue()


def test_controls_are_shown_and_our_own_colours_stay():
    """In texts, tables, sentences and what is nested, as `logs`, `status` and `events` print them."""
    table = Table(box=None)
    table.add_row(Text(EVIL, style="bold"))
    said = Sentence(at_s=0.0, who="job", what="failed", because=f"it said {EVIL}")
    nested = Group(Text(), table)
    for part in (EVIL, Text(EVIL), table, nested, tables.sentence(said)):
        shown = seen(part)
        assert "\\x1b]52" in shown
        assert SHOWN in shown or part in (table, nested)  # whose cells may be wrapped
        assert not set("\x00\x9b\u202e") & set(shown)
        assert "\x1b]" not in shown
    assert "\x1b[1m" in seen(table)


def test_program_gets_the_same_text_and_a_terminal_no_control(capsys):
    """With --json each control is an escape of JSON, so what is decoded is what was stored."""
    command = Command(None, {}, json=True)
    command.line({"line": EVIL}, Text(EVIL))
    written = capsys.readouterr().out
    assert written.strip().isprintable()
    assert msgspec.json.decode(written) == {"line": EVIL}
    command.answer({"line": EVIL})
    written = capsys.readouterr().out
    assert harmless(written) == written
    assert msgspec.json.decode(written) == {"line": EVIL}
