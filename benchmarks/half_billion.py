"""Does a GPT of half a billion parameters train in four processes of this machine, and as predicted?

    python benchmarks/half_billion.py [--steps 12] [--layers 24] [--width 1280] [--microbatches 2] [--length 128]

Four workers in a row, each of which keeps its own layers only, with `exchange="bfloat16"`; a keeper, Redis, and this
process as the manager. What is predicted is what the model takes, without the libraries (about 0.2 GiB of a worker). Every half second the memory of all of these is looked at: what is shared by processes counts once
(`Pss`). Predicted is by the planner from what the workers measured themselves (`JobProfiled`), for the very cuts.

With two microbatches at most two of the four compute at once, so this machine's two cores do not queue.
"""

import argparse
import contextlib
import itertools
import statistics
import threading
from pathlib import Path

from _crew import Commits, Crew, crew_of, machine, spread, until

from agent.messages import JobProfiled, WorkerFailed
from orchestrator.planner import plan_book
from orchestrator.planner.plans import LayoutPlan
from orchestrator.planner.search import Task

SCRIPT = Path(__file__).with_name("half_billion_gpt.py")
DEPTH = 4
GIB = 1 << 30
PATIENCE_S = 1800.0


def pss(pid: int) -> int:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) << 10
    return 0


class Memory:
    """The most that all processes of a crew have had at one moment, and each for itself."""

    def __init__(self, crew: Crew) -> None:
        self._crew, self._over = crew, threading.Event()
        self.most: dict[str, int] = {}
        self.total, self.then = 0, dict[str, int]()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._over.wait(0.5):
            crew = self._crew
            pids = {**crew.pids, "keeper": crew.keeper.process.pid, "redis": crew.redis.process.pid}
            now = {name: pss(pid) for name, pid in pids.items()}
            for name, size in now.items():
                self.most[name] = max(self.most.get(name, 0), size)
            if sum(now.values()) > self.total:
                self.total, self.then = sum(now.values()), now

    def close(self) -> None:
        self._over.set()
        self._thread.join()


def planned(crew: Crew, microbatches: int) -> LayoutPlan:
    """The planner's chain of four, by what the workers have measured."""
    profile = until("the profile", lambda: crew.of(JobProfiled), PATIENCE_S)[-1].profile
    task = Task(
        global_batch=microbatches * profile.microbatch_sizes[0],
        schedules=("1f1b",),
        recompute=(False,),
        depth_min=DEPTH,
        depth_max=DEPTH,
    )
    plan = plan_book.best(profile, task, DEPTH)
    afters = [section.after for section in profile.sections]
    crew.shape(DEPTH, cuts=tuple(afters[first - 1] for first in plan.firsts[1:]))
    return plan


def reach(crew: Crew, step: int, memory: Memory) -> None:
    """Show each step on the way, because they are slow."""
    for at in range(crew.step + 1, step + 1):
        until(f"step {at}", lambda at=at: _well(crew).step >= at, PATIENCE_S)
        held = " ".join(f"{name} {size / GIB:.2f}" for name, size in memory.then.items())
        print(f"step {at}; GiB at most {memory.total / GIB:.2f}: {held}", flush=True)


def _well(crew: Crew) -> Crew:
    failed = crew.of(WorkerFailed)
    assert not failed, failed[0].detail
    return crew


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=1280)
    parser.add_argument("--microbatches", type=int, default=2)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--exchange", default="bfloat16")
    options = parser.parse_args()
    shape = (1_000_000, options.layers, options.width, options.microbatches, options.length)
    with crew_of() as crew:
        crew.depth, crew.owned = DEPTH, True
        commits, memory = Commits(crew), Memory(crew)
        script = SCRIPT.read_text()
        crew.begin(DEPTH, script, *map(str, shape), options.exchange, sums="auto")
        reach(crew, 2, memory)
        plan = planned(crew, options.microbatches)
        reach(crew, crew.step + 3, memory)  # in the new layout, with optimizer state moved to it
        first, memory.most = len(commits.seen), {}
        reach(crew, crew.step + options.steps, memory)
        steps_s = [b.at_s - a.at_s for a, b in itertools.pairwise(commits.seen[first:])]
        held = [memory.most[worker] for worker in crew.ready]
        commits.close()
        memory.close()
    print(f"cut before sections {plan.firsts[1:]} of {plan.sections}")
    median_s = statistics.median(steps_s)
    print(f"a step: predicted {plan.step_s:.2f} s, measured {spread(steps_s, 1.0)} s, ", end="")
    print(f"{plan.step_s / median_s - 1:+.1%}")
    for worker, (predicted, found) in enumerate(zip(plan.memory_bytes, held, strict=True), 1):
        print(f"worker {worker}: predicted {predicted / GIB:.2f} GiB, ", end="")
        print(f"measured {found / GIB:.2f} GiB, {predicted / found - 1:+.1%}")
    print(f"all processes at one moment: {memory.total / GIB:.2f} GiB (16 asked)")
    print(machine())


if __name__ == "__main__":
    main()
