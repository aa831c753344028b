"""How long from SIGKILL of a worker to the next committed step?

    python benchmarks/recovery.py [--kills 5] [--rounds 2]

Ours is the whole product on this machine: house, Redis, Ray, manager, keeper, two machines of the local
cloud with one worker each. Beside it `torchrun --standalone --max-restarts` runs the same model, data and
optimizer under DistributedDataParallel on two processes, and saves a checkpoint after every step, so that it loses
no committed step either. Rounds alternate; neither runs while the other is measured.
"""

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import redis

from agent.keys import JOURNAL, commit_key
from orchestrator.client import Client, NotRunning
from orchestrator.events import JobCancelled, JobSpec, JobSubmitted, ShutdownAsked
from orchestrator.paths import Places
from orchestrator.supervisor import processes

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "examples" / "gpt.py"
PATIENCE_S = 60.0
CALM_STEPS = 3
STUCK_MAX = 5  # of torchrun, per round

# A store of their own for the workers: with the agent's they meet an older incarnation's addresses and hang more often.
PEER_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}

CONFIG = """\
[manager]
state_dir = "state"
deployment = "recovery"

[budget]
total_usd = 10.0

[local]
seed = 11
"""

PEER = """\
import os, sys, time
log = open(sys.argv[1], "a", buffering=1)
rank = int(os.environ["RANK"])
print(time.time(), "started", rank, os.getpid(), file=log)
import contextlib, importlib.util, math
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

spec = importlib.util.spec_from_file_location("gpt", sys.argv[2])
gpt = importlib.util.module_from_spec(spec)
spec.loader.exec_module(gpt)
checkpoint = sys.argv[3]
torch.set_num_threads(1)
dist.init_process_group("gloo")
world = dist.get_world_size()
torch.manual_seed(0)
text = gpt.load_text()
model = gpt.GPT(96, 3, 4, 64, 0.1)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.1)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
begin = 0
if os.path.exists(checkpoint):
    state = torch.load(checkpoint)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    scheduler.load_state_dict(state["scheduler"])
    begin = state["step"]
ddp = DistributedDataParallel(model)
print(time.time(), "loaded", rank, os.getpid(), file=log)
for step in range(begin, 1_000_000):
    x, y = gpt.pairs(text, 32, 64, seed=step + 1)
    mine = list(zip(x.split(4), y.split(4)))[rank * 8 // world : (rank + 1) * 8 // world]
    for index, (inputs, targets) in enumerate(mine):
        with contextlib.nullcontext() if index + 1 == len(mine) else ddp.no_sync():
            (gpt.loss_of(ddp, inputs, targets) / len(mine)).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    if rank == 0:
        state = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
            "step": step + 1,
        }
        torch.save(state, checkpoint + ".part")
        os.replace(checkpoint + ".part", checkpoint)
        print(time.time(), "step", step + 1, os.getpid(), file=log)
"""

Phases = dict[str, float]


class Stuck(Exception):  # noqa: N818 - it names what happened
    """Somebody did not come back in time."""


def until(what: str, look: Callable[[], Any], pause_s: float = 0.02) -> Any:
    deadline_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline_s:
        if found := look():
            return found
        time.sleep(pause_s)
    raise Stuck(f"waited {PATIENCE_S:.0f} s in vain for {what}")


# --- ours ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def running_house(folder: Path) -> Iterator[tuple[Client, Places]]:
    (folder / "orchestrator.toml").write_text(CONFIG)
    places = Places(folder / "state")
    house = processes.start(
        [
            sys.executable,
            "-m",
            "orchestrator.supervisor",
            "--config",
            str(folder / "orchestrator.toml"),
        ],
        env={**os.environ, processes.MARK: places.identity},
        log=folder / "house.log",
    )

    def ready() -> Client | None:
        with contextlib.suppress(NotRunning):
            client = Client.connect(places.state_dir)
            return client if client.view() is not None else None
        return None

    try:
        client = until("the house to answer", ready)
        yield client, places
        client.post(ShutdownAsked(at_s=time.time(), by="the benchmark"))
        with contextlib.suppress(subprocess.TimeoutExpired):
            house.wait(40.0)
    finally:
        processes.end(house, 20.0)
        processes.sweep(places.identity)
        places.remove_links()


