"""Profiles come in here: read, checked, refused in one line, imported from others.

PipeDream's text profiles hold a graph: one node a line (`node4 -- Conv2d(...) -- forward_compute_time=1.2,
..., parameter_size=6912.000`, in milliseconds and bytes), then tab, `node4 -- node5` for every edge.
"""

import re
from pathlib import Path

import msgspec

from agent.profile import Link, Network, Profile, Section
from agent.profile import parse as read
from orchestrator.morph.errors import ProfileError

BYTES_MAX = 64 * 1024 * 1024
NODES_MAX = 20_000
LOOKED_AT = 4096
AGAIN = "calibrate again, or name another profile"


def load(path: Path) -> Profile:
    """The profile in a file; one line says what is wrong with it and what to do."""
    return parse(_read(path), str(path))


def _read(path: Path) -> str:
    try:
        if path.stat().st_size > BYTES_MAX:
            raise ProfileError(f"{path}: larger than {BYTES_MAX >> 20} MiB, no profile; {AGAIN}")
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ProfileError(f"{path}: there is no such profile; calibrate first") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ProfileError(f"{path}: cannot be read ({error}); {AGAIN}") from None


def parse(text: str, source: str = "profile") -> Profile:
    """A profile from its text."""
    try:
        return read(text)
    except ValueError as error:  # msgspec's errors are of this kind, too
        reason = str(error).splitlines()[0]
        raise ProfileError(f"{source}: no usable profile, {reason}; {AGAIN}") from None


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """A layer of a graph, as PipeDream profiles it."""

    name: str
    kind: str
    forward_s: float
    backward_s: float
    activation_bytes: float
    parameter_bytes: float


class Graph(msgspec.Struct, frozen=True, kw_only=True):
    """Layers in topological order (as far as the file's own order is one) and who feeds whom."""

    nodes: tuple[Node, ...]
    edges: tuple[tuple[int, int], ...]


_NODE = re.compile(
    r"(?P<name>\S+) -- (?P<kind>.*) -- forward_compute_time=(?P<forward>[^,]+), "
    r"backward_compute_time=(?P<backward>[^,]+), activation_size=(?P<activation>\[[^\]]*\]|[^,]+), "
    r"parameter_size=(?P<parameter>\S+)"
)
_EDGE = re.compile(r"\t(\S+) -- (\S+)")


def is_pipedream(path: Path) -> bool:
    """Whether a file begins as PipeDream's text does."""
    try:
        with path.open(encoding="utf-8") as lines:
            return " -- forward_compute_time=" in lines.read(LOOKED_AT)
    except (OSError, UnicodeDecodeError):
        return False


def load_pipedream(path: Path) -> Graph:
    return parse_pipedream(_read(path), str(path))


def parse_pipedream(text: str, source: str = "profile") -> Graph:
    """The graph of a PipeDream profile, its inputs left out: they cost nothing and are always there."""
    nodes: dict[str, Node] = {}
    edges: list[tuple[str, str]] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        edge, node = _EDGE.fullmatch(line), _NODE.fullmatch(line)
        if edge is not None:
            edges.append((edge[1], edge[2]))
        elif node is not None and node["name"] in nodes:
            raise ProfileError(f"{source}, line {number}: {node['name']} is there already; {AGAIN}")
        elif node is not None:
            nodes[node["name"]] = _node(node, f"{source}, line {number}")
        else:
            raise ProfileError(f"{source}, line {number}: no node and no edge; {AGAIN}")
    if not nodes or len(nodes) > NODES_MAX:
        raise ProfileError(f"{source}: {len(nodes)} layers, no profile; {AGAIN}")
    for edge_ends in edges:
        for end in edge_ends:
            if end not in nodes:
                raise ProfileError(f"{source}: an edge names {end}, which is not there; {AGAIN}")
    apart = _apart(nodes, edges)
    if apart:
        raise ProfileError(
            f"{source}: no edge joins {apart} to the other layers: some are missing; {AGAIN}"
        )
    return _ordered(nodes, edges, source)


