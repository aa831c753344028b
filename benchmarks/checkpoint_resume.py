"""How long does it take 2 workers to resume from 1 GiB that 4 wrote? Ours beside torch's checkpoint.

Two ways of holding the state. *Split*: every worker holds a part of the state (torch: every tensor is
sharded by rows; ours: every worker is a pipeline stage with whole layers). *Replicated*: every worker
holds all of it, as in data parallelism. The reading ranks load in turn with both, each in shuffled order,
into memory that is there already; a round is over when both ranks are. Ours checks every byte that
it reads against its checksum; torch's form has none.
"""

import random
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from _checkpoints import GIB, load, machine, middle, place, show
from torch import multiprocessing, nn
from torch.distributed.checkpoint.state_dict_loader import load as torch_load
from torch.distributed.checkpoint.state_dict_saver import save as torch_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from agent.store.archive import Archive, Mark, assemble, write_parts
from agent.store.encoding.format import Part, file_of, share
from agent.store.layers import collect, memory_of
from agent.store.places.sinks import DiskSink

WRITERS, READERS = 4, 2
BLOCKS, TENSORS, SIDE = 16, 4, 2048  # 1 GiB of float32
ROUNDS = 6
WAYS = ("split", "replicated")


class Blocks(nn.Module):
    """Some of the blocks of a model, under the names that they have in the whole of it."""

    def __init__(self, blocks: range) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict(
            {
                str(block): nn.ParameterDict(
                    {f"w{at}": torch.full((SIDE, SIDE), -1.0) for at in range(TENSORS)}
                )
                for block in blocks
            }
        )

    def fill(self) -> "Blocks":
        with torch.no_grad():
            for name, item in self.named_parameters():
                item.copy_(torch.arange(item.numel()).view_as(item) + hash_of(name))
        return self

    def check(self) -> None:
        for name, item in self.named_parameters():
            assert item[0, 0].item() == hash_of(name), name
            assert item[-1, -1].item() == item.numel() - 1 + hash_of(name), name


def hash_of(name: str) -> int:
    return sum(name.encode())


def join(rank: int, world: int, folder: Path, name: str) -> None:
    warnings.filterwarnings("ignore", module="torch.distributed")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet-{name}", rank=rank, world_size=world
    )


def torch_state(way: str, world: int, whole: Blocks) -> dict[str, Any]:
    if way == "replicated":
        return dict(whole.state_dict())
    mesh = init_device_mesh("cpu", (world,))
    return {
        name: distribute_tensor(item, mesh, [Shard(0)], src_data_rank=None)
        for name, item in whole.state_dict().items()
    }


def write(rank: int, folder: Path, whole: Blocks) -> None:
    """One of the four. With both, each writes a quarter of everything, side by side."""
    join(rank, WRITERS, folder, "write")
    for way in WAYS:
        torch_save(torch_state(way, WRITERS, whole), checkpoint_id=folder / f"torch-{way}")
    sink, parts, forms = DiskSink(folder / "ours"), [], []
    for layer in collect({"model": whole}).finish():
        low, high = share(layer.form.layer_bytes, WRITERS, rank)
        pieces = [
            memory_of(item)[max(low - entry.start, 0) : max(high - entry.start, 0)]
            for entry, item in zip(layer.form.tensors, layer.tensors, strict=True)
        ]
        parts.extend(write_parts(sink, [file_of(layer.form, 1, low, high, pieces)]))
        forms.append(layer.form)
    gathered: list[Any] = [None] * WRITERS
    dist.all_gather_object(gathered, msgspec.json.encode(parts))
    if rank == 0:
        every = [part for one in gathered for part in msgspec.json.decode(one, type=list[Part])]
        assert Archive(sink, "job").commit(assemble("job", 1, 1, forms, every))
    dist.barrier()
    dist.destroy_process_group()


def timed(work: Callable[[], Any]) -> tuple[float, float]:
    """Seconds until both are done, and seconds of processor that this rank took."""
    dist.barrier()
    begun, cpu_begun = time.perf_counter(), time.process_time()
    work()
    cpu_s = time.process_time() - cpu_begun
    dist.barrier()
    return time.perf_counter() - begun, cpu_s


def read(rank: int, folder: Path, results: Any) -> None:
    """One of the two."""
    join(rank, READERS, folder, "read")
    draw = random.Random(0)
    for way in WAYS:
        stage = range(BLOCKS * rank // READERS, BLOCKS * (rank + 1) // READERS)
        whole = Blocks(range(BLOCKS))
        mine = Blocks(stage) if way == "split" else whole
        state = torch_state(way, READERS, whole)
        sink = DiskSink(folder / "ours")

        def ours(sink: DiskSink = sink, mine: Blocks = mine) -> None:
            manifest = Archive(sink, "job").newest()
            assert manifest is not None
            load(sink, manifest, {"model": mine})

        def theirs(way: str = way, state: dict[str, Any] = state) -> None:
            torch_load(state, checkpoint_id=folder / f"torch-{way}")

        contenders = {"torch": theirs, "ours": ours}
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
        for at in range(ROUNDS + 1):
            for name in draw.sample(sorted(contenders), 2):
                took = timed(contenders[name])
                if at:  # the first round warms both
                    times[name].append(took)
        load(sink, Archive(sink, "job").read(Mark(1, 1)), {"model": mine})
        mine.check()
        if rank == 0:
            results.put((way, times))
    dist.destroy_process_group()


def main() -> None:
    total = BLOCKS * TENSORS * SIDE * SIDE * 4
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    with place(8 * total) as folder:
        whole = Blocks(range(BLOCKS)).fill().share_memory()
        multiprocessing.spawn(write, (folder, whole), WRITERS)
        del whole
        multiprocessing.spawn(read, (folder, results), READERS)
        rows = []
        for way in WAYS:
            found, times = results.get(timeout=10)
            assert found == way
            (theirs, their_cpu), (ours, our_cpu) = (
                tuple(zip(*times[name], strict=True)) for name in ("torch", "ours")
            )
            ratios = [a / b for a, b in zip(theirs, ours, strict=True)]
            cpu = " / ".join(f"{statistics.median(one):.2g}" for one in (their_cpu, our_cpu))
            rows.append((way, middle(theirs), middle(ours), middle(ratios), cpu))
        show(
            f"Resume of {total / GIB:.0f} GiB written by {WRITERS} workers on {READERS}, seconds",
            ("state is", "torch", "ours", "torch / ours", "CPU s of a rank"),
            rows,
            f"{ROUNDS} rounds, medians (middle half); warm files; ours verifies, torch does not",
            machine(folder),
        )


if __name__ == "__main__":
    main()
