"""A worker of a layout whose chains have several workers; `agent.pipeline` plays the step.

    schedule on own stages -> reduce each over its replicas -> send to the chain -> sum of the step

Every worker ends with the same sum as in a layout of chains of one, bit for bit where sums are
canonical. So the keeper, the commit, a newcomer's catching up and what the script does with its
gradients are the same for every layout. Where the layout is `owned`, a worker ends with the sums of
the layers that it keeps, and the keeper gets each sum from its owner.

Everything here belongs to one generation. A newer generation interrupts every wait and drops what
was in flight, because the step is computed again in the new layout.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, overload

import msgspec
import torch

from agent.layout import Layout
from agent.pipeline.stages.channel import Channel, Parcel
from agent.pipeline.stages.execute import REACH
from agent.pipeline.stages.stage import Stage
from agent.pipeline.stages.stage_parts import Piece
from agent.pipeline.stages.stage_worker import Phase, Worker
from agent.pipeline.tracing.graphs import Leaves, Recording
from agent.pipeline.tracing.variants import Pieces, Variant
from agent.proof.evidence import Staged
from agent.sharded.holdings import Holdings
from agent.sharded.scaling import measured
from agent.store.encoding.format import REST
from agent.store.layers import block_of
from agent.store.memory import copy_bytes
from agent.tensors.metrics import Names, Numbers, decoded, encoded
from agent.tensors.shards import cut, tensors_of
from agent.tensors.sums import Norm, Sum, Summed, SumSpace
from agent.tensors.unchanged import memory_of
from agent.timeline import Notes

Span = tuple[int, int, int]  # source offset, target offset, number of bytes


class Whole(msgspec.Struct, frozen=True):
    """The parts of a session that a chain works on."""

    space: SumSpace
    holdings: Holdings
    total: Callable[[], Sum]
    scaler: torch.amp.GradScaler | None
    deterministic: bool
    sample: Callable[[Staged], object]


class How(msgspec.Struct, frozen=True):
    """The calls around each microbatch: see `agent.pipeline.stages.stage_worker.Phase`."""

    open: Callable[[int], None]
    check: Callable[[], None]
    shown: Collection[int] = ()
    thorough: bool = False


class Told(msgspec.Struct, frozen=True):
    """What all workers of a chain need to know of one stage's sum.

    Entries and gradients are in the order of the whole sum. The last stage adds the sums of the
    loss and of the metrics, and their names.
    """

    numbers: tuple[float, ...]
    names: Names
    finite: bool
    present: bytes
    norms: list[Norm]


class Chain:
    """This worker's stages in one layout of one recording, and the exchange up to its sum."""

    def __init__(
        self,
        layout: Layout,
        me: str,
        recording: Recording,
        cuts: Sequence[int],
        channel: Channel,
        whole: Whole,
    ) -> None:
        self.recording = recording
        self._layout, self._channel, self._whole = layout, channel, whole
        self.cuts = tuple(cuts)
        self._variants = Pieces(recording.variants.first, cuts)
        self._pieces = self._variants.first
        self._replica = layout.replica_of(me)
        self._number = layout.replicas.index(self._replica)
        self._place = self._replica.workers.index(me)
        schedule = layout.schedule_of(self._replica)
        self._hosts = [schedule.host(stage, 0) for stage in range(schedule.stages)]
        own = {i: p for i, p in enumerate(self._pieces) if self._hosts[i] == self._place}
        self._worker = Worker(
            layout,
            me,
            schedule,
            own,
            channel,
            reach=REACH,
            piece_of=self._piece_of,
            deterministic=whole.deterministic,
            exchange=whole.space.exchange,
            trained={id(param) for param in whole.space.params.values()},
        )
        self.tried = False  # whether a microbatch was computed twice here
        self._unused: set[int] = set()
        self._owners = self._find_owners()
        self._entries = [self._entries_of(stage) for stage in range(len(self._pieces))]
        self.kept = [self._kept(place) for place in range(layout.depth)]
        self.held = self.kept[self._place] if layout.owned else None
        self._everywhere = self._of_all()
        self._space = whole.space if self.held is None else whole.space.part(self._is_held)
        self._total: Sum | None = None
        self._totals: dict[int, Sum] = {}
        self._ways: dict[tuple[int, int], list[Span]] = {}
        self._way_back = list[Span]() if self.held is None else self._from_whole()

    def _piece_of(self, stage: int, batch: Leaves) -> Piece:
        """Return the piece that computes a stage for this microbatch."""
        return self._variants.of(batch.variant)[stage]

    @property
    def busy_s(self) -> float:
        """Return the seconds that one microbatch of the last step took here."""
        return self._worker.executor.busy_s / self._worker.replica.count

    def note(self, notes: Notes) -> None:
        """Record what this worker did in the last step. Microbatches count within the replica."""
        for span in self._worker.executor.spans:
            notes.add(span.action, span.start_s, span.end_s)

    # --- who has what -----------------------------------------------------------------------------

    def _find_owners(self) -> list[int]:
        """Return for each entry the stage that has its whole gradient.

        That is the first stage that uses it, or the last stage if none does.
        """
        owners = [len(self._pieces) - 1] * len(self._whole.space.places)
        where = {id(t): e for e, t in enumerate(self._whole.space.tensors, start=1)}
        for stage in reversed(range(len(self._pieces))):
            for tensor in tensors_of(self._pieces[stage].module):
                if id(tensor) in where:
                    owners[where[id(tensor)]] = stage
        used = {id(t) for piece in self._pieces for t in tensors_of(piece.module)}
        self._unused = {entry for key, entry in where.items() if key not in used}
        return owners

    def _entries_of(self, stage: int) -> list[int]:
        """Return the entries of a stage, in the order of the whole sum."""
        places = self._whole.space.places
        mine = [entry for entry, owner in enumerate(self._owners) if owner == stage]
        return sorted(mine, key=lambda entry: places[entry][0])

    def _kept(self, place: int) -> frozenset[str]:
        """Return the layers that a place of the chain keeps.

        Layers that no stage uses stay with the last stage. A module that has only buffers outside
        the state is not a layer, because no worker could be asked for it.
        """
        known = self._whole.holdings.layer_of
        used = [
            {known[id(t)] for t in tensors_of(p.module) if id(t) in known} for p in self._pieces
        ]
        every = self._whole.holdings.all
        kept = {REST} & every
        for stage, layers in enumerate(used):
            if self._hosts[stage] == place:
                kept |= layers & every
        if self._hosts[-1] == place:
            kept |= every - set().union(*used)
        return frozenset(kept)

    def keepers(self) -> dict[str, frozenset[str]]:
        """Return what each worker of the layout keeps after a step, by its own stages only."""
        return {
            worker: self.kept[place]
            for replica in self._layout.replicas
            for place, worker in enumerate(replica.workers)
        }

    def _of_all(self) -> frozenset[str]:
        """Return the buffers that all need, because they are in no layer and a forward writes them."""
        buffers = dict(self.recording.graph.named_buffers())
        written = {memory_of(buffers[name]) for name in self.recording.facts.written}
        return frozenset(
            name
            for name, buffer in self._whole.space.buffers.items()
            if id(buffer) in self._whole.holdings.unsaved and memory_of(buffer) in written
        )

    def _is_held(self, name: str, place: int | None = None) -> bool:
        kept = self.kept[self._place if place is None else place]
        return block_of(name) in kept or name in self._everywhere

    # --- the step ---------------------------------------------------------------------------------

    def play(self, step: int, batches: Sequence[object], how: How) -> Summed:
        """Compute the step, and return its sum."""
        flat = Flat(self.recording, batches, how.shown)
        flat.look(range(self._replica.first, self._replica.first + self._replica.count))
        self._worker.compute(step, self._phase(flat, how))
        told = {}
        for stage, sums in self._worker.sums.items():
            found = sums.reduce(self._channel, f"{step}/s{stage}")
            self._totals[stage] = found
            told[stage] = self._describe(stage, found)
            self._tell(step, stage, found, told[stage])
        total = self._ours() or self._total or self._make_total()
        if total is not self._ours():
            self._total, total.present[:] = total, bytes(len(total.present))
        for stage in range(len(self._pieces)):
            if stage in self._totals:
                self._copy(stage, total)
            else:
                told[stage] = self._hear(step, stage, total)
        return self._put_together(total, told)

    def compute_aside(self, name: str, batches: Sequence[object], how: How) -> None:
        """Compute microbatches for comparison only; all workers of the chain take part.

        Their gradients are added to no sum.
        """
        phase = self._phase(Flat(self.recording, batches, how.shown), how)
        for microbatch in how.shown:
            self._worker.compute_aside(f"{name}/{microbatch}", microbatch, phase)

    def _phase(self, flat: "Flat", how: How) -> Phase:
        def look(stage: Stage, microbatch: int, numbers: Numbers) -> None:
            index = stage.piece.index
            names, tensors = self._whole.space.names, self._whole.space.tensors
            entries = [entry - 1 for entry in self._entries[index] if entry]
            space = self._worker.sums[index].space
            left = zip(space.buffers.values(), space.written().values(), strict=True)
            written = {id(buffer): value for buffer, value in left}
            params = len(self._whole.space.params)
            one = Staged(
                microbatch=microbatch,
                generation=self._layout.generation,
                stage=index,
                given=flat.given[microbatch],
                numbers=numbers if stage.piece.last else None,
                gradients={names[at]: tensors[at].grad for at in entries if at < params},
                written={names[at]: written.get(id(tensors[at])) for at in entries if at >= params},
                graph=flat.variants[microbatch].graph,
                whole=how.thorough,
            )
            self._whole.sample(one)

        scaler = self._whole.scaler
        scale = 1.0 if scaler is None else scaler.get_scale()
        return Phase(flat, how.open, how.check, scale, how.shown, look)

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """Return the byte ranges (from, to) of the whole sum that this worker needs."""
        return tuple((source, source + size) for source, _, size in self._way_back)

    def again(self, step: int, payload: memoryview, marks: bytes) -> Summed:
        """Return the sum of a committed step, made from the bytes of `spans`.

        Each worker describes its own stages to the others, because all need to know every stage.
        """
        space = self._whole.space
        present, names = decoded(space.unsealed(marks), len(space.tensors))
        total, at = self._total or self._make_total(), 0
        for _, target, size in self._way_back:
            copy_bytes(payload[at : at + size], total.memory(target, target + size))
            at += size
        for entry, index in self._index(self._space).items():
            total.present[index - 1] = present[entry - 1]
        total.names = names
        self._total, told = total, dict[int, Told]()
        for stage in self._worker.sums:
            told[stage] = self._describe(stage, total)
            parcel = Parcel(tensors=(), plain=msgspec.to_builtins(told[stage]))
            for peer in self._replica.workers:
                if peer != self._replica.workers[self._place]:
                    self._channel.send(peer, f"{step}/again{stage}", parcel)
        for stage in range(len(self._pieces)):
            if stage not in told:
                peer = self._replica.workers[self._hosts[stage]]
                parcel = self._channel.receive(peer, f"{step}/again{stage}")
                told[stage] = msgspec.convert(parcel.plain, Told)
        return self._put_together(total, told)

    def _make_total(self) -> Sum:
        total = self._whole.total() if self.held is None else Sum(self._space)
        total.flat.zero_()
        return total

    def _describe(self, stage: int, found: Sum) -> Told:
        """Return what every worker needs to know of a stage's sum."""
        index = self._index(found.space)
        entries = [entry for entry in self._entries[stage] if entry]
        at = [index.get(entry) for entry in entries]
        present = bytes(0 if i is None else found.present[i - 1] for i in at)
        norms: list[Norm] = []
        finite = True
        if self.held is not None:
            wanted = [
                i - 1
                for entry, i, one in zip(entries, at, present, strict=True)
                if i and one and self._is_param(entry)
            ]
            # Measured on the device that a single process would use, because rounding may differ
            # here.
            norms = measured(found.space.gradients(found, wanted), self._whole.scaler)
            finite = found.space.finite(found)
        last, names = stage == len(self._pieces) - 1, found.names or ()
        numbers = found.numbers[: 1 + len(names)].tolist() if last else []
        return Told(tuple(numbers), names if last else (), finite, present, norms)

    def _tell(self, step: int, stage: int, found: Sum, told: Told) -> None:
        """Send each other worker of this chain the part of the sum that it keeps."""
        for place, peer in enumerate(self._replica.workers):
            if place == self._place:
                continue
            spans = self._way(stage, place, self._worker.sums[stage].space)
            pieces = [found.flat[start : start + size] for start, _, size in spans]
            packed = (torch.cat(pieces),) if len(pieces) > 1 else tuple(pieces)
            parcel = Parcel(tensors=packed, plain=msgspec.to_builtins(told))
            self._channel.send(peer, f"{step}/all{stage}", parcel)

    def _hear(self, step: int, stage: int, total: Sum) -> Told:
        peer = self._replica.workers[self._hosts[stage]]
        parcel = self._channel.receive(peer, f"{step}/all{stage}")
        at = 0
        for _, target, size in self._way(stage, self._place, None):
            (packed,) = parcel.tensors
            assert packed is not None
            total.flat[target : target + size] = packed[at : at + size]
            at += size
        return msgspec.convert(parcel.plain, Told)

    def _ours(self) -> Sum | None:
        """Return the sum of our only stage, if it is all that is kept here; else None.

        Such a sum is used in place, so it need not be in memory twice.
        """
        one = next(iter(self._totals.values()))
        if self.held is None or len(self._totals) > 1:
            return None
        kept = [id(tensor) for tensor in self._space.tensors]
        return one if kept == [id(tensor) for tensor in one.space.tensors] else None

    def _copy(self, stage: int, total: Sum) -> None:
        if total is self._totals[stage]:
            return
        spans = self._way(stage, self._place, self._worker.sums[stage].space)
        for source, target, size in spans:
            total.flat[target : target + size] = self._totals[stage].flat[source : source + size]

    def _put_together(self, total: Sum, told: dict[int, Told]) -> Summed:
        index, norms = self._index(self._space), dict[int, Norm]()
        everything = bytearray(len(self._whole.space.tensors))
        for stage, each in told.items():
            entries = [entry for entry in self._entries[stage] if entry]
            measured_ = iter(each.norms)
            for entry, present in zip(entries, each.present, strict=True):
                everything[entry - 1] = present
                if entry in index:
                    total.present[index[entry] - 1] = present
                if present and each.norms and self._is_param(entry):
                    norms[id(self._whole.space.tensors[entry - 1])] = next(measured_)
            if each.numbers:
                total.put(Numbers(each.names, each.numbers))
        if self.held is None:
            return self._space.summed(total)
        finite = all(each.finite for each in told.values())
        marks = encoded(everything, total.names)
        return Summed(total, finite, marks, self.held, norms)

    def slices(self) -> list[tuple[int, list[memoryview]]]:
        """Return this worker's part of the whole sum for the keeper, as offsets and bytes.

        The replicas of a stage divide the stage's sum among them. Every byte of the whole, also of
        a gap, belongs to one worker.
        """
        found: list[tuple[int, list[memoryview]]] = []
        for stage, total in self._totals.items():
            pieces = list(self._pieces_of(stage, total))
            whole_bytes = sum(piece.nbytes for _, piece in pieces)
            low, high = cut(whole_bytes, self._layout.width, self._number)
            at, end = 0, -1
            for offset, piece in pieces:
                first, last = max(low - at, 0), min(high - at, piece.nbytes)
                at += piece.nbytes
                if first >= last:
                    continue
                if offset + first != end:
                    found.append((offset + first, []))
                found[-1][1].append(piece[first:last])
                end = offset + last
        return found

    def _pieces_of(self, stage: int, total: Sum) -> Iterator[tuple[int, memoryview]]:
        """Yield the bytes of a stage's entries, each up to where the next of the whole begins."""
        index = {0: 0, **self._index(total.space)}
        for entry in self._entries[stage]:
            start, end = self._whole.space.slot(entry)
            if entry in index and entry not in self._unused:
                yield start, total.memory(*total.space.slot(index[entry]))
            elif start < end:
                yield start, memoryview(bytes(end - start))

    # --- where the numbers lie --------------------------------------------------------------------

    def _index(self, space: SumSpace) -> dict[int, int]:
        """Return the index in `space` of each entry of the whole that `space` has."""
        where = {id(tensor): entry for entry, tensor in enumerate(space.tensors, start=1)}
        whole = enumerate(self._whole.space.tensors, start=1)
        return {entry: where[id(tensor)] for entry, tensor in whole if id(tensor) in where}

    def _way(self, stage: int, place: int, source: SumSpace | None) -> list[Span]:
        """Return the spans to copy from a stage's sum into the sum that a place keeps.

        A receiver has no source space, because it needs only the targets.
        """
        if (stage, place) not in self._ways:
            there = self._index(source) if source is not None else None
            here = self._index(self._space) if place == self._place else None
            self._ways[stage, place] = _merged(
                self._span(entry, source, there, here)
                for entry in self._entries[stage]
                if entry and self._wanted(entry, place) and (there is None or entry in there)
            )
        return self._ways[stage, place]

    def _span(
        self,
        entry: int,
        source: SumSpace | None,
        there: dict[int, int] | None,
        here: dict[int, int] | None,
    ) -> Span:
        start, end = self._whole.space.slot(entry)
        from_ = source.places[there[entry]][0] if source is not None and there else start
        to = self._space.places[here[entry]][0] if here is not None else start
        return from_, to, end - start

    def _from_whole(self) -> list[Span]:
        """Return the spans to copy from a sum of the whole into the sum that is kept here."""
        here, ways = self._space.places, list[Span]()
        for entry, index in {0: 0, **self._index(self._space)}.items():
            start, end = self._whole.space.slot(entry)
            ways.append((start, here[index][0], end - start))
        return _merged(sorted(ways))

    def _is_param(self, entry: int) -> bool:
        return entry <= len(self._whole.space.params)

    def _wanted(self, entry: int, place: int) -> bool:
        if entry in self._unused:
            return False
        return self.held is None or self._is_held(self._whole.space.names[entry - 1], place)


