"""Half precision with a scaled loss: what overflows is skipped by all alike, and the scale goes where the state goes."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from crews import Crew, played_alone, until
from torch import nn

from agent.messages import Rewound, WorkerReady

TOY = Path(__file__).with_name("scaled_toy.py")
STEPS = 24


def by_hand() -> tuple[list[str], dict[str, torch.Tensor]]:
    """The same with a loop of torch's own."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=3)
    data = torch.randn(64, 16, generator=torch.Generator().manual_seed(1))
    scales = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        for x in data.split(16):
            with torch.autocast("cpu", torch.float16):
                loss = model(x).square().mean()
            (scaler.scale(loss) / 4).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        scales.append(str(scaler.get_scale()))
    return scales, model.state_dict()


@pytest.mark.processes
def test_a_scaled_loss_is_what_torch_makes_of_it(tmp_path: Path) -> None:
    """Alone: the same scales, skipped steps and weights as in a loop by hand; the loss is told unscaled."""
    lines, _ = played_alone(TOY, tmp_path / "out.pt", str(STEPS))
    scales, weights = by_hand()
    assert [line.split()[-1] for line in lines] == scales
    assert len(set(scales)) > 4, "it went down and up"
    assert all(float(line.split()[3]) < 1 for line in lines)
    found = torch.load(tmp_path / "out.pt")
    for name, tensor in weights.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-6)


@pytest.mark.processes
def test_whoever_comes_and_goes_the_scale_is_the_same(crew: Crew, tmp_path: Path) -> None:
    """A kill, a newcomer and a replay of logged sums, overflows among them: lines and weights as alone. That
    the script cannot be cut into stages is said with its line, and disturbs nothing."""
    (tmp_path / "alone").mkdir()
    lines, weights = played_alone(TOY, tmp_path / "alone" / "out.pt", str(STEPS))
    out = crew.folder / "out.pt"
    hold = Path(f"{out}.hold")
    hold.write_text("10")
    workers = crew.begin(2, TOY.read_text(), str(STEPS), str(out), backup_every_steps=40)
    crew.reach(10)
    crew.kill(workers[0])
    workers += crew.start(1)
    until("the newcomer", lambda: workers[2] in crew.ready)
    hold.write_text("17")
    crew.reach(17)
    crew.kill(*workers[1:])
    crew.settle = 2
    crew.start(2)
    hold.unlink()
    assert crew.completed().step == STEPS
    assert set(crew.printed()) <= set(lines)
    assert out.read_bytes() == weights
    assert crew.of(Rewound) == []
    whys = {ready.uncuttable for ready in crew.of(WorkerReady)}
    assert any(why.startswith("train.py:31: a GradScaler scales the loss") for why in whys)


FOR_EVER = """
import torch
from agent import Session
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
session = Session(model, optimizer, scaler, microbatches=1)
for step in session.steps(20):
    for x in session.share([torch.full((2, 4), float("nan"))]):
        session.backward(scaler.scale(model(x).sum()))
    scaler.step(optimizer)
    scaler.update()
"""


@pytest.mark.processes
def test_what_is_not_finite_at_any_scale_is_no_overflow(tmp_path: Path) -> None:
    """A scaler skips, and its scale goes down; once it makes nothing larger any more, the job fails as ever."""
    script = tmp_path / "train.py"
    script.write_text(FOR_EVER)
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=False
    )
    assert done.returncode
    assert "step 4: the loss is nan" in done.stderr.splitlines()[-1]


BFLOAT = """
import sys, torch
from torch import nn
from agent import Session

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return x + self.linear(x).relu()

torch.manual_seed(0)
model = nn.Sequential(*[Block() for _ in range(4)])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
session = Session(model, optimizer, microbatches=4)
data = torch.randn(64, 16, generator=torch.Generator().manual_seed(1))
for step in session.steps(12):
    for x in session.share(data.split(16)):
        loss = model(x).square().mean()
        session.backward(loss)
    optimizer.step()
if session.leader:
    torch.save(model.state_dict(), sys.argv[1])
"""


@pytest.mark.processes
@pytest.mark.parametrize("depth", [1, 2])
def test_bfloat16_has_the_same_bits_at_any_depth(crew: Crew, tmp_path: Path, depth: int) -> None:
    """Blocks that compute in half precision, in one piece and cut between them."""
    (tmp_path / "alone").mkdir()
    script = tmp_path / "train.py"
    script.write_text(BFLOAT)
    _, weights = played_alone(script, tmp_path / "alone" / "out.pt")
    crew.depth = depth
    crew.begin(2, BFLOAT, str(crew.folder / "out.pt"))
    crew.completed()
    assert (crew.folder / "out.pt").read_bytes() == weights
    told = [ready for ready in crew.of(WorkerReady) if not ready.uncuttable]
    assert max(ready.stages_max for ready in told) >= 4