def our_workers(places: Places) -> list[int]:
    """The processes that run the script."""
    found = []
    for pid in processes.marked(places.identity):
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/comm").read_text().startswith("worker "):
                found.append(pid)
    return found


def our_round(client: Client, places: Places, kills: int, name: str) -> list[Phases]:
    store = redis.Redis.from_url(client.house().redis_url)
    sha = client.put_script(EXAMPLE.read_bytes())
    argv = ("--steps", "1000000", "--eval-every", "1000000")
    spec = JobSpec(job=name, script="gpt.py", script_sha=sha, argv=argv, slots_max=2, haste=1000.0)
    client.post(JobSubmitted(at_s=time.time(), spec=spec))

    def commit() -> tuple[int, int]:
        generation, step = store.hmget(commit_key(name), "generation", "step")
        return int(generation or -1), int(step or 0)

    def calm() -> bool:
        view = client.view()
        job = next((job for job in view.jobs if job.id == name), None) if view else None
        return job is not None and job.layout == "1x2" and len(our_workers(places)) == 2

    taken = []
    for _ in range(kills):
        until("two workers in one layout", calm, 0.1)
        _, step = commit()
        until("some steps", lambda step=step: commit()[1] >= step + CALM_STEPS)
        generation, _ = commit()
        victim = random.choice(our_workers(places))
        killed_s = time.time()
        os.kill(victim, signal.SIGKILL)
        until("the next commit", lambda g=generation: commit()[0] > g, 0.002)
        taken.append(our_phases(store, killed_s, time.time()))
        print(f"    ours: {taken[-1]['in all']:.2f} s", flush=True)
    client.post(JobCancelled(at_s=time.time(), job=name, by="the benchmark"))
    until("the job to end", lambda: _ended(client, name), 0.1)
    store.close()
    return taken


def _ended(client: Client, name: str) -> bool:
    view = client.view()
    return view is not None and all(j.ended_at_s is not None for j in view.jobs if j.id == name)


def our_phases(store: Any, killed_s: float, committed_s: float) -> Phases:
    """From the journal: when the loss was noticed, and when a new layout was decided and written down."""
    noticed_s = decided_s = committed_s
    for key, row in store.xrange(JOURNAL, min=int(killed_s * 1000)):
        event = json.loads(row[b"e"])
        if event.get("type") == "WorkerLost" and event["at_s"] >= killed_s:
            noticed_s = min(noticed_s, event["at_s"])
            if b'"Regroup"' in row[b"a"]:
                decided_s = min(decided_s, int(key.decode().partition("-")[0]) / 1000)
    return {
        "notice the loss": noticed_s - killed_s,
        "decide on a layout": decided_s - noticed_s,
        "regroup and do the step": committed_s - decided_s,
        "in all": committed_s - killed_s,
    }


# --- the peer ------------------------------------------------------------------------------------


def peer_round(folder: Path, kills: int) -> tuple[list[Phases], int]:
    """Recoveries, and how often torchrun did not recover at all: then it is started afresh."""
    taken: list[Phases] = []
    stuck = 0
    while len(taken) < kills and stuck < STUCK_MAX:
        with running_peer(folder) as log:
            try:
                while len(taken) < kills:
                    taken.append(peer_kill(log, len(taken)))
            except Stuck as error:
                stuck += 1
                tail = (folder / "torchrun.log").read_text().strip().splitlines()[-1:]
                print(f"    torchrun: {error}; its log ends with: {' '.join(tail)}", flush=True)
    return taken, stuck


