"""Half precision with a scaled loss: what overflows is skipped by all alike, and the scale goes where the state goes."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from crews import Crew, ends_alike, played_alone
from torch import nn

from agent.errors import NotFinite
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
def test_a_scaler_that_another_object_holds_scales_as_if_given_by_itself(tmp_path: Path) -> None:
    """As timm's NativeScaler and trainers hold it: the same scales and weights."""
    wrapped = tmp_path / "wrapped_toy.py"
    held = (
        "class Held:\n"
        "    def __init__(self): self._scaler = scaler\n"
        "    def state_dict(self): return scaler.state_dict()\n"
        "    def load_state_dict(self, state): scaler.load_state_dict(state)\n"
        "session = Session(model, optimizer, Held(), microbatches=4)\n"
    )
    given = "session = Session(model, optimizer, scaler, microbatches=4)\n"
    assert given in TOY.read_text()
    wrapped.write_text(TOY.read_text().replace(given, held))
    lines, weights = played_alone(TOY, tmp_path / "given" / "out.pt", str(STEPS))
    of_wrapped, same = played_alone(wrapped, tmp_path / "held" / "out.pt", str(STEPS))
    assert of_wrapped == lines
    assert same == weights


@pytest.mark.processes
def test_whoever_comes_and_goes_the_scale_is_the_same(crew: Crew, tmp_path: Path) -> None:
    """A kill, a newcomer and a replay of logged sums, overflows among them: lines and weights as alone."""
    lines, weights = played_alone(TOY, tmp_path / "alone" / "out.pt", str(STEPS))
    out = crew.folder / "out.pt"
    hold = Path(f"{out}.hold")
    hold.write_text("10")
    workers = crew.begin(2, TOY.read_text(), str(STEPS), str(out), backup_every_steps=40)
    crew.reach(10)
    crew.kill(workers[0])
    workers += crew.start(1)
    crew.let_in(hold, workers[2])
    crew.hold(hold, 17)
    crew.reach(17)
    crew.kill(*workers[1:])
    crew.settle = 2
    crew.start(2)
    hold.unlink()
    assert crew.completed().step == STEPS
    assert set(crew.printed()) <= set(lines)
    assert out.read_bytes() == weights
    assert crew.of(Rewound) == []


HALF = Path(__file__).with_name("half_toy.py")
HALF_STEPS = 28


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], bytes]:
    return played_alone(HALF, tmp_path_factory.mktemp("alone") / "out.pt", str(HALF_STEPS))


def begin(crew: Crew, count: int, depth: int, *, owned: bool, **options: object) -> list[str]:
    crew.depth, crew.owned = depth, owned
    out = str(crew.folder / "out.pt")
    return crew.begin(count, HALF.read_text(), str(HALF_STEPS), out, **options)


@pytest.mark.processes
def test_a_scaled_loss_in_every_shape(crew: Crew, alone: tuple[list[str], bytes]) -> None:
    """From chains of one to chains of four and back, at boundaries and in steps, some of which overflow: losses,
    scales, norms and weights are those of one process."""
    assert {"inf", "nan"} <= {line.split()[-1] for line in alone[0][12:]}, "it overflows on the way"
    begin(crew, 4, 1, owned=True)
    for number, depth in enumerate((2, 4, 1, 3, 2, 4, 2), start=1):
        crew.reach(3 * number)
        crew.shape(depth, "now" if number % 2 else "boundary")
    ends_alike(crew, alone, HALF_STEPS)


@pytest.mark.processes
def test_the_scale_survives_the_loss_of_a_stage(crew: Crew, alone: tuple[list[str], bytes]) -> None:
    """One of a chain of three is killed, a newcomer takes its place; then all are, and others apply the logged sums again
    as a chain of two: what overflowed is found there as well."""
    hold = Path(f"{crew.folder / 'out.pt'}.hold")
    hold.write_text("18")
    first, *others = begin(crew, 3, 3, owned=True, backup_every_steps=40)
    crew.reach(9)
    crew.kill(first)
    others += crew.start(1)
    crew.let_in(hold, others[-1])
    crew.reach(int(hold.read_text()))
    crew.kill(*others)
    crew.depth, crew.settle = 2, 2
    crew.start(2)
    hold.unlink()
    ends_alike(crew, alone, HALF_STEPS)