def _apart(nodes: dict[str, Node], edges: list[tuple[str, str]]) -> str:
    """The first layer that nothing joins to the first one: a file that was cut off ends within its edges."""
    beside: dict[str, list[str]] = {name: [] for name in nodes}
    for before, behind in edges:
        beside[before].append(behind)
        beside[behind].append(before)
    reached = dict.fromkeys([next(iter(nodes))])
    found = list(reached)
    for name in found:  # grows as it is read
        new = [other for other in beside[name] if other not in reached]
        reached.update(dict.fromkeys(new))
        found += dict.fromkeys(new)
    return next((name for name in nodes if name not in reached), "")


def _node(found: re.Match[str], where: str) -> Node:
    try:
        activation = sum(
            float(part) for part in re.split(r"[;,\s]+", found["activation"].strip("[]")) if part
        )
        node = Node(
            name=found["name"],
            kind=found["kind"],
            forward_s=float(found["forward"]) / 1e3,
            backward_s=float(found["backward"]) / 1e3,
            activation_bytes=activation,
            parameter_bytes=float(found["parameter"]),
        )
    except ValueError as error:
        raise ProfileError(f"{where}: {error}; {AGAIN}") from None
    costs = (node.forward_s, node.backward_s, node.activation_bytes, node.parameter_bytes)
    if not all(0 <= cost < float("inf") for cost in costs):
        raise ProfileError(f"{where}: {node.name} has a cost below 0 or without bound; {AGAIN}")
    return node


def _ordered(nodes: dict[str, Node], edges: list[tuple[str, str]], source: str) -> Graph:
    """Kahn's order, first come first served; then inputs and loose ends that hold nothing are dropped."""
    after: dict[str, list[str]] = {name: [] for name in nodes}
    waiting = dict.fromkeys(nodes, 0)
    for before, behind in dict.fromkeys(edges):
        after[before].append(behind)
        waiting[behind] += 1
    fed = {behind for _, behind in edges}
    ready = [name for name, count in waiting.items() if count == 0]
    order = []
    for name in ready:  # grows as it is read
        order.append(name)
        for behind in after[name]:
            waiting[behind] -= 1
            if waiting[behind] == 0:
                ready.append(behind)
    if len(order) < len(nodes):
        raise ProfileError(f"{source}: its edges run in a circle; {AGAIN}")
    kept = [
        name
        for name in order
        if not (name not in fed and nodes[name].kind.startswith("Input"))
        and not (not after[name] and nodes[name].kind.startswith("__getitem__"))
    ]
    index = {name: i for i, name in enumerate(kept)}
    pairs = sorted(
        (index[a], index[b]) for a, b in dict.fromkeys(edges) if a in index and b in index
    )
    return Graph(nodes=tuple(nodes[name] for name in kept), edges=tuple(pairs))


def chain(
    graph: Graph, *, model: str, samples: int, network: Network, memory_bytes: float
) -> Profile:
    """A graph as sections in its topological order, measured at one microbatch size.

    What crosses a cut is what any earlier layer still has to say to a later one.
    """
    sections = []
    last_use = [0] * len(graph.nodes)
    for before, behind in graph.edges:
        last_use[before] = max(last_use[before], behind)
    for i, node in enumerate(graph.nodes):
        crossing = sum(graph.nodes[j].activation_bytes for j in range(i + 1) if last_use[j] > i)
        sections.append(
            Section(
                name=f"{node.name} {node.kind}"[:80],
                forward_s=(node.forward_s,),
                backward_s=(node.backward_s,),
                activation_bytes=crossing / samples,
                stash_bytes=node.activation_bytes / samples,
                parameter_bytes=node.parameter_bytes,
            )
        )
    try:
        return Profile(
            model=model,
            microbatch_sizes=(samples,),
            network=network,
            memory_bytes=memory_bytes,
            sections=tuple(sections),
        )
    except ValueError as error:
        raise ProfileError(f"{model}: no usable profile, {error}; {AGAIN}") from None


def ethernet(gigabit_per_s: float, *, latency_s: float = 50e-6, per_instance: float = 1) -> Network:
    """A flat network of this speed; `per_instance` is how many times faster the inside of an instance is."""
    outer = Link(bandwidth_bytes_per_s=gigabit_per_s * 1e9 / 8, latency_s=latency_s)
    inner = Link(
        bandwidth_bytes_per_s=outer.bandwidth_bytes_per_s * per_instance,
        latency_s=latency_s / per_instance,
    )
    return Network(intra=inner, inter=outer, reduce_intra=inner, reduce_inter=outer)
