"""Does the planner predict what our own runtime does? At least 12 layouts of 3 models, each P x D.

Every worker is a real `agent.pipeline` worker in a process of its own, with real tensors, sums and optimizer.
The machine has two cores, often shared with others, so time is kept per worker: a worker's clock advances by
its thread's own processor time, and a message arrives at its sender's clock plus what a link of the
given latency and bandwidth takes. This measures everything that the runtime computes, and no queueing for
cores. Calibration sees sections one by one; what is predicted is whole steps of stages made of them.

What a worker's own time is depends on who else runs beside it (caches, memory) and on the moment. So the layouts of
N workers are measured right between two calibrations in which N processes measure the model at once, and each
turn's steps are held against its own calibrations; the error is the median over turns.

    python benchmarks/planner/prediction.py [steps] [model ...]
"""

import functools
import itertools
import multiprocessing as mp
import os
import statistics
import sys
import threading
import time
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from agent.calibration.calibrate import Settings, calibrate
from agent.calibration.links import RingTime, fit_ring
from agent.layout import Layout, Replica
from agent.net.mesh import Mesh
from agent.pipeline.stages.channel import Exchange, Parcel
from agent.pipeline.stages.cut import build
from agent.pipeline.stages.reduce import ReduceShare, StageSums
from agent.pipeline.stages.stage import Stage
from agent.pipeline.stages.stage_worker import Worker
from agent.pipeline.stages.transport import MeshChannel
from agent.pipeline.tracing.analysis import examine
from agent.pipeline.tracing.recording.trace import record
from agent.profile import Link, Network, Profile
from agent.store.memory import keep_memory
from orchestrator.planner import cost_model, plan_book, search
from orchestrator.planner.plans import Cost, LayoutPlan, Way, all_but_last
from orchestrator.planner.search import Task
from orchestrator.planner.simulation import schedules

LINK = Link(bandwidth_bytes_per_s=1.25e9, latency_s=100e-6)
MICROBATCHES, SIZE, ROUNDS = 8, 2, 2
PATIENCE_S, CORES = 120.0, os.cpu_count() or 1
LAYOUTS = [
    ("1f1b", 1, 1, False),
    ("1f1b", 1, 2, False),
    ("1f1b", 2, 1, False),
    ("gpipe", 2, 1, False),
    ("1f1b", 2, 1, True),
    ("varuna", 3, 1, True),
    ("zero-bubble", 3, 1, False),
    ("eager", 2, 1, False),
    ("eager", 2, 2, False),
    ("1f1b", 2, 2, False),
    ("gpipe", 4, 1, False),
    ("1f1b", 4, 1, False),
]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.wide = nn.LayerNorm(width), nn.Linear(width, 4 * width)
        self.back = nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.back(F.gelu(self.wide(self.norm(x))))


class Words(nn.Module):
    """A stack of residual blocks over words, head on top."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(512, 256)
        self.blocks = nn.ModuleList([Block(256) for _ in range(8)])
        self.head = nn.Linear(256, 512)

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Pictures(nn.Module):
    """Convolutions, wide at first, deep at the end."""

    def __init__(self) -> None:
        super().__init__()
        widths = [3, 32, 32, 48, 48, 64, 64]
        self.convs = nn.ModuleList(
            [nn.Conv2d(a, b, 3, padding=1) for a, b in itertools.pairwise(widths)]
        )
        self.head = nn.Linear(64, 10)

    def forward(self, x):
        for i, conv in enumerate(self.convs):
            x = F.relu(conv(x))
            if i % 2:
                x = F.max_pool2d(x, 2)
        return self.head(x.mean((2, 3)))


class Rows(nn.Module):
    """Plain layers whose weights are much heavier than their activations."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(1024, 1024) for _ in range(6)])

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def words(size):
    return torch.randint(0, 512, (size, 128)), torch.randint(0, 512, (size, 128))


def pictures(size):
    return torch.randn(size * 2, 3, 64, 64), torch.randint(0, 10, (size * 2,))


def rows(size):
    return torch.randn(size * 48, 1024), torch.randint(0, 1024, (size * 48,))


MODELS = {"words": (Words, words), "pictures": (Pictures, pictures), "rows": (Rows, rows)}


