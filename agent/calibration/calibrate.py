"""A model measured once, section by section: a profile that answers for every layout.

What is measured does not depend on the number of workers, so a few microbatches on one worker are
enough (see `agent.calibration.section_times`). Other workers may take over parts of it
(`agent.calibration.assignment`).

The clock is the caller's: wall time on an accelerator that is not shared, the thread's own time on
a machine that is shared with other processes.
"""

import hashlib
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import torch
from torch import fx

from agent.calibration.assignment import Board
from agent.calibration.section_times import Batch, Clock, Gauge, How, Patience, spent_s
from agent.checks.optimizers import twin_of
from agent.errors import Misuse
from agent.pipeline.stages.cut import build, worth_cutting
from agent.pipeline.stages.stage_parts import Piece
from agent.pipeline.tracing.analysis import CutPoint, Facts, cut_points, examine
from agent.pipeline.tracing.recording.trace import LossOf, attributes_kept, buffers_kept, record
from agent.profile import Network, NetworkFrom, Profile, Section
from agent.source.tracebacks import is_own_class
from agent.tensors.device import CPU, anywhere, clock_of, device_of, stream_kept

ROUNDS = 5
LEAST = 0.3  # of the mean section's time; a shorter section is joined to its neighbour
APPLIED_BYTES_MAX = 64 << 20  # of parameters, at most, that the optimizer is tried on


