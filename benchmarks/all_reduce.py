"""How fast is a sum exchanged among processes of one machine, beside torch's gloo?

    python benchmarks/all_reduce.py [--workers 2 4] [--mib 256] [--rounds 8] [--block-mib 8] [--flows 4] [--halved]

The processes sum float32 numbers (`--halved`: as many in bfloat16, on both sides) over loopback, with gloo (`all_reduce`) and with ours in turns, after a barrier
each. Ours adds along the canonical tree, with a tag on every frame, and ends with the same bits on all. A round
takes as long as its slowest process. What the machine allows is measured beside it: copying so much memory, and
sending it through one loopback connection, with one process at each end.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time

import numpy as np
import torch
from _crew import machine, spread
from torch import distributed as dist

from agent.layout import data_parallel
from agent.profile import SumFormat
from agent.tensors.metrics import Numbers
from agent.tensors.partial_sum import partial_of
from agent.tensors.sums import Sum, SumSpace
from agent.transport.tcp import Tcp
from agent.worker.exchange.exchange import Exchange


class Numbered(torch.nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(count))


class Ours:
    """One worker of an exchange, which plays it as a worker's thread does."""

    def __init__(  # noqa: PLR0913 - a parameter per option
        self,
        rank: int,
        workers: int,
        count: int,
        *,
        block_bytes: int,
        flows: int,
        shares: bool,
        exchange: SumFormat,
    ) -> None:
        self._changed = threading.Condition()
        names = tuple(f"w{each}" for each in range(workers))
        me = names[rank]
        self.tcp = Tcp(me, "a secret", self._changed, self._lost, host="127.0.0.1", flows=flows)
        self.tcp.shares = shares  # before anybody is met
        offers: list[bytes] = [b""] * workers
        dist.all_gather_object(offers, self.tcp.offer())
        for name, offered in zip(names, offers, strict=True):
            if name != me:
                self.tcp.meet(name, offered)
        space = SumSpace({"model": Numbered(count)}, exchange=exchange)
        layout = data_parallel(0, workers, names)
        self._partial = partial_of(space, workers, deterministic=True)
        (param,) = space.params.values()
        param.grad = torch.full_like(param, rank + 1.0)
        self._partial.add(rank, Numbers(values=(1.0,)), rank, 1)
        self._mine = self._partial.nodes(rank, 1)
        self.total, self._step = Sum(space), 0
        self._exchange = Exchange(self.tcp, layout, me, self._partial, block_bytes=block_bytes)

    def _lost(self, peer: str) -> None:
        raise SystemExit(f"{peer} was lost")

    def prepare(self) -> None:
        self._exchange.open(self._step)
        self._step += 1

    def run(self) -> None:
        one = self._exchange
        one.begin(self._mine, self.total)
        one.give()
        while not one.done:
            with self._changed:
                self._changed.wait_for(one.ready)
            one.advance()
        one.end()

    def close(self) -> None:
        dist.barrier()
        self.tcp.close()


def worker(store: str, rank: int, settings: str) -> None:
    workers, mib, rounds, block_bytes, flows, shares, urgent, halved = json.loads(settings)
    torch.set_num_threads(1)
    if urgent:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))  # threads to come have it as well
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=workers)
    count = (mib << 20) // 4
    numbers = torch.ones(count, dtype=torch.bfloat16 if halved else torch.float32)
    ours = Ours(
        rank,
        workers,
        count,
        block_bytes=block_bytes,
        flows=flows,
        shares=bool(shares),
        exchange="bfloat16" if halved else "float32",
    )
    took: dict[str, list[tuple[float, float]]] = {"gloo": [], "ours": []}
    for turn in range(rounds + 1):
        for name in ("gloo", "ours") if turn % 2 else ("ours", "gloo"):
            ours.prepare() if name == "ours" else numbers.fill_(1.0)
            dist.barrier()
            begun_s, had_s = time.perf_counter(), time.process_time()
            ours.run() if name == "ours" else dist.all_reduce(numbers)
            taken = torch.tensor([time.perf_counter() - begun_s], dtype=torch.float64)
            used = torch.tensor([time.process_time() - had_s], dtype=torch.float64)
            dist.all_reduce(taken, op=dist.ReduceOp.MAX)
            dist.all_reduce(used)
            if turn:
                took[name].append((float(taken), float(used)))
    expected = workers * (workers + 1) / 2
    assert bool((ours.total.views[0] == expected).all())
    if rank == 0:
        print(json.dumps(took))
    ours.close()
    dist.destroy_process_group()


def measured(settings: list[int]) -> dict[str, list[tuple[float, float]]]:
    with tempfile.TemporaryDirectory(prefix="all-reduce-") as name:
        ranks = [
            subprocess.Popen(
                [
                    sys.executable,
                    __file__,
                    "--worker",
                    f"{name}/store",
                    str(rank),
                    json.dumps(settings),
                ],
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(settings[0])
        ]
        said = [rank.communicate()[0] for rank in ranks]
    return dict(json.loads(said[0]))


SINK = """
import socket, sys
sock = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
room = bytearray(1 << 20)
while sock.recv_into(room):
    pass
sock.sendall(b"x")
"""


def through_loopback_s(size: int) -> float:
    data = memoryview(bytearray(size))
    with socket.create_server(("127.0.0.1", 0)) as server:
        sink = subprocess.Popen([sys.executable, "-c", SINK, str(server.getsockname()[1])])
        sock, _ = server.accept()
        with sock:
            begun_s = time.perf_counter()
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
            sock.recv(1)
            took_s = time.perf_counter() - begun_s
        sink.wait()
    return took_s


def copied_s(size: int) -> float:
    source, target = np.ones(size, dtype=np.uint8), np.ones(size, dtype=np.uint8)
    begun_s = time.perf_counter()
    np.copyto(target, source)
    return time.perf_counter() - begun_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--block-mib", type=float, default=0, help="as the product does by itself")
    parser.add_argument("--flows", type=int, default=4)
    parser.add_argument("--sockets", action="store_true", help="only")
    parser.add_argument("--halved", action="store_true", help="in bfloat16")
    parser.add_argument("--urgent", action="store_true", help="before all others; only root may")
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        store, rank, settings = options.worker
        worker(store, int(rank), settings)
        return
    begun_s, size = time.monotonic(), options.mib << 20
    copies, ways = ([each(size) for _ in range(3)] for each in (copied_s, through_loopback_s))
    print(
        f"{options.mib} MiB: a copy in memory takes {min(copies) * 1e3:.0f} ms, one way through loopback "
        f"{min(ways) * 1e3:.0f} ms\nms for a sum, median (10th .. 90th percentile), and ours / gloo's speed;\n"
        "below it what all processes together have had of processors"
    )
    for workers in options.workers:
        block_bytes = int(options.block_mib * (1 << 20))
        settings = [workers, options.mib, options.rounds, block_bytes, options.flows]
        settings += [int(not options.sockets), int(options.urgent), int(options.halved)]
        took = measured(settings)
        gloo, ours = ([wall_s for wall_s, _ in took[name]] for name in ("gloo", "ours"))
        used, uses = ([cpu_s for _, cpu_s in took[name]] for name in ("gloo", "ours"))
        faster = statistics.median(gloo) / statistics.median(ours)
        print(
            f"    {workers} processes   gloo {spread(gloo):24}  ours {spread(ours):24}  {faster:.2f}\n"
            f"        of processors  {spread(used):24}       {spread(uses):24}"
        )
    print(f"{machine()}; took {time.monotonic() - begun_s:.0f} s")


if __name__ == "__main__":
    main()
