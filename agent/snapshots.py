"""What a worker sends the keeper of the state: its share, copied and sent while the next step computes.

Between two updates of an optimizer nothing writes to the state (buffers are copied when it is collected): forward and
backward only read it. So the script waits only for what is not copied yet when it is about to get its gradients.
"""

import threading
from collections.abc import Callable
from functools import partial

import msgspec

from agent.copies import Copies
from agent.crew import Crew
from agent.faults import passing
from agent.handover import Handover
from agent.protocol import Snapshot
from agent.pulling import covers, share_among
from agent.store.layers import LiveLayer, share_of
from agent.store.memory import Again, Copying
from agent.store.shares import Extent, Share, batches
from agent.world import Interrupted

CHUNK_BYTES = 1 << 20  # so that what is urgent can pass in between


class Snapshots:
    def __init__(self, crew: Crew, handover: Handover, copies: Copies) -> None:
        self._crew, self._handover, self._copies = crew, handover, copies
        self.asked_at: int | None = None  # the version that the keeper wants
        self._copying: Copying | None = None
        self._again = Again()

    def settle(self) -> None:
        """Return when nothing of the state is being copied any more: it is about to change."""
        if self._copying is not None:
            self._copying.finish()
            self._copying = None

    def due(self) -> bool:
        """What is asked for with a new layout is sent under that layout, not under the one before; and not before
        those of the layout have all of it between them.
        """
        session = self._crew.session
        unborn = session.newborn and self._crew.layout.owned and not self._handover.having
        return not unborn and not self._crew.superseded() and self.asked_at == session.version

    def send(self) -> None:
        self.asked_at, session = None, self._crew.session
        self.send_state(session.settled(), session.version, final=False)

    def send_state(self, state: list[LiveLayer], version: int, *, final: bool) -> None:
        """Copy my share and send it, on a thread of its own. The script behind its loop may do anything."""
        session, layout = self._crew.session, self._crew.layout
        workers, generation = layout.workers, layout.generation
        if layout.owned and (session.unbuilt or not final):
            shares = self._handover.shares()
            if not covers(shares, session.holdings.all):
                return  # whoever has the rest is not in the layout: we will be asked again
            share, pieces = share_among(state, shares, self._crew.me)
        else:
            share, pieces = share_of(state, len(workers), workers.index(self._crew.me))
        self.settle()
        self._copying = copying = Copying(pieces, self._again)
        if final:
            copying.finish()
        passing("save: snapshot begun")
        begun = Snapshot(
            generation=generation,
            version=version,
            forms=share.forms,
            extents=(),
            last=False,
            final=final,
        )
        keep = None
        if layout.sole and not final:
            keep = partial(self._copies.share, layout, version, len(session.holdings.all))
        threading.Thread(
            target=self._stream,
            args=(begun, share.extents, copying, keep),
            name="snapshot",
            daemon=True,
        ).start()

    def _stream(
        self,
        begun: Snapshot,
        extents: tuple[Extent, ...],
        copying: Copying,
        keep: Callable[[Share, memoryview], None] | None,
    ) -> None:
        """Batch by batch, to the neighbour that keeps a copy and then to the keeper."""
        copying.finish()
        try:
            self._send_all(begun, extents, copying.whole, keep)
        except Interrupted:
            return
        if (
            keep is None and not self._crew.session.unbuilt
        ):  # where room is short, none is held for the next
            self._again.give(copying.whole)

    def _send_all(
        self,
        begun: Snapshot,
        extents: tuple[Extent, ...],
        whole: memoryview,
        keep: Callable[[Share, memoryview], None] | None,
    ) -> None:
        at, message, link = 0, begun, self._crew.link
        for batch in batches(extents, CHUNK_BYTES):
            size = sum(extent.size for extent in batch)
            data = whole[at : at + size]
            if keep is not None:
                keep(Share(forms=message.forms, extents=batch), data)
            link.send(msgspec.structs.replace(message, extents=batch), data)
            passing("save: share sent")
            at, message = at + size, msgspec.structs.replace(begun, forms=())
            if self._crew.superseded():
                return
        link.send(msgspec.structs.replace(message, last=True))
