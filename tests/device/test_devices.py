"""A model on an accelerator: whoever comes and goes, losses and weights are those of one process with one device.

Where torch finds none, it is one that is simulated (`late.cpp`). That one copies as late as it may, lets nobody else read its
memory, and says so when a stream has not waited for another.
"""

import signal
from pathlib import Path

import pytest
from births import Births
from crews import Crew, ends_alike, until

from agent.messages import JobCompleted, WorkerFailed, WorkerReady

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]

TOY = Path(__file__).with_name("device_toy.py")
STEPS, PATIENCE_S = 20, 240.0

Alone = tuple[list[str], bytes]


@pytest.fixture(scope="module")
def alone(
    births: Births, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[list[str], bytes]]:
    """What the script prints and saves alone."""
    folder = tmp_path_factory.mktemp("alone")

    def played(kind: str) -> Alone:
        out = folder / "out.pt"
        printed = births.play([str(TOY), kind, str(STEPS), str(out)], folder)
        return printed.splitlines(), out.read_bytes()

    return {kind: played(kind) for kind in ("plain", "scaled", "unbuilt")}


def begin(
    crew: Crew, count: int, kind: str = "plain", depth: int = 1, *, owned: bool = False
) -> list[str]:
    crew.depth, crew.owned = depth, owned
    return crew.begin(count, TOY.read_text(), kind, str(STEPS), str(crew.folder / "out.pt"))


def failed(crew: Crew) -> bool:
    assert not crew.of(WorkerFailed), crew.of(WorkerFailed)[0].detail
    return False


def reach(crew: Crew, step: int) -> None:
    """The simulated device is slow."""
    until(f"step {step}", lambda: failed(crew) or crew.step >= step, PATIENCE_S)


def test_replicas_come_and_go(crew, alone):
    """A kill, a newcomer, and all of them lost: the state, a scaler's too, comes from those who are left, then from the
    keeper."""
    hold = Path(f"{crew.folder / 'out.pt'}.hold")
    hold.write_text("5")
    workers = begin(crew, 3, "scaled")
    reach(crew, 5)
    crew.kill(workers[0])
    hold.write_text("10")
    workers += crew.start(1)
    reach(crew, 10)
    crew.kill(*workers[1:], how=signal.SIGKILL)
    crew.settle = 2
    crew.start(2)
    hold.unlink()
    until("the end", lambda: failed(crew) or crew.of(JobCompleted), PATIENCE_S)
    ends_alike(crew, alone["scaled"], STEPS)


def test_every_shape_and_back(crew, alone):
    """1 x 3, 3 x 1, 2 x 1 and back: activations, random streams, sums and layers go from device to device."""
    begin(crew, 3, owned=True)
    for number, depth in enumerate((3, 1, 2, 3), start=1):
        reach(crew, 4 * number)
        crew.shape(depth, "now" if number % 2 else "boundary")
    until("the end", lambda: failed(crew) or crew.of(JobCompleted), PATIENCE_S)
    ends_alike(crew, alone["plain"], STEPS)
    told = [ready for ready in crew.of(WorkerReady) if ready.stages_max > 1]
    assert [ready.uncuttable for ready in told] == [""]


def test_what_is_born_there_is_that_of_one_process(crew, alone):
    """A model handed over unbuilt: its layers are made in host memory and brought to their device, by whoever has them
    in the first layout; they go on in another, and all are made anew of the backup when nobody is left."""
    workers = begin(crew, 3, "unbuilt", 3, owned=True)
    reach(crew, 4)
    crew.shape(2)
    reach(crew, 8)
    crew.kill(workers[1])
    reach(crew, 11)
    crew.kill(*workers[::2])
    crew.settle = 2
    crew.start(2)
    until("the end", lambda: failed(crew) or crew.of(JobCompleted), PATIENCE_S)
    ends_alike(crew, alone["unbuilt"], STEPS)


WAITING = """
import os, sys
import torch
from orchestrator import Session

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 1)).to("late")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
session = Session(model, optimizer, microbatches={microbatches})
batches = list(torch.ones({microbatches}, 4, 8, device="late"))
for step in session.steps(4):
    before = torch.late.waited()
    session.backward(lambda x: model(x).square().mean(), batches)
    optimizer.step()
    if step:
        print(torch.late.waited() - before)
sys.stdout.flush()
os._exit(0)  # see staging_script.py
"""


