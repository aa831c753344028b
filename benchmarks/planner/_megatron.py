"""Transformers by the numbers: parameters, operations and days, before anything has been measured.

From the analysis of PTD-P (Narayanan et al., Megatron-LM):

    parameters   P = 12 l h^2 (1 + 13 / (12 h) + (V + s) / (12 l h))
    operations   F = 96 B s l h^2 (1 + s / (6 h) + V / (16 l h))          a step, recompute included
    time         8 T P / (n X)                                            T tokens, n workers at X op/s
"""

import msgspec

from agent.profile import Network, Profile, Section

SECONDS_PER_DAY = 86_400
BYTES = 2  # of a number in half precision
MASTER_BYTES = 12  # of a parameter's master copy and its two moments, in single precision
STASH_PER_TOKEN = 34  # bytes per hidden unit of a block; attention scores come on top
SCORES = 5


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    layers: int
    hidden: int
    heads: int
    sequence: int = 2048
    vocabulary: int = 51_200


def parameters(shape: Shape) -> float:
    l, h = shape.layers, shape.hidden  # noqa: E741 - the paper's names
    tail = (shape.vocabulary + shape.sequence) / (12 * l * h)
    return 12 * l * h**2 * (1 + 13 / (12 * h) + tail)


def step_flops(shape: Shape, batch: int) -> float:
    """Forward, backward and recompute of a step of `batch` sequences."""
    l, h, s = shape.layers, shape.hidden, shape.sequence  # noqa: E741 - the paper's names
    tail = shape.vocabulary / (16 * l * h)
    return 96 * batch * s * l * h**2 * (1 + s / (6 * h) + tail)


def days(shape: Shape, tokens: float, workers: int, flops_per_s: float) -> float:
    """Every operation counted, at so many a second and worker."""
    each = step_flops(shape, 1) / shape.sequence
    return tokens * each / (workers * flops_per_s) / SECONDS_PER_DAY


def about_days(tokens: float, weights: float, workers: int, flops_per_s: float) -> float:
    """The rule of thumb: eight operations a parameter and token."""
    return 8 * tokens * weights / (workers * flops_per_s) / SECONDS_PER_DAY


def profile(
    shape: Shape,
    network: Network,
    *,
    flops_per_s: float,
    memory_bytes: float,
    sizes: tuple[int, ...],
) -> Profile:
    """What a calibration would find on accelerators of this pace: one section a block."""
    h, s = shape.hidden, shape.sequence
    block = 24 * s * h**2 * (1 + s / (6 * h)) / flops_per_s  # forward, a sample; a quarter of F
    logits = 2 * s * h * shape.vocabulary / flops_per_s
    weights = 12 * h**2 + 13 * h
    words = shape.vocabulary * h
    stash = s * (STASH_PER_TOKEN * h + SCORES * shape.heads * s)
    sections = []
    for index in range(shape.layers):
        last = index == shape.layers - 1
        forward = block + (logits if last else 0)
        mine = weights + (words if index == 0 or last else 0)
        sections.append(
            Section(
                name=f"block{index}",
                forward_s=tuple(size * forward for size in sizes),
                backward_s=tuple(2 * size * forward for size in sizes),
                activation_bytes=BYTES * s * h,
                stash_bytes=stash,
                parameter_bytes=BYTES * mine,
                optimizer_bytes=MASTER_BYTES * mine,
            )
        )
    return Profile(
        model=f"transformer of {shape.layers} x {h}",
        microbatch_sizes=sizes,
        network=network,
        memory_bytes=memory_bytes,
        sections=tuple(sections),
    )
