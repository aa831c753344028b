"""Who has which layers of the state, and how a worker gets those that it lacks.

They come from other workers: all of the state in slices where every worker keeps all, else layer by
layer (`agent.worker.state.layer_transfer`). They come from the keeper if no worker has them any more. If the model
was handed over unbuilt and no step has changed it, a layer is made wherever it is needed, so every
worker counts as having everything, and nothing is sent.
"""

from collections.abc import Callable

import msgspec

from agent.faults import passing
from agent.net.mesh import STATE
from agent.protocol import Enter, Held, Holding, LayersAsked, Part, State
from agent.replica import Replica
from agent.store.encoding.format import REST
from agent.store.layers import share_of, with_settings
from agent.store.memory import return_memory
from agent.store.shares import Gathered, Share
from agent.tensors.device import settle
from agent.tensors.staging import here
from agent.worker.peers import PeerWorker
from agent.worker.state.layer_transfer import Changed, Pulling, covers
from agent.worker.state.shards import Stores
from agent.world import Interrupted

Having = dict[str, frozenset[str] | None]  # None means all layers


class Handover:
    """One worker's view of who has which layers, in its present layout."""

    def __init__(self, crew: PeerWorker, pulling: Pulling, stores: Stores) -> None:
        self._crew, self.pulling, self._stores = crew, pulling, stores
        self.having: Having = {}
        # what this worker holds once the step in flight is committed
        self.promised: Held | None = None
        self.state: tuple[State, memoryview] | None = None  # what the keeper sent
        # Layers that no worker of the layout has, and which worker of it gets which.
        self._orphans: dict[str, frozenset[str]] = {}

    def enter(self, order: Enter, *, born: bool) -> None:
        self.promised, self._orphans = None, {}
        self.having = {} if born else having(order)

    def keep(self, keepers: Having) -> None:
        """Take note of which layers each worker keeps from now on."""
        if keepers != self.having:
            return_memory()  # of layers that are kept elsewhere
        self.having, self._orphans = keepers, {}

    def shares(self) -> Having:
        """Return what each worker of the layout is asked for, orphaned layers included."""
        workers = self._crew.layout.workers
        found = {worker: self.having.get(worker, frozenset()) for worker in workers}
        for worker, orphans in self._orphans.items():
            own = found[worker]
            found[worker] = None if own is None else own | orphans
        return found

    def _others(self) -> Having:
        return {worker: held for worker, held in self.having.items() if worker != self._crew.me}

    # --- layers -----------------------------------------------------------------------------------

    def pull(self, layers: frozenset[str]) -> None:
        """Get these layers, in the version that the session is at."""
        replica = self._crew.replica
        lacking = replica.holdings.lacking(layers)
        if replica.newborn:
            with self._crew.link.stuck.aided():  # the script's own model code runs here
                replica.bear(layers)
        elif lacking:
            gathered = self._found(lacking)
            self._settle()
            replica.add(gathered, lacking)
            # Offer before announcing, because a worker of the next layout may ask before we are in
            # it.
            self.pulling.offer(replica.version, replica.collected())
            self.say_held()

    def _found(self, lacking: frozenset[str]) -> Gathered:
        entered = self._crew.entered
        if entered is not None and not entered.holders and not self.having:
            return self._from_backup(tuple(sorted(lacking)))[0]
        return self.pulling.pull(lacking, self._crew.replica.version, self._others())

    def pull_whole(self) -> None:
        """Get the whole state if every worker keeps it, else what the layout lacks.

        In an `owned` layout this takes in the layers that lie outside of it and have to go to the
        keeper. Without a backup there would be no commit, and so no later moment to ask for them.
        """
        replica, entered = self._crew.replica, self._crew.entered
        assert entered is not None
        if not entered.layout.owned:
            self.pull(replica.holdings.all)
        elif not replica.newborn and entered.snapshot and entered.holders:
            self.take_in()

    def take_in(self) -> None:
        """Get the layers that no worker of the layout has.

        If the model was handed over unbuilt, each worker takes a share of them; else each takes the
        whole state.
        """
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
        """Fetch the weights that are not here, for the script to read; return whether it worked.

        `counted` says who else has what, or None if the job does not go on from the state here. The
        result is False in that case.
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
                else:  # every worker starts from the backup, and none has fetched its layers yet
                    gathered, _ = self._from_backup(tuple(sorted(layers)))
            except Interrupted:
                continue
            except Changed:
                if self._crew.me in order.layout.workers:
                    raise
                return False  # we are left out: the others have gone on and do not wait for us
            replica.borrow(gathered, layers)
            return True
        return False

    # --- what the keeper hears --------------------------------------------------------------------

    def held(self, replica: Replica) -> Held | None:
        """Return which layers are here; None means all, as it does for a model still unmade."""
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

    # --- a whole state ----------------------------------------------------------------------------

    def hand_over(self, order: Enter) -> None:
        """Send this worker's slice of the state to every worker of the layout that has none."""
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
        with self._crew.link.stuck.aided():  # after what the script has queued on a device
            lying = here(pieces)
        for receiver in receivers:
            self._crew.send(receiver, part, lying)
            passing("morph: part sent")

    def receive(self, order: Enter) -> None:
        """Receive the state that the layout begins with.

        In a layout in which each worker keeps its own layers, receive only what all of them need.
        """
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
        """Wait for what the script queued on the device; received data must come after it."""
        with self._crew.link.stuck.aided():
            settle(self._crew.replica.space.device)

    def _from_backup(self, layers: tuple[str, ...] = ()) -> tuple[Gathered, int]:
        """Return the keeper's state and its version; only these layers, if any are named.

        Layers are named where the keeper sends no worker more than it asks for.
        """
        generation = self._crew.generation
        if layers:
            # Drop the answer to an earlier question.
            self._crew.wait(lambda: (self._take_state(generation),))
            self._crew.link.send(LayersAsked(generation=generation, layers=layers))
        state, payload = self._crew.wait(lambda: self._take_state(generation))
        return self._stores.gathered(state, payload, self._crew.link), state.version

    def _take_state(self, generation: int) -> tuple[State, memoryview] | None:
        """Return the state that came for this generation, if any. The lock must be held.

        A state for a newer layout, which this worker will be called into, stays for that layout.
        """
        came = self.state
        if came is None or came[0].generation > generation:
            return None
        self.state = None
        return came if came[0].generation == generation else None

    def _start_with(self, order: Enter) -> None:
        """Load what belongs to no stage, and the settings of optimizers.

        Other layers are asked for when it is known which ones are needed.
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
    """Return which layers each holder has."""
    held = order.held
    return {one: frozenset(held[one]) if one in held else None for one in order.holders}


def _shared_out(shares: Having, every: frozenset[str]) -> dict[str, frozenset[str]]:
    """Divide the layers that no worker has among them; every worker computes the same answer."""
    found = [held for held in shares.values() if held is not None]
    orphans = sorted(every.difference(*found))
    return {worker: frozenset(orphans[index :: len(shares)]) for index, worker in enumerate(shares)}
