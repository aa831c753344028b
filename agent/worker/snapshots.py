"""A worker's share of a snapshot, copied and sent while the next step computes.

Between two updates of an optimizer nothing writes to the state (buffers are copied when it is
collected), because forward and backward only read it. So the script waits only when it is about to
get its gradients, and only for what is not copied yet. What goes slowly into a store is read where
it lies as long as it may, because a copy of all of it takes memory.
"""

import queue
import threading
from collections.abc import Callable
from functools import partial

import msgspec
import torch

from agent.errors import CheckpointError
from agent.faults import passing
from agent.protocol import Shards, Snapshot
from agent.store.encoding.format import Layer
from agent.store.layers import Collected, LiveLayer, share_of
from agent.store.memory import Again, Copying
from agent.store.shares import Share, batches
from agent.tensors.device import CPU
from agent.tensors.staging import Fetch, Piece, pinned
from agent.worker.peers import PeerWorker
from agent.worker.state.handover import Handover
from agent.worker.state.layer_transfer import covers, share_among
from agent.worker.state.shards import CopyTime, ShareWriter, Stores
from agent.world import Interrupted

Shared = tuple[Share, list[Piece]]
Shape = tuple[Share, dict[str, Layer]]  # a share, and the forms of its layers

CHUNK_BYTES = 1 << 20  # so that urgent messages can pass in between


