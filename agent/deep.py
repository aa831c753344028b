"""A worker of a layout whose chains have several workers: the step is played by `agent.pipeline`.

    schedule on own stages -> reduce each over its replicas -> tell everyone -> the sum of the whole step

Every worker ends with the same sum as in a layout of chains of one, bit for bit; the keeper, the commit, what
the script does with its gradients, and a newcomer's catching up do not know the difference.

Everything here belongs to one generation. A newer one interrupts whatever is waited for, and what was in
flight is dropped: the step is computed again in the new layout.
"""

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, overload

import msgspec
import torch

from agent.errors import Misuse
from agent.faults import passing
from agent.layout import Layout
from agent.pipeline.body import Recording
from agent.pipeline.channel import Channel, Parcel
from agent.pipeline.cut import balance, build, measured, worth_cutting
from agent.pipeline.examine import CutPoint, cut_points
from agent.pipeline.execute import REACH
from agent.pipeline.pieces import Piece
from agent.pipeline.wires import MeshChannel
from agent.pipeline.work import Worker
from agent.shards import cut
from agent.sums import Sum, SumSpace
from agent.timeline import Notes


class Part(msgspec.Struct, frozen=True):
    """One stage's sums, and where each number of them lies in the sums of the whole model."""

    space: SumSpace
    pairs: tuple[tuple[int, int], ...]  # entries of the stage, entries of the whole; 0 is the loss


class Chain:
    """This worker's stages in one layout of one recording, and the way to the sum that all end up with."""

    def __init__(
        self, layout: Layout, me: str, recording: Recording, cuts: Sequence[int], channel: Channel
    ) -> None:
        self.recording = recording
        self._layout, self._me, self._channel = layout, me, channel
        self.cuts = tuple(cuts)
        self._pieces = build(recording.graph, recording.facts, cuts)
        replica = layout.replica_of(me)
        schedule = layout.schedule_of(replica)
        self._place = replica.workers.index(me)
        self._hosts = [schedule.host(stage, 0) for stage in range(schedule.stages)]
        own = {i: p for i, p in enumerate(self._pieces) if self._hosts[i] == self._place}
        self._worker = Worker(layout, me, schedule, own, channel, reach=REACH)
        self._parts: dict[int, Part] = {}
        self._totals: dict[int, Sum] = {}

    @property
    def busy_s(self) -> float:
        """What one microbatch of the last step took here."""
        played = self._worker.executor
        whole_s = played.spans[-1].end_s - played.spans[0].start_s
        return (whole_s - played.waited_s) / self._worker.replica.count

    def note(self, notes: Notes) -> None:
        """What was done here in the last step. Microbatches are counted within the replica."""
        for span in self._worker.executor.spans:
            notes.add(span.action, span.start_s, span.end_s)

    def play(
        self,
        step: int,
        batches: Sequence[object],
        total: Sum,
        open_: Callable[[int], None],
        check: Callable[[], None],
    ) -> None:
        """The step, up to its sum."""
        self._worker.compute(step, Flat(self.recording, batches), open_, check)
        for index in self._worker.sums:
            self._totals[index] = self._reduce(step, index)
        for index in range(len(self._pieces)):
            if index not in self._worker.sums:
                self._totals[index] = self._hear(step, index, total.space)
        self._put_together(total)

    def _reduce(self, step: int, index: int) -> Sum:
        """A stage of ours: summed over its replicas, and told to whoever has other stages."""
        sums = self._worker.sums[index]
        found = sums.reduce(self._channel, f"{step}/s{index}")
        replicas = self._layout.replicas
        mine = next(i for i, replica in enumerate(replicas) if self._me in replica.workers)
        start, end = cut(found.space.total_bytes, len(replicas), mine)
        parcel = Parcel(tensors=(found.flat[start:end],), plain=bytes(found.present))
        for replica in replicas:
            for place, peer in enumerate(replica.workers):
                if place != self._place:
                    self._channel.send(peer, f"{step}/all{index}", parcel)
        return found

    def _hear(self, step: int, index: int, space: SumSpace) -> Sum:
        """A stage of others: every replica of it tells one slice."""
        part = self._part(index, space)
        found = self._totals.get(index) or Sum(part.space)
        replicas = self._layout.replicas
        for number, replica in enumerate(replicas):
            peer = replica.workers[self._hosts[index]]
            parcel = self._channel.receive(peer, f"{step}/all{index}")
            (piece,) = parcel.tensors
            assert piece is not None and isinstance(parcel.plain, bytes)
            start, end = cut(part.space.total_bytes, len(replicas), number)
            found.flat[start:end] = piece
            found.present[:] = parcel.plain
        return found

    def _put_together(self, total: Sum) -> None:
        total.flat.zero_()
        total.present[:] = bytes(len(total.present))
        for index, found in self._totals.items():
            for source, target in self._part(index, total.space).pairs:
                if source == 0:
                    total.loss.copy_(found.loss)
                else:
                    total.views[target - 1].copy_(found.views[source - 1])
                    total.present[target - 1] = found.present[source - 1]

    def _part(self, index: int, whole: SumSpace) -> Part:
        if index not in self._parts:
            sums = self._worker.sums.get(index)
            piece = self._pieces[index]
            space = sums.space if sums is not None else SumSpace([piece.module])
            self._parts[index] = Part(space, tuple(_pairs(piece, space, whole)))
        return self._parts[index]


