"""What do sharded snapshots cost a step, and what does a loss of everything cost with them?

    sudo python benchmarks/snapshots.py [--mbit 400] [--width 820] [--windows 4] [--kills 50]

Two workers have a network of so much each: a namespace with a token bucket on what it sends. The store is a small object store outside of both. In turns,
snapshots follow one another without a pause at a tenth of that link, and there are none; the model computes as an accelerator does, beside the processor.
The same model is trained by DistributedDataParallel in the same namespaces, which saves its state with torch.distributed.checkpoint as often (into a
folder, which is no way over the link at all), with `save` and with `async_save`.

Then, on loopback, both workers are killed again and again at random moments, and the final weights are compared with those of one process.
"""

import argparse
import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from _crew import ROOT, Commits, Crew, Nursery, RedisProcess, machine, spread, until

sys.path.insert(0, str(ROOT / "tests" / "store"))

import s3_server
from crews import SECRET, connect, played_alone

from agent.keeper.keeper import Keeper
from agent.keeper.storage import sharding
from agent.keeper.storage.offsite import Storage
from agent.keeper.storage.vault import Place, Vault
from agent.messages import BackupHeld, Rewound

BRIDGES = itertools.count()
NET, HERE = "10.203.78", "10.203.78.1"
BODY = """
def model_of(width):
    torch.manual_seed(0)
    torch.set_num_threads(1)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(3)))

def loss_of(model, x, seconds):
    time.sleep(seconds)  # as the host waits for an accelerator
    return (model(x) - x).square().mean()
"""
OURS = (
    "import json, sys, time\nimport torch\nfrom torch import nn\nfrom orchestrator import Session\n"
    + BODY
    + """
width, seconds = json.loads(sys.argv[1])
model = model_of(width)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
session = Session(model, optimizer, microbatches=4, deterministic=False)
data = torch.randn(16, width, generator=torch.Generator().manual_seed(1)).chunk(4)
for step in session.steps(1_000_000):
    session.backward(lambda x: loss_of(model, x, seconds), data)
    optimizer.step()
"""
)
TORCH = (
    """
import json, sys, time
import torch
from torch import nn
from torch import distributed as dist
from torch.distributed import checkpoint as dcp
from torch.nn.parallel import DistributedDataParallel
"""
    + BODY
    + """
store, rank, settings, folder = sys.argv[1:]
rank, (width, seconds, windows, steps, every) = int(rank), json.loads(settings)
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
group = dist.new_group()  # what saves beside a step must not meet its gradients
bare = model_of(width)
model = DistributedDataParallel(bare)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
data = torch.randn(16, width, generator=torch.Generator().manual_seed(1)).chunk(4)
took, saved, going = {"none": [], "save": [], "async_save": []}, 0, None

def step():
    begun_s = time.perf_counter()
    with model.no_sync():
        (loss_of(model, data[2 * rank], seconds) / 2).backward()
    (loss_of(model, data[2 * rank + 1], seconds) / 2).backward()
    optimizer.step()
    optimizer.zero_grad()
    return time.perf_counter() - begun_s

for _ in range(3):
    step()
for how in list(took) * windows:
    for at in range(steps):
        begun_s = time.perf_counter()
        if how != "none" and at % every == 0:
            saved += 1
            state = {"model": bare.state_dict(), "opt": optimizer.state_dict()}
            if going is not None:
                going.result()
            done = getattr(dcp, how)(state, checkpoint_id=f"{folder}/{saved}", process_group=group)
            going = done if how == "async_save" else None
        step()
        took[how].append(time.perf_counter() - begun_s)
if going is not None:
    going.result()
if rank == 0:
    print(json.dumps(took))
dist.destroy_process_group()
"""
)


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)}: {done.stderr.strip()} (only root may make a namespace)")


@contextmanager
def machines(mbit: float) -> Iterator[dict[str, str]]:
    """Two namespaces on one bridge, each of which sends so much at most: address by name."""
    bridge = f"s{os.getpid()}{next(BRIDGES)}"  # a deleted namespace takes its links along late
    found = {f"{bridge}-{n}": f"{NET}.{n + 2}" for n in range(2)}
    bucket = ["tbf", "rate", f"{mbit:.0f}mbit", "burst", "256kb", "latency", "20ms"]
    run("ip", "link", "add", bridge, "type", "bridge")
    try:
        run("ip", "addr", "add", f"{HERE}/24", "dev", bridge)
        run("ip", "link", "set", bridge, "up")
        for number, (name, address) in enumerate(found.items()):
            outer, inner = f"{bridge}o{number}", f"{bridge}i{number}"
            run("ip", "netns", "add", name)
            run("ip", "link", "add", outer, "type", "veth", "peer", "name", inner)
            run("ip", "link", "set", outer, "master", bridge, "up")
            run("ip", "link", "set", inner, "netns", name)
            run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", inner)
            run("ip", "-n", name, "link", "set", inner, "up")
            run("ip", "-n", name, "link", "set", "lo", "up")
            run("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", inner, "root", *bucket)
        yield found
    finally:
        for name in found:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
        run("ip", "link", "del", bridge)


