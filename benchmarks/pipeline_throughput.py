"""How fast is a step at a fixed layout, and how much memory does it take, beside torch's own ways?

    python benchmarks/pipeline_throughput.py [--rounds 7] [--only pipeline|data|memory]

* pipeline: two workers, two stages; 1F1B, with the backward split in halves, eager, and with sums in any order (`deterministic=False`), and two
  stages on each (interleaved; modulo, which is that with split backwards); against `torch.distributed.pipelining.Schedule1F1B` over gloo,
  and against the bubble bound  T1 / P * (M + P - 1) / M  of the same work in one process (T1). ROWS=1 MICROBATCHES=16 in the environment are other sizes.
* data: two workers, one stage; against `DistributedDataParallel` over gloo with `no_sync`.
* memory: the most that a fresh process of each kind ever held, and how much of it came after the imports; the model is 16 times as
  large there (WIDTH=1024), so that it outweighs the imports.

Each worker process holds both contenders and one thread. They take turns, step by step, in an order that
changes every round, so that a noisy machine is equally noisy to both; ratios are medians of paired rounds.
Ours sums gradients in the canonical order, so its weights are those of one process to the bit; but for `fast`.
"""

import argparse
import contextlib
import ctypes
import gc
import multiprocessing as mp
import os
import platform
import secrets
import statistics
import tempfile
import threading
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import nn

from agent.layout import Layout, Replica
from agent.machine.worker_process import keep_memory
from agent.net.mesh import Mesh
from agent.pipeline.stages.cut import Sections, build
from agent.pipeline.stages.stage_worker import Worker
from agent.pipeline.stages.transport import MeshChannel
from agent.pipeline.tracing.analysis import examine
from agent.pipeline.tracing.recording.trace import record
from agent.schedule import Schedule

WIDTH, WIDE = int(os.environ.get("WIDTH", "256")), 1024  # the latter where it is about memory
BLOCKS, WORDS, CLASSES = 6, 32, 64
ROWS = int(os.environ.get("ROWS", "8"))  # of a microbatch: the fewer, the more each message weighs
MICROBATCHES = int(os.environ.get("MICROBATCHES", "8"))
WORKERS = 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.wide = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH)
        self.back = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.back(F.gelu(self.wide(self.norm(x))))


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(BLOCKS)), nn.Linear(WIDTH, CLASSES))


def loss_of(net, x, y):
    return F.cross_entropy(net(x).flatten(0, 1), y.flatten())


def batches():
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(MICROBATCHES * ROWS, WORDS, WIDTH, generator=draw)
    y = torch.randint(0, CLASSES, (MICROBATCHES * ROWS, WORDS), generator=draw)
    return x, y, list(zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), strict=True))