def test_a_microbatch_waits_for_nothing(accelerator, births, tmp_path):
    """How often the host waits for the device in a step does not depend on the number of microbatches."""
    if accelerator.name != "late":
        pytest.skip(f"{accelerator.name} does not tell how often somebody waited for it")
    found = []
    for microbatches in (2, 16):
        script = tmp_path / f"train{microbatches}.py"
        script.write_text(WAITING.format(microbatches=microbatches))
        found.append(births.play([str(script)], tmp_path).split())
    assert found[0] == found[1]
    assert len(found[0]) == 3


# Whoever takes the file away has no memory left on its device when it needs room for a sum.
FULL = """
import os
import torch
from agent.tensors.tree import Canonical
room = Canonical._room
def full(sums):
    try:
        os.unlink(sys.argv[3] + ".full")
    except FileNotFoundError:
        return room(sums)
    sums._spare.clear()
    torch.ops.late.fill()
    return room(sums)
Canonical._room = full
"""


def test_who_has_no_memory_for_a_sum_fails_with_a_sentence_and_alone(accelerator, crew, alone):
    """The others have its share done again; a worker that takes its place ends with them, to the same bits."""
    if accelerator.name != "late":
        pytest.skip(
            f"{accelerator.name} cannot be filled without harm to others; the simulated can"
        )
    head, main = TOY.read_text().split("import torch\n", 1)
    out = crew.folder / "out.pt"
    hold, full = (Path(f"{out}.{name}") for name in ("hold", "full"))
    hold.write_text("5")
    crew.begin(3, f"{head}{FULL}{main}", "plain", str(STEPS), str(out))
    reach(crew, 5)
    full.touch()
    hold.unlink()
    (failure,) = until("a failure", lambda: crew.of(WorkerFailed), PATIENCE_S)
    assert failure.kind == "exception"
    assert "late: out of memory" in failure.detail
    assert failure.detail.splitlines()[-1].startswith("The device has no memory left")
    crew.start(1)
    until("the end", lambda: crew.of(JobCompleted), PATIENCE_S)
    assert crew.of(WorkerFailed) == [failure]
    assert out.read_bytes() == alone["plain"][1]


MOVED = """
import torch
from orchestrator import Session
device = torch.accelerator.current_accelerator().type
model = torch.nn.Linear(4, 1)
session = Session(model, torch.optim.SGD(model.parameters(), lr=0.1), microbatches=1)
model.to(device)
for step in session.steps(2):
    session.backward(lambda x: model(x).sum(), [torch.ones(2, 4, device=device)])
"""
TWO = """
import torch
from orchestrator import Session
device = torch.accelerator.current_accelerator().type
model = torch.nn.Sequential(torch.nn.Linear(4, 4).to(f"{device}:0"), torch.nn.Linear(4, 1).to(f"{device}:1"))
Session(model, torch.optim.SGD(model.parameters(), lr=0.1), microbatches=1)
"""


BORN = """
import torch
from agent.pipeline.deferred.initial_values import Unborn
from torch import nn
device = torch.accelerator.current_accelerator().type
class Late(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4).to(device)
        nn.init.zeros_(self.layer.bias)
{}
"""
COMPUTED = BORN.format("Unborn(Late)")
BY_DEFAULT = BORN.format("torch.set_default_device(device); Unborn(lambda: nn.Linear(4, 4))")
UNTIED = BORN.format(
    "torch.__future__.set_swap_module_params_on_conversion(False); Unborn(lambda: nn.Linear(4, 4).to(device))"
)


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (MOVED, "when Session(...) was made"),
        (TWO, "a worker has one device"),
        (COMPUTED, "Bring the model there last"),
        (BY_DEFAULT, "values drawn on that device"),
        (UNTIED, "makes new parameters there"),
    ],
)
def test_where_a_model_cannot_be_is_said(accelerator, births, tmp_path, script, said):
    """What moves after its session was made, is on two devices, or would be another model there, is refused in one line."""
    if script in (TWO, UNTIED) and accelerator.name != "late":
        pytest.skip(
            f"{accelerator.name} may be one device only, and keeps parameters; the simulated one is not so"
        )
    path = tmp_path / "train.py"
    path.write_text(script)
    code, _, complained = births.try_out([str(path)], tmp_path)
    assert code
    assert said in complained.splitlines()[-1]
