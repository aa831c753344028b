"""Virtual time, luck and the durable inbox, which all simulated parts share."""

from collections.abc import Callable
from heapq import heappop, heappush
from random import Random

import msgspec

from agent.messages import AnyReport
from orchestrator.events import AnyEvent
from orchestrator.simulated.scenario import Faults

LATE_S_MAX = 60.0


class Timeline:
    """Planned events by time; events of the same moment happen in the order of planning."""

    def __init__(self, now_s: float) -> None:
        self.now_s = now_s
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._nth = 0

    def at(self, at_s: float, what: Callable[[], None]) -> None:
        self._nth += 1
        heappush(self._queue, (at_s, self._nth, what))

    def after(self, delay_s: float, what: Callable[[], None]) -> None:
        self.at(self.now_s + delay_s, what)

    @property
    def next_s(self) -> float:
        return self._queue[0][0] if self._queue else float("inf")

    def move_to(self, at_s: float) -> None:
        self.now_s = max(self.now_s, at_s)

    def do_next(self) -> None:
        heappop(self._queue)[2]()


class Luck:
    """One seeded random stream. `faults` is what may go wrong now; it is empty in calm times."""

    def __init__(self, seed: int, faults: Faults) -> None:
        self.random = Random(seed)  # noqa: S311 - replayable by design
        self.faults = faults

    def chance(self, probability: float) -> bool:
        return probability > 0 and self.random.random() < probability

    def wait_s(self, rate_per_h: float) -> float | None:
        """Draw the seconds until the next event of this rate; None if it never happens."""
        return self.random.expovariate(rate_per_h) * 3600.0 if rate_per_h > 0 else None

    def calm_down(self) -> None:
        self.faults = Faults()


class Inbox:
    """The durable inbox for reports of instances.

    On a bad day a report comes late, twice or not at all.
    """

    def __init__(self, timeline: Timeline, luck: Luck) -> None:
        self.ready: list[AnyEvent] = []
        self._timeline = timeline
        self._luck = luck

    def report(self, event: AnyReport, delay_s: float, *, may_be_lost: bool = True) -> None:
        """Deliver a report after `delay_s`, stamped with that time even if it arrives later."""
        faults = self._luck.faults
        if may_be_lost and self._luck.chance(faults.report_lost):
            return
        stamped: AnyReport = msgspec.structs.replace(event, at_s=self._timeline.now_s + delay_s)
        for _ in range(2 if self._luck.chance(faults.report_twice) else 1):
            late = self._luck.chance(faults.report_late)
            late_s = self._luck.random.uniform(0.0, LATE_S_MAX) if late else 0.0
            self._timeline.after(delay_s + late_s, lambda: self.ready.append(stamped))
