"""A model measured once, section by section: a profile that answers for every layout.

The measured parts are those that a step is made of: a section's forward (on memory that is used again, and on
fresh memory), its backward whole and in halves, taking its gradients into the step's sums, and taking in what comes from
the section before. What is measured does not depend on the number of workers, so
a few microbatches on one worker are enough, and several workers can measure different sizes at once.

The clock is the caller's: wall time on an accelerator of one's own, the thread's own time on a machine that
is shared with others.
"""

import hashlib
import inspect
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from torch import fx

from agent.away import any_away, stood_in
from agent.errors import Misuse
from agent.pipeline.channel import Parcel
from agent.pipeline.cut import build, worth_cutting
from agent.pipeline.examine import CutPoint, Facts, cut_points, examine
from agent.pipeline.pieces import Piece
from agent.pipeline.record import LossOf, record
from agent.pipeline.stage import Stage
from agent.pipeline.wires import pack, unpack
from agent.profile import Network, NetworkFrom, Profile, Section, parse, render
from agent.sums import Contribution, Sum, SumSpace
from agent.wire import room
from agent.workspace import most_bytes

Clock = Callable[[], float]
Batch = Sequence[torch.Tensor]
ROUNDS = 5
LEAST = 0.3  # of the mean section: what takes less is joined to its neighbour
HELD = 4  # microbatches held at once to see what fresh memory costs
SECONDS_MAX, SECONDS_LEAST = 50.0, 1.0  # of all rounds; what is begun is finished
SHARE_OF_RUN = 0.05
APPLIED_BYTES_MAX = 64 << 20  # of parameters that the optimizer is tried on


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What the measuring worker knows about itself and cannot find out here."""

    model: str
    instance_type: str
    memory_bytes: float
    network: Network
    network_from: NetworkFrom = "assumed"
    rounds: int = ROUNDS
    sections_max: int = 64
    cuts: tuple[int, ...] = ()  # those of an earlier profile, to be measured again; else found anew
    microbatches_left: int = 0  # of the run that waits for this; 0 if none does
    check: Callable[[], None] = lambda: None  # between rounds; raises what ends the measurement


class Patience:
    """When it is time to come to an end: a share of the run that waits, within bounds."""

    def __init__(self, settings: Settings) -> None:
        self._settings, self._start_s, self._limit_s = settings, time.monotonic(), SECONDS_MAX

    def learn(self, microbatch_s: float) -> None:
        if self._settings.microbatches_left:
            share_s = SHARE_OF_RUN * self._settings.microbatches_left * microbatch_s
            self._limit_s = min(max(SECONDS_LEAST, share_s), SECONDS_MAX)

    @property
    def over(self) -> bool:
        self._settings.check()
        return time.monotonic() - self._start_s > self._limit_s


class Times(NamedTuple):
    """One round: seconds of every section."""

    forward: list[float]
    backward: list[float]
    input_gradient: list[float]
    weight_gradient: list[float]
    taking: list[float]
    untraced: list[float]


def calibrate(
    model: torch.nn.Module,
    loss_of: LossOf,
    batches: Mapping[int, Batch],
    settings: Settings,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    clock: Clock = time.perf_counter,
) -> Profile:
    """Record a model and measure it with one example batch of every size."""
    if not batches:
        raise Misuse("calibrate: no batches to measure with")
    example = batches[min(batches)]
    graph = record(model, loss_of, example)
    return measure(
        graph, examine(graph, example), batches, settings, optimizer=optimizer, clock=clock
    )


def measure(
    graph: fx.GraphModule,
    facts: Facts,
    batches: Mapping[int, Batch],
    settings: Settings,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    clock: Clock = time.perf_counter,
) -> Profile:
    """A recorded model, section by section. Weights, buffers and random streams are left as they were."""
    buffers = [(buffer, buffer.detach().clone()) for buffer in graph.buffers()]
    stream = torch.get_rng_state()
    try:
        return _measured(graph, facts, batches, (settings, optimizer, clock))
    finally:
        torch.set_rng_state(stream)
        graph.zero_grad(set_to_none=True)
        with torch.no_grad():
            for buffer, before in buffers:
                if not torch.equal(buffer, before):
                    buffer.copy_(before)


def _measured(
    graph: fx.GraphModule,
    facts: Facts,
    batches: Mapping[int, Batch],
    how: tuple[Settings, torch.optim.Optimizer | None, Clock],
) -> Profile:
    settings, optimizer, clock = how
    sizes, patience = sorted(batches), Patience(settings)
    example = batches[sizes[0]]
    points = [point for point in cut_points(facts) if point.after in settings.cuts]
    if not points:
        points = _apart(graph, facts, example, (settings, patience, clock))
    pieces = build(graph, facts, [point.after for point in points])
    rounds_of = _rounds_in_parts if any_away(graph) else _all_rounds
    rounds = rounds_of(
        pieces, [batches[size] for size in sizes], (settings.rounds, patience, clock)
    )
    fresh = [_fresh_s(pieces, batches[size], (settings.rounds, patience, clock)) for size in sizes]
    stash, send_s = _passed_on(pieces, example, (settings.rounds, clock))
    work_bytes = _work_bytes(
        pieces, batches[sizes[-1]], [each * sizes[-1] / sizes[0] for each in stash]
    )
    apply_s_per_byte, state = _measure_apply(graph, optimizer, settings.rounds, clock)
    sections = []
    for k, piece in enumerate(pieces):
        weights = sum(p.numel() * p.element_size() for p in piece.module.parameters())
        taking = [statistics.median(t.taking[k] for t in times) for times in rounds]
        back = [statistics.median(t.backward[k] for t in times) for times in rounds]
        sections.append(
            Section(
                name=_name(piece, k),
                forward_s=tuple(statistics.median(t.forward[k] for t in times) for times in rounds),
                backward_s=tuple(b + t for b, t in zip(back, taking, strict=True)),
                input_gradient_s=tuple(
                    statistics.median(t.input_gradient[k] for t in times) for times in rounds
                ),
                weight_gradient_s=tuple(
                    statistics.median(t.weight_gradient[k] for t in times) + late
                    for times, late in zip(rounds, taking, strict=True)
                ),
                untraced_s=tuple(
                    statistics.median(t.untraced[k] for t in times) for times in rounds
                ),
                fresh_s=tuple(times[k] for times in fresh),
                activation_bytes=points[k].nbytes / sizes[0] if k < len(points) else 0.0,
                stash_bytes=stash[k] / sizes[0],
                parameter_bytes=float(weights),
                optimizer_bytes=state * weights,
                after=points[k].after if k < len(points) else -1,
            )
        )
    return Profile(
        model=settings.model,
        key=key_of(graph, batches, settings.instance_type),
        instance_type=settings.instance_type,
        microbatch_sizes=tuple(sizes),
        network=settings.network,
        network_from=settings.network_from,
        memory_bytes=settings.memory_bytes,
        reserved_bytes=_libraries_bytes() + work_bytes,
        apply_s_per_byte=apply_s_per_byte,
        send_s=send_s,
        sections=tuple(sections),
    )


def cached(path: Path, key: str, measure: Callable[[], Profile]) -> Profile:
    """The profile in this file if it is of this key; else measure, and write it there whole."""
    try:
        found = parse(path.read_text(encoding="utf-8"))
        if found.key == key:
            return found
    except (OSError, ValueError):
        pass  # missing, old or corrupt: measured again, as for another key
    found = measure()
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".part")
    beside.write_text(render(found), encoding="utf-8")
    beside.replace(path)
    return found


def key_of(graph: fx.GraphModule, batches: Mapping[int, Batch], instance_type: str) -> str:
    """Of the code, the shapes, the type of machine and the library: any other needs another profile."""
    shapes = [
        (name, tuple(tensor.shape), str(tensor.dtype))
        for name, tensor in [*graph.named_parameters(), *graph.named_buffers()]
    ]
    drawn = [
        (size, [(tuple(t.shape), str(t.dtype)) for t in batches[size]]) for size in sorted(batches)
    ]
    text = repr((graph.code, shapes, drawn, instance_type, torch.__version__))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _apart(
    graph: fx.GraphModule, facts: Facts, example: Batch, how: tuple[Settings, Patience, Clock]
) -> list[CutPoint]:
    """Cut-points with something between them: every stage costs a little whatever it does."""
    settings, patience, clock = how
    points = worth_cutting(facts, settings.sections_max)
    pieces = build(graph, facts, [point.after for point in points])
    for _ in range(2):  # the first of all takes longer
        if any_away(graph):
            ((times, *_),) = _rounds_in_parts(pieces, [example], (0, patience, clock))
        else:
            times = _round(pieces, example, clock)
        spent = [f + b for f, b in zip(times.forward, times.backward, strict=True)]
        patience.learn(sum(spent))
        if patience.over:
            break
    least, since, kept = LEAST * sum(spent) / len(spent), 0.0, []
    for k, point in enumerate(points):
        since += spent[k]
        if since >= least and sum(spent[k + 1 :]) >= least:
            kept.append(point)
            since = 0.0
    return kept


# --- rounds ----------------------------------------------------------------------------------------


def _all_rounds(
    pieces: Sequence[Piece], examples: Sequence[Batch], how: tuple[int, Patience, Clock]
) -> list[list[Times]]:
    """Sizes take turns, so that a slow moment does not fall on one of them alone; the first is dropped."""
    rounds, patience, clock = how
    found: list[list[Times]] = [[] for _ in examples]
    for turn in range(rounds + 1):
        if turn > 0 and patience.over:
            break
        for times, example in zip(found, examples, strict=True):
            once = _round(pieces, example, clock)
            if turn == 1:
                times.clear()  # the one before it was the first of all
            times.append(once)
    return found


def _rounds_in_parts(
    pieces: Sequence[Piece], examples: Sequence[Batch], how: tuple[int, Patience, Clock]
) -> list[list[Times]]:
    """One section after the other, for a model of which this process has no room for more."""
    rounds, patience, clock = how
    found: list[list[list[Times]]] = [[] for _ in examples]
    arrived: list[Parcel | None] = [None] * len(examples)
    for piece in pieces:
        with stood_in(piece.module):
            alone = [list[Times]() for _ in examples]
            for turn in range(rounds + 1):
                if turn > 0 and patience.over:
                    break
                for times, example, before in zip(alone, examples, arrived, strict=True):
                    once = _round([piece], example, clock, before)
                    if turn == 1:
                        times.clear()
                    times.append(once)
            for index, example in enumerate(examples):
                stage = Stage(piece, microbatches=1)
                arrived[index] = stage.forward(0, arrived[index], example)
                stage.clear()
                found[index].append(alone[index])
    return [[_joined(each) for each in zip(*of_size, strict=False)] for of_size in found]


def _joined(parts: Sequence[Times]) -> Times:
    """Of all sections what was measured of each."""
    return Times(*([part[0] for part in listed] for listed in zip(*parts, strict=True)))


def _round(
    pieces: Sequence[Piece], example: Batch, clock: Clock, before: Parcel | None = None
) -> Times:
    """Every section forward and back, once with whole backwards and once with halved ones. What arrives
    at the first is from `before`; what comes back to the last is made up, if it is not the model's.
    """
    times = Times([], [], [], [], [], [])
    stages = [Stage(piece, microbatches=1) for piece in pieces]
    spaces = [SumSpace([piece.module]) for piece in pieces]
    for halved in (False, True):
        for space in spaces:
            space.begin()
        arrived = before
        for stage in stages:
            start_s = clock()
            if halved:
                stage.forward(0, arrived, example, keep=False)
                times.untraced.append(_since(start_s, clock))
                stage.clear()
                start_s = clock()
            arrived = stage.forward(0, arrived, example)
            if not halved:
                times.forward.append(_since(start_s, clock))
        back = None if pieces[-1].last or arrived is None else stages[-1].ones_for(arrived)
        for stage, space in zip(reversed(stages), reversed(spaces), strict=True):
            start_s = clock()
            if halved:
                back, whole = stage.input_gradient(0, back)
                times.input_gradient.append(_since(start_s, clock))
                start_s = clock()
                if not whole:
                    stage.weight_gradient(0)
                times.weight_gradient.append(_since(start_s, clock))
            else:
                back = stage.backward(0, back)
                times.backward.append(_since(start_s, clock))
            loss = stage.release(0)
            if not halved:
                times.taking.append(_taking_s(space, loss, clock))
            stage.clear()
    for listed in times[1:-1]:
        listed.reverse()
    return times


def _taking_s(space: SumSpace, loss: float, clock: Clock) -> float:
    """A step adds up every two microbatches, and then their sums: half of both for each."""
    one, seconds = space.take(loss), []
    next_ = Contribution(loss, [None if each is None else each.clone() for each in one.found])
    into, other = Sum(space), Sum(space)
    for _ in range(2):  # the first write touches the memory
        start_s = clock()
        space.join(into, one, next_)
        space.add(into, other)
        seconds.append(_since(start_s, clock))
    return seconds[1] / 2


def _fresh_s(
    pieces: Sequence[Piece], example: Batch, how: tuple[int, Patience, Clock]
) -> list[float]:
    """By how much a forward of every section is slower while others are held, in turns with letting go."""
    rounds, patience, clock = how
    found = []
    arrived: Parcel | None = None
    for piece in pieces:
        stage, parcel = Stage(piece, microbatches=1), arrived
        seconds: dict[bool, list[float]] = {True: [0.0], False: [0.0]}
        with stood_in(piece.module):
            arrived = stage.forward(0, parcel, example)
            for turn in range(rounds + 1):
                if patience.over:
                    break
                if turn == 1:
                    seconds = {True: [], False: []}
                for held in (True, False):
                    seconds[held] += _forwards_s(stage, parcel, example, clock, held=held)
            stage.clear()
        slower_s = statistics.median(seconds[True]) - statistics.median(seconds[False])
        found.append(max(slower_s, 0.0))
    return found


def _forwards_s(
    stage: Stage, parcel: Parcel | None, example: Batch, clock: Clock, *, held: bool
) -> list[float]:
    """Some in a row; the first is left out, which is on memory that was used before."""
    stage.clear()
    found = []
    for microbatch in range(HELD):
        start_s = clock()
        stage.forward(microbatch, parcel, example)
        found.append(_since(start_s, clock))
        if not held:
            stage.clear()
    stage.clear()
    return found[1:]


def _since(start_s: float, clock: Clock) -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return clock() - start_s


def _passed_on(
    pieces: Sequence[Piece], example: Batch, how: tuple[int, Clock]
) -> tuple[list[float], float]:
    """What autograd keeps for the backward of every section, each storage once, parameters not counted; and
    how long a worker is busy, on the average of all cuts, with a message that comes over the wire.
    """
    stash, taking_in_s = list[float](), list[float]()
    arrived: Parcel | None = None
    for piece in pieces:
        if arrived is not None:
            taking_in_s.append(_taking_in_s(arrived, *how))
        kept: dict[int, int] = {}
        with stood_in(piece.module):
            own = {p.untyped_storage().data_ptr() for p in piece.module.parameters()}

            def keep(tensor: torch.Tensor, own: set[int] = own, kept: dict[int, int] = kept) -> Any:
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in own:
                    kept[storage.data_ptr()] = storage.nbytes()
                return tensor

            stage = Stage(piece, microbatches=1)
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                arrived = stage.forward(0, arrived, example)
            stage.clear()
        stash.append(float(sum(kept.values())))
    return stash, statistics.mean(taking_in_s) if taking_in_s else 0.0


def _taking_in_s(parcel: Parcel, rounds: int, clock: Clock) -> float:
    """A message is sent by a thread of its own, but taken apart by the worker that waits for it."""
    device = next((str(t.device) for t in parcel.tensors if t is not None), "cpu")
    extra, lying = pack(parcel)
    sent = b"".join(lying)
    payload, times = room(len(sent)), list[float]()
    payload[:] = sent
    for _ in range(rounds + 1):
        start_s = clock()
        unpack(extra, payload, device)
        times.append(_since(start_s, clock))
    return statistics.median(times[1:] or times)


def _work_bytes(pieces: Sequence[Piece], example: Batch, stash: Sequence[float]) -> float:
    """The largest work space: what is alive beside what is kept for the backward, and the gradients."""
    most = 0.0
    for piece, alive, kept in zip(pieces, most_bytes(pieces, example), stash, strict=True):
        weights = sum(p.numel() * p.element_size() for p in piece.module.parameters())
        most = max(most, alive - kept - weights)
    return most


def _libraries_bytes() -> float:
    """What is taken of the device and not by tensors; on a machine's own memory nobody can tell."""
    if not torch.cuda.is_available():
        return 0.0
    free, total = torch.cuda.mem_get_info()
    return float(max(total - free - torch.cuda.memory_reserved(), 0))


