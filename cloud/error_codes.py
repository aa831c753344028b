"""What the error codes of a cloud mean to us: a table, from a code to how far a refusal reaches.

Each cloud has its own. The first row fits whose code is equal and whose text occurs in what the
cloud said. What a code without a row means, the status of its answer says: the cloud found the request
wrong and did nothing, so its pool is left alone, or the call may have taken effect, and the list tells.
"""

from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple

from cloud import errors
from cloud.model import Scope

Means = Literal[
    "refused",
    "quota",
    "sold_out",
    "misconfigured",
    "not_allowed",
    "throttled",
    "unknown",
    "mismatch",
    "spent",
]
STOPS: dict[Means, type[errors.NotAllowed | errors.Misconfigured]] = {
    "not_allowed": errors.NotAllowed,
    "misconfigured": errors.Misconfigured,
}
KINDS: dict[Means, Callable[[str], errors.CloudError]] = {
    "mismatch": errors.TokenMismatch,
    "spent": errors.TokenSpent,
    "unknown": errors.Unknown,
}


UNSURE = frozenset({408, 409, 412, 429})
"""Statuses below 500 after which something may have been made: late, twice, or by somebody else."""


class Row(NamedTuple):
    """One code; `text` narrows it to what was said, and without a `scope` its error has its own."""

    code: str
    means: Means
    scope: Scope | None = None
    retry_s: float | None = None
    text: str = ""
    advice: str = ""


def rows(
    codes: str,
    means: Means,
    scope: Scope | None = None,
    retry_s: float | None = None,
    text: str = "",
    advice: str = "",
) -> tuple[Row, ...]:
    """Return a row for each of these codes, which mean the same."""
    return tuple(Row(code, means, scope, retry_s, text, advice) for code in codes.split())


def row_of(table: Iterable[Row], code: str, said: str) -> Row | None:
    said = said.lower()
    return next((row for row in table if row.code == code and row.text.lower() in said), None)


def error_of(row: Row, text: str, retry_s: float | None) -> errors.CloudError:
    """Return the error of a row; `text` is for people, and `retry_s` how long to leave it alone."""
    if row.means == "throttled":
        return errors.Throttled(text, retry_s)
    if (stops := STOPS.get(row.means)) is not None:
        return stops(text, row.scope or "place")
    if (kind := KINDS.get(row.means)) is not None:
        return kind(text)
    return errors.Refused(row.scope or "request", row.code, text, retry_s)


def unlisted(code: str, text: str, status: int) -> errors.CloudError:
    """Return the error of a code without a row.

    An answer without a cloud's code is a proxy's, or none at all, and says nothing of the call.
    """
    if code[:1].isalpha() and 400 <= status < 500 and status not in UNSURE:
        return errors.Refused("pool", code, text)
    return errors.Unknown(text)