@contextmanager
def crew_with(url: str, host: str, nursery: Nursery, folder: Path) -> Iterator[Crew]:
    """A crew whose keeper is in this process, and always finds itself too costly."""
    sharding.SMALL_STATE_BYTES = sharding.LARGE_STATE_BYTES = 0
    server = RedisProcess(folder)
    place = Place(checkpoints=folder / "checkpoints", storage=Storage(url=url, every_s=300.0))
    keeper = Keeper(connect(server.url), place, host, SECRET)
    crew = Crew(server, nursery, folder, keeper)
    try:
        yield crew
    finally:
        crew.close()
        server.kill()


def vault_of(crew: Crew) -> Vault:
    return crew.keeper._jobs["job"].vault


def by_us(mbit: float, width: int, seconds: float, windows: int, steps: int) -> tuple[float, float]:
    """What steps take in turns; the snapshots between. Return the mean step, and what a snapshot takes."""
    sharding.LINK_BYTES_S = mbit * 1e6 / 8
    with ExitStack() as stack:
        names = stack.enter_context(machines(mbit))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="snapshots-")))
        s3_server.HOST = HERE
        store = stack.enter_context(s3_server.S3Server())
        store._http.handle_error = lambda *_: None  # killed workers hang up
        os.environ.update(
            AWS_ENDPOINT_URL=store.endpoint,
            AWS_ACCESS_KEY_ID="none",
            AWS_SECRET_ACCESS_KEY="none",
            AWS_REGION="us-east-1",
            AWS_VIRTUAL_HOSTED_STYLE_REQUEST="false",
        )
        nurseries = []
        for name in names:
            (folder / name).mkdir()
            nurseries.append(Nursery(folder / name, ("ip", "netns", "exec", name)))
            stack.callback(nurseries[-1].close)
        crew = stack.enter_context(crew_with("s3://bucket", HERE, nurseries[0], folder))
        commits = Commits(crew)
        stack.callback(commits.close)
        crew.settle = 2
        crew.open(OURS, json.dumps([width, seconds]), sums="auto", max_replay_s=1e-3)
        for nursery, address in zip(nurseries, names.values(), strict=True):
            crew.nursery = nursery
            crew.start(1, host=address)
        until("the first snapshots", lambda: len(crew.of(BackupHeld)) > 2, patience_s=300)
        # The probe between the workers takes the bucket's burst for the link.
        vault_of(crew).sharding.link_bytes_s = mbit * 1e6 / 8
        until("the rate", lambda: len(crew.of(BackupHeld)) > 4, patience_s=60)
        vault, took = vault_of(crew), {"none": list[float](), "snapshots": list[float]()}
        writes_s, parts = list[float](), 0
        for how in ["none", "snapshots"] * windows:
            vault.sharding.max_replay_s = 1e9 if how == "none" else 1e-3
            if how == "none":
                until("what is under way", partial(quiet, vault), patience_s=120)
            first = len(commits.seen)
            before = len(crew.of(BackupHeld))
            until("the steps", partial(seen_beyond, commits, first + steps), patience_s=600)
            at_s = [one.at_s for one in commits.seen[first : first + steps + 1]]
            took[how] += [b - a for a, b in itertools.pairwise(at_s)]
            if how == "snapshots":
                held = [said.at_s for said in crew.of(BackupHeld)[before:]]
                writes_s += [b - a for a, b in itertools.pairwise(held)]
        backup = vault.backup
        assert backup is not None
        state, parts = backup.state_bytes, len(backup.stored.parts)
    due_s = state / (2 * sharding.SHARE * sharding.LINK_BYTES_S)
    means = {how: statistics.mean(times) for how, times in took.items()}
    slower = means["snapshots"] / means["none"] - 1
    print(f"  ours: a state of {state / 1e6:.0f} MB in {parts} files")
    for how, times in took.items():
        print(f"    {how:12} {spread(times):28} mean {1e3 * means[how]:.1f}")
    print(f"    step slower by {slower:.1%} (reach: 2 %)")
    print(
        f"    one snapshot after the other: every {spread(writes_s, 1.0)} s; state / (2 x a tenth of the link) = {due_s:.2f} s"
    )
    return means["none"], statistics.median(writes_s)


def seen_beyond(commits: Commits, count: int) -> bool:
    return len(commits.seen) > count