def loss_of(model, x, y):
    return F.cross_entropy(model(x).flatten(0, -2), y.flatten())


class Clock:
    """One worker's time: its own computing, and waiting for messages that arrive later."""

    def __init__(self) -> None:
        self.now_s, self._mark = 0.0, 0.0

    def begin(self) -> None:
        self.now_s, self._mark = 0.0, time.thread_time()

    def tick(self) -> float:
        mark = time.thread_time()
        self.now_s += mark - self._mark
        self._mark = mark
        return self.now_s


class Clocked:
    """The channel of a worker whose messages carry the time of their arrival."""

    def __init__(self, inner, clock: Clock) -> None:
        self._inner, self._clock, self._free = inner, clock, {}
        self.ready, self.wait = inner.ready, inner.wait

    def begin(self) -> None:
        self._free.clear()

    def send(self, peer, tag, parcel):
        now_s = self._clock.tick()
        size = sum(t.numel() * t.element_size() for t in parcel.tensors if t is not None)
        depart_s = max(now_s, self._free.get(peer, 0.0)) + size / LINK.bandwidth_bytes_per_s
        self._free[peer] = depart_s
        plain = (depart_s + LINK.latency_s, parcel.plain)
        self._inner.send(peer, tag, Parcel(tensors=parcel.tensors, plain=plain))

    def receive(self, peer, tag):
        self._clock.tick()
        parcel = self._inner.receive(peer, tag)
        arrival_s, plain = parcel.plain
        self._clock.now_s = max(self._clock.tick(), arrival_s)
        return Parcel(tensors=parcel.tensors, plain=plain)


class Crew:
    """The workers of one layout, each a process of its own, connected over loopback."""

    def __init__(self, model: str, plan: LayoutPlan, afters) -> None:
        replicas, first = [], 0
        for index, count in enumerate(plan.shares):
            names = tuple(f"r{index}s{stage}" for stage in range(plan.way.depth))
            replicas.append(Replica(workers=names, first=first, count=count))
            first += count
        layout = Layout(generation=0, microbatches=first, replicas=tuple(replicas))
        cuts = [afters[k - 1] for k in plan.firsts[1:]]
        context, self._pipes, self._processes, self._number = mp.get_context("fork"), {}, [], 0
        for replica in layout.replicas:
            schedule = schedules.make(
                plan.way.schedule, plan.way.depth, replica.count, recompute=plan.way.recompute
            )
            for stage, name in enumerate(replica.workers):
                self._pipes[name], far = context.Pipe()
                args = (layout, (name, stage), schedule, model, cuts, far)
                self._processes.append(context.Process(target=work, args=args, daemon=True))
                self._processes[-1].start()
        addresses = {name: pipe.recv() for name, pipe in self._pipes.items()}
        for pipe in self._pipes.values():
            pipe.send(addresses)
            pipe.recv()

    def step(self) -> tuple[float, float]:
        """The slowest worker's clock, and the slowest worker's wall."""
        self._number += 1
        for pipe in self._pipes.values():
            pipe.send(self._number)
        found = [pipe.recv() for pipe in self._pipes.values()]
        return max(clock_s for clock_s, _ in found), max(wall_s for _, wall_s in found)

    def close(self) -> None:
        for pipe in self._pipes.values():
            pipe.send(None)
        for process in self._processes:
            process.join(PATIENCE_S)


