"""Moments, as a person types them: so long before now or after it, or a date."""

import re
from datetime import UTC, datetime
from typing import Annotated

import typer

from cloud.clock import DAY_S
from orchestrator.cli.command import USAGE, CommandError

DURATION = re.compile(r"(\d+(?:\.\d+)?)([smhd])")
UNIT_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}

Since = Annotated[
    str | None,
    typer.Option("--since", metavar="TIME", help="From then on: 90m, 2h, 7d ago, or a date."),
]


def past(option: str, text: str, now_s: float) -> float:
    """Return the moment that a time before now, or a date with or without a time, stands for."""
    return max(0.0, _moment(option, text, now_s, -1))


def day_of(at_s: float) -> float:
    """Return the beginning of a moment's day (UTC), as money is kept by whole days."""
    return at_s // DAY_S * DAY_S


def utc_day(at_s: float) -> str:
    return f"{datetime.fromtimestamp(at_s, UTC):%Y-%m-%d} 00:00 UTC"


def to_come(option: str, text: str, now_s: float) -> float:
    """Return the moment that a time from now on, or a date with or without a time, stands for."""
    return _moment(option, text, now_s, 1)


def _moment(option: str, text: str, now_s: float, sign: int) -> float:
    """A date is in local time unless it has a zone."""
    if match := DURATION.fullmatch(text):
        return now_s + sign * float(match[1]) * UNIT_S[match[2]]
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError):
        raise CommandError(
            f"{option} {text}: write 90m, 2h, 7d or a date such as 2030-01-31T18:00", USAGE
        ) from None
