"""Tiers of machines on virtual time: stages, additions and evictions over links of one speed.

Every worker reads and writes the whole model once in a clock. Times are in seconds; computing
without any network takes one second of a clock that `reference` machines share.
"""

import bisect
import itertools
import math
from typing import NamedTuple

import numpy as np

from agent.paramserver.api import Application, Params, Stop, even
from agent.paramserver.controller import Plan
from agent.paramserver.placement import Stages
from agent.paramserver.tables import Table
from agent.paramserver.virtual.cluster import Place, Virtual
from agent.paramserver.virtual.network import Fair
from agent.paramserver.worker import Bound

KEYS = 64
OWN_WIDTH = 1
MODEL_BYTES = 1e9
GRAINS = 20
PACE = 3  # clocks whose median is the pace before a change, or after it


class Dense(Application):
    """Reads and writes every row once for each worker and clock."""

    tables: tuple[Table, ...] = (Table("model", KEYS, 1, own_writes=False),)
    grainwise = False
    loads = 0

    def __init__(self, items: int, clocks: int) -> None:
        self.items, self.stop = items, Stop(clocks=clocks)

    def load(self, lo: int, hi: int) -> None:  # noqa: ARG002
        type(self).loads += 1

    def process_range(self, lo: int, hi: int, params: Params) -> None:  # noqa: ARG002
        keys = np.arange(KEYS)
        params.read("model", keys)
        params.update("model", keys, np.ones((KEYS, 1)))


class Factors(Dense):
    """Rows of its own for each block, and rows that all share, as a factorisation by users has.

    So a worker touches its part of a model only, and yet all of the model changes in a clock.
    """

    def __init__(self, items: int, clocks: int, blocks: int) -> None:
        super().__init__(items, clocks)
        self._blocks, self._each = blocks, items // blocks
        self.tables = (
            Table("own", blocks, OWN_WIDTH, own_writes=False),
            Table("shared", KEYS, 1, own_writes=False),
        )

    @staticmethod
    def values(blocks: int) -> int:
        return blocks * OWN_WIDTH + KEYS

    def process_range(self, lo: int, hi: int, params: Params) -> None:
        own = np.arange(lo // self._each, -(-hi // self._each))
        for table, keys in (("own", own), ("shared", np.arange(KEYS))):
            change = np.ones_like(params.read(table, keys))
            params.update(table, keys, change)


class Setting(NamedTuple):
    reliable: int
    transient: int
    clocks: int = 6
    blocks: int = 128
    partitions: int = 32
    clock_s: float = 1.0  # of computing, if `reference` machines share it
    reference: int = 64
    bytes_per_s: float = 1e9  # of a link; a model takes one second
    stage: int = 0  # forced, if it is not 0
    dense: bool = True  # else only `KEYS` values of the model are of interest to all


def places(setting: Setting) -> list[Place]:
    made = [Place(f"r{at:02}", f"r{at}") for at in range(setting.reliable)]
    return made + [
        Place(f"t{at:02}", f"t{at}", False, f"spot{at % 2}") for at in range(setting.transient)
    ]


def cluster(setting: Setting) -> tuple[Virtual, Fair]:
    """Return a cluster and its network."""
    work = even(setting.blocks * GRAINS, setting.blocks, GRAINS)
    total_s = setting.clock_s * setting.reference
    plan = Plan(
        work=work,
        stop=Stop(clocks=setting.clocks),
        partitions=setting.partitions,
        expected=setting.reliable + setting.transient,
        partition_bytes=MODEL_BYTES / setting.partitions,
        bytes_per_s=setting.bytes_per_s,
        dead_s=1e9,
        dwell=3,
    )
    networks: list[Fair] = []
    values = KEYS if setting.dense else Factors.values(setting.blocks)

    def made_for_a_node() -> Dense:
        items = work.bounds[-1]
        if setting.dense:
            return Dense(items, setting.clocks)
        return Factors(items, setting.clocks, setting.blocks)

    def network(made: Virtual) -> Fair:
        networks.append(Fair(made, setting.bytes_per_s, MODEL_BYTES / (values * 8), 2e-3))
        return networks[0]

    virtual = Virtual(
        made_for_a_node,
        plan,
        places(setting),
        cost=lambda _: total_s / setting.blocks / GRAINS,
        network=network,
        bound=Bound(0),
    )
    if setting.stage:
        virtual.brain.stages = Forced(stage=setting.stage)
    return virtual, networks[0]


class Forced(Stages):
    """A stage that stays, to compare stages at one ratio."""

    def next(self, clock: int, transient: int, reliable: int, nic: float | None = None) -> "Stages":  # noqa: ARG002
        return self


def clock_s(setting: Setting) -> float:
    """Return how long a clock takes, once it is regular."""
    virtual, _ = cluster(setting)
    why = virtual.run()
    assert why.endswith("are done"), why
    return float(np.median(np.diff(virtual.closed_s)[1:]))


class Story(NamedTuple):
    """What an addition and an eviction did to the times of clocks."""

    ends_s: list[float]  # the beginning, then when each clock was closed for the first time
    loads_at_eviction: int
    rolls: int
    stages: list[int]
    added_s: float
    evicted_s: float

    @property
    def clocks_s(self) -> list[float]:
        return [after - before for before, after in itertools.pairwise(self.ends_s)]


def lost_s(ends_s: list[float], since_s: float, until: int) -> float:
    """Return what a change cost, in time of the pace that it led to, until a clock was closed.

    That is sigma of a planned change and lambda of an eviction, with clocks that are done again. What
    was done of the clock that was open at `since_s` counts as done.
    """
    closed = bisect.bisect_right(ends_s, since_s) - 1
    before_s = float(np.median(np.diff(ends_s[max(0, closed - PACE) : closed + 1])))
    after_s = float(np.median(np.diff(ends_s[until - PACE : until + 1])))
    done = min(1.0, (since_s - ends_s[closed]) / before_s)
    return ends_s[until] - since_s - (until - closed - done) * after_s


def elastic(
    setting: Setting,
    added: int,
    add_at: int,
    evict_at: int,
    warning_s: float = 120.0,
    *,
    share: float = 0.0,
) -> Story:
    """Add machines after one clock, and evict all that were added after a later one.

    Both happen when about this `share` of the next clock is over.
    """
    virtual, _ = cluster(setting)
    names = [f"t{setting.transient + at:02}" for at in range(added)]
    stages: list[int] = []
    happened = {"add": math.nan, "evict": math.nan}
    loads = 0
    Dense.loads = 0

    def add() -> None:
        happened["add"] = virtual.now_s
        for at, name in enumerate(names):
            virtual.add(Place(name, name, False, f"spot{at % 2}"))

    def evict() -> None:
        nonlocal loads
        happened["evict"], loads = virtual.now_s, Dense.loads
        virtual.evict(names, warning_s)

    due = [(add_at, add), (evict_at, evict)]

    def look() -> None:
        closed = virtual.brain.ledger.closed + 1
        while len(stages) < closed:
            stages.append(virtual.brain.stages.stage)
        while due and closed >= due[0][0]:
            ends_s = [virtual.brain.begun_s or 0.0, *virtual.closed_s][-2:]
            virtual.at(virtual.now_s + share * (ends_s[1] - ends_s[0]), due.pop(0)[1])

    virtual.on_event = look
    why = virtual.run()
    assert why.endswith("are done"), why
    return Story(
        [virtual.brain.begun_s or 0.0, *virtual.closed_s],
        Dense.loads - loads,
        virtual.brain.rolls,
        stages,
        happened["add"],
        happened["evict"],
    )
