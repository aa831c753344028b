"""Jobs of several files: modules beside the script, a package, data, and what they may not hide."""

import os
from pathlib import Path

import pytest
from crews import SECRET, Crew, ends_alike, played_alone, until

from agent.messages import WorkerFailed, WorkerLost
from agent.net.handshake import job_secret
from agent.net.wire import dial
from agent.protocol import Hello, Welcome
from agent.source.parcel import File, pack

pytestmark = pytest.mark.processes

STEPS = 24
FILES = {
    "train.py": """
import sys
from pathlib import Path

import torch

import loop
from settings import read

if __name__ == "__main__":
    torch.manual_seed(0)
    beside = Path(__file__).with_name("width.txt").read_text()
    assert beside == open("width.txt").read(), "both are the same file"
    loop.train(read(), int(beside), int(sys.argv[1]), float(sys.argv[2]), sys.argv[3])
""",
    "settings.py": """
def read():
    with open("conf/rate.txt") as file:
        return float(file.read())
""",
    "loop.py": """
import time
import torch
from orchestrator import Session
from nets.deep import Net

def batches(step):
    rows = torch.Generator().manual_seed(step)
    return [torch.randn(8, 16, generator=rows) for _ in range(6)]

def train(rate, width, steps, pause_s, out):
    model = Net(width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    session = Session(model, optimizer, microbatches=6)
    def loss_of(x):
        return model(x).square().mean()
    for step in session.steps(steps):
        time.sleep(pause_s)
        result = session.backward(loss_of, batches(step))
        optimizer.step()
        if session.leader:
            print(f"step {step} loss {result.loss!r}")
    if session.leader:
        torch.save(model.state_dict(), out)
""",
    "nets/__init__.py": "",
    "nets/deep.py": """
import torch
from .shallow import layer

class Net(torch.nn.Sequential):
    def __init__(self, width):
        super().__init__(layer(16, width), torch.nn.Dropout(0.1), torch.nn.ReLU(), layer(width, 4))
""",
    "nets/shallow.py": "import torch\nlayer = torch.nn.Linear\n",
    "conf/rate.txt": "0.01",
    "width.txt": "64",
}
START = """
from functools import partial
import torch
from orchestrator import Session
import beside
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
session = Session(model, optimizer, microbatches=2)
"""
STEP = """
for step in session.steps(6):
    session.backward(partial(beside.loss_of, model), [torch.ones(2, 4)] * 2)
    optimizer.step()
    beside.behind(model)
"""
LOSS = "def loss_of(model, b): return model(b).square().mean()\n"
BEHIND = "def behind(model): pass\n"


def packed(files: dict[str, str], script: str = "train.py") -> bytes:
    return pack(script, {path: File(text.encode()) for path, text in files.items()})


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], bytes]:
    """The very files, started by hand in their folder."""
    folder = tmp_path_factory.mktemp("project")
    for path, text in FILES.items():
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_text(text)
    out = tmp_path_factory.mktemp("alone") / "out.pt"
    return played_alone(Path("train.py"), out, str(STEPS), "0", cwd=folder)


def begin(crew: Crew, count: int) -> list[str]:
    return crew.begin(count, packed(FILES), str(STEPS), "0.035", str(crew.folder / "out.pt"))


def test_cut_through_a_kill_and_with_a_newcomer(crew: Crew, alone: tuple[list[str], bytes]) -> None:
    """The loop and the model are in other files than the script, and are cut all the same. One of two is killed, another
    one comes later: the same lines and the same bits as by hand."""
    crew.depth = 2
    first, *_ = begin(crew, 2)
    crew.reach(6)
    crew.kill(first)
    crew.start(1)
    ends_alike(crew, alone, STEPS)


def test_the_keeper_and_all_workers_are_killed(
    mortal: Crew, alone: tuple[list[str], bytes]
) -> None:
    """The next keeper has all the files for workers that never knew the first."""
    workers = begin(mortal, 2)
    mortal.reach(6)
    mortal.keeper.write_checkpoint(mortal.job)
    mortal.keeper.kill()
    mortal.kill(*workers)
    mortal.keeper.start()
    mortal.start(2)
    assert mortal.completed().step == STEPS
    assert (mortal.folder / "out.pt").read_bytes() == alone[1]


@pytest.mark.parametrize(
    ("beside", "line", "words"),
    [
        (LOSS.replace("model(b)", "missing(b)") + BEHIND, 1, "NameError: name 'missing'"),
        (LOSS + BEHIND + "1 / 0\n", 3, "ZeroDivisionError"),
    ],
    ids=["in the loop", "when it is imported"],
)
def test_what_fails_beside_the_script_is_told_by_its_file_and_line(
    crew: Crew, beside: str, line: int, words: str
) -> None:
    """The traceback has both files by the names that they have at home, and no folder of ours."""
    crew.begin(1, packed({"train.py": START + STEP, "beside.py": beside}))
    report = until("the failure", lambda: crew.of(WorkerFailed))[0]
    assert words in report.detail
    assert f'File "beside.py", line {line}' in report.detail
    assert 'File "train.py"' in report.detail
    assert report.detail.count("File ") == 2


def test_a_module_that_the_worker_has_is_not_passed_off_as_ones_own(crew: Crew) -> None:
    """The script would get another module than by hand: it is told to rename its own."""
    crew.begin(1, packed({"train.py": START + STEP, "beside.py": LOSS + BEHIND, "json.py": ""}))
    report = until("the failure", lambda: crew.of(WorkerFailed))[0]
    assert report.kind == "setup"
    assert report.detail.startswith("json.py: a worker has another module of that name")


def test_twenty_megabytes_are_read_by_nobody_and_nobody_else_waits(
    crew: Crew, alone: tuple[list[str], bytes]
) -> None:
    """A newcomer never reads its 20 MB: it is lost by that alone; the others are not taken for silent, and commit on."""
    data = os.urandom(20 << 20)
    files = {path: File(text.encode()) for path, text in FILES.items()}
    payload = pack("train.py", {**files, "data.bin": File(data)})
    crew.begin(2, payload, str(STEPS), "0.035", str(crew.folder / "out.pt"))
    crew.reach(3)
    secret = job_secret(SECRET, crew.job)
    hello = Hello(job=crew.job, worker="idle", machine_id="m", mesh_address="127.0.0.1:1")
    idle = dial(crew.keeper.address, secret, hello)
    crew.reach(10)
    slow = dial(crew.keeper.address, secret, Hello(**{**_fields(hello), "worker": "slow"}))
    message, received = slow.receive()
    assert isinstance(message, Welcome)
    assert bytes(received) == payload
    ends_alike(crew, alone, STEPS)
    assert {lost.worker for lost in crew.of(WorkerLost)} <= {"idle", "slow"}
    idle.close()
    slow.close()


def _fields(hello: Hello) -> dict[str, object]:
    return {name: getattr(hello, name) for name in hello.__struct_fields__}