class Ours:
    """Our worker of a pipeline that plays this schedule; the rest are replicas."""

    def __init__(self, rank: int, links: dict, played: Schedule, *, deterministic: bool) -> None:
        self.rank, self.links = rank, links
        _, _, self.batches = batches()
        depth, stages = played.workers, played.stages
        counts = [MICROBATCHES // (WORKERS // depth)] * (WORKERS // depth)
        replicas, names = [], iter(range(WORKERS))
        for index, count in enumerate(counts):
            chain = tuple(f"w{next(names)}" for _ in range(depth))
            replicas.append(Replica(workers=chain, first=index * count, count=count))
        layout = Layout(generation=1, microbatches=MICROBATCHES, replicas=tuple(replicas))
        graph = record(model(), loss_of, self.batches[0])
        facts = examine(graph, self.batches[0])
        if ("cuts", stages) not in links:
            example = self.batches[0]
            own = Sections().choose(graph, facts, example, stages, played) if rank == 0 else ()
            links["cuts", stages] = told(own)
        pieces = build(graph, facts, links["cuts", stages])
        place = rank % depth
        self.worker = Worker(
            layout,
            f"w{rank}",
            played,
            {i: piece for i, piece in enumerate(pieces) if played.host(i, 0) == place},
            links["channel"](depth),
            deterministic=deterministic,
        )
        params = [p for stage in self.worker.stages.values() for p in stage.module.parameters()]
        self.optimizer = torch.optim.SGD(params, lr=0.01)
        self.number = 0

    def step(self) -> None:
        self.worker.step(self.number, self.batches, torch.manual_seed)
        self.optimizer.step()
        self.number += 1


def told(mine):
    """What rank 0 measured is what all do."""
    box = [mine]
    dist.broadcast_object_list(box, 0)
    return box[0]


class TorchPipeline:
    """The same halves under torch's own 1F1B."""

    def __init__(self, rank: int) -> None:
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B

        self.rank = rank
        self.x, self.y, _ = batches()
        layers = list(model())
        halves = (layers[: BLOCKS // 2], layers[BLOCKS // 2 :])
        self.module = nn.Sequential(*halves[rank])
        stage = PipelineStage(self.module, rank, WORKERS, torch.device("cpu"))
        self.schedule = Schedule1F1B(
            stage, MICROBATCHES, lambda out, y: F.cross_entropy(out.flatten(0, 1), y.flatten())
        )
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.01)

    def step(self) -> None:
        if self.rank == 0:
            self.schedule.step(self.x)
        else:
            self.schedule.step(target=self.y, losses=[])
        self.optimizer.step()
        self.optimizer.zero_grad()


class TorchData:
    """The same model by hand: `DistributedDataParallel`, one exchange a step."""

    def __init__(self, rank: int) -> None:
        self.net = nn.parallel.DistributedDataParallel(model())
        _, _, every = batches()
        share = MICROBATCHES // WORKERS
        self.mine = every[rank * share : (rank + 1) * share]
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.01)

    def step(self) -> None:
        for index, (x, y) in enumerate(self.mine):
            last = index == len(self.mine) - 1
            with contextlib.nullcontext() if last else self.net.no_sync():
                (loss_of(self.net, x, y) / len(self.mine)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


class Apart:
    """These microbatches of the whole model, and nothing said to anybody."""

    def __init__(self, mine: slice) -> None:
        self.net = model()
        self.batches = batches()[2][mine]
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.01)

    def step(self) -> None:
        for x, y in self.batches:
            (loss_of(self.net, x, y) / MICROBATCHES).backward()
        if self.batches:
            self.optimizer.step()
            self.optimizer.zero_grad()


def contender(name: str, rank: int, links: dict, played: Schedule | None):
    who, _, what = name.partition("-")
    match who, what:
        case "ours", _:
            return Ours(rank, links, played, deterministic=what != "fast")
        case "torch", "pipeline":
            return TorchPipeline(rank)
        case "torch", _:
            return TorchData(rank)
        case "one", _:  # all of the work in one process, the others idle: T1
            return Apart(slice(None if rank == 0 else 0))
    # Everyone at once: workers share a machine's memory and caches, and no order of messages helps against that.
    share = MICROBATCHES // WORKERS
    return Apart(slice(rank * share, (rank + 1) * share))


def connect(rank: int, pipe) -> dict:
    """A mesh between the workers; the parent passes the addresses on."""
    changed = threading.Condition()
    mesh = Mesh(f"w{rank}", pipe.recv(), "127.0.0.1", changed, lambda _: None)
    pipe.send(mesh.address)
    mesh.want({name: at for name, at in pipe.recv().items() if name != f"w{rank}"})
    with changed:
        peers = [f"w{r}" for r in range(WORKERS) if r != rank]
        changed.wait_for(lambda: all(mesh.connection(peer) for peer in peers), 30)
    mesh.enter(1)
    channels: dict = {}

    def channel(depth: int) -> MeshChannel:
        # One mesh carries the messages of both layouts: they never run at once.
        return channels.setdefault(depth, MeshChannel(mesh, changed, 1))

    return {"channel": channel}


def memory_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(field))
    return int(line.split()[1]) * 1024


