"""How long from SIGKILL of one worker to the next committed step, when nothing but the training side runs?

    python benchmarks/recovery_crew.py [--kills 20] [--stops 3] [--peer-kills 3] [--torchft PYTHON]

Ours: worker processes, a keeper, Redis, and this process as the manager. Without a spare the survivor of two goes on
alone; with a warm one it takes the place of the lost one. What is shown is the time beyond one undisturbed
step. A commit that was on its way when the kill came does not count: it has to be one of the new layout.

Beside it the same small model under torchrun (two nodes with one process each; store sharing off, the rendezvous pinned
to the node that survives, last_call_timeout=1) and under torchft 0.2.0, its allreduce called by hand since its DDP
wrapper takes survivors with it. torchft needs an interpreter of its own, since it is none of our dependencies:

    python -m venv /somewhere && /somewhere/bin/pip install torch torchft==0.2.0
"""

import argparse
import contextlib
import itertools
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from _crew import Commits, Crew, crew_of, machine, spread, until

from agent.messages import Regrouped, Rewound, WorkerLost

CALM_STEPS = 10
PEER_PATIENCE_S = 90.0

MODEL = """
import torch
torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
data = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
"""

OURS = """
from orchestrator import Session
session = Session(model, optimizer, microbatches=2)
for step in session.steps(1_000_000):
    session.backward(lambda x: (model(x) - x).square().mean(), data.chunk(2))
    optimizer.step()
"""

# Each peer writes a line for each step that it has committed; a checkpoint after each, as ours loses none.
TORCHRUN = """
import os, sys, time
log = open(sys.argv[1], "a", buffering=1)
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
print(time.monotonic(), "began", world, os.getpid(), file=log)
if os.path.exists(sys.argv[2]):
    state = torch.load(sys.argv[2])
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
ddp = DistributedDataParallel(model)
while True:
    x = data.chunk(world)[rank]
    (ddp(x) - x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, sys.argv[2] + ".part")
        os.replace(sys.argv[2] + ".part", sys.argv[2])
    print(time.monotonic(), "step", world, os.getpid(), file=log)
"""

TORCHFT = """
import os, sys, time
from datetime import timedelta
log, name = open(sys.argv[1], "a", buffering=1), sys.argv[2]
import torch.distributed as dist
from torchft.manager import Manager
from torchft.process_group import ProcessGroupGloo
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
def load(state):
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
def save():
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
manager = Manager(
    pg=ProcessGroupGloo(timeout=timedelta(seconds=5)), load_state_dict=load, state_dict=save, min_replica_size=1,
    rank=0, world_size=1, store_addr="127.0.0.1", store_port=store.port, replica_id=name, hostname="127.0.0.1",
    lighthouse_addr=os.environ["TORCHFT_LIGHTHOUSE"], timeout=timedelta(seconds=10),
)
print(time.monotonic(), "began", name, os.getpid(), file=log)
while True:
    optimizer.zero_grad()
    manager.start_quorum()
    (model(data) - data).square().mean().backward()
    works = [manager.allreduce(p.grad) for p in model.parameters()]
    for work in works:
        work.wait()
    if manager.should_commit():
        optimizer.step()
        print(time.monotonic(), "step", manager.num_participants(), os.getpid(), file=log)
"""

LIGHTHOUSE = """
import sys
from torchft._torchft import LighthouseServer
server = LighthouseServer(
    bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=int(sys.argv[1]), heartbeat_timeout_ms=int(sys.argv[1]))
print(server.address(), flush=True)
sys.stdin.read()
"""


# --- ours ----------------------------------------------------------------------------------------


def calm(crew: Crew, commits: Commits, workers: int) -> None:
    """All are there, and their layout has made some steps."""
    until("the workers to be ready", lambda: len(crew.ready) == workers)
    seen = len(commits.seen)
    until(
        "some steps under the newest layout",
        lambda: (
            len(commits.seen) >= seen + CALM_STEPS
            and commits.seen[-CALM_STEPS].generation == crew.generation
        ),
    )


def disturb(crew: Crew, commits: Commits, victim: str, how: signal.Signals) -> float:
    """Seconds from the signal to the first commit under a new layout, beyond an undisturbed step."""
    step_s = commits.step_s(CALM_STEPS)
    generation = crew.generation
    at_s = time.monotonic()
    crew.kill(victim, how=how)
    commit = until("a commit of the new layout", lambda: commits.after(generation))
    if how == signal.SIGSTOP:
        crew.kill(victim)
    return commit.at_s - at_s - step_s


