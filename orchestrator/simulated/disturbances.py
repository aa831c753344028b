"""Seeded disturbances from outside a deployment."""

from collections.abc import Callable

from agent.messages import NoticeSeen
from cloud.model import Notice
from cloud.simulated import SimulatedCloud
from orchestrator.simulated.fleet import Fleet
from orchestrator.simulated.timeline import Inbox, Luck, Timeline

DROUGHT = "it has run dry"


class BadDays:
    """Bulk losses, droughts, clock jumps, false notices, keepers that lose their memory."""

    def __init__(
        self, cloud: SimulatedCloud, fleet: Fleet, timeline: Timeline, luck: Luck, inbox: Inbox
    ) -> None:
        self.dry_until_s = -1.0
        self._cloud = cloud
        self._fleet = fleet
        self._timeline = timeline
        self._luck = luck
        self._inbox = inbox
        faults = luck.faults
        for every_s, what in (
            (faults.bulk_loss_every_s, self._bulk_loss),
            (faults.drought_every_s, self._drought),
            (faults.clock_jump_every_s, self._clock_jump),
            (faults.false_notice_every_s, self._false_notice),
            (faults.keeper_lost_every_s, self._keeper_lost),
        ):
            if every_s > 0:
                self._repeat(every_s, what)

    def calm_down(self) -> None:
        """Let capacity return, and let nothing go wrong any more."""
        self._luck.calm_down()
        self.dry_until_s = -1.0

    @property
    def calm(self) -> bool:
        return not any(getattr(self._luck.faults, f) for f in self._luck.faults.__struct_fields__)

    def _repeat(self, every_s: float, what: Callable[[], None]) -> None:
        def again() -> None:
            if not self.calm:
                what()
                self._repeat(every_s, what)

        self._timeline.after(self._luck.random.expovariate(1 / every_s), again)

    def _bulk_loss(self) -> None:
        share = self._luck.random.choice((0.3, 0.6, 1.0))
        victims = [m for m in sorted(self._fleet.machines) if self._luck.chance(share)]
        warning_s = self._luck.random.choice((0.0, 0.0, 30.0, 120.0))
        self._cloud.revoke(victims, self._timeline.now_s, warning_s)

    def _drought(self) -> None:
        self.dry_until_s = self._timeline.now_s + self._luck.faults.drought_s

    def _clock_jump(self) -> None:
        """Advance time unseen, as if the manager's machine had been suspended."""
        self._timeline.now_s += self._luck.random.uniform(10.0, 100.0)

    def _false_notice(self) -> None:
        """Report a notice that no eviction follows; its deadline may have passed already."""
        alive = sorted(self._fleet.machines)
        if alive:
            deadline_s = self._timeline.now_s + self._luck.random.choice((-5.0, 30.0, 120.0))
            victim = self._luck.random.choice(alive)
            notice = Notice(machine_id=victim, kind="terminate", deadline_s=deadline_s)
            self._inbox.report(NoticeSeen(at_s=0.0, notice=notice), 0.0)

    def _keeper_lost(self) -> None:
        for job in self._fleet.jobs.values():
            job.lose_memory()
