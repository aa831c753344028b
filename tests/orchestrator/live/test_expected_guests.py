"""Whom the manager expects at the door, what it hears of their first boot, and when it says so."""

import asyncio
from io import StringIO
from typing import Any

import msgspec
from rich.console import Console

from agent.keys import GUESTS, READING, VIEW
from cloud.clock import SystemClock
from orchestrator.actions import Launch, Terminate
from orchestrator.brain.holdings import leases
from orchestrator.cli import tables
from orchestrator.door.guests import Guest, Guests, guests_of
from orchestrator.events import BootSeen
from orchestrator.live.world import LiveWorld
from orchestrator.view_builder import view_of


def held(hand: Any) -> Any:
    """A manager whose one machine was started a moment ago."""
    h = hand()
    h.start()
    h.submit(slots_max=1)
    (launch,) = h.only(h.wait(2.0), Launch)
    machine_id = h.launched(launch, state="pending")
    return h, machine_id


def test_a_machine_is_expected_from_its_launch_until_it_is_given_back(hand):
    """By what its cloud signs, and with the address that the cloud lists, once it does."""
    h, machine_id = held(hand)
    cloud = h.leases[0].pool.cloud
    assert guests_of(h.state).machines == (Guest(cloud, machine_id, machine_id),)
    listed = msgspec.structs.replace(h.machines[machine_id], identity="vm-1", address="10.0.0.7")
    h.machines[machine_id] = listed
    h.listed()
    assert guests_of(h.state).machines == (Guest(cloud, "vm-1", machine_id, "10.0.0.7"),)
    h.state.leases[h.leases[0].token].state = "ending"
    assert guests_of(h.state).machines == ()


def test_the_phases_of_a_first_boot_are_shown(hand):
    """A machine that has proved who it is boots, whatever the list says; each phase is told once."""
    h, machine_id = held(hand)
    lease = h.leases[0]
    assert lease.state == "pending"
    admitted = BootSeen(at_s=h.at_s, machine_id=machine_id, phase="admitted", took_s=1.25)
    assert "proved who it is, 1.2 s after its first boot began" in h.words(h.see(admitted))
    assert lease.state == "booting"
    assert h.see(admitted) == []
    h.see(BootSeen(at_s=h.at_s, machine_id=machine_id, phase="node", took_s=9.0))
    (shown,) = view_of(h.state, h.at_s).machines
    assert shown.boot == {"admitted": 1.25, "node": 9.0}
    paper = StringIO()
    Console(width=200, file=paper).print(tables.machines([shown], h.at_s))
    assert "booting, node 9 s" in paper.getvalue()
    other = BootSeen(at_s=h.at_s, machine_id="i-none", phase="node", took_s=1.0)
    assert h.see(other) == []


def test_a_machine_with_another_image_goes_back_and_its_region_waits(hand):
    """All machines there have that image: each would be paid for until it finds out by itself."""
    h, machine_id = held(hand)
    why = "this machine has Python 3.11 and the manager Python 3.12"
    unlike = BootSeen(at_s=h.at_s, machine_id=machine_id, phase="unlike", took_s=9.0, why=why)
    actions = h.see(unlike)
    (given_back,) = h.only(actions, Terminate)
    assert given_back.ref.id == machine_id
    assert f"{machine_id} cannot join: {why}" in h.words(actions)
    place = h.leases[0].pool.place
    assert why in h.state.blocks[place.key].because
    assert not h.only(h.wait(2.0), Launch)


def test_a_machine_without_a_driver_leaves_types_without_cards_to_be_bought(hand):
    h = hand()
    with_cards = {"accelerators": 1, "accelerator": "a10g", "family": "g5", "speed": 9.0}
    first, *others = h.kinds
    h.kinds = (msgspec.structs.replace(first, **with_cards), *others)
    h.start()
    h.submit(slots_max=1)
    (launch,) = h.only(h.wait(2.0), Launch)
    assert launch.request.pool.type == first.name
    machine_id, why = h.launched(launch, state="pending"), "no driver serves the NVIDIA cards (1)"
    h.see(BootSeen(at_s=h.at_s, machine_id=machine_id, phase="unlike", took_s=9.0, why=why))
    rests = [leases.block_of(h.state, known, "spot") for known in h.state.pools.values()]
    told = {
        known.kind.name: block for known, block in zip(h.state.pools.values(), rests, strict=True)
    }
    assert why in told.pop(first.name).because
    assert set(told.values()) == {None}


class Journal:
    """What the world publishes."""

    def __init__(self) -> None:
        self.said: list[dict[str, bytes]] = []

    async def publish(self, said: dict[str, bytes]) -> None:
        self.said.append(said)


def test_the_newest_state_is_published_though_no_event_follows(hand):
    """A machine that was launched a moment after the last publication need not wait for the next event."""
    h = hand()
    h.start()
    h.submit(slots_max=1)
    (launch,) = h.only(h.wait(2.0), Launch)

    async def play() -> list[dict[str, bytes]]:
        store, parts = Journal(), {"store": None, "engine": None, "quotes": None}
        world: Any = LiveWorld(journal=store, providers={}, clock=SystemClock(), **parts)  # type: ignore[arg-type]
        await world.show(h.state)
        machine_id = h.launched(launch)
        await world.show(h.state)
        await world.show(h.state)
        async with asyncio.timeout(20):
            while len(store.said) < 2:
                await asyncio.sleep(0.01)
        await world.close()
        assert (
            msgspec.json.decode(store.said[-1][GUESTS], type=Guests).machines[0].machine_id
            == machine_id
        )
        return store.said

    first, second = asyncio.run(play())
    assert set(first) == {VIEW, GUESTS, READING}
    assert {VIEW, GUESTS} <= set(second)  # the ledger is read once a second only
