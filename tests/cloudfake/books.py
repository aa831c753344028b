"""The books of a fake cloud: who bought what, what it costs, who ended it. The judge of a test.

Everything that a cloud bills is a line: machines, disks, addresses. The code under test never reads
these; a test asks them afterwards whether something was bought twice, left behind, or taken from
somebody else.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from hashlib import blake2b
from typing import Literal

import msgspec

Kind = Literal["machine", "disk", "nic", "address", "spot_request"]
By = Literal["user", "provider"]


def draw(*key: object) -> float:
    """Return a number in [0, 1) that depends on the key alone."""
    return int.from_bytes(blake2b(repr(key).encode(), digest_size=7).digest()) / (1 << 56)


class Line(msgspec.Struct, kw_only=True):
    """One thing that is paid for, from when to when, at which prices."""

    id: str
    kind: Kind
    owner: str
    token: str = ""
    zone: str = ""
    market: str = ""
    asked: int = 1
    began_s: float
    ended_s: float | None = None
    ended_by: By | None = None
    steps: list[tuple[float, float]] = msgspec.field(default_factory=list)

    def usd(self, at_s: float, minimum_s: float = 0.0) -> float:
        """Return what it has cost until then: every price for as long as it held."""
        if not self.steps:
            return 0.0
        until_s = at_s if self.ended_s is None else min(at_s, self.ended_s)
        until_s = max(until_s, self.steps[0][0] + minimum_s)
        ends = [began_s for began_s, _ in self.steps[1:]] + [until_s]
        return sum(
            usd_per_h * max(0.0, min(end_s, until_s) - began_s) / 3600
            for (began_s, usd_per_h), end_s in zip(self.steps, ends, strict=True)
        )


class Books:
    """All lines of an account; `refund` says which of them were free of charge after all.

    A machine that has run is paid for `minimum_s` at least.
    """

    def __init__(
        self, refund: Callable[[Line], bool] = lambda line: False, minimum_s: float = 0.0
    ) -> None:
        self.lines: dict[str, Line] = {}
        self._refund = refund
        self._minimum_s = minimum_s

    def open(self, line: Line) -> None:
        assert line.id not in self.lines, f"{line.id} was bought before"
        self.lines[line.id] = line

    def price(self, line_id: str, at_s: float, usd_per_h: float) -> None:
        self.lines[line_id].steps.append((at_s, usd_per_h))

    def close(self, line_id: str, at_s: float, by: By) -> None:
        line = self.lines[line_id]
        if line.ended_s is None:
            line.ended_s, line.ended_by = at_s, by

    def bill(self, at_s: float, owner: str | None = None) -> dict[str, float]:
        """Return what each line has cost in US dollars."""
        return {
            line.id: 0.0 if self._refund(line) else line.usd(at_s, self._least_s(line))
            for line in self.lines.values()
            if owner is None or line.owner == owner
        }

    def _least_s(self, line: Line) -> float:
        return self._minimum_s if line.kind == "machine" else 0.0

    def bought_twice(self) -> list[str]:
        """Return the tokens under which more machines were bought than one request asked for."""
        bought: dict[tuple[str, str], list[Line]] = defaultdict(list)
        for line in self.lines.values():
            if line.kind == "machine" and line.token:
                bought[line.owner, line.token].append(line)
        return [
            token
            for (_, token), lines in bought.items()
            if len(lines) > min(x.asked for x in lines)
        ]

    def alive(self, owner: str, kinds: Iterable[Kind] = ()) -> list[Line]:
        """Return what this owner still pays for."""
        wanted = set(kinds)
        return [
            line
            for line in self.lines.values()
            if line.owner == owner and line.ended_s is None and (not wanted or line.kind in wanted)
        ]

    def touched(self, ours: str) -> list[str]:
        """Return what belongs to others and was ended by a call."""
        return [x.id for x in self.lines.values() if x.owner != ours and x.ended_by == "user"]


class Bucket:
    """Room for `burst` requests that fills again by `per_s`."""

    def __init__(self, burst: float, per_s: float) -> None:
        self.burst, self.per_s = burst, per_s
        self._left, self._at_s = burst, 0.0

    def take(self, at_s: float, amount: float = 1.0) -> bool:
        self._left = min(self.burst, self._left + self.per_s * max(0.0, at_s - self._at_s))
        self._at_s = max(self._at_s, at_s)
        if self._left < amount:
            return False
        self._left -= amount
        return True