class CalibrationPlan(msgspec.Struct, frozen=True):
    """What other workers need to know to measure parts of the same model."""

    afters: tuple[int, ...]
    rounds: int
    limit_s: float


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What the measuring worker knows about itself and cannot find out here."""

    model: str
    instance_type: str
    memory_bytes: float
    network: Network
    network_from: NetworkFrom = "assumed"
    rounds: int = ROUNDS
    sections_max: int = 64
    cuts: tuple[int, ...] = ()  # those of an earlier profile to measure again; if none, chosen here
    microbatches_left: int = 0  # of the run that waits for this; 0 if none does
    check: Callable[[], None] = lambda: None  # called now and then; raises to end the measurement
    opened: Callable[[CalibrationPlan, Board], None] = lambda *_: (
        None
    )  # called when others may take parts


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
    """Measure a recorded model by sections; put weights, buffers and random streams back."""
    clock = clock_of(device_of(graph), clock)
    with _untouched(graph):
        return _measured(graph, facts, batches, (settings, optimizer, clock))


@contextmanager
def gauging(
    graph: fx.GraphModule,
    facts: Facts,
    batches: Mapping[int, Batch],
    plan: CalibrationPlan,
    patience: Patience,
) -> Iterator[Gauge]:
    """Provide a gauge for parts of a plan that another worker measures; put the model back."""
    with _untouched(graph):
        pieces = build(graph, facts, plan.afters)
        how = How(plan.rounds, patience, clock_of(device_of(graph), time.perf_counter))
        yield Gauge(pieces, [batches[size] for size in sorted(batches)], how)


@contextmanager
def _untouched(graph: fx.GraphModule) -> Iterator[None]:
    try:
        with attributes_kept(graph), buffers_kept(graph), stream_kept(device_of(graph)):
            yield
    finally:
        graph.zero_grad(set_to_none=True)


def _measured(
    graph: fx.GraphModule,
    facts: Facts,
    batches: Mapping[int, Batch],
    given: tuple[Settings, torch.optim.Optimizer | None, Clock],
) -> Profile:
    settings, optimizer, clock = given
    sizes = sorted(batches)
    how = How(settings.rounds, Patience(settings.check), clock)
    points = [point for point in cut_points(facts) if point.after in settings.cuts]
    if not points:
        points = _apart(graph, facts, batches[sizes[0]], (settings, how))
    afters = tuple(point.after for point in points)
    pieces = build(graph, facts, afters)
    gauge = Gauge(pieces, [batches[size] for size in sizes], how)
    board = Board(len(pieces), 0 if gauge.in_parts else how.rounds)
    settings.opened(CalibrationPlan(afters, how.rounds, how.patience.left_s), board)
    apply_s_per_byte, state = _measure_apply(graph, optimizer, settings.rounds, clock)
    gauge.finish(board)
    sections = _sections(pieces, points, board, (sizes[0], state))
    taking_in_s = [each.taking_in_s for each in board.alone()[1:]]
    return Profile(
        model=settings.model,
        key=key_of(graph, batches, settings.instance_type),
        instance_type=settings.instance_type,
        microbatch_sizes=tuple(sizes),
        network=settings.network,
        network_from=settings.network_from,
        memory_bytes=settings.memory_bytes,
        copies=copies_on(device_of(graph)),
        reserved_bytes=_libraries_bytes(device_of(graph)) + _work_bytes(sections, board, sizes),
        apply_s_per_byte=apply_s_per_byte,
        send_s=statistics.mean(taking_in_s) if taking_in_s else 0.0,
        sections=tuple(sections),
    )


def copies_on(device: torch.device) -> float:
    """Return how often a worker's share of the state is in a device's memory besides.

    It lies in the memory of the machine until it is sent or stored.
    """
    return 1.0 if device == CPU else 0.0


def _sections(
    pieces: Sequence[Piece],
    points: Sequence[CutPoint],
    board: Board,
    given: tuple[int, float],
) -> list[Section]:
    """Return the medians over rounds of what any worker has measured."""
    (size, state), rounds, found = given, board.rounds(), []
    for k, (piece, alone) in enumerate(zip(pieces, board.alone(), strict=True)):
        weights = float(sum(p.numel() * p.element_size() for p in piece.module.parameters()))
        taking = [statistics.median(t.taking[k] for t in times) for times in rounds]
        back = [statistics.median(t.backward[k] for t in times) for times in rounds]
        found.append(
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
                fresh_s=alone.fresh_s,
                activation_bytes=points[k].nbytes / size if k < len(points) else 0.0,
                stash_bytes=alone.stash_bytes / size,
                parameter_bytes=weights,
                optimizer_bytes=state * weights,
                after=points[k].after if k < len(points) else -1,
            )
        )
    return found


def _work_bytes(sections: Sequence[Section], board: Board, sizes: Sequence[int]) -> float:
    """Return the largest work space: live bytes besides the stash and the gradients."""
    return max(
        0.0,
        *(
            alone.most_bytes - section.stash_bytes * sizes[-1] - section.parameter_bytes
            for section, alone in zip(sections, board.alone(), strict=True)
        ),
    )


def key_of(
    graph: fx.GraphModule, batches: Mapping[int, Batch], instance_type: str, code: str = ""
) -> str:
    """Return a key of the code, the shapes, the type of machine and the library.

    If any of these differs, another profile is needed. A module that is called unchanged shows in
    the graph by its name only, so its settings are in the key, and `code` is too if any of it is
    the person's own.
    """
    shapes = [
        (name, tuple(tensor.shape), str(tensor.dtype))
        for name, tensor in [*graph.named_parameters(), *graph.named_buffers()]
    ]
    drawn = [(size, [_kind_of(leaf) for leaf in batches[size]]) for size in sorted(batches)]
    called = [node for node in graph.graph.nodes if node.op == "call_module"]
    whole = [graph.get_submodule(str(node.target)) for node in called]
    own = any(is_own_class(type(part)) for each in whole for part in each.modules())
    kept = [*map(repr, whole), code if own else ""]
    text = repr((anywhere(graph.code), shapes, drawn, kept, instance_type, torch.__version__))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _kind_of(leaf: Any) -> object:
    if isinstance(leaf, torch.Tensor):
        return tuple(leaf.shape), str(leaf.dtype)
    return type(leaf).__name__


def _apart(
    graph: fx.GraphModule, facts: Facts, example: Batch, given: tuple[Settings, How]
) -> list[CutPoint]:
    """Choose cut-points with enough time between them, because each stage has fixed costs."""
    settings, how = given
    points = worth_cutting(facts, settings.sections_max)
    pieces = build(graph, facts, [point.after for point in points])
    for _ in range(2):  # the first round takes longer
        spent = spent_s(pieces, example, how)
        how.patience.learn(settings.microbatches_left * sum(spent))
        if how.patience.over:
            break
    least, behind_s, kept = LEAST * sum(spent) / len(spent), 0.0, []
    for k, point in enumerate(points):
        behind_s += spent[k]
        if behind_s >= least and sum(spent[k + 1 :]) >= least:
            kept.append(point)
            behind_s = 0.0
    return kept


def _libraries_bytes(device: torch.device) -> float:
    """Return the bytes of a device that are used, but not by tensors; 0 if that is not known."""
    if device == CPU:
        return 0.0
    try:
        free, total = torch.accelerator.get_memory_info(device)
        return float(max(total - free - torch.accelerator.memory_reserved(device), 0))
    except RuntimeError:  # the device does not report its memory
        return 0.0


def _measure_apply(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
    rounds: int,
    clock: Clock,
) -> tuple[float, float]:
    """Return the optimizer's seconds per byte of parameters, and its state's share of them.

    It is measured on copies, because a step would change the weights. The copies are of parameters
    that it trains, because it may accept no others.
    """
    groups = [] if optimizer is None else optimizer.param_groups
    theirs = {id(param) for group in groups for param in group["params"]}
    params, taken = [], 0
    for param in [p for p in model.parameters() if id(p) in theirs] or model.parameters():
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
        times.append(clock() - start_s)
    size = sum(copy.nbytes for copy in copies)
    return statistics.median(times) / size, _state_bytes(twin) / size


def state_share(optimizer: torch.optim.Optimizer) -> float:
    """Return an optimizer's state as a share of the parameters, measured on a small one."""
    copy = torch.nn.Parameter(torch.zeros(64, 64, device=CPU))
    return _state_bytes(_twin(optimizer, [copy])) / copy.nbytes


def _twin(
    optimizer: torch.optim.Optimizer, copies: list[torch.nn.Parameter]
) -> torch.optim.Optimizer:
    """Return another optimizer with the same settings, after its first step."""
    for copy in copies:
        copy.grad = torch.zeros_like(copy)
    twin = twin_of(optimizer, copies)
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
