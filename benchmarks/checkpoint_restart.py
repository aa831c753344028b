"""Kill everything, restart from local disk into another layout: what part of the read bandwidth is reached?

Four data-parallel workers train, write a quarter of every layer each, and are killed with
SIGKILL. Two new processes are the two stages of a pipeline: each loads its half of the layers into a
fresh model and optimizer, verified. Beside it, in turn: the same files read by the same two processes into
warm memory and not looked at (the bound), and torch loading the same state from its own form.
*Cold*: the files are dropped from the page cache before every read. *Warm*: they are in it.
"""

import os
import random
import signal
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
from _checkpoints import GIB, load, machine, middle, show
from torch import multiprocessing, nn
from torch.distributed.checkpoint.state_dict_loader import load as torch_load

from agent.store.archive import Archive, assemble, write_parts
from agent.store.encoding.format import PARTS, Layer, Part, file_of, share
from agent.store.export import to_torch
from agent.store.layers import collect
from agent.store.places.sinks import DiskSink

WRITERS, READERS = 4, 2
BLOCKS, WIDTH = 22, 1024
ROUNDS = 5
WAIT_S = 240.0
RAW_BYTES = 1 << 20


class Blocks(nn.Module):
    """Blocks of a model, under the names that they have in the whole of it."""

    def __init__(self, blocks: range) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({str(at): nn.Linear(WIDTH, WIDTH) for at in blocks})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks.values():
            x = torch.tanh(block(x))
        return x


def objects_of(blocks: range) -> dict[str, Any]:
    model = Blocks(blocks)
    return {"model": model, "opt": torch.optim.AdamW(model.parameters())}


def worker(rank: int, folder: Path, receipts: Any) -> None:
    """Train a step, write a share, say so, and go on until killed."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    objects = objects_of(range(BLOCKS))
    sink = DiskSink(folder / "ours")

    for step in range(1_000_000):
        objects["opt"].zero_grad()
        objects["model"](torch.ones(2, WIDTH)).mean().backward()
        objects["opt"].step()
        if step:
            continue
        forms, parts = [], list[Part]()
        for layer in collect(objects).finish():
            low, high = share(layer.form.layer_bytes, WRITERS, rank)
            file = file_of(layer.form, 1, low, high, layer.pieces(low, high))
            forms.append(layer.form)
            parts.extend(write_parts(sink, [file] if low < high else []))
        receipts.put((msgspec.json.encode(forms), msgspec.json.encode(parts)))


def write_and_kill(folder: Path) -> None:
    context = multiprocessing.get_context("spawn")
    receipts = context.Queue()
    workers = [context.Process(target=worker, args=(at, folder, receipts)) for at in range(WRITERS)]
    for one in workers:
        one.start()
    layers: list[Layer] = []
    parts: list[Part] = []
    try:
        for _ in workers:
            form, written = receipts.get(timeout=WAIT_S)
            layers = msgspec.json.decode(form, type=list[Layer])
            parts.extend(msgspec.json.decode(written, type=list[Part]))
    finally:
        for one in workers:
            if one.pid is not None:
                os.kill(one.pid, signal.SIGKILL)
            one.join()
    archive = Archive(DiskSink(folder / "ours"), "job")
    assert archive.commit(assemble("job", 1, 1, layers, parts))


def drop(folder: Path) -> None:
    """Take every file below a folder out of the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            handle = os.open(path, os.O_RDONLY)
            os.fsync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(handle)