@contextlib.contextmanager
def running_peer(folder: Path) -> Iterator[Path]:
    script, log = folder / "peer.py", folder / "peer.log"
    script.write_text(PEER)
    log.write_text("")
    (folder / "peer.pt").unlink(missing_ok=True)
    arguments = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    arguments += ["--nproc-per-node", "2", "--max-restarts", "1000", "--monitor-interval", "0.1"]
    arguments += [str(script), str(log), str(EXAMPLE), str(folder / "peer.pt")]
    with (folder / "torchrun.log").open("w") as sink:
        torchrun = subprocess.Popen(
            arguments,
            stdout=sink,
            stderr=sink,
            env={**os.environ, **PEER_ENVIRONMENT, "PYTHONPATH": str(ROOT)},
        )
    try:
        yield log
    finally:
        torchrun.kill()
        torchrun.wait()
        # Its workers have sessions of their own, and would go on beside whatever is measured next.
        for row in [line.split() for line in log.read_text().splitlines()]:
            if row[1:2] == ["started"]:
                end_worker(int(row[3]), script)


def end_worker(pid: int, script: Path) -> None:
    with contextlib.suppress(OSError):  # it is gone already
        if os.fsencode(script) in Path(f"/proc/{pid}/cmdline").read_bytes():
            os.kill(pid, signal.SIGKILL)


def peer_kill(log: Path, index: int) -> Phases:
    def rows(after_s: float, what: str) -> list[list[str]]:
        lines = [line.split() for line in log.read_text().splitlines() if line.count(" ") == 3]
        return [row for row in lines if row[1] == what and float(row[0]) > after_s]

    began_s = time.time()
    until("some steps", lambda: len(rows(began_s, "step")) >= CALM_STEPS)
    victim = [row for row in rows(0.0, "started") if row[2] == str(index % 2)][-1]
    killed_s = time.time()
    os.kill(int(victim[3]), signal.SIGKILL)
    until("the restart", lambda: len(rows(killed_s, "loaded")) >= 2, 0.01)
    loaded_s = float(rows(killed_s, "loaded")[-1][0])
    step = until("the next step", lambda: rows(loaded_s, "step"), 0.002)[0]
    started_s = float(rows(killed_s, "started")[-1][0])
    print(f"    torchrun: {float(step[0]) - killed_s:.2f} s", flush=True)
    return {
        "notice the loss, end the others, start new": started_s - killed_s,
        "import, connect, load": loaded_s - started_s,
        "do the step": float(step[0]) - loaded_s,
        "in all": float(step[0]) - killed_s,
    }


# --- the table -----------------------------------------------------------------------------------


def show(name: str, taken: list[Phases]) -> float:
    print(f"{name}, {len(taken)} kills")
    for phase in taken[0]:
        values = sorted(each[phase] for each in taken)
        low, high = values[len(values) // 10], values[-1 - len(values) // 10]
        median = statistics.median(values)
        print(f"    {phase:<44} {median:8.3f} s   ({low:.3f} .. {high:.3f})")
    return statistics.median(each["in all"] for each in taken)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=5, help="per round")
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="recovery-"))
    ours: list[Phases] = []
    peers: list[Phases] = []
    stuck = 0
    try:
        with running_house(folder) as (client, places):
            for index in range(options.rounds):
                ours += our_round(client, places, options.kills, f"gpt{index}")
                theirs, hung = peer_round(folder, options.kills)
                peers, stuck = peers + theirs, stuck + hung
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print("SIGKILL of a worker to the next committed step; median (10th .. 90th percentile)")
    mine = show("ours: the whole product, no step lost", ours)
    peer = show("torchrun --max-restarts, a checkpoint after every step", peers)
    print(
        f"    and {stuck} times torchrun did not recover within {PATIENCE_S:.0f} s (left out above)"
    )
    load = os.getloadavg()[0]
    print(f"ours is {peer / mine:.1f} times as fast ({os.cpu_count()} cores, load {load:.1f})")


if __name__ == "__main__":
    main()