def work(layout: Layout, place: tuple[str, int], schedule, model: str, cuts, pipe) -> None:
    """A worker's process: steps on request, until there are no more."""
    torch.set_num_threads(1)
    keep_memory()  # as our workers do
    me, stage = place
    changed = threading.Condition()
    mesh = Mesh(me, "secret", "127.0.0.1", changed, lambda _: None)
    pipe.send(mesh.address)
    peers = {name: address for name, address in pipe.recv().items() if name != me}
    mesh.enter(1)
    mesh.want(peers)
    with changed:
        assert changed.wait_for(lambda: all(map(mesh.connection, peers)), PATIENCE_S)
    factory, draw = MODELS[model]
    torch.manual_seed(1)
    graph = record(factory(), loss_of, draw(1))
    piece = build(graph, examine(graph, draw(1)), cuts)[stage]
    batches = [draw(SIZE) for _ in range(layout.microbatches)]
    channel, clock = MeshChannel(mesh, changed, 1, patience_s=PATIENCE_S), Clock()
    clocked = Clocked(channel, clock)
    worker = Worker(layout, me, schedule, {stage: piece}, clocked)
    params = list(piece.module.parameters())
    optimizer = torch.optim.AdamW(params) if params else None
    pipe.send(None)
    while (number := pipe.recv()) is not None:
        start_s = time.perf_counter()
        clocked.begin()
        clock.begin()
        worker.step(number, batches, lambda _: None)
        if optimizer is not None:
            optimizer.step()
        pipe.send((clock.tick(), time.perf_counter() - start_s))
    channel.close()
    mesh.close()