def ours(kills: int, stops: int, workers: int) -> tuple[list[float], list[float]]:
    """Beyond a step: after kills, and after silent hangs."""
    killed, stopped = [], []
    with crew_of() as crew:
        commits = Commits(crew)
        crew.begin(workers, MODEL + OURS)
        for number in range(kills + stops):
            calm(crew, commits, workers)
            # Of the layout, never the spare; the one that leads in turn with the other.
            victim = crew.ready[number % 2]
            if number < kills:
                killed.append(disturb(crew, commits, victim, signal.SIGKILL))
            else:
                stopped.append(disturb(crew, commits, victim, signal.SIGSTOP))
            crew.start(1)
        assert not crew.of(Rewound), "a committed step was lost"
        assert len(crew.of(WorkerLost)) == kills + stops, (
            "others were lost than those that were killed"
        )
        pauses = [report.pause_s for report in crew.of(Regrouped)[1:]]
        print(f"    the keeper's own word, joins included: {spread(pauses)} ms", flush=True)
        commits.close()
    return killed, stopped


# --- peers ---------------------------------------------------------------------------------------


class Rows:
    """What a peer's workers have written: when, what, under which world, and by which process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.write_text("")

    def of(self, what: str, after_s: float = 0.0) -> list[list[str]]:
        lines = [
            line.split() for line in self.path.read_text().splitlines() if line.count(" ") == 3
        ]
        return [row for row in lines if row[1] == what and float(row[0]) > after_s]

    def pids(self) -> set[int]:
        return {int(row[3]) for row in self.of("began")}

    def step_s(self, pid: int) -> float:
        at_s = [float(row[0]) for row in self.of("step") if row[3] == str(pid)][-CALM_STEPS:]
        return statistics.median(b - a for a, b in itertools.pairwise(at_s))


def wait(what: str, look: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + PEER_PATIENCE_S
    while not look():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"waited {PEER_PATIENCE_S:.0f} s in vain for {what}")
        time.sleep(0.05)


def together(rows: Rows, after_s: float) -> bool:
    """Two processes step in a world of two."""
    recent = [row for row in rows.of("step", after_s) if row[2] == "2"]
    return len({row[3] for row in recent}) == 2 and len(recent) >= 2 * CALM_STEPS


def end(process: subprocess.Popen) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def end_pid(pid: int, script: Path) -> None:
    """torchrun's workers have process groups of their own."""
    with contextlib.suppress(OSError):  # it is gone already
        if os.fsencode(script) in Path(f"/proc/{pid}/cmdline").read_bytes():
            os.kill(pid, signal.SIGKILL)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


def start(arguments: list[str], log: Path, **environment: str) -> subprocess.Popen:
    with log.open("a") as sink:
        return subprocess.Popen(
            arguments,
            stdout=sink,
            stderr=sink,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        )