class Reader:
    """One of the two new processes."""

    def __init__(self, rank: int, folder: Path) -> None:
        self.folder = folder
        self.sink = DiskSink(folder / "ours")
        self.blocks = range(BLOCKS * rank // READERS, BLOCKS * (rank + 1) // READERS)
        wanted = {f"blocks_{at}-" for at in self.blocks}
        self.files = [
            folder / "ours" / key
            for key in sorted(self.sink.sizes(PARTS))
            if any(key.split("/")[2].startswith(one) for one in wanted)
        ]
        self.memory = memoryview(bytearray(RAW_BYTES))
        self.torch_state = self._torch_state()
        self.objects = objects_of(self.blocks)

    def _torch_state(self) -> dict[str, Any]:
        objects = objects_of(self.blocks)
        names = dict(objects["model"].named_parameters())
        kept = {
            name: {
                "exp_avg": torch.ones_like(item),
                "exp_avg_sq": torch.ones_like(item),
                "step": torch.zeros(()),
            }
            for name, item in names.items()
        }
        return {"model": dict(objects["model"].state_dict()), "opt": {"state": kept}}

    def fresh(self) -> None:
        self.objects = objects_of(self.blocks)

    def raw(self) -> None:
        for path in self.files:
            handle = os.open(path, os.O_RDONLY)
            at = 0
            while count := os.preadv(handle, [self.memory], at):
                at += count
            os.close(handle)

    def ours(self) -> None:
        manifest = Archive(self.sink, "job").newest()
        assert manifest is not None
        load(self.sink, manifest, self.objects)

    def torch(self) -> None:
        torch_load(self.torch_state, checkpoint_id=self.folder / "torch", no_dist=True)

    def ways(self) -> dict[str, tuple[Callable[[], None], Callable[[], None]]]:
        """What is done before the clock starts, and what is timed."""
        return {
            "plain read": (lambda: None, self.raw),
            "ours": (self.fresh, self.ours),
            "torch": (lambda: None, self.torch),
        }


def restart(rank: int, folder: Path, barrier: Any, results: Any) -> None:
    warnings.filterwarnings("ignore", module="torch.distributed")
    torch.set_num_threads(1)
    reader, draw = Reader(rank, folder), random.Random(0)
    times: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for at in range(ROUNDS + 1):
        for heat in ("warm", "cold"):
            for name in draw.sample(sorted(reader.ways()), 3):
                prepare, work = reader.ways()[name]
                prepare()
                if heat == "cold" and rank == 0:
                    drop(folder)
                barrier.wait(WAIT_S)
                begun, cpu_begun = time.perf_counter(), time.process_time()
                work()
                cpu_s = time.process_time() - cpu_begun
                barrier.wait(WAIT_S)
                took = time.perf_counter() - begun
                if at:
                    times.setdefault((heat, name), []).append((took, cpu_s))
    if rank == 0:
        results.put(times)


def main() -> None:
    warnings.filterwarnings("ignore", module="torch.distributed")
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_and_kill(folder)
        sink = DiskSink(folder / "ours")
        manifest = Archive(sink, "job").newest()
        assert manifest is not None
        to_torch(folder / "torch", sink, manifest)
        barrier, results = context.Barrier(READERS), context.Queue()
        readers = [
            context.Process(target=restart, args=(at, folder, barrier, results))
            for at in range(READERS)
        ]
        for one in readers:
            one.start()
        times = results.get(timeout=2 * WAIT_S)
        for one in readers:
            one.join()
        gib = manifest.state_bytes / GIB
        rows = []
        for (heat, way), taken in sorted(times.items(), reverse=True):
            bound = [wall for wall, _ in times[heat, "plain read"]]
            walls = [wall for wall, _ in taken]
            part = [plain / wall for plain, wall in zip(bound, walls, strict=True)]
            cpu_s = statistics.median(cpu for _, cpu in taken) * READERS / gib
            speed = gib / statistics.median(walls)
            rows.append((heat, way, middle(walls), f"{speed:.3g}", middle(part), f"{cpu_s:.3g}"))
        show(
            f"Killed as 1x{WRITERS}, restarted as {READERS}x1 from local disk: {gib:.2f} GiB",
            ("files", "way", "seconds", "GiB/s", "of the read bandwidth", "CPU s/GiB"),
            rows,
            f"{ROUNDS} rounds, medians (middle half); ours verifies and fills a fresh model",
            machine(folder),
        )


if __name__ == "__main__":
    main()