class Snapshots:
    def __init__(self, crew: PeerWorker, handover: Handover, stores: Stores) -> None:
        self._crew, self._handover, self._stores = crew, handover, stores
        self.asked_at: int | None = None  # the version that the keeper wants
        self._shards: Shards | None = None  # where it wants it, if not itself
        self._copying: Copying | None = None
        self._copy_time, self._again = CopyTime(), Again()
        self._ended = (
            False  # the script's loop, and with it what is written for a loss before its end
        )
        self.failed = False  # whether the final state could not be sent
        self._idle: list[queue.SimpleQueue[Callable[[], None]]] = []  # threads that have finished

    def ask(self, version: int | None, shards: Shards | None) -> None:
        """Note which version the keeper wants, if any, and where."""
        self.asked_at, self._shards = version, shards

    def settle(self) -> None:
        """Return when no part of the state is being copied, so that it may change."""
        if self._copying is not None:
            with self._crew.link.stuck.aided():  # waits for the copying thread, or for a device
                self._copying.let_change()
            self._copying = None
            self._copy_time.end()

    def due(self) -> bool:
        """Return whether the snapshot that the keeper asked for can be sent now.

        A snapshot asked for with a new layout is sent in that layout, not in the one before; and
        not before the workers of the layout have all layers between them.
        """
        replica = self._crew.replica
        unborn = replica.newborn and self._crew.layout.owned and not self._handover.having
        due = self.asked_at == replica.version and replica.at_boundary
        return due and not unborn and not self._crew.superseded()

    def send(self) -> None:
        self.asked_at, replica = None, self._crew.replica
        self.send_state(replica.collected(), replica.version, final=False)

    def send_state(self, state: Collected, version: int, *, final: bool) -> None:
        """Copy this worker's share of the state and send it on a separate thread.

        The final state is copied before this returns, because a script may do anything after its
        loop.
        """
        layout, self._ended = self._crew.layout, final
        shared = self._shared(final=final)
        if shared is None:
            return  # the rest is outside of the layout: the keeper will ask again
        self.settle()
        shares = list[Shape]()  # this worker's share, as soon as it is known

        def sources() -> list[Piece]:
            live = state.finish()
            share, pieces = shared(live)
            shares.append((share, {layer.form.name: layer.form for layer in live}))
            return pieces

        self._copying = copying = self._copying_of(sources)
        self._copy_time.begin()
        if final:
            copying.finish()
        passing("save: snapshot begun")
        begun = Snapshot(
            generation=layout.generation,
            version=version,
            forms=(),
            extents=(),
            last=False,
            final=final,
        )
        shards = None if final else self._shards
        self._beside(partial(self._stream, begun, copying, shares, shards))

    def _copying_of(self, sources: Callable[[], list[Piece]]) -> Copying:
        device = self._crew.replica.space.device
        if device == CPU:
            return Copying(sources, self._again)
        return Copying(
            sources,
            self._again,
            far=lambda pairs: Fetch(
                [(a, torch.frombuffer(m, dtype=torch.uint8)) for a, m in pairs]
            ),
            room=lambda count: pinned(count, device).numpy().data,
        )

    def _shared(self, *, final: bool) -> Callable[[list[LiveLayer]], Shared] | None:
        """Return how to take this worker's share of a state, as the state is divided now.

        Return None if the workers of the layout do not have all layers.
        """
        replica, layout, me = self._crew.replica, self._crew.layout, self._crew.me
        if layout.owned and (replica.unbuilt or not final):
            having = self._handover.shares()
            if not covers(having, replica.holdings.all):
                return None
            return partial(share_among, having=having, me=me)
        return partial(share_of, holders=len(layout.workers), index=layout.workers.index(me))

    def _beside(self, stream: Callable[[], None]) -> None:
        """Run `stream` on an idle thread if there is one, as the script waits for a new one."""
        if self._idle:
            self._idle.pop().put(stream)
            return
        given = queue.SimpleQueue[Callable[[], None]]()
        given.put(stream)
        threading.Thread(target=self._serve, args=(given,), name="snapshot", daemon=True).start()

    def _serve(self, given: queue.SimpleQueue[Callable[[], None]]) -> None:
        while True:
            given.get()()
            self._idle.append(given)

    def _stream(
        self, begun: Snapshot, copying: Copying, shares: list[Shape], shards: Shards | None
    ) -> None:
        """Send what was copied to the keeper, batch by batch, or write it into the store."""
        copying.begin()
        try:
            if shards is None:
                copying.finish()
                self._send_all(begun, shares[0][0], copying.whole)
            else:
                self._write_all(begun, shares[0], copying, shards)
        except Interrupted:
            return
        except Exception:
            # A lost snapshot that is not the final one is noticed by the keeper, which asks again.
            self.failed |= begun.final
            self._crew.wake()
            raise
        finally:
            copying.give_up()
        # Where memory is short, none is held for the next snapshot.
        if not self._crew.replica.unbuilt:
            self._again.give(copying.whole)

    def _send_all(self, begun: Snapshot, share: Share, whole: memoryview) -> None:
        at, link = 0, self._crew.link
        message = msgspec.structs.replace(begun, forms=share.forms)
        for batch in batches(share.extents, CHUNK_BYTES):
            size = sum(extent.size for extent in batch)
            data = whole[at : at + size]
            link.send(msgspec.structs.replace(message, extents=batch), data)
            passing("save: share sent")
            at, message = at + size, begun
            if self._crew.superseded():
                return
        link.send(msgspec.structs.replace(message, last=True))

    def _write_all(self, begun: Snapshot, shape: Shape, copying: Copying, shards: Shards) -> None:
        """Write the share into the store, and tell the keeper what lies there."""
        link, (share, forms) = self._crew.link, shape
        once = self._crew.replica.unbuilt  # where memory is short
        message = msgspec.structs.replace(begun, stored=True)
        link.send(msgspec.structs.replace(message, forms=share.forms))
        writer = None
        try:
            sink = self._stores.sink(shards.place)
            writer = ShareWriter(sink, shards, begun.version, self._copy_time)
            for part in writer.write(share, copying, forms, once=once):
                if self._crew.superseded() or self._ended:
                    writer.undo()
                    return
                link.send(msgspec.structs.replace(message, parts=(part,)))
        except CheckpointError as error:
            if writer is not None:
                writer.undo()
            message = msgspec.structs.replace(message, why=str(error) or type(error).__name__)
        link.send(msgspec.structs.replace(message, last=True))