def quiet(vault: Vault) -> bool:
    return vault._assembly is None and not vault.landing


def by_torch(mbit: float, settings: Sequence[float]) -> None:
    with ExitStack() as stack:
        names = stack.enter_context(machines(mbit))
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="dcp-"))
        ranks = []
        for rank, name in enumerate(names):
            command = ["ip", "netns", "exec", name, sys.executable, "-W", "ignore", "-c", TORCH]
            link = {"GLOO_SOCKET_IFNAME": f"{name[:-2]}i{rank}"}
            arguments = [f"{folder}/store", str(rank), json.dumps(settings), folder]
            ranks.append(
                subprocess.Popen(
                    [*command, *arguments],
                    stdout=subprocess.PIPE,
                    text=True,
                    env={**os.environ, **link},
                )
            )
        said = [rank.communicate()[0] for rank in ranks]
    took = json.loads(said[0])
    base = statistics.mean(took["none"])
    print("  torch.distributed.checkpoint, as often, into a folder")
    for how, times in took.items():
        mean = statistics.mean(times)
        print(
            f"    {how:12} {spread(times):28} mean {1e3 * mean:.1f}, slower by {mean / base - 1:.1%}"
        )


def killed(kills: int, max_replay_s: float, seed: int) -> None:
    """Kill all again and again; compare what is lost with what is allowed, and the last bits."""
    dice, toy = random.Random(seed), ROOT / "tests" / "agent" / "toy.py"
    steps = 40 * (kills + 1)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="killed-")))
        (folder / "disk").mkdir()
        nursery = stack.enter_context(Nursery.shared(folder / "disk"))
        _, weights = played_alone(toy, folder / "alone" / "out.pt", str(steps), "0")
        url = (folder / "elsewhere").as_uri()
        crew = stack.enter_context(crew_with(url, "127.0.0.1", nursery, folder))
        commits = Commits(crew)
        stack.callback(commits.close)
        arguments = (str(steps), "0.005", str(folder / "out.pt"))
        options = {"sums": "auto", "max_replay_s": max_replay_s}
        workers = crew.begin(2, toy.read_text(), *arguments, **options)
        lost_s, step_s = list[float](), list[float]()
        for n in range(kills):
            until("a snapshot", partial(held_since, crew, 30 * n), patience_s=120)
            time.sleep(dice.uniform(0.0, 2 * max_replay_s))  # a random moment is what is tested
            crew.kill(*workers)
            at_s, rewound = time.monotonic(), len(crew.of(Rewound))
            seen = {one.step: one.at_s for one in commits.seen}
            step_s.append(commits.step_s(10))
            crew.settle = 2
            workers = crew.start(2)
            newest = max(seen)
            until("the next step", partial(gone_on, crew, commits, at_s), 120)
            back = crew.of(Rewound)[rewound:]
            reached = back[0].to_step if back else newest
            lost_s.append(at_s - seen[reached])
        done = crew.completed()
        same = (folder / "out.pt").read_bytes() == weights
    most = max(lost_s)
    print(f"  all killed {kills} times at random moments, max_replay_s = {max_replay_s:g}")
    print(
        f"    lost: {spread(lost_s, 1.0)} s, at most {most:.2f} s; allowed {max_replay_s + statistics.median(step_s):.2f} s"
    )
    print(f"    {done.step} steps, the same final bits: {same}")


def held_since(crew: Crew, step: int) -> bool:
    return any(said.step > step for said in crew.of(BackupHeld))


def gone_on(crew: Crew, commits: Commits, since_s: float) -> bool:
    crew._well()
    return bool(commits.seen) and commits.seen[-1].at_s > since_s + 0.05


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mbit", type=float, default=400.0)
    parser.add_argument("--width", type=int, default=820)
    parser.add_argument("--seconds", type=float, default=0.4, help="of a microbatch")
    parser.add_argument("--windows", type=int, default=4, help="0 for kills alone")
    parser.add_argument("--steps", type=int, default=15, help="of a window")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--max-replay-s", type=float, default=1.0)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # namespaces outlive processes
    begun_s = time.monotonic()
    print(
        "ms per step, median (10th .. 90th percentile)\n"
        f"{options.mbit:g} Mbit/s from each of two workers, {2 * options.seconds:g} s of computing in a step"
    )
    size = (options.width, options.seconds, options.windows, options.steps)
    if options.windows:
        step_s, writes_s = by_us(options.mbit, *size)
        by_torch(options.mbit, (*size, max(1, round(writes_s / step_s))))
    if options.kills:
        killed(options.kills, options.max_replay_s, seed=5)
    print(f"{machine()}; took {time.monotonic() - begun_s:.0f} s")


if __name__ == "__main__":
    main()
