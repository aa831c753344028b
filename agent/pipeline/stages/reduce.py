"""The sums of one stage over its replicas, and the gradients of what several stages hold.

Reduce-scatter, then all-gather: each replica of the stage owns a slice of the flat sum, folds the
nodes of all replicas into it, and sends it to all. A parameter of several stages has its whole
gradient on the first of them, which then sends it to the others.
"""

from collections.abc import Container, Hashable, Mapping, Sequence

import msgspec
import torch

from agent.errors import CannotRecord
from agent.faults import passing
from agent.pipeline.stages.channel import Channel, Parcel
from agent.pipeline.stages.stage import Stage
from agent.profile import SumFormat
from agent.tensors.device import CPU
from agent.tensors.metrics import Numbers
from agent.tensors.partial_sum import partial_of
from agent.tensors.shards import cut
from agent.tensors.sums import Plan, Sum, SumSpace, paired, union


class ReduceShare(msgspec.Struct, frozen=True, kw_only=True):
    """The microbatches of one replica, and the worker that holds the stage there."""

    peer: str
    first: int
    count: int


class StageSums:
    """One worker's part of one stage's sums."""

    def __init__(  # noqa: PLR0913
        self,
        stage: Stage,
        shares: Sequence[ReduceShare],
        me: str,
        microbatches: int,
        *,
        deterministic: bool,
        exchange: SumFormat = "float32",
        trained: Container[int] = (),
    ) -> None:
        self.stage, self._shares, self._me, self._microbatches = stage, shares, me, microbatches
        self.space = SumSpace({"stage": stage.module}, trained, exchange=exchange)
        self._partial = partial_of(self.space, microbatches, deterministic=deterministic)
        self._total: Sum | None = None
        together = all(param.device == self.space.device for param in self.space.params.values())
        self._lends = together and not stage.shares and not self.space.rounds
        (self._own,) = (share for share in shares if share.peer == me)
        self._peers = tuple(share for share in shares if share.peer != me)

    def begin(self) -> None:
        self.space.begin()
        self._partial.clear()

    def lend(self, microbatch: int) -> None:
        """Lend gradients, unless other stages share a parameter, or each gradient is rounded.

        Earlier stages receive the gradient of each microbatch separately.
        """
        if self._lends:
            self._partial.lend(microbatch, self._own.first, self._own.count)

    def take(self, microbatch: int, numbers: Numbers) -> None:
        passing("step: stage played", self.space.params)
        self._partial.add(microbatch, numbers, self._own.first, self._own.count)
        for name in self.space.changed:
            if not self.stage.writes(self.space.buffers[name]):
                raise CannotRecord(
                    f"the forward has written to the buffer {name.removeprefix('model.')!r}, and had not when it was looked "
                    "at, so others that were under way here have seen that: write to it in every forward, or train with depth 1"
                )

    def reduce(self, channel: Channel, mark: str) -> Sum:
        """Return the sum over the whole step, the same on every replica."""
        mine = self._partial.nodes(self._own.first, self._own.count)
        if len(self._shares) == 1:
            return mine[0]
        spans = {
            share.peer: cut(self.space.total_bytes, len(self._shares), index)
            for index, share in enumerate(self._shares)
        }
        total = self._total = self._total or Sum(self.space)
        entries = len(total.present)
        marks = union((node.marks for node in mine), entries)
        for share in self._peers:
            slices = tuple(node.flat[slice(*spans[share.peer])] for node in mine)
            channel.send(share.peer, f"{mark}/part", Parcel(tensors=slices, plain=marks))
        passing("step: sums sent")
        own = self._fold(channel, mark, mine, spans[self._me])
        passing("step: sums taken")
        for share in self._peers:
            channel.send(share.peer, f"{mark}/sum", Parcel(tensors=(own,), plain=marks))
        total.flat[slice(*spans[self._me])] = own
        found = [marks]
        for share in self._peers:
            parcel = channel.receive(share.peer, f"{mark}/sum")
            (piece,) = parcel.tensors
            assert piece is not None and isinstance(parcel.plain, bytes)
            total.flat[slice(*spans[share.peer])] = piece
            found.append(parcel.plain)
        total.marks = union(found, entries)
        return total

    def _fold(
        self, channel: Channel, mark: str, mine: list[Sum], span: tuple[int, int]
    ) -> torch.Tensor:
        """Return the sum of all replicas' nodes in this worker's slice."""
        parts: dict[Hashable, Plan] = {}
        for share in self._shares:
            pieces: Sequence[torch.Tensor | None] = [node.flat[slice(*span)] for node in mine]
            if share.peer != self._me:
                pieces = channel.receive(share.peer, f"{mark}/part").tensors
            keys = self._partial.keys(share.first, share.count)
            for key, piece in zip(keys, pieces, strict=True):
                assert piece is not None
                parts[key] = piece
        own = torch.empty(span[1] - span[0], dtype=torch.uint8, device=CPU)
        self.space.fold(self._partial.fold(parts, paired), own, span[0])
        return own

    def install(self, total: Sum) -> None:
        self.space.install(total, self._microbatches)


def tell_tied(
    sums: Mapping[int, StageSums], hosts: Sequence[str], channel: Channel, mark: str
) -> None:
    """Send the first owner's gradient to all owners; `hosts` are the peers of the stages."""
    tied = next(iter(sums.values())).stage.piece.tied
    for name, (first, *others) in tied.items():
        for stage in others:
            tag = f"{mark}/tied/{name}/{stage}"
            gradient = sums[first].stage.tied_param(name).grad if first in sums else None
            if first in sums and stage not in sums:
                channel.send(hosts[stage], tag, Parcel(tensors=(gradient,)))
            elif stage in sums:
                if first not in sums:
                    (gradient,) = channel.receive(hosts[first], tag).tensors
                sums[stage].stage.tied_param(name).grad = gradient
