"""Workers that exchange the sums of a step by real sockets, as an exchange sees them; on any device."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from agent.layout import Layout, data_parallel
from agent.profile import SumFormat
from agent.protocol import Slice
from agent.tensors.device import CPU
from agent.tensors.metrics import Numbers
from agent.tensors.partial_sum import Partial, partial_of
from agent.tensors.sums import Sum, SumSpace
from agent.transport.tcp import Tcp
from agent.worker.exchange.early import Early
from agent.worker.exchange.exchange import Exchanging
from agent.worker.exchange.promise import Preparing

PATIENCE_S = 30.0
MICROBATCHES = 5
Forward = Callable[[torch.nn.Module, torch.Tensor], torch.Tensor]


class Model(torch.nn.Module):
    """Layers one after the other, and one that no microbatch uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.unused = torch.nn.Linear(16, 64), torch.nn.Linear(3, 3)
        self.middle = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(4))
        self.last = torch.nn.Linear(64, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.middle:
            x = torch.tanh(layer(x))
        return self.last(x).square().mean()


def plain(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x)


def in_two_parts(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A parameter gets its gradient in two backwards, one inside the other, as torch's reentrant checkpoints do it."""
    x = model.first(x).requires_grad_()
    for _ in range(2):
        x = checkpoint(model.middle[0], x, use_reentrant=True)
    return model.last(x).square().mean()


def changed_late(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A hook on an early layer changes the gradient of a later one, which has left by then."""
    seen = model.first(x)
    seen.register_hook(lambda _: model.last.weight.grad.mul_(2.0).numel() and None)
    for layer in model.middle:
        seen = torch.tanh(layer(seen))
    return model.last(seen).square().mean()


class Worker:
    """What an exchange sees of a worker; it listens at a real socket, and notes what the keeper would get."""

    def __init__(
        self,
        me: str,
        layout: Layout,
        block_bytes: int,
        exchange: SumFormat,
        device: torch.device,
    ) -> None:
        self.me, self.layout, self.generation = me, layout, layout.generation
        self.changed = threading.Condition()
        self.tcp = Tcp(me, "a secret", self.changed, lambda _: None, host="127.0.0.1")
        self.model = Model().to(device)
        space = SumSpace({"model": self.model}, exchange=exchange)
        self.replica = SimpleNamespace(space=space)
        self.partial = partial_of(space, MICROBATCHES, deterministic=True)
        self.total, self.slices = Sum(space, device), list[tuple[int, int, bytes]]()
        self.stuck = SimpleNamespace(aided=_nothing)
        self.link: Any = SimpleNamespace(connects=1, send=self._send, stuck=self.stuck)
        self.preparing = Preparing(self)  # type: ignore[arg-type]
        self.exchanging = Exchanging(self, self.tcp, self.preparing)  # type: ignore[arg-type]
        self.exchanging.block_bytes = block_bytes
        self.left_early = False

    def _send(self, message: Slice, piece: memoryview) -> None:
        self.slices.append((message.step, message.offset, bytes(piece)))

    def wait(self, look: Callable[[], Any]) -> Any:
        with self.changed:
            assert self.changed.wait_for(look, PATIENCE_S)

    def step(self, step: int, forward: Forward) -> None:
        own = self.layout.replica_of(self.me)
        self.partial.space.begin()
        self.partial.clear()
        self.exchanging.open(step, self.partial)
        self.compute(step, forward, own.first, own.count)
        self.exchanging.run(step, self.partial, self.total)
        self.preparing.settle()

    def compute(self, step: int, forward: Forward, first: int, count: int) -> None:
        missing = self.partial.missing(first, count)
        for microbatch in missing:
            early: Early | None = None
            if microbatch == missing[-1]:
                early = self.exchanging.early(step, self.partial, self.total, microbatch)
            with early or _nothing():
                loss = backward(self.model, forward, step, microbatch)
            numbers = Numbers(values=(loss,))
            if early is None:
                self.partial.add(microbatch, numbers, first, count)
                continue
            self.left_early = early._given > 0
            if not early.add(microbatch, numbers, first, count):
                self.compute(step, forward, first, count)


@contextmanager
def _nothing() -> Iterator[None]:
    yield


def backward(model: torch.nn.Module, forward: Forward, step: int, microbatch: int) -> float:
    generator = torch.Generator().manual_seed(100 * step + microbatch)
    x = torch.randn(8, 16, generator=generator, device=CPU).to(model.last.weight.device)
    loss = forward(model, x) / MICROBATCHES
    loss.backward()
    return float(loss.detach())


def alone(
    step: int,
    forward: Forward,
    odd: Forward = plain,
    odd_ones: int = 0,
    *,
    exchange: SumFormat = "float32",
    device: torch.device = CPU,
) -> Sum:
    """The sum of one process; the first microbatches are `odd`."""
    model = Model().to(device)
    space = SumSpace({"model": model}, exchange=exchange)
    partial: Partial = partial_of(space, MICROBATCHES, deterministic=True)
    space.begin()
    for microbatch in range(MICROBATCHES):
        chosen = odd if microbatch < odd_ones else forward
        loss = backward(model, chosen, step, microbatch)
        partial.add(microbatch, Numbers(values=(loss,)), 0, MICROBATCHES)
    (whole,) = partial.nodes(0, MICROBATCHES)
    return whole


@contextmanager
def workers(
    count: int, exchange: SumFormat = "float32", device: torch.device = CPU
) -> Iterator[list[Worker]]:
    names = tuple(f"w{number}" for number in range(count))
    layout = data_parallel(0, MICROBATCHES, names)
    made = [Worker(name, layout, 4096, exchange, device) for name in names]
    for one in made:
        for other in made:
            if one is not other:
                one.tcp.meet(other.me, other.tcp.offer())
    yield made
    for each in made:
        each.tcp.close()


def together(made: list[Worker], step: int, *forwards: Forward) -> None:
    """One step of all, the first with the first of these, and so on; the last holds for all others."""
    threads, failed = [], list[BaseException]()

    def play(worker: Worker, forward: Forward) -> None:
        try:
            worker.step(step, forward)
        except BaseException as error:
            failed.append(error)

    for number, worker in enumerate(made):
        forward = forwards[min(number, len(forwards) - 1)]
        threads.append(threading.Thread(target=play, args=(worker, forward)))
        threads[-1].start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert not failed, failed[0]


def check(made: list[Worker], wanted: Sum) -> None:
    for worker in made:
        assert worker.total.marks == wanted.marks
        for start, end, _ in wanted.space.groups:
            assert bytes_of(worker.total, start, end) == bytes(wanted.memory(start, end))


def bytes_of(total: Sum, start: int, end: int) -> bytes:
    return bytes(total.flat[start:end].cpu().numpy().data)


def kept(made: list[Worker], step: int) -> bytes:
    """What the keeper has got of the sum of a step."""
    found = sorted(each[1:] for worker in made for each in worker.slices if each[0] == step)
    return b"".join(piece for _, piece in found)
