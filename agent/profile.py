"""The result of a calibration: a model's costs on one type of instance. No torch here.

A *section* is the part of a model between two neighbouring cut-points; a stage is a run of
sections. Everything is independent of the number of workers, so one profile answers for every
footprint. Times are given for each of `microbatch_sizes`; bytes per sample grow with the
microbatch, the others do not.

The file is JSON with one section a line, so that a person can read it and a diff shows what moved.
"""

import math
from typing import Literal

import msgspec

from cloud.ranges import Amount, Count, Name, Positive, Step

VERSION = 1
# Which links were measured: none, those within a machine, those between machines, or both.
NetworkFrom = Literal["assumed", "within", "between", "measured"]
# In which a sum has the gradients of float32 parameters.
SumFormat = Literal["float32", "bfloat16"]
# The bytes of a sum's gradients for each byte of such parameters.
EXCHANGED: dict[SumFormat, float] = {"float32": 1.0, "bfloat16": 0.5}
Stragglers = Literal["wait", "flexrr"]  # what a step does about a worker that is late
HELPERS_MAX = 4  # of one late worker at a time
TIMES = (
    "forward_s",
    "backward_s",
    "input_gradient_s",
    "weight_gradient_s",
    "untraced_s",
    "fresh_s",
)


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """A message takes bytes / bandwidth on the link, then the latency and the mean jitter.

    `lanes` messages can use it at the same time at full speed; more than that share it.
    """

    bandwidth_bytes_per_s: Amount
    latency_s: Amount = 0.0
    jitter_s: Amount = 0.0
    lanes: Positive = 1

    def __post_init__(self) -> None:
        _require("bandwidth_bytes_per_s", self.bandwidth_bytes_per_s, above_zero=True)
        _require("latency_s", self.latency_s)
        _require("jitter_s", self.jitter_s)
        _require("lanes", self.lanes, above_zero=True)


class Network(msgspec.Struct, frozen=True, kw_only=True):
    """Messages and all-reduces, inside an instance and between instances.

    The latency of a reduce link is that of one hop of the ring.
    """

    intra: Link
    inter: Link
    reduce_intra: Link
    reduce_inter: Link


class Section(msgspec.Struct, frozen=True, kw_only=True):
    """The costs of one section.

    A neighbour waits for `input_gradient_s`; a cost that is not measured is estimated.
    """

    name: Name
    forward_s: tuple[Amount, ...]
    backward_s: tuple[Amount, ...]
    input_gradient_s: tuple[Amount, ...] = ()
    weight_gradient_s: tuple[Amount, ...] = ()  # both halves together may take more than the whole
    untraced_s: tuple[Amount, ...] = ()  # a forward that keeps nothing: it will be recomputed
    fresh_s: tuple[Amount, ...] = ()  # what a forward takes longer on memory not used before
    activation_bytes: Amount  # sent on, per sample
    stash_bytes: Amount = 0.0  # kept for the backward, per sample
    parameter_bytes: Amount
    optimizer_bytes: Amount = 0.0
    after: Step = -1  # the node of the recorded graph after which it ends; -1 at the model's end

    def __post_init__(self) -> None:
        where = f"section {self.name}"
        for name in TIMES:
            for value in getattr(self, name):
                _require(f"{where}: {name}", value)
        for name in ("activation_bytes", "stash_bytes", "parameter_bytes", "optimizer_bytes"):
            _require(f"{where}: {name}", getattr(self, name))


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """All that the planner knows about a model on a type of instance."""

    version: int = VERSION
    model: Name
    key: Name = ""  # of the code, the shapes and the libraries that were measured
    instance_type: Name = ""
    microbatch_sizes: tuple[Count, ...]
    network: Network
    network_from: NetworkFrom = "assumed"
    memory_bytes: Amount  # of one accelerator, usable
    reserved_bytes: Amount = 0.0  # the part of it that libraries and the largest work space take
    # how many gradients a worker holds at most, until they are the sum of the step
    sums: Amount = 0.0
    # how often a worker has its share of the state in this memory besides, to send or store it
    copies: Amount = 0.0
    exchanged: Amount = 1.0  # bytes of a sum's gradients for each byte of parameters
    apply_s_per_byte: Amount = 0.0  # of parameters
    overhead_s: Amount = 0.0  # of a step, whatever the layout
    send_s: Amount = 0.0  # of a worker's own time, for every message that comes
    host_bytes_per_s: Amount = 0.0  # to and from host memory; 0 where there is no offload
    reduce_overlaps: bool = False  # sections reduce while earlier ones compute their last backward
    sections: tuple[Section, ...]

    @property
    def parameter_bytes(self) -> float:
        return sum(section.parameter_bytes for section in self.sections)

    @property
    def sum_bytes(self) -> float:
        """The bytes of a sum of all gradients, as workers exchange it."""
        return self.parameter_bytes * self.exchanged

    def __post_init__(self) -> None:
        if self.version != VERSION:
            raise ValueError(f"version {self.version} of the format; this is version {VERSION}")
        if not self.sections:
            raise ValueError("there are no sections")
        sizes = self.microbatch_sizes
        if not sizes or list(sizes) != sorted(set(sizes)) or sizes[0] < 1:
            raise ValueError(f"microbatch_sizes {list(sizes)} must be positive and rising")
        _require("memory_bytes", self.memory_bytes, above_zero=True)
        for name in (
            "reserved_bytes",
            "sums",
            "copies",
            "exchanged",
            "apply_s_per_byte",
            "overhead_s",
            "send_s",
        ):
            _require(name, getattr(self, name))
        _require("host_bytes_per_s", self.host_bytes_per_s)
        for section in self.sections:
            lengths = {len(section.forward_s), len(section.backward_s)}
            lengths |= {len(times) for name in TIMES if (times := getattr(section, name))}
            if lengths != {len(sizes)}:
                raise ValueError(
                    f"section {section.name}: {sorted(lengths)} times for {len(sizes)} sizes"
                )
        for row, size in enumerate(sizes):
            if not any(s.forward_s[row] or s.backward_s[row] for s in self.sections):
                raise ValueError(f"a microbatch of {size} takes no time in any section")


def _require(name: str, value: float, *, above_zero: bool = False) -> None:
    if not math.isfinite(value) or value < 0 or (above_zero and value == 0):
        raise ValueError(f"{name} is {value}; it must be {'above' if above_zero else 'at least'} 0")


def render(profile: Profile) -> str:
    """Return the profile as text, one field and one section a line."""
    fields = msgspec.to_builtins(profile)
    sections = fields.pop("sections")
    lines = [f" {_text(name)}: {_text(value)}," for name, value in fields.items()]
    body = ",\n".join(f"  {_text(section)}" for section in sections)
    return "\n".join(["{", *lines, ' "sections": [', body, " ]", "}", ""])


def parse(text: str) -> Profile:
    """Return the profile in a text; raise ValueError with what is wrong with it."""
    version = msgspec.json.decode(text, type=dict[str, object]).get("version")
    if version != VERSION:
        raise ValueError(f"written in format {version}, this is format {VERSION}")
    return msgspec.json.decode(text, type=Profile)


def _text(value: object) -> str:
    return msgspec.json.encode(value).decode()