def schedule_of(name: str) -> Schedule | None:
    """The manager makes it; a worker is told, and has no planner in its memory."""
    from orchestrator.planner.simulation.schedules import make

    who, _, what = name.partition("-")
    if who != "ours":
        return None
    depth = 1 if what == "data" else WORKERS
    schedule = "1f1b" if what in ("data", "pipeline", "fast") else what
    return make(schedule, depth, MICROBATCHES // (WORKERS // depth))


def serve(rank: int, store: str, names: dict[str, Schedule | None], rounds: int, pipe) -> None:
    """One worker process: the contenders in turn, timed from barrier to barrier."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    keep_memory()  # as our workers do; good for everyone here
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORKERS)
    links = connect(rank, pipe)
    before = memory_bytes("VmRSS")
    field = {name: contender(name, rank, links, played) for name, played in names.items()}
    for each in field.values():
        each.step()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what is left of the preparations is nobody's
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
    times: dict[str, list[float]] = {name: [] for name in names}
    cpu: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds):
        order = list(names) if turn % 2 else list(names)[::-1]
        for name in order:
            dist.barrier()
            start_s, cpu_s = time.perf_counter(), time.process_time()
            field[name].step()
            cpu[name].append(time.process_time() - cpu_s)
            dist.barrier()
            times[name].append(time.perf_counter() - start_s)
    pipe.send((times, cpu, memory_bytes("VmHWM"), before))
    pipe.recv()
    dist.destroy_process_group()


def play(names: list[str], rounds: int):
    """Start the workers, and return what each of them saw."""
    context = mp.get_context("spawn")
    secret = secrets.token_hex()
    played = {name: schedule_of(name) for name in names}
    with tempfile.TemporaryDirectory() as folder:
        pipes, workers = [], []
        for rank in range(WORKERS):
            near, far = context.Pipe()
            args = (rank, str(Path(folder, "store")), played, rounds, far)
            worker = context.Process(target=serve, args=args, daemon=True)
            worker.start()
            near.send(secret)
            pipes.append(near)
            workers.append(worker)
        addresses = {f"w{rank}": pipe.recv() for rank, pipe in enumerate(pipes)}
        for pipe in pipes:
            pipe.send(addresses)
        seen = [pipe.recv() for pipe in pipes]
        for pipe, worker in zip(pipes, workers, strict=True):
            pipe.send("done")
            worker.join(30)
    return seen


def line(what: str, values: list[float], unit: str, reach: str = "") -> None:
    low, mid, high = min(values), statistics.median(values), max(values)
    print(f"{what:<46} {mid:8.3f} {unit:<5} [{low:.3f} .. {high:.3f}] {reach}")


def compare(ours: str, theirs: str, rounds: int, reach: str) -> None:
    other = [f"ours-{n}" for n in ("fast", "zero-bubble", "eager", "interleaved", "modulo")]
    names = [ours, *other, theirs, "one", "shared"] if ours == "ours-pipeline" else [ours, theirs]
    seen = play(names, rounds)
    times = seen[0][0]
    cpu = {
        name: [sum(each) for each in zip(*(s[1][name] for s in seen), strict=True)]
        for name in names
    }
    for name in names:
        line(f"{name}, a step", [1e3 * value for value in times[name]], "ms")
        line(f"{name}, processor time of all workers", [1e3 * value for value in cpu[name]], "ms")
    for name in [each for each in names if each.startswith("ours")]:
        pairs = zip(times[name], times[theirs], strict=True)
        line(f"{name}: throughput over {theirs}", [b / a for a, b in pairs], "x", reach)
    if "one" in names:
        bubble = (MICROBATCHES + WORKERS - 1) / MICROBATCHES / WORKERS
        for name, goal in ((ours, "(reach 0.85)"), ("ours-eager", ""), (theirs, "")):
            both = zip(times["one"], times[name], strict=True)
            line(
                f"{name}: fraction of the bubble bound",
                [t1 * bubble / t for t1, t in both],
                "",
                goal,
            )
        both = zip(times["one"], times[theirs], strict=True)
        limit = [t / (t1 / WORKERS) for t1, t in both]
        line(f"no bubble and no overhead: over {theirs}", limit, "x", "(nobody can be faster)")
        both = zip(times["shared"], times[theirs], strict=True)
        line(
            f"the same, on cores that share a machine: over {theirs}",
            [t / ts for ts, t in both],
            "x",
            "(nor than this here)",
        )


def memory(rounds: int) -> None:
    peaks = {}
    os.environ["WIDTH"] = str(WIDE)  # of the workers
    for name in ("ours-fast", "ours-pipeline", "ours-eager", "torch-pipeline"):
        seen = play([name], max(2, rounds // 2))
        for rank, (_, _, peak, before) in enumerate(seen):
            peaks[name, rank] = peak, peak - before
            print(
                f"{name}, worker {rank}: peak {peak / 2**20:7.1f} MiB, {(peak - before) / 2**20:6.1f} after imports"
            )
    for name in ("ours-fast", "ours-pipeline", "ours-eager"):
        for rank in range(WORKERS):
            ours, theirs = peaks[name, rank], peaks["torch-pipeline", rank]
            print(
                f"worker {rank}: {name} over torch's {ours[0] / theirs[0]:.3f} in all, {ours[1] / theirs[1]:.3f} after imports (reach 1.05)"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", choices=("pipeline", "data", "memory"))
    asked = parser.parse_args()
    print(
        f"torch {torch.__version__}, {platform.machine()}, {os.cpu_count()} cores, "
        f"load {os.getloadavg()[0]:.1f}; medians [least .. most] of {asked.rounds} paired rounds; "
        f"{MICROBATCHES} microbatches, {WORKERS} workers, one thread each"
    )
    if asked.only in (None, "pipeline"):
        compare("ours-pipeline", "torch-pipeline", asked.rounds, "(reach 1.2)")
    if asked.only in (None, "data"):
        compare("ours-data", "torch-data", asked.rounds, "(reach 0.98)")
    if asked.only in (None, "memory"):
        memory(asked.rounds)


if __name__ == "__main__":
    main()
