"""Virtual networks: one of delays only, and one whose links are shared fairly."""

import random
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy as np

from agent.paramserver.messages import CONTROLLER, Message, Section
from agent.paramserver.virtual.cluster import Virtual

HEAD_BYTES = 64.0


class Delays:
    """Every message takes `delay_s`, more or less by a share; each pair of nodes is in order."""

    def __init__(self, cluster: Virtual, delay_s: float, share: float = 0.0, seed: int = 0) -> None:
        self._cluster, self._delay_s, self._share = cluster, delay_s, share
        self._draw = random.Random(seed)  # noqa: S311 - it is a simulation
        self._last_s: dict[tuple[str, str], float] = {}

    def send(self, source: str, target: str, message: Message, deliver: Callable[[], None]) -> None:  # noqa: ARG002
        due_s = self._cluster.now_s + self._delay_s
        if self._share:
            due_s += self._delay_s * self._share * (self._draw.random() * 2 - 1)
        due_s = max(due_s, self._last_s.get((source, target), 0.0))
        self._last_s[source, target] = due_s
        self._cluster.at(due_s, deliver)


class Flow:
    def __init__(self, source: str, target: str, size: float, deliver: Callable[[], None]) -> None:
        self.source, self.target, self.left, self.deliver = source, target, size, deliver
        self.rate = 0.0


def weight(message: Any) -> float:
    """Return the bytes of all rows in a message."""
    if isinstance(message, Section):
        return float(message.values.nbytes)
    if isinstance(message, list | tuple):
        return sum(weight(one) for one in message)
    fields = getattr(message, "__struct_fields__", ())
    return sum(weight(getattr(message, name)) for name in fields)


class Fair:
    """Links of one speed for each direction of each node; flows share them by max-min fairness.

    Messages of one pair go one after the other. `scale` makes big models of small tables. Rates are
    calculated anew at most every `tick_s`, for all that changed meanwhile.
    """

    def __init__(
        self, cluster: Virtual, bytes_per_s: float, scale: float = 1.0, tick_s: float = 1e-3
    ) -> None:
        self._cluster, self._speed, self._scale, self._tick_s = cluster, bytes_per_s, scale, tick_s
        self._flows: dict[tuple[str, str], Flow] = {}
        self._queues: dict[tuple[str, str], deque[Flow]] = defaultdict(deque)
        self._since_s = 0.0
        self._planned = False
        self.sent: dict[str, float] = defaultdict(float)
        self.received: dict[str, float] = defaultdict(float)
        self.delay_s = 1e-4

    def send(self, source: str, target: str, message: Message, deliver: Callable[[], None]) -> None:
        size = weight(message) * self._scale
        pair = (source, target)
        if CONTROLLER in pair or (size < 1 and pair not in self._flows):
            self._cluster.at(self._cluster.now_s + self.delay_s, deliver)
            return
        self.sent[source] += size
        self.received[target] += size
        flow = Flow(source, target, size + HEAD_BYTES, deliver)
        if pair in self._flows:
            self._queues[pair].append(flow)
        else:
            self._flows[pair] = flow
        self._plan()

    def _plan(self) -> None:
        if not self._planned:
            self._planned = True
            self._cluster.at(self._cluster.now_s + self._tick_s, self._look)

    def _look(self) -> None:
        self._planned = False
        passed_s = self._cluster.now_s - self._since_s
        self._since_s = self._cluster.now_s
        done = []
        for pair, flow in self._flows.items():
            flow.left -= flow.rate * passed_s
            if flow.left <= flow.rate * self._tick_s * 0.5:
                done.append(pair)
        for pair in done:
            flow = self._flows.pop(pair)
            if self._queues[pair]:
                self._flows[pair] = self._queues[pair].popleft()
            self._cluster.at(self._cluster.now_s + self.delay_s, flow.deliver)
        if self._flows:
            self._share_out()
            first_s = min(flow.left / flow.rate for flow in self._flows.values())
            self._planned = True
            self._cluster.at(self._cluster.now_s + max(self._tick_s, first_s), self._again)

    def _again(self) -> None:
        self._look()

    def _share_out(self) -> None:
        """Fill all links together; whoever crosses a full link keeps what it has."""
        flows = list(self._flows.values())
        ends = {
            name: at
            for at, name in enumerate(sorted({f.source for f in flows} | {f.target for f in flows}))
        }
        count = len(ends)
        out = np.array([ends[flow.source] for flow in flows])
        into = np.array([ends[flow.target] + count for flow in flows])
        room, rates = np.full(2 * count, self._speed), np.zeros(len(flows))
        growing = np.ones(len(flows), bool)
        while growing.any():
            users = np.bincount(out[growing], minlength=2 * count)
            users = users + np.bincount(into[growing], minlength=2 * count)
            used = users > 0
            step = (room[used] / users[used]).min()
            rates[growing] += step
            room[used] -= step * users[used]
            full = used & (room <= self._speed * 1e-9)
            growing &= ~(full[out] | full[into])
        for flow, rate in zip(flows, rates.tolist(), strict=True):
            flow.rate = rate
