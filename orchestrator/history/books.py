"""Where the money goes: two readings of the ledger make charges, which add up to it. Pure.

    charge(machine, cause) = its share of (cost now - cost at the reading before)
    other                  = what the ledger has spent and no machine, disk or sum of traffic explains

Because every charge is a difference of two sums of the ledger, all charges together are the newest
sum, whatever was missed in between.
"""

from collections.abc import Iterator

import msgspec

from cloud.clock import HOUR_S
from orchestrator.history.records import Cause, LeaseReading, Reading

JOBS_MAX = 2_000  # more than the manager remembers, and so more than can come again
WORTH_A_LINE_USD = 1e-7  # less is kept until more has come together


class Charge(msgspec.Struct, frozen=True, kw_only=True):
    """Money for one cause, over a time; `token` is empty where no machine was."""

    from_s: float
    to_s: float
    token: str
    job: str
    pool: str
    market: str
    cause: Cause
    usd: float
    hours: float = 0.0
    on_demand_usd: float = 0.0


class Line(msgspec.Struct, array_like=True):
    """What a machine has been charged for, up to a moment, and what it was doing then."""

    at_s: float
    job: str
    machine_usd: float
    disk_usd: float
    egress_usd: float
    usd_per_h: float  # without its disk
    causes: tuple[tuple[Cause, float], ...]
    ended: bool


class JobLine(msgspec.Struct, array_like=True):
    charged_usd: float
    traffic_usd: float


class Books(msgspec.Struct, kw_only=True):
    """The sums at the newest reading. It encodes to JSON and back without loss."""

    at_s: float = 0.0
    ledger: str = ""  # of these sums; "" if an earlier version began them
    charged_usd: float = 0.0
    manager_usd: float = 0.0
    lines: dict[str, Line] = {}
    jobs: dict[str, JobLine] = {}

    def take(self, reading: Reading) -> list[Charge]:
        """Return the charges since the reading before; none for one that is older.

        Another ledger begins at zero: its journal is a new one, because the one before was moved
        away. An older copy of the same journal is the same ledger, so what it does not know any
        more is taken back.
        """
        if self.ledger and reading.ledger != self.ledger:
            self.at_s = self.charged_usd = self.manager_usd = 0.0
            self.lines, self.jobs = {}, {}
        elif reading.at_s < self.at_s:
            return []
        self.ledger = reading.ledger
        since_s, self.at_s = self.at_s or reading.at_s, reading.at_s
        charges = [charge for lease in reading.leases for charge in self._lease(lease)]
        here = {lease.token for lease in reading.leases}
        self.lines = {token: line for token, line in self.lines.items() if token in here}
        for charge in charges:
            self._job(charge.job).charged_usd += charge.usd
        more = [*self._traffic(reading, since_s), *self._others(reading, since_s)]
        charges += more
        self.charged_usd += sum(charge.usd for charge in charges)
        manager_usd, self.manager_usd = reading.manager_usd - self.manager_usd, reading.manager_usd
        charges += self._whole("manager", manager_usd, since_s, 0.0)
        charges += self._whole(
            "other", reading.spent_usd - self.charged_usd, since_s, WORTH_A_LINE_USD
        )
        for name in list(self.jobs)[: max(0, len(self.jobs) - JOBS_MAX)]:
            del self.jobs[name]
        return charges

    def _job(self, name: str) -> JobLine:
        line = self.jobs.pop(name) if name in self.jobs else JobLine(0.0, 0.0)
        self.jobs[name] = line  # the newest last
        return line

    def _lease(self, lease: LeaseReading) -> Iterator[Charge]:
        """Yield what a machine has cost since its line was written, and write the next one."""
        disk_usd_per_h = _rate(lease.disk_usd, lease.from_s, lease.ended_at_s or self.at_s)
        new = Line(
            self.at_s,
            lease.job,
            lease.cost_usd - lease.disk_usd - lease.egress_usd,
            lease.disk_usd,
            lease.egress_usd,
            lease.usd_per_h - disk_usd_per_h,
            lease.causes,
            lease.ended_at_s is not None,
        )
        old = self.lines.get(lease.token)
        self.lines[lease.token] = new
        if old is None:
            old = Line(lease.from_s, lease.job, 0.0, 0.0, 0.0, new.usd_per_h, new.causes, False)
        until_s = max(old.at_s, min(lease.ended_at_s or self.at_s, self.at_s))
        usd, billed_usd = new.machine_usd - old.machine_usd, 0.0
        if old.ended:  # a list has said better what it cost
            usd, billed_usd = 0.0, usd
        elif new.ended:
            run_usd = old.usd_per_h * (until_s - old.at_s) / HOUR_S
            usd, billed_usd = run_usd, usd - run_usd
        if abs(billed_usd) < WORTH_A_LINE_USD and not old.ended:
            usd, billed_usd = usd + billed_usd, 0.0
        took_h = (until_s - old.at_s) / HOUR_S
        for cause, share in () if old.ended else old.causes:
            yield _charge(lease, old, until_s, cause, usd * share, took_h * share)
        more: tuple[tuple[Cause, float], ...] = (
            ("disk", new.disk_usd - old.disk_usd),
            ("traffic", new.egress_usd - old.egress_usd),
            ("billing", billed_usd),
        )
        for cause, more_usd in more:
            if more_usd:
                yield _charge(lease, old, until_s, cause, more_usd, 0.0)

    def _traffic(self, reading: Reading, since_s: float) -> Iterator[Charge]:
        for one in reading.jobs:
            line = self._job(one.job)
            usd, line.traffic_usd = one.traffic_usd - line.traffic_usd, one.traffic_usd
            line.charged_usd += usd
            if usd:
                yield _plain(one.job, "traffic", usd, since_s, reading.at_s)

    def _others(self, reading: Reading, since_s: float) -> Iterator[Charge]:
        """Yield what a job has spent and none of its lines explains."""
        for one in reading.jobs:
            line = self._job(one.job)
            usd = one.spent_usd - line.charged_usd
            if abs(usd) >= WORTH_A_LINE_USD:
                line.charged_usd += usd
                yield _plain(one.job, "other", usd, since_s, reading.at_s)

    def _whole(
        self, cause: Cause, usd: float, since_s: float, least_usd: float
    ) -> Iterator[Charge]:
        if usd and abs(usd) >= least_usd:
            self.charged_usd += usd
            yield _plain("", cause, usd, since_s, self.at_s)


def _rate(usd: float, from_s: float, to_s: float) -> float:
    return usd * HOUR_S / (to_s - from_s) if to_s > from_s else 0.0


def _charge(
    lease: LeaseReading, old: Line, to_s: float, cause: Cause, usd: float, hours: float
) -> Charge:
    return Charge(
        from_s=old.at_s,
        to_s=to_s,
        token=lease.token,
        job=old.job,
        pool=lease.pool,
        market=lease.market,
        cause=cause,
        usd=usd,
        hours=hours,
        on_demand_usd=hours * lease.on_demand_usd_per_h,
    )


def _plain(job: str, cause: Cause, usd: float, from_s: float, to_s: float) -> Charge:
    return Charge(
        from_s=from_s, to_s=to_s, token="", job=job, pool="", market="", cause=cause, usd=usd
    )