UNSCALES = "        scaler.unscale_(optimizer)\n        norm = session.clip_grad_norm_(0.5)\n"
LOSS = "return functional.mse_loss(found, x[:, :4].tanh())"
USES = {
    "without unscale_, scaled by the script itself": (
        *(UNSCALES, "        norm = 0.0\n"),
        *(LOSS, "return scaler.scale(functional.mse_loss(found, x[:, :4].tanh()))"),
    ),
    "clipped by the scale, scaled in a list, a block in float32": (
        *(UNSCALES, "        norm = session.clip_grad_norm_(0.5 * scaler.get_scale())\n"),
        *(LOSS, "return scaler.scale([functional.mse_loss(found, x[:, :4].tanh())])[0]"),
        "        return x +",
        "        with torch.autocast('cpu', enabled=False):\n            h = self.norm(x.float()).tanh()\n        return x +",
    ),
    "a fused optimizer, a step left out": (
        *("lr=1e-2)", "lr=1e-2, fused=True)"),
        "        scaler.step(optimizer)\n",
        "        norm.isfinite() and scaler.step(optimizer)\n",
    ),
}


@pytest.mark.processes
@pytest.mark.parametrize("use", USES)
def test_whatever_a_script_does_with_its_scaler(crew: Crew, tmp_path: Path, use: str) -> None:
    """Each of two keeps its own layers, and both decide alike."""
    script = tmp_path / "train.py"
    text = HALF.read_text()
    for before, after in zip(USES[use][::2], USES[use][1::2], strict=True):
        assert before in text
        text = text.replace(before, after)
    script.write_text(text)
    lines, weights = played_alone(script, tmp_path / "alone" / "out.pt", "20")
    crew.depth, crew.owned = 2, True
    crew.begin(2, script.read_text(), "20", str(crew.folder / "out.pt"))
    ends_alike(crew, (lines, weights), 20)


TWO = """
    front, behind = [*model[:3].parameters()], [*model[3:].parameters()]
    optimizer, second = torch.optim.AdamW(front, lr=1e-2), torch.optim.SGD(behind, lr=1e-2)
"""


@pytest.mark.processes
def test_two_optimizers_skip_each_for_itself(crew: Crew, tmp_path: Path) -> None:
    """What overflows in the one's layers is no reason for the other to skip, though its worker has none of them."""
    text = HALF.read_text().replace(
        "    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)\n", TWO
    )
    text = text.replace("Session(model, optimizer,", "Session(model, optimizer, second,")
    for call in ("        scaler.unscale_(optimizer)\n", "        scaler.step(optimizer)\n"):
        text = text.replace(call, call + call.replace("optimizer", "second"))
    script = tmp_path / "train.py"
    script.write_text(text)
    alone = played_alone(script, tmp_path / "alone" / "out.pt", "20")
    crew.depth, crew.owned = 2, True
    crew.begin(2, text, "20", str(crew.folder / "out.pt"))
    ends_alike(crew, alone, 20)


FOR_EVER = """
import torch
from orchestrator import Session
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
session = Session(model, optimizer, scaler, microbatches=1)
for step in session.steps(20):
    session.backward(lambda x: model(x).sum(), [torch.full((2, 4), float("nan"))])
    scaler.step(optimizer)
    scaler.update()
"""


def test_what_is_not_finite_at_any_scale_is_no_overflow(by_hand: Callable[[str], None]) -> None:
    """A scaler skips, and its scale goes down; once it makes nothing larger any more, the job fails as ever."""
    with pytest.raises(NotFinite, match="step 4: the loss is nan"):
        by_hand(FOR_EVER)


TWO_PHASES = """
import torch
from orchestrator import Session
model = torch.nn.Linear(4, 1, bias=False)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
torch.nn.init.zeros_(model.weight)
scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
session = Session(model, optimizer, scaler, microbatches=1)
for step in session.steps(2):
    for factor in (1.0, 2.0):
        session.backward(lambda x: factor * model(x).sum(), [torch.ones(1, 4)])
    scaler.unscale_(optimizer)
    norm = session.clip_grad_norm_(100.0)
    assert norm == 6.0, norm
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
assert model.weight.tolist() == [[-6.0] * 4]
"""


def test_the_gradients_of_two_phases_are_unscaled_where_all_are_here(
    by_hand: Callable[[str], None],
) -> None:
    by_hand(TWO_PHASES)


BFLOAT = """
import sys, torch
from torch import nn
from orchestrator import Session

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
    session.backward(lambda x: model(x).square().mean(), data.split(16))
    optimizer.step()
if session.leader:
    torch.save(model.state_dict(), sys.argv[1])
"""


@pytest.mark.processes
def test_bfloat16_has_the_same_bits_in_stages(crew: Crew, tmp_path: Path) -> None:
    """Blocks that compute in half precision, cut between them."""
    script = tmp_path / "train.py"
    script.write_text(BFLOAT)
    _, weights = played_alone(script, tmp_path / "alone" / "out.pt")
    crew.depth = 2
    crew.begin(2, BFLOAT, str(crew.folder / "out.pt"))
    crew.completed()
    assert (crew.folder / "out.pt").read_bytes() == weights
    told = [ready for ready in crew.of(WorkerReady) if not ready.uncuttable]
    assert max(ready.stages_max for ready in told) >= 4
