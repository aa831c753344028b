"""A counter model: every item adds one to its key, so a lost or doubled change is visible."""

import random
from typing import NamedTuple

import numpy as np

from agent.paramserver.api import Application, Stop, even
from agent.paramserver.controller import Plan
from agent.paramserver.messages import (
    Begun,
    Cancel,
    CancelAck,
    Close,
    Committed,
    Completed,
    Copy,
    DoThis,
    Finished,
    Fresh,
    Grant,
    Installed,
    Move,
    Passed,
    Progress,
    Push,
    PushUp,
    Received,
    Release,
    Released,
    Roll,
    Route,
    Saved,
    Stage,
    Staged,
    Subscribe,
)
from agent.paramserver.tables import Table
from agent.paramserver.virtual.cluster import Place, Virtual
from agent.paramserver.virtual.network import Delays
from agent.paramserver.worker import Bound

KEYS = 13
STEPS = (
    Stage,
    Staged,
    Finished,
    Passed,
    Close,
    Fresh,
    Subscribe,
    Committed,  # flush
    Push,
    PushUp,
    Received,
    Saved,  # push
    Move,
    Copy,
    Installed,
    Route,
    Grant,
    Release,
    Released,  # move
    Roll,  # roll-back
    Progress,
    DoThis,
    Begun,
    Completed,
    Cancel,
    CancelAck,  # help
)


class Counter(Application):
    """Dense counts and sparse ones; what a worker reads of its own keys is never too much."""

    tables = (Table("dense", KEYS, 1), Table("sparse", 0, 2, "int64"))
    items = 120
    grainwise = False
    stop = Stop(clocks=6)

    def process_range(self, lo, hi, params):
        items = np.arange(lo, hi)
        params.update("dense", items % KEYS, np.ones((hi - lo, 1)))
        params.update("sparse", items * 1000, np.stack([np.ones(hi - lo), items], 1))
        params.read("dense", items % KEYS)
        params.measure(hi - lo)


class Twice(Delays):
    """Every twentieth message comes twice."""

    def send(self, source, target, message, deliver):
        for _ in range(1 + (self._draw.random() < 0.05)):
            super().send(source, target, message, deliver)


class Narrow(Delays):
    """Every eighth way from one node to another takes a hundred times as long."""

    def send(self, source, target, message, deliver):
        usual_s = self._delay_s
        if random.Random(f"{source} {target}").random() < 1 / 8:
            self._delay_s = 100 * usual_s
        super().send(source, target, message, deliver)
        self._delay_s = usual_s


class Fate(NamedTuple):
    """What happens in a run: at the n-th message of a kind, somebody dies."""

    seed: int
    traps: tuple[tuple[type, int, str], ...] = ()


def cluster(seed: int, *, bound="drawn", help_size=None, apart=False, network=Delays) -> Virtual:
    draw = random.Random(seed)
    reliable, transient = draw.randint(1, 3), draw.randint(1, 5)
    reliable = 1 if apart else reliable
    if bound == "drawn":
        bound = draw.choice([0, 0, 1, 2, None])
    blocks = draw.randint(5, 10)
    plan = Plan(
        work=even(Counter.items, blocks, 8),
        stop=Counter.stop,
        partitions=draw.randint(1, 4),
        expected=reliable + transient,
        help_size=draw.randint(0, 3) if help_size is None else help_size,
        save_every=2,
        apart=apart,
    )
    places = [Place(f"r{at}", f"r{at}") for at in range(reliable)]
    places += [Place(f"t{at}", f"t{at // 2}", False, f"pool{at % 2}") for at in range(transient)]
    costs = [draw.choice([0.01, 0.01, 0.03]) for _ in range(blocks)]
    delay_s = draw.choice([0.0005, 0.004, 0.03])
    return Virtual(
        Counter,
        plan,
        places,
        cost=costs.__getitem__,
        network=lambda made: network(made, delay_s, 0.95, seed),
        bound=Bound(bound),
    )


def small(network: type[Delays], reliable: int = 1) -> Virtual:
    """Few reliable machines beside three transient ones, of which one has the only partition."""
    plan = Plan(work=even(Counter.items, 6, 8), stop=Counter.stop, partitions=1)
    places = [Place(f"r{at}", f"r{at}") for at in range(reliable)]
    places += [Place(f"t{at}", f"t{at}", False) for at in range(3)]
    return Virtual(
        Counter,
        plan._replace(save_every=1, expected=len(places)),
        places,
        cost=lambda _: 0.01,
        network=lambda made: network(made, 0.001, 0.5, 1),
    )


def mishaps(virtual: Virtual, seed: int, count: int = 3) -> list[str]:
    """Plan mishaps at moments that a message chooses; return what they did, as it happens."""
    draw = random.Random(f"mishaps {seed}")
    traps = [
        (draw.choice(STEPS), draw.randint(1, 12), draw.choice(sorted(ACTS))) for _ in range(count)
    ]
    seen: dict[type, int] = {}
    story: list[str] = []

    def look(source, target, message):
        kind = type(message)
        seen[kind] = seen.get(kind, 0) + 1
        for trap in [one for one in traps if one[0] is kind and one[1] <= seen[kind]]:
            traps.remove(trap)
            act = trap[2]
            what = f"{virtual.now_s:.3f} {kind.__name__} {source}>{target}: {act}"
            virtual.at(
                virtual.now_s,
                lambda a=act, w=what: story.append(
                    w + " " + ACTS[a](virtual, draw, source, target)
                ),
            )

    virtual.on_message = look
    return story


