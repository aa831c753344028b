"""Which machines the manager expects at the door. Its regular news are its sign of life there."""

from typing import TYPE_CHECKING

import msgspec

from cloud.ranges import Name, Time

if TYPE_CHECKING:  # the door itself starts without all that decides
    from orchestrator.state import State

EXPECTED = ("pending", "booting", "ready", "working", "noticed", "leaving")


class Guest(msgspec.Struct, frozen=True):
    """A machine of a lease of ours: what its cloud signs, what we call it, and where it is."""

    cloud: Name
    identity: Name
    machine_id: Name
    address: Name = ""  # as the cloud lists it; empty if it does not


class Guests(msgspec.Struct, frozen=True):
    """All of them, and when the manager said so."""

    at_s: Time = 0.0
    machines: tuple[Guest, ...] = ()

    def of(self, cloud: str, identity: str) -> Guest | None:
        wanted = (cloud, identity)
        return next((g for g in self.machines if (g.cloud, g.identity) == wanted), None)


def guests_of(state: "State") -> Guests:
    machines = tuple(
        Guest(
            cloud=lease.pool.cloud,
            identity=lease.identity or lease.machine_id,
            machine_id=lease.machine_id,
            address=lease.address,
        )
        for lease in state.leases.values()
        if lease.machine_id and lease.state in EXPECTED
    )
    return Guests(state.now_s, machines)
