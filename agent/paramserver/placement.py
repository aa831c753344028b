"""Pure decisions about places: the stage, who serves partitions, who owns and holds blocks."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

FEW, MANY = 1.0, 15.0  # transient machines for each reliable one, where the stages meet
NIC_LOW, NIC_HIGH = 0.5, 0.9  # of the reliable machines' network: load at which a stage is left


class Node(NamedTuple):
    """A machine as far as placement goes."""

    name: str
    reliable: bool
    machine: str
    allocation: str
    order: int  # of joining: the smaller has run longer

    @property
    def domain(self) -> str:
        """Return what is taken away together with it."""
        return "reliable" if self.reliable else self.allocation


def stage_by_ratio(transient: int, reliable: int) -> int:
    if not transient or transient <= FEW * reliable:
        return 1
    return 2 if transient <= MANY * reliable else 3


class Stages(NamedTuple):
    """The present stage, and since which clock it is."""

    stage: int = 1
    since: int = -1
    dwell: int = 3

    def next(self, clock: int, transient: int, reliable: int, nic: float | None = None) -> "Stages":
        """Return the stage from now on. The measured load of the reliable machines' network, if

        there is one, moves it by one beside what the ratio says; it is kept for `dwell` clocks.
        """
        wanted = stage_by_ratio(transient, reliable)
        if nic is not None and transient and reliable:
            wanted = self._by_load(wanted, nic)
        if not transient:
            return self if self.stage == 1 else self._replace(stage=1, since=clock)
        if not reliable or wanted == self.stage or clock - self.since < self.dwell:
            return self
        return self._replace(stage=wanted, since=clock)

    def _by_load(self, prior: int, nic: float) -> int:
        if nic > NIC_HIGH:
            return min(3, max(prior, self.stage + 1))
        if nic < NIC_LOW:
            return max(1, min(prior, self.stage))
        return self.stage


def actives(nodes: Iterable[Node], stage: int, partitions: int, serving: set[str]) -> list[str]:
    """Return who serves: half of all machines at most, those that run longest first."""
    all_nodes = list(nodes)
    if stage == 1:
        return [node.name for node in all_nodes if node.reliable]
    transient = [node for node in all_nodes if not node.reliable]
    count = min(len(transient), -(-len(all_nodes) // 2), partitions)
    turns: dict[str, int] = {}
    ranked = []
    for node in sorted(transient, key=lambda node: node.order):
        turn = turns[node.allocation] = turns.get(node.allocation, 0) + 1
        ranked.append((node.name not in serving, node.order, turn, node.name))
    return [name for *_, name in sorted(ranked)[:count]]


def workers(nodes: Iterable[Node], stage: int) -> list[str]:
    return [node.name for node in nodes if stage < 3 or not node.reliable]


def spread(
    current: Mapping[int, str | None],
    places: list[str],
    holders: Mapping[int, set[str]] | None = None,
) -> dict[int, str]:
    """Spread things over places, equally within one, and move as few as possible.

    A thing that has to move goes to a place that holds it already, if there is one with room.
    """
    if not places:
        return {}
    least, more = divmod(len(current), len(places))
    kept: dict[str, list[int]] = {place: [] for place in places}
    homeless = []
    for thing in sorted(current):
        home = current[thing]
        if home in kept:
            kept[home].append(thing)
        else:
            homeless.append(thing)
    full = sorted(places, key=lambda place: -len(kept[place]))[:more]
    quota = {place: least + (place in set(full)) for place in places}
    for place in places:
        homeless += kept[place][quota[place] :]
        del kept[place][quota[place] :]
    return _housed(sorted(homeless), kept, quota, holders or {})


def _housed(
    homeless: list[int],
    kept: dict[str, list[int]],
    quota: dict[str, int],
    holders: Mapping[int, set[str]],
) -> dict[int, str]:
    rest = []
    for thing in sorted(homeless, key=lambda one: len(holders.get(one, ()))):
        ready = [
            place
            for place in holders.get(thing, ())
            if len(kept.get(place, ())) < quota.get(place, 0)
        ]
        if ready:
            kept[min(ready, key=lambda place: (len(kept[place]), place))].append(thing)
        else:
            rest.append(thing)
    open_places = [place for place in kept if len(kept[place]) < quota[place]]
    for thing in rest:
        place = min(open_places, key=lambda place: (len(kept[place]), place))
        kept[place].append(thing)
        open_places = [place for place in open_places if len(kept[place]) < quota[place]]
    return {thing: place for place, things in kept.items() for thing in things}


def preloads(
    owners: Mapping[int, str], holders: Mapping[int, set[str]], nodes: Mapping[str, Node]
) -> dict[str, list[int]]:
    """Return what to load so that each block has a holder outside its owner's domain."""
    if len({node.domain for node in nodes.values()}) < 2:
        return {}
    load = dict.fromkeys(nodes, 0)
    for block, those in holders.items():
        for name in those | {owners[block]}:
            load[name] = load.get(name, 0) + 1
    found: dict[str, list[int]] = {}
    for block, owner in sorted(owners.items()):
        domain = nodes[owner].domain
        if any(nodes[name].domain != domain for name in holders.get(block, ()) if name in nodes):
            continue
        outside = [name for name, node in nodes.items() if node.domain != domain]
        name = min(outside, key=lambda name: (load[name], name))
        load[name] += 1
        found.setdefault(name, []).append(block)
    return found


class Drain(NamedTuple):
    """What it takes until leavers hold nothing that is not elsewhere."""

    poll_s: float = 5.0
    drain_s: float = 0.0  # what is left of the open clock
    ack_s: float = 0.1
    margin_s: float = 0.5

    def fits(self, warning_s: float, unpushed: Mapping[str, float], bytes_per_s: float) -> bool:
        """Whether a warning is long enough; `unpushed` are the bytes for each reliable machine."""
        push_s = max(unpushed.values(), default=0.0) / bytes_per_s
        return self.poll_s + self.drain_s + push_s + self.ack_s + self.margin_s <= warning_s