def _together(tasks) -> None:
    threads = [threading.Thread(target=task) for task in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def planned(profile, task, name, depth, width, recompute) -> LayoutPlan:
    """This layout with the stages that the planner gives it, priced in full."""
    tables = cost_model.tables(profile)
    again = all_but_last(depth) if recompute else ()
    way = Way(schedule=name, depth=depth, microbatch_size=SIZE, recompute=again)
    full = schedules.pack(name, depth, MICROBATCHES, recompute=again)
    firsts = search.Splitter(tables).firsts(way, search.peaks(way, full))
    plan = LayoutPlan(
        way=way,
        firsts=firsts,
        sections=len(profile.sections),
        shares=plan_book.shared_out(MICROBATCHES, width),
        workers=depth * width,
        samples=SIZE * MICROBATCHES,
        cost=Cost(step_s=0, busy_s=0, bubble_s=0, reduce_s=0),
        memory_bytes=(),
    )
    return plan_book.exact(tables, task, plan)


def reduce_link(factory, draw, rounds: int) -> Link:
    """All-reduces of the runtime's own kind, on the workers' clocks: two, three and four replicas."""
    torch.manual_seed(1)
    graph = record(factory(), loss_of, draw(1))
    (piece,) = build(graph, examine(graph, draw(1)), [])
    size = sum(p.numel() * p.element_size() for p in piece.module.parameters())
    times = []
    for width in (2, 3, 4):
        shares = [ReduceShare(peer=f"r{i}", first=i, count=1) for i in range(width)]
        found = [_reduction(piece, shares) for _ in range(rounds + 1)][1:]
        times.append(RingTime(workers=width, size_bytes=size, seconds=statistics.median(found)))
    return fit_ring(times)


def _reduction(piece, shares) -> float:
    exchange, clocks, tasks = Exchange(), [], []
    for i, share in enumerate(shares):
        sums = StageSums(Stage(piece, microbatches=len(shares)), shares, share.peer, len(shares))
        for p in piece.module.parameters():
            p.grad = torch.zeros_like(p)
        sums.take(i, 0.0)
        clock = Clock()
        clocks.append(clock)
        channel = Clocked(exchange.channel(share.peer), clock)
        tasks.append(functools.partial(_reduce, sums, clock, channel))
    _together(tasks)
    return max(clock.now_s for clock in clocks)


def _reduce(sums, clock, channel) -> None:
    clock.begin()
    sums.reduce(channel, "s0")
    clock.tick()


def calibrated(model: str, ring: Link, cuts=()) -> Profile:
    factory, draw = MODELS[model]
    network = Network(intra=LINK, inter=LINK, reduce_intra=ring, reduce_inter=ring)
    settings = Settings(
        model=model,
        instance_type="here",
        memory_bytes=1e12,
        network=network,
        rounds=ROUNDS,
        cuts=cuts,
    )
    torch.manual_seed(1)
    module = factory()
    optimizer = torch.optim.AdamW(module.parameters())
    return calibrate(
        module, loss_of, {SIZE: draw(SIZE)}, settings, optimizer=optimizer, clock=time.thread_time
    )


class Calibrators:
    """Processes that measure the model, any number of them at once: a layout's workers share what they run on."""

    def __init__(self, model: str, ring: Link, cuts) -> None:
        context, self._pipes, self._processes = mp.get_context("fork"), [], []
        for _ in range(max(depth * width for _, depth, width, _ in LAYOUTS)):
            near, far = context.Pipe()
            args = (model, ring, cuts, far)
            self._pipes.append(near)
            self._processes.append(context.Process(target=gauge, args=args, daemon=True))
            self._processes[-1].start()

    def together(self, count: int) -> list[Profile]:
        for pipe in self._pipes[:count]:
            pipe.send(count)
        return [pipe.recv() for pipe in self._pipes[:count]]

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join(PATIENCE_S)


def gauge(model: str, ring: Link, cuts, pipe) -> None:
    torch.set_num_threads(1)
    keep_memory()
    while pipe.recv() is not None:
        pipe.send(calibrated(model, ring, cuts))


class Found(NamedTuple):
    """Of a layout: what was predicted and measured by turns, and the wall times."""

    plan: LayoutPlan
    predicted: list[float]
    measured: list[float]
    walls: list[float]

    @property
    def error(self) -> float:
        """The median over turns: the speed of a shared machine drifts from one to the next."""
        each = zip(self.predicted, self.measured, strict=True)
        return statistics.median(expected / seconds for expected, seconds in each) - 1


def compare(model: str, steps: int) -> list[Found]:
    """Layouts of as many workers right between two calibrations by as many workers at once."""
    torch.manual_seed(0)
    ring = reduce_link(*MODELS[model], ROUNDS)
    before = calibrated(model, ring)
    afters = [section.after for section in before.sections]
    task = Task(global_batch=SIZE * MICROBATCHES)
    plans = [planned(before, task, *layout) for layout in LAYOUTS]
    crews = [Crew(model, plan, afters) for plan in plans]
    calibrators = Calibrators(model, ring, tuple(afters[:-1]))
    found = [Found(plan, [], [], []) for plan in plans]
    for turn in range(steps + 1):
        for count in sorted({plan.way.depth * plan.width for plan in plans}):
            some = [n for n, plan in enumerate(plans) if plan.way.depth * plan.width == count]
            profiles = calibrators.together(count)
            clocks = [crews[n].step() for n in some]
            profiles += calibrators.together(count)
            if not turn:
                continue
            for n, (clock_s, wall_s) in zip(some, clocks, strict=True):
                each = [
                    plan_book.exact(cost_model.tables(p), task, plans[n]).step_s for p in profiles
                ]
                found[n].predicted.append(statistics.mean(each))
                found[n].measured.append(clock_s)
                found[n].walls.append(wall_s)
    for each in (calibrators, *crews):
        each.close()
    alone = found[0].predicted
    print(
        f"{model}: {len(afters)} sections; calibrated alone, the slowest turn found "
        f"{max(alone) / min(alone) - 1:.1%} more than the fastest"
    )
    return found


def main() -> None:
    torch.set_num_threads(1)
    keep_memory()
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 7
    errors = []
    print(f"{'model':9} {'layout':34} {'predicted':>10} {'measured':>10} {'error':>7} {'wall':>10}")
    for model in sys.argv[2:] or MODELS:
        found = compare(model, steps)
        for each in found:
            plan = each.plan
            errors.append(abs(each.error))
            again = " recompute" if plan.way.recompute else ""
            name = f"{plan.describe()} {plan.way.schedule}{again}"
            wall = f"{min(each.walls):9.4f}s" if plan.way.depth * plan.width <= CORES else ""
            print(
                f"{model:9} {name:34} {statistics.median(each.predicted):9.4f}s "
                f"{statistics.median(each.measured):9.4f}s {each.error:+7.1%} {wall}",
                flush=True,
            )
        chosen = min(found, key=lambda each: statistics.median(each.predicted))
        least_s = min(statistics.median(each.measured) for each in found)
        lost = statistics.median(chosen.measured) / least_s - 1
        print(f"{model}: the predicted best is {lost:.1%} from the measured best (reach 3 %)")
    mean, most = statistics.mean(errors), max(errors)
    print(
        f"{len(errors)} layouts: mean error {mean:.1%} (reach 3 %), largest {most:.1%} (reach 8 %)"
    )


if __name__ == "__main__":
    main()
