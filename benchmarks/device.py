"""What a job costs on this machine's accelerator, and how fast it goes on after a kill there.

    python benchmarks/device.py [--layers 12] [--width 768] [--kills 10] [--only copies step kills nccl]

One card is shared by all workers, so two are not faster than one here; what is seen is what each
step costs beside its computing, whether the weights are the same bits in every layout, and how long
the survivors need after a SIGKILL.

    copies  bytes per second between the card and pinned host memory: the limit of what follows
    step    the same model trained by torch alone, by one process with a session, and by crews of
            one, two and four workers; `torch` sums gradients of bf16 autocast in float32 as all do
    kills   from SIGKILL of one of two workers to the next commit, beyond an undisturbed step
    nccl    what NCCL needs to make a communicator, and whether two processes may share a card

Prints a table with the card's name. It takes less than ten minutes.
"""

import argparse
import hashlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from _crew import Commits, Crew, crew_of, machine, spread, until

from agent.messages import JobCompleted, WorkerFailed

SHOWN = 30  # steps
SCRIPT = Path(__file__).with_name("device_gpt.py")
COPY_BYTES = 32 << 20
PATIENCE_S = 240.0


def copies(device: torch.device) -> None:
    there = torch.empty(8, COPY_BYTES, dtype=torch.uint8, device=device)
    here = torch.empty(8, COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    for name, target, source in (("to the host", here, there), ("to the card", there, here)):
        rates = []
        for _ in range(10):
            torch.accelerator.synchronize()
            began_s = time.perf_counter()
            for to, of in zip(target, source, strict=True):
                to.copy_(of, non_blocking=True)
            torch.accelerator.synchronize()
            rates.append(source.nbytes / (time.perf_counter() - began_s))
        print(f"copies, pinned, {name}: {spread(rates, 1e-9)} GB/s", flush=True)


def alone(how: str, arguments: Sequence[str], folder: Path) -> None:
    """The script as a process without a manager; with plain torch or with a session."""
    out = folder / f"{how}.pt"
    command = [sys.executable, str(SCRIPT), how, str(SHOWN), str(out), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    if done.returncode:
        raise SystemExit(done.stderr)
    times = [float(line) for line in done.stdout.split("\n") if line]
    print(f"step, {how}: {spread(times[5:], 1.0)} ms, weights {digest(out)}", flush=True)


def digest(path: Path) -> str:
    found = hashlib.sha256()
    for name, value in sorted(torch.load(path).items()):
        found.update(name.encode() + value.numpy().tobytes())
    return found.hexdigest()[:12]


def crew_steps(workers: int, arguments: Sequence[str]) -> None:
    with crew_of() as crew:
        commits = Commits(crew)
        out = crew.folder / "out.pt"
        crew.begin(workers, SCRIPT.read_text(), "session", str(SHOWN), str(out), *arguments)
        until("the end", lambda: ended(crew), PATIENCE_S)
        times = [b.at_s - a.at_s for a, b in zip(commits.seen, commits.seen[1:], strict=False)]
        found = spread(times[5:])
        print(f"step, crew of {workers}: {found} ms, weights {digest(out)}", flush=True)
        commits.close()


def ended(crew: Crew) -> bool:
    if bad := crew.of(WorkerFailed):
        raise SystemExit(str(bad[0]))
    return bool(crew.of(JobCompleted))


def kills(count: int, arguments: Sequence[str]) -> None:
    beyond = []
    with crew_of() as crew:
        commits = Commits(crew)
        out = crew.folder / "out.pt"
        crew.begin(2, SCRIPT.read_text(), "session", "1000000", str(out), *arguments)
        for number in range(count):
            until("both", lambda: ended(crew) or len(crew.ready) == 2, PATIENCE_S)
            seen = len(commits.seen)
            until(
                "calm",
                lambda seen=seen: (
                    len(commits.seen) > seen + 6 and commits.seen[-6].generation == crew.generation
                ),
                PATIENCE_S,
            )
            step_s, generation = commits.step_s(6), crew.generation
            began_s = time.monotonic()
            crew.kill(crew.ready[number % 2], how=signal.SIGKILL)
            commit = until("a commit", lambda g=generation: commits.after(g), PATIENCE_S)
            beyond.append(commit.at_s - began_s - step_s)
            crew.start(1)
        print(
            f"kills: {spread(beyond)} ms beyond a step of {step_s * 1e3:.0f} ms, "
            f"worst {max(beyond) * 1e3:.0f}, {len(beyond)} of {count} went on",
            flush=True,
        )
        commits.close()


NCCL = """
import sys, time
import torch, torch.distributed as dist
rank, world, port = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
torch.cuda.set_device(0)
x = torch.ones(1 << 20, device="cuda"); torch.cuda.synchronize()
for turn in range(3):
    began = time.perf_counter()
    dist.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    dist.all_reduce(x); torch.cuda.synchronize()
    made = time.perf_counter()
    dist.destroy_process_group()
    print(f"{1e3 * (made - began):.0f} ms to make, {1e3 * (time.perf_counter() - made):.0f} to end", flush=True)
    port = str(int(port) + 1)
"""


def nccl() -> None:
    for world in (1, 2):
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", NCCL, str(rank), str(world), str(29500 + 10 * world)],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(world)
        ]
        try:
            printed, complained = ranks[0].communicate(timeout=60)
        except subprocess.TimeoutExpired:
            printed, complained = "", "nothing within 60 s"
        for each in ranks:
            each.kill()
            each.communicate()
        last = "; ".join(printed.split("\n")[:-1]) or complained.strip().split("\n")[-1][:200]
        print(f"nccl, {world} on one card: {last}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4])
    parts = ["copies", "step", "kills", "nccl"]
    parser.add_argument("--only", nargs="+", choices=parts, default=parts)
    options = parser.parse_args()
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        raise SystemExit("torch finds no accelerator on this machine, so there is nothing to show")
    module = torch.get_device_module(device)
    print(f"{machine()}, {module.get_device_name()}", flush=True)
    arguments = [str(options.layers), str(options.width)]
    began_s = time.monotonic()
    if "copies" in options.only:
        copies(device)
    if "step" in options.only:
        with tempfile.TemporaryDirectory() as name:
            for how in ("torch", "session"):
                alone(how, arguments, Path(name))
        for workers in options.workers:
            crew_steps(workers, arguments)
    if "kills" in options.only:
        kills(options.kills, arguments)
    if "nccl" in options.only and device.type == "cuda":
        nccl()
    print(f"{time.monotonic() - began_s:.0f} s in all", flush=True)


if __name__ == "__main__":
    main()
