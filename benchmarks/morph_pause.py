"""How long does a planned change of layout hold up training? Moves the state between P x D and P' x D' on loopback.

    python benchmarks/morph_pause.py [--mib 100] [--rounds 3] [--shapes 1x2-1x3,2x2-1x4]

The model's parameters and optimizer state make up the bytes asked for. A shape is P x D, the depth first. All changes
are planned: newcomers are started, have imported, built their model and wait for the boundary. The pause is the time from
the last commit under the old layout to the first under the new one, less one undisturbed step of the new one. The
bandwidth is that of one TCP connection on loopback, with the checksums that frames have, measured before.

Beside it stands what the cores of this machine need at least: the processor time of all workers and of the keeper between
those two commits, less that of an undisturbed step, shared out evenly. Other work on the machine lengthens the pause;
this it does not, but for what it takes from the caches.
"""

import argparse
import itertools
import os
import socket
import statistics
import threading
import time
from typing import NamedTuple

import numpy as np
from _crew import KEEPER, Commits, Crew, crew_of, machine, spread, until

from agent.messages import BackupHeld
from agent.net.wire import Connection
from agent.protocol import Part

CALM_STEPS = 8
PATIENCE_S = 240.0  # a step of 100 MB takes long on a machine with other work
BOUND_S = 0.3
PROBE_BYTES = 1 << 26
PROBES = 5
WIDTH = 512
MODEL = """
import sys
import torch
from torch import nn
from orchestrator import Session
torch.manual_seed(0)
width, layers = int(sys.argv[1]), int(sys.argv[2])
model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
data = torch.randn(16, width, generator=torch.Generator().manual_seed(1))
session = Session(model, optimizer, microbatches=4)
for step in session.steps(1_000_000):
    session.backward(lambda x: (model(x) - x).square().mean(), data.chunk(4))
    optimizer.step()
"""


def bandwidth() -> float:
    """Bytes per second from one connection to another, checksums included."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = Connection(socket.create_connection(listener.getsockname()))
        far = Connection(listener.accept()[0])
    body = np.zeros(PROBE_BYTES, dtype=np.uint8).data
    landing = np.zeros(PROBE_BYTES, dtype=np.uint8).data
    rates = []
    for number in range(PROBES):
        message = Part(generation=0, step=number, tag="probe")
        sender = threading.Thread(target=near.send, args=(message, body))
        begun_s = time.perf_counter()
        sender.start()
        far.receive(lambda *_: landing)
        rates.append(PROBE_BYTES / (time.perf_counter() - begun_s))
        sender.join()
    near.close()
    far.close()
    return statistics.median(rates)


def parse(text: str) -> tuple[int, int]:
    depth, _, width = text.partition("x")
    return int(depth), int(width)


class Taken(NamedTuple):
    """Of one change, in seconds: the pause, and the processor time beyond a step."""

    pause_s: float
    newcomers_s: float
    others_s: float

    @property
    def least_s(self) -> float:
        return (self.newcomers_s + self.others_s) / (os.cpu_count() or 1)


def change(crew: Crew, commits: Commits, begin: tuple[int, int], target: tuple[int, int]) -> Taken:
    reshape(crew, commits, *begin)
    before = set(crew.ready)
    reshape(crew, commits, *target)
    seen = list(commits.seen)
    first = next(i for i, one in enumerate(seen) if one.generation >= crew.generation)
    calm = list(itertools.pairwise(seen[first : first + CALM_STEPS + 1]))
    step_s = statistics.median(b.at_s - a.at_s for a, b in calm)

    def beyond(workers: set[str]) -> float:
        last, begun = (
            sum(one.had_s.get(w, 0.0) for w in workers) for one in seen[first - 1 : first + 1]
        )
        steps = [sum(b.had_s[w] - a.had_s[w] for w in workers) for a, b in calm]
        return begun - last - statistics.median(steps)

    came = set(crew.ready) - before
    return Taken(
        seen[first].at_s - seen[first - 1].at_s - step_s,
        beyond(came),
        beyond({*crew.ready, KEEPER} - came),
    )


def reshape(crew: Crew, commits: Commits, depth: int, width: int) -> None:
    """Who is missing is ready before anything changes; who is over leaves with the change."""
    needed = depth * width
    crew.settle = needed + 1  # of itself the manager asks for nothing
    if len(crew.ready) < needed:
        crew.start(needed - len(crew.ready))
        until("the newcomers", lambda: len(crew.ready) == needed)
    over = crew.ready[needed:]
    del crew.ready[needed:]
    crew.shape(depth, "boundary")
    generation = crew.generation
    until(
        f"some steps as {depth}x{width}",
        lambda: (
            len(commits.seen) > CALM_STEPS
            and commits.seen[-CALM_STEPS - 1].generation >= generation
        ),
        PATIENCE_S,
    )
    if over:
        crew.kill(*over)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=100, help="of state")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--shapes", default="1x1-1x2,1x2-1x1,1x2-1x3,2x1-1x2,1x2-2x1,2x1-2x2")
    options = parser.parse_args()
    layers = max(2, round((options.mib << 20) / (3 * 4 * (WIDTH + 1) * WIDTH)))
    changes = [tuple(map(parse, one.split("-"))) for one in options.shapes.split(",")]
    rate = bandwidth()
    taken: dict[int, list[Taken]] = {index: [] for index in range(len(changes))}
    with crew_of() as crew:
        commits = Commits(crew, clocked=True)
        crew.begin(1, MODEL, str(WIDTH), str(layers))
        until("some steps", lambda: crew.step >= CALM_STEPS, PATIENCE_S)
        for _ in range(options.rounds):
            for index, (begin, target) in enumerate(changes):
                taken[index].append(change(crew, commits, begin, target))
        state_bytes = max(report.state_bytes for report in crew.of(BackupHeld))
        commits.close()
    print(f"{state_bytes / 1e6:.0f} MB of state, {rate / 1e9:.2f} GB/s on loopback; pauses in ms")
    for index, (begin, target) in enumerate(changes):
        newcomers = max(0, target[0] * target[1] - begin[0] * begin[1])
        moved = newcomers * state_bytes
        bound_s = BOUND_S + moved / rate
        name = f"{begin[0]}x{begin[1]} -> {target[0]}x{target[1]}"
        pauses = [one.pause_s for one in taken[index]]
        median_s = statistics.median(pauses)
        parts = [statistics.median(one) * 1e3 for one in zip(*taken[index], strict=True)]
        least = statistics.median(one.least_s for one in taken[index]) * 1e3
        verdict = "within" if median_s <= bound_s else "beyond"
        print(
            f"    {name:<14} {spread(pauses):>30}   {moved / 1e6:6.0f} MB moved, "
            f"{verdict} {bound_s * 1e3:.0f}; the cores need {least:.0f} (processor time of newcomers "
            f"{parts[1]:.0f}, of others {parts[2]:.0f})"
        )
    print(machine())


if __name__ == "__main__":
    main()
