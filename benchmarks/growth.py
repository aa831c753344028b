"""Does any process of a job, or its folder, grow from step to step?

    python benchmarks/growth.py [--steps 20000]

The whole product on this machine, and a small model on two workers, which draws from `session.data`, clips, logs a number and
keeps one in `session.state` at each step. The memory of each process is compared between an eighth of the steps and all of
them; what a process takes while it starts counts for neither. A month of steps of a second is 2.6 million.
"""

import argparse
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from _memory import resident_bytes

import agent  # noqa: F401 - before `tests`, which has a folder of this name
from cloud.local.processes import living

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests" / "faults"), str(ROOT / "tests")]

from houses import RunningHouse, command_line  # noqa: E402

STEP_S_MAX = 1.0
KINDS = {
    "ray::ManagerActor": "manager",
    "ray::KeeperActor": "keeper",
    "ray::AgentActor": "agent of a machine",
    "agent.machine.fork_server": "worker, or its fork server",
    "redis-server": "Redis",
    "orchestrator.door": "page",
    "orchestrator.history": "history",
    "cloud.local": "local cloud",
    "orchestrator.supervisor": "supervisor",
}
SCRIPT = """\
import sys
import torch
from torch import nn
from torch.utils.data import TensorDataset
from orchestrator import Session

torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
session = Session(model, optimizer)
x = torch.randn(4096, 16)
data = session.data(TensorDataset(x, x.sum(1, keepdim=True).sin()), batch_size=32, microbatches=4)
for epoch in session.epochs(int(sys.argv[1]) // 128 + 20):
    for microbatches in data:
        result = session.backward(lambda b: ((model(b[0]) - b[1]) ** 2).mean(), microbatches)
        session.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        session.log(last=result.loss)
        session.state["best"] = min(session.state.get("best", 9e9), result.loss)
"""


def resident_mib(house: RunningHouse) -> dict[str, float]:
    """The memory of all processes of a house, by what they are."""
    found: defaultdict[str, float] = defaultdict(float)
    for pid in living({"none": house.process.pid}) | {house.process.pid}:
        words = command_line(pid)
        if kind := next((k for k in KINDS if k in words), ""):
            found[KINDS[kind]] += resident_bytes(pid) / 2**20
    return found


def folder_mib(folder: Path) -> float:
    files = (path.lstat() for path in folder.rglob("*") if not path.is_symlink())
    return sum(one.st_size for one in files) / 2**20


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20_000)
    steps = parser.parse_args().steps
    with tempfile.TemporaryDirectory() as name:
        house = RunningHouse(Path(name))
        try:
            house.start()
            house.submit(SCRIPT, argv=(str(steps),), slots_max=2)
            sizes, at = [], []
            for wanted in (steps // 8, steps):
                at.append(house.reached(wanted, 60.0 + steps * STEP_S_MAX).step)
                sizes.append({**resident_mib(house), "the folder": folder_mib(house.folder)})
            print(f"{'MiB':28}{at[0]:>9,} {at[1]:>9,} steps   for each million more")
            for kind, before in sizes[0].items():
                grown = (sizes[1].get(kind, 0.0) - before) / (at[1] - at[0]) * 1e6
                print(f"{kind:28}{before:9.1f} {sizes[1].get(kind, 0.0):9.1f} {grown:17.0f}")
        finally:
            house.close()


if __name__ == "__main__":
    main()
