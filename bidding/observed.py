"""What the manager itself has seen of a pool: how long it held machines there, and how they ended.

A pool loses its machines together, so losses within `BULK_S` of each other are one. Time that is
still running counts without an event: that is the censoring. Refusals tell the other side, how
long the pool has nothing to sell. What was seen fades: markets do not stay as they were.
"""

import math
from statistics import median
from typing import Literal

import msgspec

from bidding.history import HOUR_S
from bidding.risk import HAZARD_PRIOR, RETURN_PRIOR, Gamma

BULK_S = 120.0
MEMORY_H = 48.0  # half is left then; docs/bidding.md says what 12 h and no end would do
# Half of the time since the last refusal counts as away, but of no more than this.
UNASKED_H_MAX = 1.0
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
    """Events and hours as they weigh at `as_of_s`; `*_since_s` is the stretch that runs now.

    What was seen loses half of its weight in `MEMORY_H`, so that a pool nobody has been in for long is as
    little known as one that is new. Of a refusal only what was asked is known: after `refused_at_s`
    nobody knows.
    """

    losses: float = 0.0
    held_h: float = 0.0
    returns: float = 0.0
    refused_h: float = 0.0
    as_of_s: float = 0.0
    held_since_s: float | None = None
    lost_at_s: float | None = None
    refused_since_s: float | None = None
    refused_at_s: float = 0.0

    def sold(self, at_s: float) -> "PoolRecord":
        """It sold us a machine: a stretch without capacity is over, one of holding begins or goes on."""
        record = self
        if self.refused_since_s is not None:
            asked_h = _hours(self.refused_since_s, self.refused_at_s)
            unknown_h = min(UNASKED_H_MAX, _hours(self.refused_at_s, at_s))
            record = self._aged(at_s, returns=1.0, refused_h=asked_h + unknown_h / 2)
            record = msgspec.structs.replace(record, refused_since_s=None)
        if record.held_since_s is None:
            record = msgspec.structs.replace(record, held_since_s=at_s)
        return record

    def refused(self, at_s: float) -> "PoolRecord":
        since_s = at_s if self.refused_since_s is None else self.refused_since_s
        return msgspec.structs.replace(
            self, refused_since_s=since_s, refused_at_s=max(since_s, at_s)
        )

    def lost(self, at_s: float, others_left: bool) -> "PoolRecord":
        """The cloud took a machine; `others_left` says whether we still hold some there."""
        again = self.lost_at_s is not None and at_s - self.lost_at_s < BULK_S
        record = self._aged(at_s, losses=float(not again))
        record = msgspec.structs.replace(record, lost_at_s=at_s)
        return record if others_left else record.left(at_s)

    def left(self, at_s: float) -> "PoolRecord":
        """We hold nothing there any more."""
        if self.held_since_s is None:
            return self
        record = self._aged(at_s, held_h=_weight_h(self.held_since_s, at_s, at_s))
        return msgspec.structs.replace(record, held_since_s=None)

    def losses_at(self, at_s: float) -> float:
        """How much the losses that were seen weigh now."""
        return self.losses * _weight(self.as_of_s, at_s)

    def hazard_per_h(self, at_s: float, prior: Gamma = HAZARD_PRIOR) -> float:
        weight, running_h = _weight(self.as_of_s, at_s), 0.0
        if self.held_since_s is not None:
            running_h = _weight_h(self.held_since_s, at_s, at_s)
        return prior.seen(self.losses * weight, self.held_h * weight + running_h).per_h

    def return_per_h(self, at_s: float, prior: Gamma = RETURN_PRIOR) -> float:
        weight, running_h = _weight(self.as_of_s, at_s), 0.0
        if self.refused_since_s is not None:
            running_h = _weight_h(self.refused_since_s, self.refused_at_s, at_s)
        return prior.seen(self.returns * weight, self.refused_h * weight + running_h).per_h

    def _aged(self, at_s: float, **more: float) -> "PoolRecord":
        """The sums as they weigh at a moment, with what was seen then."""
        weight = _weight(self.as_of_s, at_s)
        sums = {
            name: getattr(self, name) * weight + more.get(name, 0.0)
            for name in ("losses", "held_h", "returns", "refused_h")
        }
        return msgspec.structs.replace(self, as_of_s=max(self.as_of_s, at_s), **sums)


def _weight(from_s: float, at_s: float) -> float:
    """What is left at a moment of what was seen at another."""
    return float(0.5 ** (_hours(from_s, at_s) / MEMORY_H))


def _weight_h(from_s: float, to_s: float, at_s: float) -> float:
    """What the hours of a stretch weigh: the integral of the weight over it."""
    scale_h = MEMORY_H / math.log(2)
    return scale_h * max(0.0, _weight(to_s, at_s) - _weight(from_s, at_s))


def _hours(from_s: float, to_s: float) -> float:
    """A clock that jumped back makes no negative time."""
    return max(0.0, to_s - from_s) / HOUR_S
