"""How fast is the planner? The simulator, the partitioner, the plan book, all templates, a look-up.

Everything is compiled first and runs on one thread. Timed is the processor time that it takes, which is the wall
time on a core of its own: on a machine that is shared, wall time says how many others there are. Shown are
the least and the median of several rounds, and the least wall time beside them. Peers cannot be had in a form that runs here (see docs/planner.md) and are quoted as published:
Varuna's simulator 660 ms (its paper, P=36, 128 workers); PipeDream's optimizer 145 s and 174 s, over 500 s
for gnmt_large; Oobleck's planner 26 s.

    python benchmarks/planner/speed.py
"""

import statistics
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pipedream
from _greedy import uniform
from pipedream import Level

from agent.profile import Link, Network, Profile, Section
from orchestrator.planner import plan_book
from orchestrator.planner.search import Task
from orchestrator.planner.simulation import schedules, simulator

SHARED = Path(__file__).parents[3] / "shared" / "data" / "profiles" / "pipedream"


def blocks(count: int, sizes=(1, 2, 4)) -> Profile:
    """A model of equal blocks, about a large transformer on a 10 Gbit/s network."""
    link = Link(bandwidth_bytes_per_s=1.25e9, latency_s=1e-4, jitter_s=1e-4)
    section = {
        "forward_s": tuple(0.02 * (size + 0.5) / 4.5 for size in sizes),
        "backward_s": tuple(0.04 * (size + 0.5) / 4.5 for size in sizes),
        "activation_bytes": 6e6,
        "stash_bytes": 3e7,
        "parameter_bytes": 2.3e8,
        "optimizer_bytes": 1.4e9,
    }
    return Profile(
        model=f"{count} blocks",
        microbatch_sizes=sizes,
        network=Network(intra=link, inter=link, reduce_intra=link, reduce_inter=link),
        memory_bytes=80e9,
        sections=tuple(Section(name=f"b{i}", **section) for i in range(count)),
    )


class Timed(NamedTuple):
    least_s: float
    median_s: float
    wall_s: float


def timed(work, rounds: int) -> Timed:
    """After one round that compiles."""
    work()
    spent, walls = [], []
    for _ in range(rounds):
        wall_s, start_s = time.perf_counter(), time.process_time()
        work()
        spent.append(time.process_time() - start_s)
        walls.append(time.perf_counter() - wall_s)
    return Timed(min(spent), statistics.median(spent), min(walls))


def show(name: str, found: Timed, reach_s: float, peer: str = "") -> None:
    least, median, wall = (f"{s * 1e3:.3f} ms" if s < 0.1 else f"{s:.3f} s" for s in found)
    reach = f"{reach_s * 1e3:g} ms" if reach_s < 0.1 else f"{reach_s:g} s"
    met = "met" if found.median_s <= reach_s else "missed"
    print(f"{name:52} {least:>11} {median:>11} {wall:>11} {reach:>8} {met:7} {peer}", flush=True)


def simulated() -> None:
    for share, reach_s in ((683, 0.4e-3), (228, 0.15e-3)):
        for name, again in (("varuna", True), ("1f1b", False), ("1f1b", True), ("gpipe", True)):
            programs = schedules.pack(name, 36, share, recompute=(again,) * 36)
            wire = np.zeros((2, 36, 3))
            wire[:, :, 0], wire[:, :, 1] = 0.01, 0.001
            costs = simulator.costs(uniform(36, 0.04, 0.08), wire=wire)
            label = f"a step, P=36, {share} microbatches, {name}" + (
                " + recompute" if again else ""
            )
            peer = "Varuna: 660 ms" if share == 683 and name == "varuna" else ""
            show(label, timed(lambda p=programs, c=costs: simulator.run(p, c), 50), reach_s, peer)


def booked() -> None:
    for sizes in ((4,), (1, 2, 4)):
        profile, task = blocks(72, sizes), Task(global_batch=8192)
        label = f"book for 1..1024, 72 sections, sizes {','.join(map(str, sizes))}"
        show(label, timed(lambda p=profile, t=task: plan_book.book(p, t, 1024), 4), 1.0)
    made = plan_book.book(blocks(72, (4,)), Task(global_batch=8192), 1024)
    show("a look-up in the book", timed(lambda: made.at(777), 1000), 10e-6)
    print(made.at(128).because)


def templates() -> None:
    profile = blocks(34, (1,))
    for per_node in (1, 4):
        task = Task(
            global_batch=256,
            width_max=1,
            per_instance=per_node,
            schedules=("1f1b",),
            recompute=(False,),
        )

        def all_of_them(task=task, per_node=per_node):
            made = plan_book.book(profile, task, 16 * per_node)
            return [made.at(nodes * per_node) for nodes in range(4, 17)]

        label = f"templates, 34 layers, 4..16 nodes of {per_node}"
        show(label, timed(all_of_them, 5), 0.1, "Oobleck: 26 s")


def partitioned() -> None:
    if not SHARED.is_dir():
        print(f"the partitioner is not timed: the measured profiles are not here ({SHARED})")
        return
    levels = [
        Level(components=4, bandwidth_bytes_per_s=10e9),
        Level(components=4, bandwidth_bytes_per_s=1.25e9),
    ]
    peers = {
        "resnet101": (0.5, "PipeDream: 145 s"),
        "densenet121": (0.6, "PipeDream: 174 s"),
        "gnmt_large": (10.0, "PipeDream: over 500 s"),
    }
    for name, (reach_s, peer) in peers.items():
        graph = pipedream.load_pipedream(SHARED / f"{name}.txt")
        show(
            f"partition of {name}, 4 servers of 4",
            timed(lambda g=graph: pipedream.pipedream(pipedream.states_of(g), levels), 3),
            reach_s,
            peer,
        )
        found = pipedream.pipedream(pipedream.states_of(graph), levels)
        print(
            f"  {found.describe()}: {found.input_s * 1e3:.2f} ms an input, {found.states} states, "
            f"{'all' if found.exact else 'the narrowest'} of them"
        )


def main() -> None:
    print(f"{'processor time':52} {'least':>11} {'median':>11} {'wall':>11} {'reach':>8}")
    simulated()
    booked()
    templates()
    partitioned()


if __name__ == "__main__":
    main()