def _pairs(piece: Piece, space: SumSpace, whole: SumSpace) -> list[tuple[int, int]]:
    """A parameter of several stages has its whole gradient on the first of them."""
    places = {id(tensor): index for index, tensor in enumerate(whole.tensors, start=1)}
    others = {
        id(piece.module.get_parameter(piece.names[name]))
        for name, stages in piece.tied.items()
        if piece.index in stages[1:]
    }
    pairs = [(0, 0)] if piece.last else []
    for index, tensor in enumerate(space.tensors, start=1):
        if id(tensor) in places and id(tensor) not in others:
            pairs.append((index, places[id(tensor)]))
    return pairs


class Flat(Sequence[tuple[torch.Tensor, ...]]):
    """Microbatches as the graph takes them, each looked at when it is its turn."""

    def __init__(self, recording: Recording, batches: Sequence[object]) -> None:
        self._recording, self._batches = recording, batches

    def __len__(self) -> int:
        return len(self._batches)

    @overload
    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[tuple[torch.Tensor, ...]]: ...

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return Flat(self._recording, self._batches[index])
        return self._recording.flatten(self._batches[index])


class Sections:
    """Where a recording may be cut, and what lies between: measured once by whoever has to choose."""

    def __init__(self) -> None:
        self._recording: Recording | None = None
        self._points: tuple[CutPoint, ...] = ()
        self._seconds: list[float] = []

    def choose(self, recording: Recording, stages: int) -> tuple[int, ...]:
        if self._recording is not recording or stages > len(self._points) + 1:
            self._measure(recording, stages)
        chosen = balance(self._seconds, [point.nbytes for point in self._points], stages)
        return tuple(self._points[index].after for index in chosen)

    def _measure(self, recording: Recording, stages: int) -> None:
        points = worth_cutting(recording.facts)
        if stages > len(points) + 1:
            points = cut_points(recording.facts)
        pieces = build(recording.graph, recording.facts, [point.after for point in points])
        self._seconds = measured(pieces, recording.example)
        self._recording, self._points = recording, points


class Deep:
    """What a worker keeps of deep layouts, from one to the next."""

    def __init__(self, me: str) -> None:
        self._me = me
        self._sections = Sections()
        self._channel: MeshChannel | None = None
        self._generation = -1
        self._chain: Chain | None = None

    def leave(self) -> None:
        """The layout is not the one any more: nothing more of it is sent."""
        if self._channel is not None:
            self._channel.break_off("the layout has changed")
        self._channel, self._chain = None, None

    def chain(
        self, layout: Layout, step: int, recording: Recording, channel: Callable[[], MeshChannel]
    ) -> Chain:
        """The chain of this layout; another one if the script computes something else now."""
        if self._generation != layout.generation:
            self.leave()
            self._generation = layout.generation
        if self._channel is None:
            self._channel = channel()
        if self._chain is None or self._chain.recording is not recording:
            cuts = self._cuts(layout, step, recording)
            self._chain = Chain(layout, self._me, recording, cuts, self._channel)
        return self._chain

    def _cuts(self, layout: Layout, step: int, recording: Recording) -> tuple[int, ...]:
        """Those of the layout, if they are of this graph; else the first worker chooses for all."""
        stages = layout.schedule_of(layout.replica_of(self._me)).stages
        known = {point.after for point in cut_points(recording.facts)}
        if len(layout.cuts) == stages - 1 and known.issuperset(layout.cuts):
            return layout.cuts
        assert self._channel is not None
        first, *others = layout.workers
        digest = hashlib.blake2b(recording.graph.code.encode(), digest_size=8).hexdigest()
        if first == self._me:
            cuts = self._sections.choose(recording, stages)
            for peer in others:
                parcel = Parcel(tensors=(), plain=[digest, list(cuts)])
                self._channel.send(peer, f"cuts/{step}", parcel)
            passing("morph: cuts told")
            return cuts
        told: Any = self._channel.receive(first, f"cuts/{step}").plain
        passing("morph: cuts told")
        if told[0] != digest:
            raise Misuse(
                f"the loop over session.share(...) computes something else here than on {first}: a script has "
                "to do the same on every worker, or cannot be cut into stages"
            )
        return tuple(told[1])
