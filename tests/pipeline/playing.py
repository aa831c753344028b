"""Small models of every shape, and layouts played by workers that take turns in one process."""

import copy
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from agent import session
from agent.layout import Layout, Replica
from agent.pipeline.stages.channel import Exchange, Key, Local, Parcel
from agent.pipeline.stages.cut import Sections
from agent.pipeline.stages.stage_worker import Worker
from agent.pipeline.tracing.analysis import examine
from agent.pipeline.tracing.recording.trace import record
from agent.pipeline.tracing.variants import Pieces, Variant, Variants
from agent.profile import SumFormat
from agent.schedule import Schedule
from orchestrator.planner.simulation import schedules

SEED = 7


class Block(nn.Module):
    """A residual block: two tensors are alive inside it, one between blocks."""

    def __init__(self, width: int, drop: float = 0.2) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.wide = nn.Linear(width, 2 * width)
        self.drop = nn.Dropout(drop)
        self.back = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.back(self.drop(F.gelu(self.wide(self.norm(x)))))


class TiedLanguage(nn.Module):
    """Embedding and head share one weight, and the embedding skips all blocks as well."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList([Block(8) for _ in range(blocks)])
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        h = start = self.embed(x)
        for block in self.blocks:
            h = block(h)
        return self.head(h + start)


class ResNet(nn.Module):
    """Batch norm, in-place activations, and shortcuts that change width."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(True))
        self.blocks = nn.ModuleList()
        for wide, out in ((4, 4), (4, 8), (8, 8)):
            side = nn.Conv2d(wide, out, 1) if wide != out else nn.Identity()
            self.blocks.append(
                nn.ModuleList(
                    [nn.Conv2d(wide, out, 3, padding=1), nn.BatchNorm2d(out), nn.ReLU(True), side]
                )
            )
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        h = self.stem(x)
        for conv, norm, act, side in self.blocks:
            out = norm(conv(h))
            out += side(h)
            h = act(out)
        return self.head(h.mean((2, 3)))


class UNet(nn.Module):
    """Skips that reach over the whole depth, and shapes asked for on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 8, 3, padding=1)])
        self.middle = nn.Conv2d(8, 8, 3, padding=1)
        self.up = nn.ModuleList([nn.Conv2d(16, 4, 3, padding=1), nn.Conv2d(8, 5, 3, padding=1)])

    def forward(self, x):
        skips = []
        for conv in self.down:
            x = F.relu(conv(x))
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = F.relu(self.middle(x))
        for conv in self.up:
            skip = skips.pop()
            x = F.interpolate(x, size=(skip.shape[2], skip.shape[3]))
            x = conv(torch.cat([x, skip], 1))
        return x.mean((2, 3))


class Seq2Seq(nn.Module):
    """Encoder and decoder: what the encoder says is used by every decoder layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.encoder = nn.ModuleList([Block(8) for _ in range(2)])
        self.attend = nn.ModuleList(
            [nn.MultiheadAttention(8, 2, batch_first=True) for _ in range(2)]
        )
        self.decoder = nn.ModuleList([Block(8) for _ in range(2)])
        self.head = nn.Linear(8, 11)

    def forward(self, x):
        memory = self.embed(x)
        for block in self.encoder:
            memory = block(memory)
        h = self.embed(x.flip(1))
        for attend, block in zip(self.attend, self.decoder, strict=True):
            h = block(h + attend(h, memory, memory, need_weights=False)[0])
        return self.head(h)


class Recurrent(nn.Module):
    """LSTM layers return nested tuples, of which only some parts go on."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.first = nn.LSTM(8, 8, batch_first=True)
        self.second = nn.LSTM(8, 8, batch_first=True)
        self.head = nn.Linear(8, 11)

    def forward(self, x):
        h, _ = self.first(self.embed(x))
        h, (last, _) = self.second(h)
        return self.head(h + last.transpose(0, 1))


class Repeated(nn.Module):
    """One layer used again and again, with nothing of its own in between."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.again = nn.Linear(6, 6), nn.Linear(6, 6)
        self.out = nn.Linear(6, 5)
        self.scale = nn.Parameter(torch.ones(6))
        self.register_buffer("seen", torch.zeros(1, dtype=torch.int64))

    def forward(self, x):
        self.seen.add_(1)
        h = self.into(x)
        for _ in range(4):
            h = torch.tanh(self.again(h)) * self.scale
        return self.out(h * self.scale)