def _kill(virtual, draw, names):
    """Kill nodes of these names, but leave one that can go on."""
    if virtual.brain.begun_s is None:
        return "nobody yet"
    gone = [name for name in names if name in virtual.hosts]
    if virtual.plan.apart:  # the keeper stays
        gone = [name for name in gone if name.startswith("t")]
        _replace(virtual, draw, 2.0)
    left = [
        n
        for n in virtual.hosts
        if n not in gone and n in virtual.brain.nodes and n not in virtual.brain.leaving
    ]
    if not any(name.startswith("r") for name in left):
        return "nobody"
    virtual.kill(gone)
    return ",".join(gone)


def _replace(virtual, draw, after_s):
    """Where copies are apart, have somebody come if all others are gone by then."""

    def look():
        if not any(name.startswith("t") for name in virtual.hosts):
            _add(virtual, draw, "", "")

    if virtual.plan.apart:
        virtual.at(virtual.now_s + after_s, look)


def _all_transient(virtual, draw, source, target):
    return _kill(virtual, draw, [name for name in virtual.hosts if name.startswith("t")])


def _evict(virtual, draw, source, target):
    if virtual.brain.begun_s is None or virtual.controller is None:
        return "nobody yet"
    names = [name for name in virtual.hosts if name.startswith("t")]
    going = [name for name in names if draw.random() < 0.6]
    warning_s = draw.choice([120, 30, 8, 0.2, 0])
    virtual.evict(going, warning_s)
    _replace(virtual, draw, warning_s + 2.0)
    return f"{going} in {warning_s} s"


def _add(virtual, draw, source, target):
    kinds = "t" if virtual.plan.apart else "trt"
    new = f"{draw.choice(kinds)}{100 + len(virtual.brain.notes) + draw.randint(0, 10**6)}"
    virtual.add(Place(new, new, new.startswith("r"), f"pool{draw.randint(2, 4)}"))
    return new


def _slow(virtual, draw, source, target):
    name = draw.choice(sorted(virtual.hosts))
    virtual.slow_down(name, draw.choice([1.0, 3.0, 8.0]))
    return name


def _restart(virtual, draw, source, target):
    if virtual.controller is None or virtual.brain.begun_s is None:
        return "not now"
    virtual.stop_controller(0.05)
    return ""


ACTS = {
    "sender dies": lambda v, d, s, t: _kill(v, d, [s]),
    "receiver dies": lambda v, d, s, t: _kill(v, d, [t]),
    "both die": lambda v, d, s, t: _kill(v, d, [s, t]),
    "all transient die": _all_transient,
    "eviction": _evict,
    "addition": _add,
    "slow": _slow,
    "controller restarts": _restart,
}


def totals(virtual: Virtual) -> tuple[np.ndarray, dict[int, list[int]]]:
    """Return the counts as the store has them at the end."""
    dense, sparse = np.zeros(KEYS), {}
    for partition in range(virtual.plan.partitions):
        for section in virtual.disk.read(partition, virtual.brain.saved):
            if section.table == "dense":
                dense[section.keys] = section.values[:, 0]
            else:
                rows = section.values.tolist()
                sparse.update(zip(section.keys.tolist(), rows, strict=True))
    return dense, sparse


def violations(virtual: Virtual) -> list[str]:
    """Return what is wrong with the counts of a run that has ended."""
    clocks, items = len(virtual.brain.ledger.measures), np.arange(Counter.items)
    dense, sparse = totals(virtual)
    found = [] if clocks == Counter.stop.clocks else [f"{clocks} clocks"]
    expected = np.bincount(items % KEYS, minlength=KEYS) * clocks
    if not np.array_equal(dense, expected):
        found.append(f"dense {dense - expected}")
    wrong = [item for item in items.tolist() if sparse.get(item * 1000) != [clocks, clocks * item]]
    if wrong:
        found.append(f"sparse {wrong[:5]}: {[sparse.get(item * 1000) for item in wrong[:5]]}")
    if virtual.brain.ledger.measures != [Counter.items] * clocks:
        found.append(f"measures {virtual.brain.ledger.measures}")
    return found


def judged(
    seed: int, count: int = 3, *, apart: bool = False, network: type[Delays] = Delays
) -> tuple[list[str], str]:
    """Run a seed with mishaps; return what is wrong, and the story."""
    virtual = cluster(seed, apart=apart, network=network)
    story = mishaps(virtual, seed, count)
    why = virtual.run(limit_s=4000)
    text = f"seed {seed}: {why} at {virtual.now_s:.2f}; {story}; {virtual.brain.notes}"
    if why != "6 clocks are done":
        return [why], text
    return violations(virtual), text
