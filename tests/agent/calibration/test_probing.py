"""The network as workers find it: links, jitter, and several at once on one machine."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from agent.calibration import network_probe
from agent.calibration.measurement import NETWORK
from agent.calibration.network_probe import probed
from agent.net.mesh import Mesh
from agent.profile import Profile, Section
from agent.protocol import Part

PATIENCE_S = 20.0
MACHINES = {"a1": "127.0.0.1", "a2": "127.0.0.1", "a3": "127.0.0.1", "b1": "127.0.0.2"}


class Member:
    """A worker with its mesh and nothing else."""

    generation = 0

    def __init__(self, name: str, host: str) -> None:
        self.asked: list[str] = []
        self._changed = threading.Condition()
        self.mesh = Mesh(name, "secret", host, self._changed, self.asked.append, self._answer)
        self.mesh.enter(0)

    def _answer(self, peer: str, part: Part) -> None:
        self.asked.append(peer)
        network_probe.answer(self, self.mesh, peer, part)

    def know(self, addresses: dict[str, str]) -> None:
        self.mesh.want(addresses)
        with self._changed:
            assert self._changed.wait_for(
                lambda: all(self.mesh.connection(peer) for peer in addresses), PATIENCE_S
            )

    def send(self, peer: str, part: Part, pieces: list[memoryview]) -> None:
        connection = self.mesh.connection(peer)
        assert connection is not None
        connection.send(part, *pieces)

    def take(
        self, peer: str, step: int, tag: str, generation: int | None = None
    ) -> tuple[bytes, memoryview]:
        key = (peer, generation or 0, step, tag)
        deadline_s = time.monotonic() + PATIENCE_S
        with self._changed:
            assert self._changed.wait_for(
                lambda: key in self.mesh.mailbox, deadline_s - time.monotonic()
            )
            return self.mesh.mailbox.pop(key)


@contextmanager
def together() -> Iterator[dict[str, Member]]:
    members = {name: Member(name, host) for name, host in MACHINES.items()}
    try:
        for name, member in members.items():
            member.know({n: m.mesh.address for n, m in members.items() if n != name})
        yield members
    finally:
        for member in members.values():
            member.mesh.close()


def unmeasured() -> Profile:
    section = Section(
        name="all", forward_s=(1.0,), backward_s=(2.0,), activation_bytes=0.0, parameter_bytes=1.0
    )
    return Profile(
        model="any", microbatch_sizes=(1,), network=NETWORK, memory_bytes=1e9, sections=(section,)
    )


def test_neighbours_exchange_at_the_same_time() -> None:
    """A neighbour of the leader's machine talks to the other machine meanwhile; lanes are as many as were tried."""
    with together() as members:
        found = probed(unmeasured(), ["a2", "a3"], ["b1"], members["a1"], 7)
        asked = {name: set(member.asked) for name, member in members.items()}
    assert found.network_from == "measured"
    assert asked == {"a1": set(), "a2": {"a1"}, "a3": {"a1"}, "b1": {"a1", "a2"}}
    network = found.network
    assert network.reduce_inter.lanes in (1, 2)
    for link in (network.intra, network.inter, network.reduce_intra, network.reduce_inter):
        assert 1e6 < link.bandwidth_bytes_per_s < 1e13
        assert 0 <= link.latency_s < PATIENCE_S
    assert 0 <= network.inter.jitter_s < PATIENCE_S


@pytest.mark.parametrize("near", [[], ["a2"]])
def test_only_what_is_there_is_measured(near: list[str]) -> None:
    """Without neighbours on the machine, or with one: no relay, and what was not measured stays assumed."""
    with together() as members:
        found = probed(unmeasured(), near, [], members["a1"], 0)
    assert found.network_from == ("within" if near else "assumed")
    assert found.network.inter == NETWORK.inter
    assert found.network.reduce_intra.lanes == 1