class Codes(nn.Module):
    """Looks at its values: on some microbatches it draws, and writes to its buffer. Not on the one that is looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(6, 6)
        self.register_buffer("codes", torch.ones(6))

    def forward(self, x):
        if x[0].sum() < x[1].sum():
            with torch.no_grad():
                self.codes.copy_(torch.randn(6))
        return self.mix(x) * self.codes


def codebook() -> nn.Module:
    drop = nn.Dropout(0.2)
    return nn.Sequential(nn.Linear(6, 6), Codes(), drop, nn.Linear(6, 6), drop, nn.Linear(6, 5))


class Kept(torch.autograd.Function):
    """Its gradient is a tensor that lives on."""

    gradient = torch.full((3, 6), 0.25)

    @staticmethod
    def forward(ctx, x, weight):
        return x + weight

    @staticmethod
    def backward(ctx, arriving):
        return arriving, Kept.gradient


class Twins(nn.Module):
    """What comes in and two weights have one gradient between them, in one memory; a third has one that is kept elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.third = (nn.Parameter(torch.zeros(18)) for _ in range(3))

    def forward(self, x):
        both = x + self.left.view(3, 6) + self.right.view(3, 6)
        return torch.tanh(Kept.apply(both, self.third.view(3, 6)))


def twins() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), Twins(), nn.Linear(6, 6), Twins(), nn.Linear(6, 5))


def words(generator: torch.Generator, size: int):
    x = torch.randint(0, 11, (size, 5), generator=generator)
    return x, torch.randint(0, 11, (size, 5), generator=generator)


def pictures(generator: torch.Generator, size: int):
    x = torch.randn(size, 3, 8, 8, generator=generator)
    return x, torch.randint(0, 5, (size,), generator=generator)


def rows(generator: torch.Generator, size: int):
    x = torch.randn(size, 6, generator=generator)
    return x, torch.randint(0, 5, (size,), generator=generator)


MODELS = {
    "tied": (TiedLanguage, words),
    "resnet": (ResNet, pictures),
    "unet": (UNet, pictures),
    "seq2seq": (Seq2Seq, words),
    "lstm": (Recurrent, words),
    "repeated": (Repeated, rows),
    "codes": (codebook, rows),
    "twins": (twins, rows),
}


def loss_of(model, x, y):
    """The loss that every model here is trained on."""
    return F.cross_entropy(model(x).flatten(0, -2), y.flatten())


