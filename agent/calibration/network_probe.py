"""Measure messages between the current workers, over the connections of the training.

One worker asks. The meshes of the others answer at once, on separate threads, so that no script
takes part. It happens once for neighbours on one machine and once for those on others, and ends
when its time is up.

    link    a message of so many bytes there, and nothing back:   least rtt(n) - least rtt(0) / 2
    jitter  by how much such messages are later than the fastest of them, for one way
    ring    n / D bytes to and from each of D - 1 others at once, as each worker does in an exchange
            of sums
    lanes   the same by k workers of one machine at once; neighbours are asked to exchange with
            another worker meanwhile
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import Protocol

import msgspec

from agent.calibration.links import RingTime, fit_link, fit_ring, jitter_s
from agent.errors import WireError
from agent.net.mesh import ASK, Mesh
from agent.profile import Link, Profile
from agent.protocol import Part
from agent.world import Interrupted

PROBE = f"{ASK}/probe"
SIZES = (1 << 10, 1 << 18, 1 << 22)
RINGS = (2, 3, 5, 9)
AT_ONCE = (2, 4, 8)
ROUNDS, ROUNDS_SMALL = 5, 25
SECONDS_MAX = 0.2  # each for messages, for rings, for several at once
SIZES_LEAST = 2  # sizes that are measured however long it takes
FASTER = 10.0  # a fitted bandwidth is capped at so many times the measured throughput
ZEROS = memoryview(bytes(SIZES[-1]))


class Probe(msgspec.Struct, frozen=True):
    """A request to answer with so many bytes, marked with `serial`.

    If there is a partner, exchange them with that worker, and answer how long it took.
    """

    serial: int
    back_bytes: int
    partner: str = ""


class ProbingWorker(Protocol):
    """What probing needs from the group that this worker is in."""

    @property
    def generation(self) -> int: ...

    def send(self, peer: str, part: Part, pieces: list[memoryview]) -> None: ...

    def take(
        self, peer: str, step: int, tag: str, generation: int | None = None
    ) -> tuple[bytes, memoryview]: ...


def answer(crew: ProbingWorker, mesh: Mesh, peer: str, part: Part) -> None:
    """Send back what is asked for. This runs on a separate thread."""
    ask = msgspec.msgpack.decode(part.extra, type=Probe)
    extra, back_bytes = b"", ask.back_bytes
    if ask.partner:
        asking = _Probing(crew, part.step, [ask.partner], generation=part.generation)
        try:
            took_s = asking.exchange_s([ask.partner], ask.back_bytes, ask.back_bytes)
        except Interrupted:
            return  # the asking worker is interrupted too
        extra, back_bytes = msgspec.msgpack.encode(took_s), 0
    tag = _answered(ask.serial)
    reply = Part(generation=part.generation, step=part.step, tag=tag, extra=extra)
    connection = mesh.connection(peer)
    if connection is None:
        return
    try:
        connection.send(reply, ZEROS[:back_bytes])
    except WireError:
        mesh.drop(peer, connection)


def probed(
    profile: Profile, near: Sequence[str], far: Sequence[str], crew: ProbingWorker, step: int
) -> Profile:
    """Return the profile with the links that can be measured now and have not been."""
    network, known = profile.network, profile.network_from
    if near and known in ("assumed", "between"):
        pairs = list(zip(near[1::2], near[2::2], strict=False))
        link, ring = _Probing(crew, step, near, pairs).measure()
        network = msgspec.structs.replace(network, intra=link, reduce_intra=ring)
        known = "within" if known == "assumed" else "measured"
    if far and known in ("assumed", "within"):
        pairs = [(one, far[n % len(far)]) for n, one in enumerate(near, 1)]
        link, ring = _Probing(crew, step, far, pairs).measure()
        network = msgspec.structs.replace(network, inter=link, reduce_inter=ring)
        known = "between" if known == "assumed" else "measured"
    return msgspec.structs.replace(profile, network=network, network_from=known)


def _answered(serial: int) -> str:
    return f"probed/{serial}"


def _seen(link: Link, bytes_per_s: float) -> Link:
    """Cap the bandwidth, because the fit makes it infinite if only latency was measurable."""
    bandwidth = min(link.bandwidth_bytes_per_s, FASTER * bytes_per_s)
    return msgspec.structs.replace(link, bandwidth_bytes_per_s=bandwidth)


class _Probing:
    """One worker's questions to neighbours of one kind.

    `pairs` are workers that can exchange while it does so itself.
    """

    def __init__(
        self,
        crew: ProbingWorker,
        step: int,
        peers: Sequence[str],
        pairs: Sequence[tuple[str, str]] = (),
        generation: int | None = None,
    ) -> None:
        self._crew, self._step, self._peers, self._pairs = crew, step, peers, pairs
        self._generation = crew.generation if generation is None else generation
        self._serial = time.monotonic_ns()
        self._until_s = 0.0

    def measure(self) -> tuple[Link, Link]:
        self.exchange_s(self._peers, SIZES[1], SIZES[1])  # to warm up the connections
        sent = dict(self._messages())
        small_s = sent[SIZES[0]]
        half_s = min(small_s) / 2
        each_s = [max(min(seconds) - half_s, half_s) for seconds in sent.values()]
        link = _seen(fit_link(list(sent), each_s), max(sent) / each_s[-1])
        link = msgspec.structs.replace(link, jitter_s=jitter_s(small_s) / 2)
        rings = [*self._rings(), *self._several()]
        most = max(2 * (1 - 1 / one.workers) * one.size_bytes / one.seconds for one in rings)
        return link, _seen(fit_ring(rings), most)

    def _messages(self) -> Iterator[tuple[int, list[float]]]:
        self._until_s = time.monotonic() + SECONDS_MAX
        for n, size in enumerate(SIZES):
            if n >= SIZES_LEAST and time.monotonic() > self._until_s:
                return
            there = partial(self.exchange_s, self._peers[:1], size, 0)
            yield size, self._times(there, ROUNDS_SMALL if n == 0 else ROUNDS)

    def _rings(self) -> Iterator[RingTime]:
        self._until_s = time.monotonic() + SECONDS_MAX
        able = [workers for workers in RINGS if workers <= len(self._peers) + 1]
        for n, (workers, size) in enumerate(product(able, SIZES)):
            if n >= SIZES_LEAST and time.monotonic() > self._until_s:
                return
            part = size // workers
            both = partial(self.exchange_s, self._peers[: workers - 1], part, part)
            seconds = self._times(both)
            yield RingTime(workers=workers, size_bytes=size, seconds=statistics.median(seconds))

    def _several(self) -> Iterator[RingTime]:
        """Yield times of rings of two on the same machine at the same time."""
        self._until_s = time.monotonic() + SECONDS_MAX
        able = [many for many in AT_ONCE if many <= len(self._pairs) + 1]
        for many, size in product(able, SIZES[1:]):
            if time.monotonic() > self._until_s:
                return
            seconds = self._times(partial(self._together_s, self._pairs[: many - 1], size // 2))
            median_s = statistics.median(seconds)
            yield RingTime(workers=2, size_bytes=size, at_once=many, seconds=median_s)

    def _times(self, once: Callable[[], float], rounds: int = ROUNDS) -> list[float]:
        times = [once()]
        while len(times) < rounds and time.monotonic() + times[-1] < self._until_s:
            times.append(once())
        return times

    def _together_s(self, pairs: Sequence[tuple[str, str]], each_bytes: int) -> float:
        """Return the longest of several exchanges at once, including this worker's own."""
        tags = [(peer, self._ask(peer, 0, each_bytes, partner)) for peer, partner in pairs]
        took_s = [self.exchange_s(self._peers[:1], each_bytes, each_bytes)]
        for peer, tag in tags:
            extra, _ = self._crew.take(peer, self._step, tag, self._generation)
            took_s.append(msgspec.msgpack.decode(extra, type=float))
        return max(took_s)

    def exchange_s(self, peers: Sequence[str], there_bytes: int, back_bytes: int) -> float:
        start_s = time.monotonic()
        tags = [(peer, self._ask(peer, there_bytes, back_bytes)) for peer in peers]
        for peer, tag in tags:
            self._crew.take(peer, self._step, tag, self._generation)
        return max(time.monotonic() - start_s, 1e-9)

    def _ask(self, peer: str, there_bytes: int, back_bytes: int, partner: str = "") -> str:
        """Send a request, and return the tag of the answer."""
        self._serial += 1
        part = Part(
            generation=self._generation,
            step=self._step,
            tag=PROBE,
            extra=msgspec.msgpack.encode(Probe(self._serial, back_bytes, partner)),
        )
        self._crew.send(peer, part, [ZEROS[:there_bytes]])
        return _answered(self._serial)
