"""Calibration inside a running job: a worker measures its model at a boundary.

One worker measures, once, as soon as its loop has been recorded, with a microbatch of the script.
Others may take over parts (`agent.worker.survey.helper`). What was measured before (same code, shapes, kind
of machine and libraries) is known to the keeper and is not measured again. It changes nothing of
the run: see `agent.calibration.calibrate.measure`.
"""

import os
import platform
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path

import torch

from agent.calibration import calibrate
from agent.calibration.assignment import Board
from agent.calibration.calibrate import CalibrationPlan, Settings
from agent.calibration.section_times import Gauge, Patience
from agent.messages import Unbuilt
from agent.pipeline.tracing.graphs import Recording
from agent.profile import Link, Network, Profile
from agent.tensors.device import CPU, device_of, memory_bytes, name_of, where

# Assumed until it is measured: a datacentre's 10 Gbit/s, and the memory of one machine.
BETWEEN = Link(bandwidth_bytes_per_s=1.25e9, latency_s=1e-4)
WITHIN = Link(bandwidth_bytes_per_s=5e9, latency_s=3e-5)
NETWORK = Network(intra=WITHIN, inter=BETWEEN, reduce_intra=WITHIN, reduce_inter=BETWEEN)


def machine_kind(device: torch.device = CPU) -> str:
    """Return what machines of one kind have in common, as seen by a worker on this device."""
    if device != CPU:
        return name_of(device)
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    name = next(names, platform.machine())
    return f"{os.cpu_count()} x {name}, {torch.get_num_threads()} at work"


def unbuilt(things: Iterable[object], mark: str, sums: float) -> Unbuilt | None:
    """Return what a worker reports about an unbuilt model, or None if it is built.

    The training bytes are those of weights, gradients, the sums that these are added up in, the
    optimizer's state, and a copy of what a worker sends or stores of it.
    """
    if not mark:
        return None
    models, optimizers, training_bytes = list[torch.nn.Module](), list[torch.optim.Optimizer](), 0.0
    for thing in things:
        if isinstance(thing, torch.nn.Module):
            models.append(thing)
        elif isinstance(thing, torch.optim.Optimizer):
            optimizers.append(thing)
    state = max((calibrate.state_share(each) for each in optimizers), default=0.0)
    device = where(param for model in models for param in model.parameters())
    copies = calibrate.copies_on(device)
    for param in [param for model in models for param in model.parameters()]:
        trained = param.requires_grad
        training_bytes += param.nbytes * (1 + state * trained) * (1 + copies)
        training_bytes += param.nbytes * (1 + sums) * trained
    room_bytes = int(memory_bytes(device))
    return Unbuilt(training_bytes=int(training_bytes), room_bytes=room_bytes, mark=mark)


def size_of(recording: Recording) -> int:
    """Return the samples of a microbatch, which is the size of the first tensor's first axis."""
    first = next(filter(torch.is_tensor, recording.example))
    return int(first.shape[0]) if first.dim() and first.shape[0] else 1


def key_of(recording: Recording, code: str, adding: str) -> str:
    """Return the key of this recording's profile.

    `code` is the checksum of the job's files, and `adding` says how gradients are added up.
    """
    batches = {size_of(recording): recording.example}
    kind = machine_kind(device_of(recording.graph))
    return calibrate.key_of(recording.graph, batches, f"{kind}; {adding}", code)


def profile_of(
    recording: Recording,
    things: Iterable[object],
    model: str,
    microbatches_left: int,
    check: Callable[[], None],
    opened: Callable[[CalibrationPlan, Board], None],
) -> Profile:
    """Measure here and now; `things` are what the session holds, the optimizer among them."""
    device = device_of(recording.graph)
    optimizers = [thing for thing in things if isinstance(thing, torch.optim.Optimizer)]
    return calibrate.measure(
        recording.graph,
        recording.facts,
        {size_of(recording): recording.example},
        Settings(
            model=model,
            instance_type=machine_kind(device),
            memory_bytes=memory_bytes(device),
            network=NETWORK,
            microbatches_left=microbatches_left,
            check=check,
            opened=opened,
        ),
        optimizer=optimizers[0] if optimizers else None,
    )


def gauging(
    recording: Recording, plan: CalibrationPlan, patience: Patience
) -> AbstractContextManager[Gauge]:
    """Provide a gauge for parts of what another worker measures of the same recording."""
    batches = {size_of(recording): recording.example}
    return calibrate.gauging(recording.graph, recording.facts, batches, plan, patience)
