"""The command `top`: money, jobs, machines and events, live on the whole screen."""

import time
from typing import Any

import redis
from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from orchestrator.cli import tables
from orchestrator.cli.command import Command
from orchestrator.cli.watch import age, why_silent
from orchestrator.client import Client
from orchestrator.formatting import percent, usd
from orchestrator.history.reader import History
from orchestrator.history.records import Spent
from orchestrator.paths import Places
from orchestrator.view import View

DRAW_S = 1.0
MONEY_S = 5.0  # between two looks at the history
EVENTS_SHOWN = 12
CAUSES_SHOWN = 6


def top(command: Command) -> None:
    """Show money, jobs, machines and events, live on the whole screen, until Ctrl-C.

    Without a terminal, or with --json, it shows them once.
    """
    client, places = command.client(), Places(command.config.state_dir)
    history = History.open(places)
    if command.json or not command.out.is_terminal:
        view, lines = client.view(), history.money()
        command.answer({"view": view, "money": lines}, *screen(view, lines, places))
        return
    with Live(console=command.out, screen=True, auto_refresh=False) as live:
        _draw(live, client, history, places)


def _draw(live: Live, client: Client, history: History, places: Places) -> None:
    """Draw again and again; what cannot be read for a moment stays as it was."""
    view: View | None = None
    lines: list[Spent] = []
    asked_s = float("-inf")
    while True:
        try:
            view = client.view()
        except redis.RedisError as error:
            parts: tuple[Any, ...] = (
                Text(str(error), style="yellow"),
                *screen(view, lines, places),
            )
        else:
            if time.monotonic() >= asked_s + MONEY_S:
                asked_s, lines = time.monotonic(), history.money()
            parts = screen(view, lines, places)
        live.update(Group(*parts), refresh=True)
        time.sleep(DRAW_S)


def screen(view: View | None, lines: list[Spent], places: Places) -> tuple[RenderableType, ...]:
    """Return the parts of the screen, the most important first, as the last may not fit."""
    if view is None:
        return (Text(f"the manager has not said anything yet; {why_silent(view, places)}"),)
    parts: list[RenderableType] = [tables.cost_line(view)]
    if lines:
        parts.append(_causes(lines))
    if old := "; ".join(filter(None, (age(view), why_silent(view, places)))):
        parts.insert(0, Text(old, style="yellow"))
    if view.jobs:
        parts += [Text(), tables.jobs(view.jobs)]
    if view.machines:
        parts += [Text(), tables.machines(view.machines, view.at_s, tables.live(view))]
    if view.events:
        parts += [Text(), *(tables.sentence(said) for said in view.events[-EVENTS_SHOWN:])]
    return tuple(parts)


def _causes(lines: list[Spent]) -> Text:
    whole_usd = sum(line.usd for line in lines)
    said = [f"{line.key} {usd(line.usd)} ({percent(line.usd, whole_usd)})" for line in lines]
    return Text("went to " + " · ".join(said[:CAUSES_SHOWN]), style="dim")
