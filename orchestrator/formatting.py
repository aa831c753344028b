"""Writing amounts, times and counts for a person, in the terminal and in sentences."""

import errno
import re
from datetime import datetime
from math import ceil
from urllib.parse import unquote

OURS = re.compile(r"^agent\.[\w.]+: ")


def usd(value: float | None) -> str:
    """Return an amount in dollars; small amounts get more digits.

    The local market has prices of a hundredth of a cent.
    """
    if value is None:
        return "-"
    size = abs(value)
    return f"{'-' if value <= -5e-7 else ''}${size:,.{_digits(size)}f}"


def usd_enough(value: float) -> str:
    """Return an amount in dollars rounded up, so that a budget that is called enough is enough."""
    parts = 10 ** _digits(value)
    return usd(ceil(value * parts - 1e-6) / parts)


def _digits(size_usd: float) -> int:
    return 2 if size_usd >= 1 or size_usd < 5e-7 else 4 if size_usd >= 0.01 else 6


def of_budget(budget_usd: float | None, short_usd: float) -> str:
    """Return the words that follow what is spent: its bound, and whether that will do."""
    bound = "" if budget_usd is None else f" of {usd(budget_usd)}"
    return f"{bound}, at this cost {usd(short_usd)} too little" if short_usd else bound


def loss(value: float | None) -> str:
    """Return a loss with four decimal places, or three digits if it is very small or large."""
    if value is None:
        return "-"
    return f"{value:.4f}" if 0.01 <= abs(value) < 1e5 else f"{value:.3g}"


def duration(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 172_800:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86_400} days {whole % 86_400 // 3600} h"


def pause(seconds: float) -> str:
    """Return a short time, in milliseconds if it is below one second."""
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"


def memory(size_bytes: float) -> str:
    """Return a size of memory, rounded up so that a size that is called enough is enough."""
    for unit_bytes, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size_bytes >= unit_bytes:
            return f"{ceil(size_bytes / unit_bytes * 100) / 100:,.2f} {unit}"
    return f"{ceil(size_bytes)} bytes"


def plural(number: int, word: str) -> str:
    ending = "es" if word.endswith("s") else "s"
    return f"{number:,} {word}{'' if number == 1 else ending}"


def nth(number: int) -> str:
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number:,}{'th' if number % 100 in (11, 12, 13) else ending}"


def told(who: str, what: str, because: str) -> str:
    """Return what was done and why; for a note, only the reason.

    If the reason begins with `who`, that is left out, because the name already stands before it.
    """
    reason = because.removeprefix(f"{who}: ").removeprefix(f"{who} ")
    return reason if what == "note" else f"{what}: {reason}"


def reason_of(detail: str) -> str:
    """Return the last line of a traceback; of a sentence of ours without the name of its class."""
    return OURS.sub("", detail.strip().rpartition("\n")[2])


def as_path(uri: str) -> str:
    """Return an address as it is typed: a path if it is on a disk of this machine."""
    return unquote(uri.removeprefix("file://")) if uri.startswith("file:///") else uri


def clock(at_s: float) -> str:
    return datetime.fromtimestamp(at_s).strftime("%H:%M:%S")


def moment(at_s: float, now_s: float) -> str:
    """Return a moment that may be far away: with its date unless that is today's."""
    try:
        at = datetime.fromtimestamp(at_s)
    except (ValueError, OverflowError, OSError):
        return "after the year 9999"
    is_today = at.date() == datetime.fromtimestamp(now_s).date()
    return clock(at_s) if is_today else at.strftime("%Y-%m-%d %H:%M")


def percent(part: float, whole: float) -> str:
    return f"{round(100 * part / whole)} %" if whole > 0 else "-"


def instead_of(error: OSError, host: str, port: str) -> str:
    """Return what to do about an address that cannot be listened on.

    `host` and `port` are the names of its settings.
    """
    if error.errno == errno.EADDRNOTAVAIL:
        return f"set {host} to an address that this machine has"
    return f"set {port} to a free port, or 0 to have one chosen"