def made(factory: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(SEED)
    return factory()


def batches(draw, step: int, microbatches: int):
    generator = torch.Generator().manual_seed(1000 + step)
    return [draw(generator, 3) for _ in range(microbatches)]


def optimizer(params):
    return torch.optim.AdamW(list(params), lr=1e-2)


Means = list[dict[str, float]]


def alone(
    factory,
    draw,
    microbatches: int,
    steps: int,
    told: Means | None = None,
    exchange: SumFormat = "float32",
):
    """The script on one device: its losses and its state at the end. `told` gets the metrics of each step."""
    model = made(factory)
    opt = optimizer(model.parameters())
    session._sessions.clear()
    own = session.Session(model, opt, microbatches=microbatches, seed=SEED, exchange=exchange)
    losses = []
    for step in own.steps(steps):
        todo = batches(draw, step, microbatches)
        result = own.backward(lambda batch: loss_of(model, *batch), todo)
        opt.step()
        losses.append(result.loss)
        if told is not None:
            told.append(dict(result.metrics))
    session._sessions.clear()
    return losses, model.state_dict(), Streams(own)


class Streams:
    """The random streams of a session, for the workers of a layout."""

    def __init__(self, own: session.Session) -> None:
        self._replica = own.replica

    def seed_for(self, step: int, microbatch: int) -> None:
        self._replica.step, self._replica.phase = step, 0
        self._replica.seed_for(microbatch)


class Turns:
    """A channel of workers that take turns: torch's random stream belongs to the whole process."""

    def __init__(self, channel: Local, turn: threading.Lock) -> None:
        self._channel, self._turn = channel, turn
        self.send, self.ready = channel.send, channel.ready

    def receive(self, peer: str, tag: str) -> Parcel:
        self.wait([(peer, tag)])
        return self._channel.receive(peer, tag)

    def wait(self, wanted: Collection[Key]) -> None:
        self._turn.release()
        try:
            self._channel.wait(wanted)
        finally:
            self._turn.acquire()


def in_turns(wires: Exchange, turn: threading.Lock, plays: Iterable[Callable[[], object]]) -> None:
    """Have each of these played in a thread of its own, one at a time. What fails ends all of them, and is raised."""
    raised: list[BaseException] = []

    def guarded(play: Callable[[], object]) -> None:
        with turn:
            try:
                play()
            except BaseException as error:
                raised.append(error)
                wires.break_off(repr(error))

    threads = [threading.Thread(target=guarded, args=(play,)) for play in plays]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if raised:
        raise raised[0]


def even(total: int, shares: int) -> list[int]:
    return [total * (i + 1) // shares - total * i // shares for i in range(shares)]


def layout_of(depth: int, counts: Sequence[int]) -> Layout:
    replicas, first = [], 0
    for index, count in enumerate(counts):
        names = tuple(f"r{index}s{place}" for place in range(depth))
        replicas.append(Replica(workers=names, first=first, count=count))
        first += count
    return Layout(generation=0, microbatches=first, replicas=tuple(replicas))


def graph_of(factory, draw):
    """A model, recorded and examined on a microbatch."""
    first = variants_of(factory, draw).first
    return first.graph, first.facts, first.example


def variants_of(factory, draw) -> Variants:
    model = made(factory)
    example = draw(torch.Generator().manual_seed(1), 3)
    graph = record(model, loss_of, example)
    first = Variant(graph, examine(graph, example), example)
    return Variants(first, lambda batch: record(model, loss_of, batch, fixed=True), lambda *_: None)


def together(
    factory,
    draw,
    name: str,
    depth: int,
    counts: Sequence[int],
    *,
    steps: int,
    cuts: Sequence[int] | None = None,
    recompute: tuple[bool, ...] = (),
    reach: int = 1,
    deterministic: bool = True,
    exchange: SumFormat = "float32",
    opener: Callable[[int, int], None],
    told: Means | None = None,
):
    """The same training by `depth` x `len(counts)` workers: losses, and every worker's state."""
    layout = layout_of(depth, counts)
    wires, turn = Exchange(patience_s=10), threading.Lock()
    losses: dict[int, float] = {}
    metrics: dict[int, dict[str, float]] = {}
    states: list[dict[str, torch.Tensor]] = []
    workers = []
    chunks = 2 if name in schedules.MODULO else 1
    if cuts is None:
        cuts = Sections().choose(*graph_of(factory, draw), depth * chunks)
    for replica in layout.replicas:
        schedule: Schedule = schedules.make(name, depth, replica.count, recompute=recompute)
        for place, me in enumerate(replica.workers):
            variants = variants_of(factory, draw)
            pieces = Pieces(variants.first, cuts)
            own = {i: p for i, p in enumerate(pieces.first) if schedule.host(i, 0) == place}
            channel = Turns(wires.channel(me), turn)
            piece_of = partial(_piece_of, variants, pieces)
            worker = Worker(
                layout,
                me,
                schedule,
                own,
                channel,
                reach=reach,
                piece_of=piece_of,
                deterministic=deterministic,
                exchange=exchange,
            )
            workers.append(worker)

    def play(worker: Worker) -> None:
        params = {id(p): p for s in worker.stages.values() for p in s.module.parameters()}
        opt = optimizer(params.values()) if params else None
        for step in range(steps):
            todo = batches(draw, step, layout.microbatches)
            found = worker.step(step, todo, lambda m, step=step: opener(step, m))
            if found is not None:
                losses[step] = found.pop("loss")
                metrics[step] = found
            if opt is not None:
                opt.step()
        for stage in worker.stages.values():
            states.append(copy.deepcopy(stage.module.state_dict()))

    in_turns(wires, turn, (partial(play, worker) for worker in workers))
    if told is not None:
        told += [metrics[step] for step in range(steps)]
    return [losses[step] for step in range(steps)], states, workers


def _piece_of(variants: Variants, pieces: Pieces, stage: int, batch):
    return pieces.of(variants.of(batch))[stage]


def same_weights(states, expected) -> list[str]:
    """The names that differ. A tied weight may go by another of its names."""
    wrong = []
    for state in states:
        for name, tensor in state.items():
            if not torch.equal(tensor, expected[name.removeprefix("model.")]):
                wrong.append(name)
    return wrong
