"""Patterns of slow workers on virtual time, each with what perfectly balanced work would take.

Times are in iterations: one worker's share of a clock takes 1 if nothing slows it.
"""

import random
from typing import NamedTuple, Protocol

import numpy as np

from agent.paramserver.api import Application, Params, Stop, Work
from agent.paramserver.controller import Plan
from agent.paramserver.help import Settings
from agent.paramserver.tables import Table
from agent.paramserver.virtual.cluster import Place, Virtual
from agent.paramserver.virtual.network import Delays
from agent.paramserver.worker import Bound

GRAINS = 200  # of a worker's share: so often does it look for messages
DELAY = 0.0005  # of a message, in iterations


class Idle(Application):
    """Work that takes time and changes nothing."""

    tables = (Table("none", 1, 1),)
    grainwise = False

    def process_range(self, lo: int, hi: int, params: Params) -> None:
        pass


class Pattern(Protocol):
    def begin(self, cluster: Virtual, seed: int) -> None: ...

    def ideal(self, cluster: Virtual) -> float:
        """Return the time of a clock if all work were balanced at every moment."""


class Outcome(NamedTuple):
    clock: float  # mean time of a clock
    ideal: float
    given: float  # share of all work that was given away
    messages: float  # of help, for each worker and clock


class Slowed:
    """Keeps how long each worker is slow; overlapping periods extend and do not add."""

    def __init__(self, cluster: Virtual, times: float) -> None:
        self._cluster, self._times = cluster, times
        self._until: dict[str, float] = {}
        self.total = 0.0

    def slow(self, name: str, length: float) -> None:
        now = self._cluster.now_s
        until = max(self._until.get(name, now), now + length)
        self.total += until - max(now, self._until.get(name, now))
        if self._until.get(name, 0.0) <= now:
            self._cluster.slow_down(name, self._times)
            self._cluster.at(until, lambda: self._end(name))
        self._until[name] = until

    def _end(self, name: str) -> None:
        until = self._until[name]
        if until > self._cluster.now_s + 1e-12:
            self._cluster.at(until, lambda: self._end(name))
        else:
            self._cluster.slow_down(name, 1.0)

    def ideal(self, workers: int) -> float:
        share = self.total / (workers * self._cluster.now_s)
        return 1 / (1 - share * (1 - 1 / self._times))


class SlowWorker:
    """At ten points in each iteration a worker is slowed with probability 1 %, for up to two.

    Iterations are the cluster's present ones, in wall time: reading (b) of the description.
    """

    def __init__(self, delay: float) -> None:
        self._delay = delay

    def begin(self, cluster: Virtual, seed: int) -> None:
        self._cluster, self._draw = cluster, random.Random(seed)  # noqa: S311
        self._slowed = Slowed(cluster, 1 + self._delay)
        if self._delay:
            cluster.at(0.05, self._point)

    def _point(self) -> None:
        ends = [0.0, *self._cluster.closed_s]
        length = max(1.0, ends[-1] - ends[-2]) if len(ends) > 1 else 1.0
        length = max(length, self._cluster.now_s - ends[-1])
        for name in self._cluster.hosts:
            if self._draw.random() < 0.01:
                self._slowed.slow(name, self._draw.uniform(0, 2) * length)
        self._cluster.at(self._cluster.now_s + length / 10, self._point)

    def ideal(self, cluster: Virtual) -> float:
        return self._slowed.ideal(len(cluster.hosts)) if self._delay else 1.0


class Disrupted:
    """Every two iterations each machine is disturbed with probability 20 %, for two iterations."""

    def __init__(self, delay: float, length: float = 2.0) -> None:
        self._delay, self._length = delay, length

    def begin(self, cluster: Virtual, seed: int) -> None:
        self._cluster, self._draw = cluster, random.Random(seed)  # noqa: S311
        self._slowed = Slowed(cluster, 1 + self._delay)
        cluster.at(0.0, self._point)

    def _point(self) -> None:
        machines = sorted({name.split("/")[0] for name in self._cluster.hosts})
        hit = {machine for machine in machines if self._draw.random() < 0.2}
        for name in self._cluster.hosts:
            if name.split("/")[0] in hit:
                self._slowed.slow(name, self._length)
        self._cluster.at(self._cluster.now_s + self._length, self._point)

    def ideal(self, cluster: Virtual) -> float:
        return self._slowed.ideal(len(cluster.hosts))


class PowerLaw:
    """Each worker's iteration takes a time of density t^-alpha, of 1 at least."""

    def __init__(self, alpha: float) -> None:
        self.alpha = alpha

    def begin(self, cluster: Virtual, seed: int) -> None:
        draw = random.Random(seed)  # noqa: S311
        inner = cluster._work

        def work(host):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN202
            worker = host.member.worker
            before = worker.turn.clock if worker.turn else None
            inner(host)
            turn = worker.turn
            if turn is not None and turn.clock != before:
                cluster.slow_down(worker.name, draw.paretovariate(self.alpha - 1))

        cluster._work = work  # type: ignore[method-assign]

    def ideal(self, cluster: Virtual) -> float:  # noqa: ARG002
        return self.alpha / (self.alpha - 1)


class Uneven:
    """Half of the machines have three quarters of the work; nothing is slowed."""

    def begin(self, cluster: Virtual, seed: int) -> None:
        pass

    def ideal(self, cluster: Virtual) -> float:  # noqa: ARG002
        return 1.0


def simulate(  # noqa: PLR0913 - what a run consists of
    pattern: Pattern,
    *,
    machines: int = 16,
    each: int = 8,
    clocks: int = 40,
    slack: int | None = 1,
    settings: Settings | None = None,
    seed: int = 0,
) -> Outcome:
    """Run workers of one block each under a pattern, and return how long a clock took."""
    settings = settings or Settings()
    count = machines * each
    names = sorted(f"m{at % machines:03}/{at // machines}" for at in range(count))
    # Blocks are given to workers in the order of their names.
    heavy = [isinstance(pattern, Uneven) * (1 if int(name[1:4]) % 2 else -1) for name in names]
    sizes = [GRAINS * (2 + more) // 2 for more in heavy]
    bounds = tuple(sum(sizes[:at]) for at in range(count + 1))
    plan = Plan(
        work=Work(bounds, GRAINS),
        stop=Stop(clocks=clocks),
        partitions=1,
        expected=count,
        help_size=settings.size,
        dead_s=1e9,
    )

    def make() -> Idle:
        idle = Idle()
        idle.items = bounds[-1]
        return idle

    def cost(block: int) -> float:
        return sizes[block] / GRAINS / GRAINS

    cluster = Virtual(
        make,
        plan,
        [Place(name, name.split("/")[0]) for name in names],
        cost=cost,
        network=lambda made: Delays(made, DELAY, 0.5, seed),
        bound=Bound(slack),
        help_settings=settings,
    )
    pattern.begin(cluster, seed)
    why = cluster.run()
    assert why.endswith("are done"), why
    begun, ended = cluster.brain.begun_s or 0.0, cluster.closed_s[-1]
    given = sum(host.member.worker.helpee.total_given for host in cluster.hosts.values())
    reports = sum(host.member.worker.helper.total_reports for host in cluster.hosts.values())
    return Outcome(
        clock=(ended - begun) / clocks,
        ideal=pattern.ideal(cluster),
        given=given / (count * GRAINS * clocks),
        messages=reports / (count * clocks),
    )


def mean(outcomes: list[Outcome]) -> Outcome:
    return Outcome(*(float(value) for value in np.mean(np.array(outcomes), axis=0)))
