"""What the manager itself has seen of a pool: how long it held machines there, and how they ended.

A pool loses its machines together, so losses within `BULK_S` of each other are one. Time that is
still running counts without an event: that is the censoring. Refusals tell the other side, how
long the pool has nothing to sell.
"""

from statistics import median
from typing import Literal

import msgspec

from bidding.history import HOUR_S
from bidding.risk import HAZARD_PRIOR, RETURN_PRIOR, Gamma

BULK_S = 120.0
TIMES_MAX = 32
Took = Literal["start_s", "morph_s", "recovery_s"]


class Times(msgspec.Struct, frozen=True, kw_only=True):
    """What changes took, the newest last: from the order of a machine to its first step, the stall of
    a change of layout (sigma), and what a loss cost, lost steps included (lambda).
    """

    start_s: tuple[float, ...] = ()
    morph_s: tuple[float, ...] = ()
    recovery_s: tuple[float, ...] = ()

    def saw(self, what: Took, seconds: float) -> "Times":
        """One more; a clock that jumped back says nothing."""
        if seconds < 0:
            return self
        kept = (*getattr(self, what), seconds)[-TIMES_MAX:]
        return msgspec.structs.replace(self, **{what: kept})

    def typical_s(self, what: Took, assumed_s: float) -> float:
        """The median of what was seen; what is assumed counts as one more sight."""
        return float(median([assumed_s, *getattr(self, what)]))


class PoolRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Events and hours so far; `*_since_s` is the stretch that runs now."""

    losses: int = 0
    held_h: float = 0.0
    held_since_s: float | None = None
    lost_at_s: float | None = None
    returns: int = 0
    refused_h: float = 0.0
    refused_since_s: float | None = None

    def sold(self, at_s: float) -> "PoolRecord":
        """It sold us a machine: a stretch without capacity is over, one of holding begins or goes on."""
        record = self
        if self.refused_since_s is not None:
            gone_h = _hours(self.refused_since_s, at_s)
            record = msgspec.structs.replace(
                self, returns=self.returns + 1, refused_h=self.refused_h + gone_h, refused_since_s=None
            )  # fmt: skip
        if record.held_since_s is None:
            record = msgspec.structs.replace(record, held_since_s=at_s)
        return record

    def refused(self, at_s: float) -> "PoolRecord":
        if self.refused_since_s is not None:
            return self
        return msgspec.structs.replace(self, refused_since_s=at_s)

    def lost(self, at_s: float, others_left: bool) -> "PoolRecord":
        """The cloud took a machine; `others_left` says whether we still hold some there."""
        again = self.lost_at_s is not None and at_s - self.lost_at_s < BULK_S
        record = msgspec.structs.replace(self, losses=self.losses + (not again), lost_at_s=at_s)
        return record if others_left else record.left(at_s)

    def left(self, at_s: float) -> "PoolRecord":
        """We hold nothing there any more."""
        if self.held_since_s is None:
            return self
        held_h = self.held_h + _hours(self.held_since_s, at_s)
        return msgspec.structs.replace(self, held_h=held_h, held_since_s=None)

    def hazard_per_h(self, at_s: float, prior: Gamma = HAZARD_PRIOR) -> float:
        running_h = 0.0 if self.held_since_s is None else _hours(self.held_since_s, at_s)
        return prior.seen(self.losses, self.held_h + running_h).per_h

    def return_per_h(self, at_s: float, prior: Gamma = RETURN_PRIOR) -> float:
        running_h = 0.0 if self.refused_since_s is None else _hours(self.refused_since_s, at_s)
        return prior.seen(self.returns, self.refused_h + running_h).per_h


def _hours(from_s: float, to_s: float) -> float:
    """A clock that jumped back makes no negative time."""
    return max(0.0, to_s - from_s) / HOUR_S
