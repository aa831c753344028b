"""What reads well at 120 columns reads well at 80 and at 40."""

import io
from types import SimpleNamespace

import pytest
from rich.console import Console
from rich.text import Text

from orchestrator.cli import tables
from orchestrator.cli.command import Command, Screen

WHY = "$0.0312 per slot-hour, the cheapest of 6 pools; the job can use 2 more slots"
ON = "local/local-a/local.small"


def shown(what, width):
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(what)
    lines = console.file.getvalue().splitlines()
    assert all(len(line) <= width for line in lines)
    return [line.rstrip() for line in lines]


@pytest.fixture
def machines():
    """Two of them, as `status` shows them."""
    found = [
        SimpleNamespace(
            id=name,
            pool=ON,
            market="on_demand",
            state="working",
            price_usd_per_h=0.0312,
            cost_usd=0.0051,
            launched_at_s=0.0,
            ended_at_s=None,
            why_bought=WHY,
            why_ended="",
            boot={},
        )
        for name in ("m-1", "m-2")
    ]
    return tables.machines(found, 590.0)


def test_a_reason_stands_beside_its_row_where_it_has_room(machines):
    """Wide enough, it is one table."""
    head, first, second, *_ = shown(machines, 120)
    assert head.split() == ["machine", "state", "pool", "market", "$/h", "cost", "time", "why"]
    assert first.startswith(
        f"m-1     working {ON} on demand $0.0312 $0.005100 9 min 50 s $0.0312 per"
    )
    assert second.startswith(" " * 80)
    assert shown(machines, 400)[1].endswith(WHY)


def test_a_reason_stands_below_its_row_where_it_would_be_a_narrow_column(machines):
    """What it is about goes with it; the numbers stay below each other, none is cut."""
    assert shown(machines, 80)[:5] == [
        "machine state       $/h      cost time",
        "m-1     working $0.0312 $0.005100 9 min 50 s",
        f"  {ON}, on demand: $0.0312 per slot-hour, the cheapest of 6",
        "  pools; the job can use 2 more slots",
        "m-2     working $0.0312 $0.005100 9 min 50 s",
    ]


def test_where_not_even_the_numbers_have_room_they_follow_one_another(machines):
    """No word is cut, and every number says what it is."""
    lines = shown(machines, 40)
    assert lines[:3] == [
        "m-1 working · $/h $0.0312 · cost",
        "$0.005100 · time 9 min 50 s",
        f"  {ON}, on demand:",
    ]
    words = " ".join(lines).split()
    assert (
        words
        == " ".join(
            f"{name} working · $/h $0.0312 · cost $0.005100 · time 9 min 50 s {ON}, on demand: {WHY}"
            for name in ("m-1", "m-2")
        ).split()
    )


@pytest.mark.parametrize(("width", "command"), [(40, "submit"), (80, "submit"), (80, "plan")])
def test_the_help_is_wrapped_to_the_width_there_is_and_nothing_is_cut(
    shell, monkeypatch, width, command
):
    """Of every command its whole first sentence, in the list and by itself."""
    monkeypatch.setenv("COLUMNS", str(width))
    listed = shell("--help").out
    for text in (listed, shell(command, "--help").out):
        assert max(len(line) for line in text.splitlines()) <= width
    assert "..." not in listed.split("Commands:")[1]
    assert "commented orchestrator.toml with every setting; never over one" in " ".join(
        listed.split()
    )


def test_an_address_is_one_line_on_the_narrowest_terminal():
    """It is copied, or clicked on: half a key opens nothing."""
    address = "http://127.0.0.1:36509/#key=" + "a1" * 32
    command = Command(None, {}, json=False)
    command.out = Screen(file=io.StringIO(), width=60, force_terminal=True, color_system=None)
    command.answer({}, Text.assemble("dashboard  ", (address, "bold"), no_wrap=True))
    assert command.out.file.getvalue() == f"dashboard  {address}\n"
