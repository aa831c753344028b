"""Sum a step over chains of one: reduce-scatter, and then all-gather."""

from collections.abc import Callable, Hashable

import torch

from agent.faults import passing
from agent.protocol import Part
from agent.store.memory import copy_bytes
from agent.tensors.device import CPU
from agent.tensors.partial_sum import Partial
from agent.tensors.shards import cut
from agent.tensors.sums import Sum, union
from agent.worker.peers import PeerWorker


def all_reduce(
    crew: PeerWorker, step: int, partial: Partial, total: Sum, reduced: Callable[[Sum], None]
) -> None:
    """Sum over all workers into `total`.

    `reduced` is called when this worker's slice is complete and on its way to the others, whose
    slices it need not wait for.
    """
    layout = crew.layout
    peers = [worker for worker in layout.workers if worker != crew.me]
    spans = {
        worker: cut(total.space.total_bytes, len(layout.workers), index)
        for index, worker in enumerate(layout.workers)
    }
    own = layout.replica_of(crew.me)
    mine = partial.nodes(own.first, own.count)
    entries = len(total.present)
    marks = union((node.marks for node in mine), entries)
    for peer in peers:
        part = Part(generation=layout.generation, step=step, tag="part", extra=marks)
        crew.send(peer, part, [node.memory(*spans[peer]) for node in mine])
    passing("step: sums sent")
    start, end = spans[crew.me]
    parts, masks = _parts(crew, step, partial, end - start, marks)
    passing("step: sums taken")
    keys = partial.keys(own.first, own.count)
    parts |= dict(zip(keys, (node.flat[start:end] for node in mine), strict=True))
    total.flat[start:end] = partial.fold(parts, lambda a, b: total.space.add_slices(a, b, start))
    summed = Part(generation=layout.generation, step=step, tag="sum")
    for peer in peers:
        crew.send(peer, summed, [total.memory(start, end)])
    reduced(total)
    for peer in peers:
        _, payload = crew.take(peer, step, "sum")
        copy_bytes(payload, total.memory(*spans[peer]))
    total.marks = union(masks, entries)


def _parts(
    crew: PeerWorker, step: int, partial: Partial, size: int, own: bytes
) -> tuple[dict[Hashable, torch.Tensor], list[bytes]]:
    """Return all workers' sums for this worker's slice, by node, and each one's marks."""
    parts: dict[Hashable, torch.Tensor] = {}
    masks = [own]
    for replica in crew.layout.replicas:
        peer = replica.workers[0]
        if peer == crew.me:
            continue
        marks, payload = crew.take(peer, step, "part")
        keys = partial.keys(replica.first, replica.count)
        flat = torch.frombuffer(payload, dtype=torch.uint8) if size else torch.empty(0, device=CPU)
        for index, key in enumerate(keys):
            parts[key] = flat[index * size : (index + 1) * size]
        masks.append(marks)
    return parts, masks