def _measure_apply(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
    rounds: int,
    clock: Clock,
) -> tuple[float, float]:
    """Seconds per byte of parameters for a step of the optimizer, and its state as a share of them.

    Measured on copies, since a step would change the weights.
    """
    params, taken = [], 0
    for param in model.parameters():
        left = APPLIED_BYTES_MAX - taken
        if param.requires_grad and left > 0 and param.numel():
            fits = param.nbytes <= left
            params.append(param if fits else param[: max(1, left * len(param) // param.nbytes)])
            taken += params[-1].nbytes
    if optimizer is None or not params:
        return 0.0, 0.0
    copies = [torch.nn.Parameter(p.detach().clone()) for p in params]
    twin = _twin(optimizer, copies)
    times = []
    for _ in range(max(rounds, 1)):
        start_s = clock()
        twin.step()
        times.append(_since(start_s, clock))
    size = sum(copy.nbytes for copy in copies)
    return statistics.median(times) / size, _state_bytes(twin) / size


def state_share(optimizer: torch.optim.Optimizer) -> float:
    """An optimizer's state as a share of the parameters, from one that is small."""
    copy = torch.nn.Parameter(torch.zeros(64, 64))
    return _state_bytes(_twin(optimizer, [copy])) / copy.nbytes


def _twin(
    optimizer: torch.optim.Optimizer, copies: list[torch.nn.Parameter]
) -> torch.optim.Optimizer:
    """Another one with the same settings, behind its first step."""
    for copy in copies:
        copy.grad = torch.zeros_like(copy)
    known = inspect.signature(type(optimizer)).parameters
    twin = type(optimizer)(copies, **{k: v for k, v in optimizer.defaults.items() if k in known})
    twin.step()
    return twin


def _state_bytes(optimizer: torch.optim.Optimizer) -> int:
    return sum(
        value.nbytes
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    )


def _name(piece: Piece, index: int) -> str:
    calls = [node.name for node in piece.module.graph.nodes if node.op.startswith("call")]
    return f"{index}: {calls[0]} .. {calls[-1]}" if calls else f"{index}"