def _merged(spans: Iterable[Span]) -> list[Span]:
    """Join spans adjacent in both source and target, so that they are copied together."""
    merged: list[Span] = []
    for source, target, size in spans:
        if merged:
            from_, to, length = merged[-1]
            if (from_ + length, to + length) == (source, target):
                merged[-1] = from_, to, length + size
                continue
        merged.append((source, target, size))
    return merged


class Flat(Sequence[Leaves]):
    """Microbatches as the graph takes them; each is flattened when it is first read."""

    def __init__(
        self, recording: Recording, batches: Sequence[object], shown: Collection[int] = ()
    ) -> None:
        self._recording, self._batches, self._shown = recording, batches, shown
        self._found: dict[int, Leaves] = {}
        # For the microbatches in `shown`: the script's own form of each, and the graph that
        # computes it.
        self.given: dict[int, object] = {}
        self.variants: dict[int, Variant] = {}

    def __len__(self) -> int:
        return len(self._batches)

    def look(self, numbers: Iterable[int]) -> None:
        """Flatten these microbatches now, if they are there already.

        Recording a further graph takes as long as a forward of the whole model, so all workers do
        it at the same time.
        """
        if self._recording.fixed and isinstance(self._batches, list | tuple):
            self._found = {number: self[number] for number in numbers}

    @overload
    def __getitem__(self, index: int) -> Leaves: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Leaves]: ...

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return Flat(self._recording, self._batches[index])
        found = self._found.get(index)
        if found is None:
            given = self._batches[index]
            found = self._recording.flatten(given)
            if index in self._shown:
                self.given[index], self.variants[index] = given, found.variant
        return found
