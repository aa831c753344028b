"""How fast messages are between the workers at hand, over the connections that they train over.

One worker asks. The meshes of the others answer at once, on threads of their own, so that nobody's script takes
part. It happens once for neighbours on one machine and once for those on others, and ends when its time is up.

    link    a message of so many bytes there, and nothing back:   rtt(n) - rtt(0) / 2
    ring    n / D bytes to and from each of D - 1 others at once: what an exchange of sums is for everyone in it
"""

import statistics
import time
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Protocol

import msgspec

from agent.calibrate import RingTime, fit_link, fit_ring
from agent.errors import WireError
from agent.mesh import ASK, Mesh
from agent.profile import Link, Profile
from agent.protocol import Part

PROBE = f"{ASK}/probe"
SIZES = (1 << 10, 1 << 18, 1 << 22)
RINGS = (2, 3, 5, 9)
ROUNDS = 5
SECONDS_MAX = 0.2  # for messages, and again for rings; two sizes are measured whatever that takes
SIZES_LEAST = 2
FASTER = 10.0  # a bandwidth is not believed beyond so many times what was seen to go through
ZEROS = memoryview(bytes(SIZES[-1]))


class Probe(msgspec.Struct, frozen=True):
    """Answer with so many bytes, marked with `serial`."""

    serial: int
    back_bytes: int


class Crew(Protocol):
    """What is needed of the group that this worker is in."""

    @property
    def generation(self) -> int: ...

    def send(self, peer: str, part: Part, pieces: list[memoryview]) -> None: ...

    def take(self, peer: str, step: int, tag: str) -> tuple[bytes, memoryview]: ...


def answer(mesh: Mesh, peer: str, part: Part) -> None:
    """On a thread of its own: send back what is asked for."""
    ask = msgspec.msgpack.decode(part.extra, type=Probe)
    reply = Part(generation=part.generation, step=part.step, tag=_answered(ask.serial))
    connection = mesh.connection(peer)
    if connection is None:
        return
    try:
        connection.send(reply, ZEROS[: ask.back_bytes])
    except WireError:
        mesh.drop(peer, connection)


def probed(
    profile: Profile, near: Sequence[str], far: Sequence[str], crew: Crew, step: int
) -> Profile:
    """The profile with the links that can be measured now, and have not been; itself if there are none."""
    network, known = profile.network, profile.network_from
    if near and known in ("assumed", "between"):
        link, ring = _Probing(crew, step, near).measure()
        network = msgspec.structs.replace(network, intra=link, reduce_intra=ring)
        known = "within" if known == "assumed" else "measured"
    if far and known in ("assumed", "within"):
        link, ring = _Probing(crew, step, far).measure()
        network = msgspec.structs.replace(network, inter=link, reduce_inter=ring)
        known = "between" if known == "assumed" else "measured"
    return msgspec.structs.replace(profile, network=network, network_from=known)


def _answered(serial: int) -> str:
    return f"probed/{serial}"


def _seen(link: Link, bytes_per_s: float) -> Link:
    """Where latency is all that was seen, the fit makes the rest endless."""
    bandwidth = min(link.bandwidth_bytes_per_s, FASTER * bytes_per_s)
    return msgspec.structs.replace(link, bandwidth_bytes_per_s=bandwidth)


class _Probing:
    """One worker's questions to neighbours of one kind."""

    def __init__(self, crew: Crew, step: int, peers: Sequence[str]) -> None:
        self._crew, self._step, self._peers = crew, step, peers
        self._serial = time.monotonic_ns()
        self._until_s = 0.0

    def measure(self) -> tuple[Link, Link]:
        self._exchange_s(self._peers, SIZES[1], SIZES[1])  # a connection has to warm up
        self._until_s = time.monotonic() + SECONDS_MAX
        sent = dict(self._messages())
        half_s = sent[SIZES[0]] / 2
        each_s = [max(seconds - half_s, half_s) for seconds in sent.values()]
        link = _seen(fit_link(list(sent), each_s), max(sent) / each_s[-1])
        self._until_s = time.monotonic() + SECONDS_MAX
        rings = list(self._rings())
        most = max(2 * (1 - 1 / one.workers) * one.size_bytes / one.seconds for one in rings)
        return link, _seen(fit_ring(rings), most)

    def _messages(self) -> Iterator[tuple[int, float]]:
        for n, size in enumerate(SIZES):
            if n >= SIZES_LEAST and time.monotonic() > self._until_s:
                return
            yield size, self._median_s(self._peers[:1], size, 0)

    def _rings(self) -> Iterator[RingTime]:
        able = [workers for workers in RINGS if workers <= len(self._peers) + 1]
        for n, (workers, size) in enumerate(product(able, SIZES)):
            if n >= SIZES_LEAST and time.monotonic() > self._until_s:
                return
            part = size // workers
            seconds = self._median_s(self._peers[: workers - 1], part, part)
            yield RingTime(workers=workers, size_bytes=size, seconds=seconds)

    def _median_s(self, peers: Sequence[str], there_bytes: int, back_bytes: int) -> float:
        times = [self._exchange_s(peers, there_bytes, back_bytes)]
        while len(times) < ROUNDS and time.monotonic() + times[-1] < self._until_s:
            times.append(self._exchange_s(peers, there_bytes, back_bytes))
        return statistics.median(times)

    def _exchange_s(self, peers: Sequence[str], there_bytes: int, back_bytes: int) -> float:
        self._serial += 1
        part = Part(
            generation=self._crew.generation,
            step=self._step,
            tag=PROBE,
            extra=msgspec.msgpack.encode(Probe(self._serial, back_bytes)),
        )
        start_s = time.monotonic()
        for peer in peers:
            self._crew.send(peer, part, [ZEROS[:there_bytes]])
        for peer in peers:
            self._crew.take(peer, self._step, _answered(self._serial))
        return max(time.monotonic() - start_s, 1e-9)
