"""Where the blocks that are expected from peers land, for every transport."""

import threading
from collections.abc import Callable

from agent.errors import WireError
from agent.transport.transport import BEGUN, Slot, Ticket

LOOK_S = 0.25  # between two looks whether a peer that nobody reads from is gone

Key = tuple[str, Slot]


class Berth:
    """The place of one block, and how much of it has not come yet."""

    __slots__ = ("into", "key", "left", "ticket", "users")

    def __init__(self, key: Key, into: memoryview) -> None:
        self.key, self.into, self.ticket = key, into, Ticket()
        self.left = into.nbytes
        self.users = 0  # threads that write to it now

    def span(self, offset: int, count: int, size: int) -> memoryview:
        """Return where a piece of the block belongs, or raise if it does not fit."""
        there = self.into.nbytes
        if size != there or offset + count > there:
            raise WireError(f"{offset} + {count} of {size} bytes came, and {there} are expected")
        return self.into[offset : offset + count]


class Landings:
    """Berths by peer and slot. `arrived` is called without our lock when a block is whole."""

    def __init__(self, arrived: Callable[[], None]) -> None:
        self._arrived = arrived
        self._changed = threading.Condition()
        self._berths: dict[Key, Berth] = {}
        self._generation = -1

    def expect(self, peer: str, slot: Slot, into: memoryview) -> Ticket:
        berth = Berth((peer, slot), into)
        with self._changed:
            if slot.generation < self._generation:
                berth.ticket.fail(BEGUN.format(self._generation))
                return berth.ticket
            if berth.key in self._berths:
                raise ValueError(f"{slot} of {peer} is expected already")
            self._berths[berth.key] = berth
            self._changed.notify_all()
        return berth.ticket

    def wait(self, peer: str, slot: Slot, gone: Callable[[], bool] = lambda: True) -> Berth | None:
        """Return the berth of a block, whose user the caller then is, as soon as it is expected.

        Return None if its generation is over, or if the peer is `gone` before that.
        """
        with self._changed:
            while True:
                berth = self._berths.get((peer, slot))
                if berth is not None:
                    berth.users += 1
                    return berth
                if slot.generation < self._generation or gone():
                    return None
                self._changed.wait(LOOK_S)

    def take(self, berth: Berth, count: int, extra: bytes = b"") -> None:
        """Note that so many bytes have come, and that the caller uses the berth no more."""
        with self._changed:
            berth.left -= count
            berth.ticket.extra = berth.ticket.extra or extra
            whole = not berth.left and self._berths.get(berth.key) is berth
            if whole:
                del self._berths[berth.key]
                berth.ticket.done = True
            self._leave(berth)
        if whole:
            self._arrived()

    def leave(self, berth: Berth) -> None:
        """Note that the caller uses the berth no more, as the rest of its piece will not come."""
        with self._changed:
            self._leave(berth)

    def wake(self) -> None:
        """Have all that wait look again whether their peer is gone."""
        with self._changed:
            self._changed.notify_all()

    def enter(self, generation: int) -> list[Berth]:
        """Fail what is older. Return the berths dropped."""
        with self._changed:
            self._generation = max(self._generation, generation)
            why = BEGUN.format(generation)
            return self._drop(lambda key: key[1].generation < generation, why)

    def forget(self, peer: str, why: str) -> list[Berth]:
        with self._changed:
            return self._drop(lambda key: key[0] == peer, why)

    def unused(self, berths: list[Berth], patience_s: float | None = None) -> bool:
        """Wait until nobody writes to any of these, and return whether that is so."""
        with self._changed:
            return self._changed.wait_for(lambda: not any(b.users for b in berths), patience_s)

    def _drop(self, is_meant: Callable[[Key], bool], why: str) -> list[Berth]:
        dropped = [berth for key, berth in self._berths.items() if is_meant(key)]
        for berth in dropped:
            del self._berths[berth.key]
            berth.ticket.fail(why)
        self._changed.notify_all()
        return dropped

    def _leave(self, berth: Berth) -> None:
        berth.users -= 1
        if not berth.users:
            self._changed.notify_all()
