"""How long from the order to a script's first line, and what a worker and a machine cost to start?

    python benchmarks/worker_start.py [--starts 8]

The whole product on this machine, with one machine of the local cloud. Its worker is killed after each start,
so the next one is started on the same machine. An order is the manager's entry in the journal; the first
line writes the time and how much processor time its process has taken so far. The machine's processor time is that of
all its processes, until its first worker's first line.
"""

import argparse
import json
import os
import shutil
import signal
import statistics
import tempfile
import time
from pathlib import Path

import redis
from recovery import running_house, until

from agent.keys import JOURNAL
from cloud.local.processes import living
from orchestrator.events import JobSpec, JobSubmitted

SCRIPT = """\
import os, sys, time
at_s, spent = time.time(), os.times()
if "proof_process" not in open("/proc/self/cmdline").read():
    with open(sys.argv[1], "a") as file:
        print(at_s, spent.user + spent.system, os.getpid(), file=file)
import torch
from orchestrator import Session
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
session = Session(model, optimizer, microbatches=1)
for step in session.steps(1_000_000):
    session.backward(lambda x: model(x).sum(), [torch.ones(2, 4)])
    optimizer.step()
    time.sleep(0.02)
"""
TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def cpu_s(pid: int) -> float:
    """Of a process and of its children that have ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) * TICK_S


def init_of(state: Path) -> int | None:
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes()
            if b"machine_init" in words and os.fsencode(state) in os.fsencode(
                (entry / "cwd").readlink()
            ):
                return int(entry.name)
        except OSError:
            continue
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--starts", type=int, default=8)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="worker-start-"))
    told = folder / "told"

    def rows() -> list[list[str]]:
        return [line.split() for line in told.read_text().splitlines()] if told.exists() else []

    try:
        with running_house(folder) as (client, places):
            store = redis.Redis.from_url(client.house().redis_url)
            sha = client.put_script(SCRIPT.encode())
            spec = JobSpec(
                job="job", script="train.py", script_sha=sha, argv=(str(told),), slots_max=1
            )
            client.post(JobSubmitted(at_s=time.time(), spec=spec))
            until("the first line", rows)
            init = until("the machine", lambda: init_of(places.state_dir))
            machine_s = sum(map(cpu_s, living({"none": init})))
            processes = len(living({"none": init}))
            for number in range(1, options.starts + 1):
                time.sleep(4.0)  # the machine has warmed up again
                os.kill(int(rows()[-1][2]), signal.SIGKILL)
                until("the next first line", lambda n=number: len(rows()) > n)
            orders = []
            for key, row in store.xrange(JOURNAL):
                for action in json.loads(row[b"a"]):
                    if action.get("type") == "StartWorker":
                        orders.append(int(key.decode().partition("-")[0]) / 1000)
            store.close()
            lines = rows()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    waits = [1000 * (float(line[0]) - order) for order, line in zip(orders, lines, strict=False)]
    spent = [float(line[1]) for line in lines]
    print(f"order to first line, first worker of a machine: {waits[0]:.0f} ms")
    print(
        f"order to first line, {len(waits) - 1} later ones: {statistics.median(waits[1:]):.0f} ms (median; {min(waits[1:]):.0f} .. {max(waits[1:]):.0f})"
    )
    print(
        f"processor time of a worker until its first line: {statistics.median(spent):.2f} s (median)"
    )
    print(
        f"processor time of a machine until its first worker's first line: {machine_s:.1f} s, {processes} processes"
    )
    print(f"load {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
