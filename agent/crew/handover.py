"""Who has what of the state, and how a worker comes by what it lacks.

From the others: all of it in slices where everyone keeps all, else layer by layer (`agent.crew.pulling`). From the
keeper, where nobody has it any more. From nobody, if the model was handed over unbuilt and no step has changed it:
then a layer is made wherever it is wanted, everyone counts as having everything, and nothing is sent.
"""

from collections.abc import Callable

import msgspec

from agent.crew.crew import Crew
from agent.crew.pulling import Changed, Pulling, covers
from agent.faults import passing
from agent.net.mesh import STATE
from agent.protocol import Enter, Held, Holding, LayersAsked, Part, State
from agent.replica import Replica
from agent.store.layers import REST, share_of, with_settings
from agent.store.shares import Gathered, Share, whole
from agent.tensors.device import settle
from agent.tensors.staging import here
from agent.world import Interrupted

Having = dict[str, frozenset[str] | None]  # None is all


class Handover:
    """One worker's view of it, in the layout that it is in."""

    def __init__(self, crew: Crew, pulling: Pulling) -> None:
        self._crew, self.pulling = crew, pulling
        self.having: Having = {}
        self.promised: Held | None = None  # what is here once the step in flight is committed
        self.state: tuple[State, memoryview] | None = None  # what the keeper sent
        # Layers that nobody in the layout has, and who of them gets which.
        self._orphans: dict[str, frozenset[str]] = {}

    def enter(self, order: Enter, *, born: bool) -> None:
        self.promised, self._orphans = None, {}
        self.having = {} if born else having(order)

    def keep(self, keepers: Having) -> None:
        """Each has its own from now on."""
        self.having, self._orphans = keepers, {}

    def shares(self) -> Having:
        """What those of the layout have between them, where somebody wants it from them."""
        workers = self._crew.layout.workers
        found = {worker: self.having.get(worker, frozenset()) for worker in workers}
        for worker, orphans in self._orphans.items():
            own = found[worker]
            found[worker] = None if own is None else own | orphans
        return found

    def _others(self) -> Having:
        return {worker: held for worker, held in self.having.items() if worker != self._crew.me}

    # --- layers -------------------------------------------------------------------------------------

    def pull(self, layers: frozenset[str]) -> None:
        """Have these layers, of the version that the session is at."""
        replica = self._crew.replica
        lacking = replica.holdings.lacking(layers)
        if replica.newborn:
            with self._crew.link.stuck.aided():  # it is the script's model
                replica.bear(layers)
        elif lacking:
            gathered = self._found(lacking)
            self._settle()
            replica.add(gathered, lacking)
            # Before anybody knows of it: who asks in the next layout may ask before we are in it.
            self.pulling.offer(replica.version, replica.collected())
            self.say_held()

    def _found(self, lacking: frozenset[str]) -> Gathered:
        entered = self._crew.entered
        if entered is not None and not entered.holders and not self.having:
            return self._from_backup(tuple(sorted(lacking)))[0]
        return self.pulling.pull(lacking, self._crew.replica.version, self._others())

    def pull_whole(self) -> None:
        """Have all of the state, where everyone keeps it; or where some of it lies outside of the layout and
        is to go to the keeper: without a backup there would be no commit, and so no moment to ask for it again.
        """
        replica, entered = self._crew.replica, self._crew.entered
        assert entered is not None
        if not entered.layout.owned:
            self.pull(replica.holdings.all)
        elif not replica.newborn and entered.snapshot and entered.holders:
            self.take_in()

    def take_in(self) -> None:
        """Have between all of the layout what none of them has: all of it each, if that may be."""
        replica, shares = self._crew.replica, self.shares()
        if covers(shares, replica.holdings.all):
            return
        if replica.unbuilt:
            self._orphans = _shared_out(shares, replica.holdings.all)
            self.pull((replica.holdings.here or frozenset()) | self._orphans[self._crew.me])
        else:
            self.pull(replica.holdings.all)
            self.having |= dict.fromkeys(self._crew.layout.workers)

    def look(self, counted: Callable[[Enter | None], Having | None]) -> bool:
        """Fetch the weights that are not here, for the script to look at. `counted` says who else has what, if
        the job goes on from what is here; False if it does not.
        """
        replica = self._crew.replica
        held, version = replica.holdings, replica.next_version
        layers = held.lacking(held.all) - held.borrowed
        if not layers:
            return True
        if replica.newborn:
            replica.bear_to_look()
            return True
        self.pulling.show(version, replica.snapshot())
        while (known := counted(order := self._crew.order)) is not None:
            assert order is not None
            others = {worker: held for worker, held in known.items() if worker != self._crew.me}
            try:
                if known:
                    gathered = self.pulling.look(layers, version, others, order.layout.generation)
                else:  # all begin with the backup, and have not fetched their layers of it yet
                    gathered, _ = self._from_backup(tuple(sorted(layers)))
            except Interrupted:
                continue
            except Changed:
                if self._crew.me in order.layout.workers:
                    raise
                return False  # nobody waits for who is left out: they have gone on
            replica.borrow(gathered, layers)
            return True
        return False

    # --- what is told -------------------------------------------------------------------------------

    def held(self, replica: Replica) -> Held | None:
        """Which layers are here; None is all, and so is what can be born."""
        layers = replica.holdings.here
        if layers is None or replica.newborn:
            return None
        return Held(tuple(sorted(layers)), len(replica.holdings.all))

    def say_held(self) -> None:
        self.promised, replica = None, self._crew.replica
        self._crew.link.send(
            Holding(
                generation=self._crew.layout.generation,
                version=replica.version,
                held=self.held(replica),
            )
        )

    # --- a whole state ------------------------------------------------------------------------------

    def hand_over(self, order: Enter) -> None:
        """My slice of the state, to everyone in the layout who has none."""
        replica = self._crew.replica
        if order.catch_up:
            return
        if order.layout.owned or order.held:
            self.pulling.offer(order.version, replica.collected())
            return
        receivers = [w for w in order.layout.workers if w not in order.holders]
        if receivers:
            self._hand_out(order, receivers)

    def _hand_out(self, order: Enter, receivers: list[str]) -> None:
        passing("morph: hand-over begun")
        index = order.holders.index(self._crew.me)
        settled = self._crew.replica.settled()
        share, pieces = share_of(settled, len(order.holders), index)
        part = Part(
            generation=order.layout.generation,
            step=order.version,
            tag=STATE,
            extra=msgspec.msgpack.encode(share),
        )
        with self._crew.link.stuck.aided():  # behind what the script has told a device
            lying = here(pieces)
        for receiver in receivers:
            self._crew.send(receiver, part, lying)
            passing("morph: part sent")

    def receive(self, order: Enter) -> None:
        """The state that the layout begins with; in layouts in which each keeps its own, what all need of it."""
        replica = self._crew.replica
        self.pulling.clear()
        self._settle()
        if order.layout.owned or (order.holders and order.held):
            self._start_with(order)
        elif order.holders and not order.catch_up:
            replica.load(self._gather_state(order), order.version)
        else:
            replica.load(*self._from_backup())
        if order.holders:
            passing("morph: state received")

    def _settle(self) -> None:
        """What comes to a device comes behind what the script has told it."""
        with self._crew.link.stuck.aided():
            settle(self._crew.replica.space.device)

    def _from_backup(self, layers: tuple[str, ...] = ()) -> tuple[Gathered, int]:
        """What the keeper has, and of which version; these layers of it, where nobody is sent more."""
        generation = self._crew.generation
        if layers:
            # What came of another question is dropped.
            self._crew.wait(lambda: (self._take_state(generation),))
            self._crew.link.send(LayersAsked(generation=generation, layers=layers))
        state, payload = self._crew.wait(lambda: self._take_state(generation))
        gathered = Gathered()
        gathered.add(Share(forms=state.layers, extents=whole(state.layers)), payload)
        return gathered, state.version

    def _take_state(self, generation: int) -> tuple[State, memoryview] | None:
        """What came for a newer layout, into which we shall be called, stays for that one. The lock is held."""
        came = self.state
        if came is None or came[0].generation > generation:
            return None
        self.state = None
        return came if came[0].generation == generation else None

    def _start_with(self, order: Enter) -> None:
        """What belongs to no stage, and what optimizers are set to. Layers are asked for when it is known which
        ones are needed.
        """
        replica = self._crew.replica
        every = replica.holdings.all
        layers = every & {REST} if order.layout.owned else every
        asked, version = layers | with_settings(replica.objects), order.version
        if order.holders:
            gathered = self.pulling.pull(asked, version, self._others())
        else:
            gathered, version = self._from_backup(tuple(sorted(asked)))
        replica.load(gathered, version, layers if order.layout.owned else None)

    def _gather_state(self, order: Enter) -> Gathered:
        gathered = Gathered()
        for holder in order.holders:
            extra, payload = self._crew.take(holder, order.version, STATE)
            gathered.add(msgspec.msgpack.decode(extra, type=Share), payload)
        return gathered


def having(order: Enter) -> Having:
    """Which layers each holder has."""
    held = order.held
    return {one: frozenset(held[one]) if one in held else None for one in order.holders}


def _shared_out(shares: Having, every: frozenset[str]) -> dict[str, frozenset[str]]:
    """The layers that none of these has, each to one of them: everyone comes to the same answer."""
    found = [held for held in shares.values() if held is not None]
    orphans = sorted(every.difference(*found))
    return {worker: frozenset(orphans[index :: len(shares)]) for index, worker in enumerate(shares)}
