"""The manager's own observations of a pool: how long it held machines, and how they ended.

A pool loses its machines together, so losses within `BULK_S` of each other count as one. A stretch
that still runs counts its time without an event (censoring). Refusals show for how long the pool
has nothing to sell. Observations lose weight with time, because markets change.
"""

import math
from collections.abc import Mapping
from statistics import median, median_low
from typing import Literal

import msgspec

from bidding.risk import HAZARD_PRIOR, RETURN_PRIOR, Gamma
from cloud.clock import HOUR_S

BULK_S = 120.0
MEMORY_H = 48.0  # the half-life of an observation; docs/bidding.md compares 12 h and no end
# Half of the time since the last refusal, cut off at this, counts as time without capacity.
UNASKED_H_MAX = 1.0
TIMES_MAX = 32
SIZES_MAX = 16
ONE_SIZE = 1e-3
ALIKE_MIN, ALIKE_MAX = 2, 4  # machines by which a type is known
MOVED = 1.1  # noise is less
FACTOR_MAX = 20.0
Took = Literal["start_s", "morph_s", "recovery_s"]


class Times(msgspec.Struct, frozen=True, kw_only=True):
    """The durations of changes, the newest last.

    They are the time from the order of a machine to its first step, the stall of a change of layout
    (sigma), and the cost of a loss in time, lost steps included (lambda).
    """

    start_s: tuple[float, ...] = ()
    morph_s: tuple[float, ...] = ()
    recovery_s: tuple[float, ...] = ()

    def saw(self, what: Took, seconds: float) -> "Times":
        """Add an observation; a negative one is ignored, because the clock jumped back."""
        if seconds < 0:
            return self
        kept = (*getattr(self, what), seconds)[-TIMES_MAX:]
        return msgspec.structs.replace(self, **{what: kept})

    def typical_s(self, what: Took, assumed_s: float) -> float:
        """Return the median of the observations, with the assumed value counted as one."""
        return float(median([assumed_s, *getattr(self, what)]))


class Scaling(msgspec.Struct, frozen=True, kw_only=True):
    """What a step took on footprints of other sizes: BidBrain's phi, as this job has it.

    `seen` has the newest step time for each size, in slots times their speed; the newest size last.
    Sizes that differ by less than `ONE_SIZE` are one: their difference says nothing about others.
    """

    seen: tuple[tuple[float, float], ...] = ()

    def saw(self, size: float, step_s: float) -> "Scaling":
        others = tuple(one for one in self.seen if not math.isclose(one[0], size, rel_tol=ONE_SIZE))
        return Scaling(seen=(*others, (size, step_s))[-SIZES_MAX:])

    def work_per_s(self, size: float) -> float | None:
        """Return the steps per second at any size, or None before two sizes were seen.

        A step is taken to be `shared / size + fixed` seconds, of which neither part is below 0;
        the fit weighs relative errors. So work that does not shrink with machines is not paid for.
        """
        if len(self.seen) < 2 or size <= 0:
            return None
        # Relative errors: shared / (size T) + fixed / T is to be 1.
        rows = [(1 / (n * step_s), 1 / step_s) for n, step_s in self.seen]
        aa, ab, bb = (sum(r[i] * r[j] for r in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
        a, b = (sum(r[i] for r in rows) for i in (0, 1))
        span = aa * bb - ab * ab
        shared, fixed = (a * bb - b * ab) / span, (b * aa - a * ab) / span
        if fixed < 0:
            shared, fixed = a / aa, 0.0
        elif shared < 0:
            shared, fixed = 0.0, b / bb
        return 1 / (shared / size + fixed)


class Speeds(msgspec.Struct, frozen=True, kw_only=True):
    """How fast types of machines are for a job: BidBrain's nu, as far as the job has measured it.

    `seen` has the seconds of a part of the job's work on the newest machines of each type. A type
    is known by the faster half of them, from `ALIKE_MIN` on, because one alone may be a straggler.
    `factors` is what the speeds that the catalogue states are multiplied with. Known types keep the
    catalogue's mean, so that others compare with them as stated.
    """

    seen: dict[str, dict[str, float]] = {}
    factors: dict[str, float] = {}

    def saw(self, kind: str, machine: str, part_s: float, stated: Mapping[str, float]) -> "Speeds":
        """Add what a part of the work took; `stated` has the catalogue's speeds."""
        machines = dict(self.seen.get(kind, {}))
        machines.pop(machine, None)
        machines[machine] = part_s  # the newest last
        kept = dict(list(machines.items())[-ALIKE_MAX:])
        seen = {**self.seen, kind: kept}
        return Speeds(seen=seen, factors=self._factors(seen, stated))

    def _factors(
        self, seen: Mapping[str, Mapping[str, float]], stated: Mapping[str, float]
    ) -> dict[str, float]:
        """Compare the types that are known; a factor stays until it is wrong by `MOVED`."""
        over = {
            kind: -math.log(median_low(machines.values()) * stated[kind])
            for kind, machines in seen.items()
            if len(machines) >= ALIKE_MIN and kind in stated
        }
        if len(over) < 2:
            return self.factors
        mean = sum(over.values()) / len(over)
        found = dict(self.factors)
        for kind, each in over.items():
            moved = each - mean - math.log(found.get(kind, 1.0))
            if abs(moved) > math.log(MOVED):
                found[kind] = min(max(math.exp(each - mean), 1 / FACTOR_MAX), FACTOR_MAX)
        return found


class PoolRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Events and hours with their weights at `as_of_s`; `*_since_s` begin running stretches.

    Observations lose half of their weight in `MEMORY_H`, so a pool without machines for a long time
    is as little known as a new one. A stretch of refusals is known only until `refused_at_s`, the
    last time that we asked.
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
        """Record a sale: it ends a stretch without capacity, and begins or continues a holding."""
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
        """Record a machine taken by the cloud; `others_left` says whether we still hold some."""
        again = self.lost_at_s is not None and at_s - self.lost_at_s < BULK_S
        record = self._aged(at_s, losses=float(not again))
        record = msgspec.structs.replace(record, lost_at_s=at_s)
        return record if others_left else record.left(at_s)

    def left(self, at_s: float) -> "PoolRecord":
        """Record that we hold no machine there any more."""
        if self.held_since_s is None:
            return self
        record = self._aged(at_s, held_h=_weight_h(self.held_since_s, at_s, at_s))
        return msgspec.structs.replace(record, held_since_s=None)

    def losses_at(self, at_s: float) -> float:
        """Return the present weight of the observed losses."""
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
        """Return the sums with their weights at a moment, plus what was observed then."""
        weight = _weight(self.as_of_s, at_s)
        sums = {
            name: getattr(self, name) * weight + more.get(name, 0.0)
            for name in ("losses", "held_h", "returns", "refused_h")
        }
        return msgspec.structs.replace(self, as_of_s=max(self.as_of_s, at_s), **sums)


def _weight(from_s: float, at_s: float) -> float:
    """Return the weight at `at_s` of an observation made at `from_s`."""
    return float(0.5 ** (_hours(from_s, at_s) / MEMORY_H))


def _weight_h(from_s: float, to_s: float, at_s: float) -> float:
    """Return the weight of the hours of a stretch: the integral of the weight over it."""
    scale_h = MEMORY_H / math.log(2)
    return scale_h * max(0.0, _weight(to_s, at_s) - _weight(from_s, at_s))


def _hours(from_s: float, to_s: float) -> float:
    """Return the hours between two moments; 0 if the clock jumped back."""
    return max(0.0, to_s - from_s) / HOUR_S
