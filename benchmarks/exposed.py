"""How much of an exchange is seen when it runs while the last backward does?

    python benchmarks/exposed.py [--workers 2 4] [--mib 32] [--gbit 25] [--exchange bfloat16]

Workers exchange a sum in the product's blocks, in one process and under a virtual clock, over links of this speed.
First all blocks are given at once, which takes as long as the exchange does. Then they are given one after the other,
as a backward that lasts as long has them, and what comes after its end is what is exposed. Processors cost nothing here.
"""

import argparse
from typing import get_args

import torch

from agent.layout import data_parallel
from agent.profile import SumFormat
from agent.tensors.metrics import Numbers
from agent.tensors.partial_sum import partial_of
from agent.tensors.sums import Sum, SumSpace
from agent.transport.virtual import Fabric, Virtual
from agent.worker.exchange.exchange import Exchange

CHUNK_BYTES = 1 << 17


class Workers:
    def __init__(self, count: int, mib: int, bytes_per_s: float, exchange: SumFormat) -> None:
        names = tuple(f"w{number}" for number in range(count))
        self.fabric = Fabric(bytes_per_s, bytes_per_s, latency_s=1e-4, chunk_bytes=CHUNK_BYTES)
        self._layout = data_parallel(0, count, names)
        model = torch.nn.Module()
        model.weight = torch.nn.Parameter(torch.zeros((mib << 20) // 4))
        self._space = SumSpace({"model": model}, exchange=exchange)
        self._transports = [Virtual(self.fabric, name, lambda _: None) for name in names]
        for one in self._transports:
            for name in names:
                one.meet(name, name.encode())
        while self.fabric.go_on():
            pass

    def exchange_s(self, step: int, backward_s: float = 0.0) -> float:
        """From the begin of the backward until all have the sum."""
        begun_s, running = self.fabric.now_s, []
        for number, name in enumerate(self._layout.workers):
            partial = partial_of(self._space, len(self._layout.workers), deterministic=True)
            for param in self._space.params.values():
                param.grad = torch.full_like(param, number + 1.0)
            partial.add(number, Numbers(values=(1.0,)), number, 1)
            one = Exchange(self._transports[number], self._layout, name, partial)
            one.open(step)
            one.begin(partial.nodes(number, 1), Sum(self._space))
            running.append(one)
            for turn in range(one.rounds):
                ends_s = backward_s * (turn + 1) / one.rounds
                self.fabric.after(ends_s, lambda one=one, turn=turn: one.give(turn + 1))
        while not all(one.done for one in running):
            for one in running:
                while not one.done and one.ready():
                    one.advance()
            assert self.fabric.go_on() or all(one.done for one in running)
        return self.fabric.now_s - begun_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--mib", type=int, default=32)
    parser.add_argument("--gbit", type=float, default=25.0)
    parser.add_argument("--exchange", choices=get_args(SumFormat), default="float32")
    options = parser.parse_args()
    print(
        f"{options.mib} MiB of float32 over {options.gbit:g} Gbit/s, in {options.exchange}: "
        "ms of the exchange, and what of it is exposed"
    )
    for count in options.workers:
        workers = Workers(count, options.mib, options.gbit * 1e9 / 8, options.exchange)
        whole_s = workers.exchange_s(0)
        exposed_s = workers.exchange_s(1, whole_s) - whole_s
        print(f"    {count} workers  {whole_s * 1e3:6.1f}  {exposed_s / whole_s:.2f}")


if __name__ == "__main__":
    main()
