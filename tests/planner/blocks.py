"""A small profile of equal or uneven blocks, its network, and a schedule played with equal stages."""

import numpy as np

from agent.profile import Link, Network, Profile, Section
from agent.schedule import Schedule
from orchestrator.planner.simulation import kernel, schedules, simulator


def network(bandwidth: float = 1e9, latency_s: float = 1e-4, faster: float = 8.0) -> Network:
    inter = Link(bandwidth_bytes_per_s=bandwidth, latency_s=latency_s)
    intra = Link(bandwidth_bytes_per_s=bandwidth * faster, latency_s=latency_s / faster)
    return Network(intra=intra, inter=inter, reduce_intra=intra, reduce_inter=inter)


def make_profile(sections: int, *, seed: int | None = None, **changes) -> Profile:
    """Equal sections, or uneven ones from a seed; about as heavy as blocks of a transformer."""
    rng = np.random.default_rng(seed)
    uneven = rng.uniform(0.5, 2.0, sections) if seed is not None else np.ones(sections)
    sizes = (1, 2, 4)
    listed = tuple(
        Section(
            name=f"block{i}",
            forward_s=tuple(0.001 * u * (size + 0.5) for size in sizes),
            backward_s=tuple(0.002 * u * (size + 0.5) for size in sizes),
            activation_bytes=1e5,
            stash_bytes=2e6 * u,
            parameter_bytes=4e6 * u,
            optimizer_bytes=8e6 * u,
        )
        for i, u in enumerate(uneven.tolist())
    )
    fields = {
        "model": "blocks",
        "microbatch_sizes": sizes,
        "network": network(),
        "memory_bytes": 16e9,
        "apply_s_per_byte": 1e-11,
        "overhead_s": 1e-3,
        "sections": listed,
    }
    return Profile(**{**fields, **changes})


def uniform(stages: int, forward_s: float, backward_s: float) -> np.ndarray:
    """Equal stages: a recompute is a forward again, a backward is input- and weight-gradient."""
    half = backward_s / 2
    each = (forward_s, backward_s, half, half, forward_s)
    return np.repeat(np.array(each)[:, None], stages, axis=1)


def simulate(schedule: Schedule, costs: kernel.Costs) -> simulator.SimulatedStep:
    """One pipeline, nothing reduced."""
    return simulator.finish([simulator.run(schedules.arrays(schedule), costs, schedule.name)])


def in_flight(schedule: Schedule) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Per stage, the most microbatches stashed and the most weight-gradients owed at any time."""
    stashed, owed = kernel.peaks(schedules.arrays(schedule), schedule.stages)
    return tuple(stashed.tolist()), tuple(owed.tolist())