def torchrun(folder: Path, kills: int) -> list[float | None]:
    """The node that does not host the rendezvous is killed, its agent and its worker at once."""
    script, taken = folder / "torchrun_peer.py", []
    script.write_text(MODEL + TORCHRUN)
    for number in range(kills):
        rows = Rows(folder / "torchrun.steps")
        port, weights = free_port(), folder / f"torchrun{number}.pt"

        def node(
            host: int, port: int = port, rows: Rows = rows, weights: Path = weights
        ) -> subprocess.Popen:
            conf = f"is_host={host},last_call_timeout=1"
            arguments = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:2"]
            arguments += ["--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-id", "bench"]
            arguments += ["--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-conf", conf]
            arguments += ["--max-restarts", "100", "--monitor-interval", "0.1"]
            arguments += [str(script), str(rows.path), str(weights)]
            return start(arguments, folder / "torchrun.log", TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")

        nodes = [node(1), node(0)]
        try:
            taken.append(_torchrun_kill(rows, nodes[1], script))
        except TimeoutError as error:
            taken.append(None)
            print(f"    torchrun: {error}", flush=True)
        finally:
            for process in nodes:
                end(process)
            for pid in rows.pids():
                end_pid(pid, script)
    return taken


def _torchrun_kill(rows: Rows, victim: subprocess.Popen, script: Path) -> float:
    wait("torchrun's two nodes", lambda: together(rows, 0.0))
    children = Path(f"/proc/{victim.pid}/task/{victim.pid}/children").read_text().split()
    worker = next(pid for pid in rows.pids() if str(pid) in children)
    step_s = rows.step_s(worker)
    at_s = time.monotonic()
    end(victim)
    end_pid(worker, script)
    wait("torchrun's next step", lambda: [row for row in rows.of("step", at_s) if row[2] == "1"])
    (first, *_) = [row for row in rows.of("step", at_s) if row[2] == "1"]
    taken_s = float(first[0]) - at_s - step_s
    print(f"    torchrun: {taken_s:.2f} s", flush=True)
    return taken_s


@contextlib.contextmanager
def lighthouse(python: str, heartbeat_ms: int) -> Iterator[str]:
    process = subprocess.Popen(
        [python, "-c", LIGHTHOUSE, str(heartbeat_ms)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process.stdout.readline().strip()
    finally:
        end(process)
        process.stdin.close()
        process.stdout.close()


def torchft(folder: Path, python: str, heartbeat_ms: int, kills: int) -> list[float | None]:
    script, taken = folder / "torchft_peer.py", []
    script.write_text(MODEL + TORCHFT)
    for number in range(kills):
        rows = Rows(folder / "torchft.steps")
        with lighthouse(python, heartbeat_ms) as address:
            groups = [
                start(
                    [python, str(script), str(rows.path), f"{number}.{index}"],
                    folder / "torchft.log",
                    TORCHFT_LIGHTHOUSE=address,
                )
                for index in range(2)
            ]
            try:
                wait("torchft's two groups", lambda rows=rows: together(rows, 0.0))
                step_s = rows.step_s(groups[0].pid)
                at_s = time.monotonic()
                end(groups[1])
                wait(
                    "torchft's next step",
                    lambda rows=rows, at_s=at_s: [
                        row for row in rows.of("step", at_s) if row[2] == "1"
                    ],
                )
                first = next(row for row in rows.of("step", at_s) if row[2] == "1")
                taken.append(float(first[0]) - at_s - step_s)
                print(f"    torchft, heartbeat {heartbeat_ms} ms: {taken[-1]:.2f} s", flush=True)
            except TimeoutError as error:
                taken.append(None)
                print(f"    torchft: {error}", flush=True)
            finally:
                for process in groups:
                    end(process)
    return taken


def has_torchft(python: str) -> bool:
    done = subprocess.run([python, "-c", "import torchft"], capture_output=True, check=False)
    return done.returncode == 0


# --- the table -----------------------------------------------------------------------------------


def show(name: str, taken: list[float | None]) -> float:
    good = [one for one in taken if one is not None]
    if not good:
        print(f"{name:<52} none of {len(taken)} recovered")
        return float("nan")
    print(f"{name:<52} {spread(good):>30} ms   {len(good)} of {len(taken)}")
    return statistics.median(good)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20, help="of ours, in each of two settings")
    parser.add_argument("--stops", type=int, default=3, help="silent hangs of ours")
    parser.add_argument("--peer-kills", type=int, default=2, help="of each peer and setting")
    parser.add_argument("--torchft", default=sys.executable, help="an interpreter that has torchft")
    options = parser.parse_args()
    alone, silent = ours(options.kills, options.stops, 2)
    spare, _ = ours(options.kills, 0, 3)
    with tempfile.TemporaryDirectory(prefix="recovery-") as name:
        folder = Path(name)
        theirs = {"torchrun, last_call_timeout=1": torchrun(folder, options.peer_kills)}
        if has_torchft(options.torchft):
            for heartbeat_ms in (1000, 300):
                theirs[f"torchft 0.2.0, heartbeat {heartbeat_ms} ms"] = torchft(
                    folder, options.torchft, heartbeat_ms, options.peer_kills
                )
        else:
            print("    torchft is left out: not installed (see --help and the head of this file)")
    print(
        "from SIGKILL to the next committed step, beyond one undisturbed step; median (10th .. 90th)"
    )
    mine = max(
        show("ours, the survivor goes on", alone), show("ours, a warm spare takes over", spare)
    )
    if silent:
        show("ours, SIGSTOP: a silent hang", silent)
    for name, taken in theirs.items():
        print(f"    ours is {show(name, taken) / mine:.0f} times as fast")
    print(machine())


if __name__ == "__main__":
    main()
