"""Models and losses that are hard to cut into stages: cut all the same, with the bits of one process."""

from pathlib import Path

import pytest
from crews import Crew, ends_alike, ends_alike_in_two, played_alone

from agent.messages import WorkerReady

pytestmark = pytest.mark.processes


def script(steps: int, parts: str, first: str = "pass", then: str = "") -> str:
    """A whole script of what it trains: `model`, `batches`, `loss_of`; `first` and `then` are in its loop."""
    return f"""
import sys
import warnings
import torch
from torch import nn
from torch.distributions import Categorical, Normal
from torch.nn import functional
from orchestrator import Session
torch.manual_seed(0)
{parts}
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
session = Session(model, optimizer, microbatches=len(batches(0)))
for step in session.steps({steps}):
    {first}
    result = session.backward(loss_of, batches(step))
    told = f"step {{step}} loss {{result.loss!r}}"
    {then}
    optimizer.step()
    if session.leader:
        print(told)
if session.leader:
    torch.save(model.state_dict(), sys.argv[1])
"""


STEPS = 20
SCRIPTS = dict[str, str]()

# A newcomer records the loop before it has any layer: neither the loop's own run nor torch's sampler takes what is
# not a number.
SCRIPTS["what is drawn from a distribution"] = script(
    STEPS,
    """
model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)])
def batches(step):
    rows = torch.Generator().manual_seed(step)
    return [torch.randn(4 + step % 2, 8, generator=rows) for _ in range(4)]
def loss_of(x):
    logits, mean = model(x).split(4, 1)
    chosen = Categorical(logits=logits)
    taken = chosen.sample()
    wanted = x.gather(1, taken[:, None]).squeeze(1)
    found = Normal(mean, 1.0).log_prob(wanted[:, None]).sum(1)
    return -(chosen.log_prob(taken) * wanted + found).mean()
""",
)

# Lengths and numbers of rows change from one microbatch to the next, in a model that asks how long they are, and some have
# no padding, of which another graph is made. A newcomer begins with another one than those who were there. Microbatches
# are objects with a number in them.
SCRIPTS["microbatches of other lengths"] = script(
    STEPS,
    """
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.into, self.out, self.drop = nn.Linear(8, 24), nn.Linear(8, 8), nn.Dropout(0.1)
        self.register_buffer("longest", torch.zeros(()))
    def forward(self, h, mask):
        rows, length, _ = h.shape
        self.longest.copy_(self.longest * 0.9 + length)
        q, k, v = self.into(h).view(rows, length, 6, 4).transpose(1, 2).chunk(3, 1)
        seen = None if mask is None else mask[:, None, None]
        found = functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        return h + self.drop(self.out(found.transpose(1, 2).reshape(rows, length, 8)))
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.places = nn.Embedding(16, 8), nn.Embedding(16, 8)
        self.blocks = nn.ModuleList([Block() for _ in range(4)])
        self.head = nn.Linear(8, 16)
    def forward(self, words, mask):
        if words.dim() != 2:
            raise ValueError("rows of words")
        h = self.embed(words) + self.places(torch.arange(words.shape[1]))
        if mask.all():  # as libraries do: without one there are quicker ways
            mask = None
        for block in self.blocks:
            h = block(h, mask)
        return self.head(h)
model = Model()
class Batch:
    def __init__(self, words, mask, weight):
        self.words, self.mask, self.weight = words, mask, weight
def batches(step):
    rows, found = torch.Generator().manual_seed(step), []
    for each in range(4):
        lengths = torch.randint(2, 8, (1 + (step + each) % 3, 1), generator=rows)
        mask = torch.arange(int(lengths.max())) < lengths
        words = torch.randint(0, 16, mask.shape, generator=rows) * mask
        found.append(Batch(words, mask, 1.0 - 0.5 * (each % 2)))
    return found
def loss_of(batch):
    logits = model(batch.words, batch.mask).flatten(0, 1)
    return functional.cross_entropy(logits, batch.words.flatten()) * batch.weight
""",
)

# Beside the session: one is asked at the end, another one drops half of what it has and is asked in its turn. Who asks it
# is killed, and a newcomer has teachers of its own.
SCRIPTS["a teacher that the session does not know of"] = script(
    STEPS,
    """
def layers(*drops):
    return [nn.Sequential(nn.Linear(8, 8), nn.Dropout(p)) for p in drops]
model = nn.Sequential(*layers(0.1, 0.1, 0.1, 0.1))
teacher, noisy = (nn.Sequential(*layers(0.5, 0.5)) for _ in range(2))
teacher.eval()
def batches(step):
    rows = torch.Generator().manual_seed(step)
    return [torch.randn(4, 8, generator=rows) for _ in range(4)]
def loss_of(x):
    with torch.no_grad():
        wanted = asked(x)
    return functional.mse_loss(model(x), wanted)
""",
    first="asked = (teacher, noisy)[step // 4 % 2]",
)

# As those of Fourier neural operators: summed, saved, and clipped by their norm as well, where each worker has those of
# its own layers only.
SCRIPTS["complex weights"] = script(
    STEPS,
    """
warnings.simplefilter("ignore")  # of strides of gradients, by torch
class Spectral(nn.Module):
    def __init__(self, width, modes):
        super().__init__()
        self.modes = modes
        self.weight = nn.Parameter(torch.rand(width, width, modes, dtype=torch.cfloat) / width**2)
        self.register_buffer("turn", torch.polar(torch.ones(modes), torch.arange(float(modes))).conj())
        self.beside = nn.Conv1d(width, width, 1)
    def forward(self, x):
        found = torch.fft.rfft(x)
        out = torch.zeros_like(found)
        taken = found[..., : self.modes] * self.turn
        out[..., : self.modes] = torch.einsum("bix,iox->box", taken, self.weight)
        return torch.tanh(torch.fft.irfft(out, n=x.size(-1)) + self.beside(x))
model = nn.Sequential(nn.Conv1d(1, 6, 1), Spectral(6, 4), Spectral(6, 4), Spectral(6, 4), nn.Conv1d(6, 1, 1))
def batches(step):
    rows = torch.Generator().manual_seed(step)
    return [torch.randn(4, 1, 16, generator=rows) for _ in range(4)]
def loss_of(x):
    return (model(x) - x.cumsum(-1)).square().mean()
""",
    then='told += f" norm {session.clip_grad_norm_(0.5).item()!r}"',
)


@pytest.mark.parametrize("name", SCRIPTS)
def test_each_worker_keeps_its_own_layers_and_one_is_replaced(
    crew: Crew, tmp_path: Path, name: str
) -> None:
    ends_alike_in_two(crew, SCRIPTS[name], tmp_path, STEPS)


SHARED_TABLE = """
class Rotary(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("speeds", 1.0 / 100 ** (torch.arange(0, 8, 2) / 8), persistent=False)
        BEGIN
    def table(self, length):
        self.longest = length
        angles = torch.outer(torch.arange(length).float(), self.speeds)
        return angles.cos(), angles.sin()
    def forward(self, h):
        length = h.shape[1]
        GROW
        a, b = h.chunk(2, 2)
        cos, sin = self.cos[:length], self.sin[:length]
        return torch.cat([a * cos - b * sin, a * sin + b * cos], 2)
class Block(nn.Module):
    def __init__(self, rotary):
        super().__init__()
        self.rotary, self.into, self.out = rotary, nn.Linear(8, 24), nn.Linear(8, 8)
    def forward(self, h):
        q, k, v = self.into(h).chunk(3, 2)
        found = functional.scaled_dot_product_attention(self.rotary(q), self.rotary(k), v)
        return h + self.out(found)
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        rotary = Rotary()
        self.embed, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)
        self.blocks = nn.ModuleList([Block(rotary) for _ in range(4)])
    def forward(self, words):
        h = self.embed(words)
        for block in self.blocks:
            h = block(h)
        return self.head(h)
model = Model()
def batches(step):
    rows = torch.Generator().manual_seed(step)
    return [torch.randint(0, 16, (2, 4 + (step + 3 * each) % 7), generator=rows) for each in range(4)]
def loss_of(words):
    return functional.cross_entropy(model(words).flatten(0, 1), words.flatten())
"""
HOW = {
    "made in the first forward": (
        'for key in ("cos", "sin"): self.register_buffer(key, None, persistent=False)',
        "if self.cos is None or len(self.cos) < length: self.cos, self.sin = self.table(length)",
    ),
    "registered anew for a longer microbatch": (
        'for key, it in zip(("cos", "sin"), self.table(5)): self.register_buffer(key, it, persistent=False)',
        'if length > self.longest:\n            for key, it in zip(("cos", "sin"), self.table(length)): '
        "self.register_buffer(key, it, persistent=False)",
    ),
}


@pytest.mark.parametrize("how", HOW)
def test_a_table_that_all_blocks_share(crew: Crew, tmp_path: Path, how: str) -> None:
    """Who was there before has a longer one than newcomers, and whoever was alone in between has another than who was not."""
    begin, grow = HOW[how]
    text = script(24, SHARED_TABLE.replace("BEGIN", begin).replace("GROW", grow))
    (tmp_path / "train.py").write_text(text)
    by_hand = played_alone(tmp_path / "train.py", tmp_path / "alone" / "out.pt")
    crew.depth = 2
    workers = crew.begin(2, text, str(tmp_path / "out.pt"))
    crew.reach(5)
    crew.kill(workers[1])
    crew.start(1)
    crew.reach(12)
    crew.start(2)
    crew.reach(16)
    crew.kill(workers[0])
    ends_alike(crew, by_hand, 24)
    assert crew.depth == 2


ANOTHER_LATER = """
model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])
def batches(step):
    rows = torch.Generator().manual_seed(step)
    return [torch.randn(4 if step < 8 else 3 + each, 8, generator=rows) for each in range(2)]
def loss_of(x):
    for layer in model if len(x.shape) + len(list(x)) > 5 else [*model][::-1]:
        x = layer(x)
    return x.square().sum()
"""


def why_it_ends_whole(crew: Crew, folder: Path, text: str) -> str:
    """A job of two stages ends in one piece, with the weights of one process; what was said of that."""
    (folder / "train.py").write_text(text)
    by_hand = played_alone(folder / "train.py", folder / "alone" / "out.pt")
    crew.depth = 2
    crew.begin(2, text, str(folder / "out.pt"))
    ends_alike(crew, by_hand, 12)
    assert crew.depth == 1
    return [report.uncuttable for report in crew.of(WorkerReady) if report.uncuttable][-1]


def test_other_shapes_in_a_later_step_end_the_depth_and_not_the_job(
    crew: Crew, tmp_path: Path
) -> None:
    """The first steps can be cut and are played with depth 2; the recording is not of microbatches of two sizes, which come
    after these: the job goes on in one piece."""
    assert "asks how large its inputs are" in why_it_ends_whole(
        crew, tmp_path, script(12, ANOTHER_LATER)
    )


NOTHING_LATER = """
class Look(nn.Module):
    def forward(self, x):
        return x * 2, (x.abs().mean() if x.max().item() > 1e-3 else None)
class Penalized(nn.Module):
    def __init__(self):
        super().__init__()
        self.look, self.out = Look(), nn.Linear(8, 8)
    def forward(self, x):
        x, penalty = self.look(x)
        return self.out(x) if penalty is None else self.out(x) + penalty
model = nn.Sequential(Penalized(), *[nn.Linear(8, 8) for _ in range(4)])
def batches(step):
    rows = torch.Generator().manual_seed(step)
    return [torch.rand(4, 8, generator=rows) * (1 if step < 8 else 1e-5) for each in range(2)]
def loss_of(x):
    return model(x).square().sum()
"""


def test_a_stage_that_fails_later_ends_the_depth_and_not_the_job(
    crew: Crew, tmp_path: Path
) -> None:
    """What it was recorded from has a tensor there, and from step 8 on there is None. The script itself has no fault."""
    assert "TypeError" in why_it_ends_whole(crew, tmp_path, script(12, NOTHING_LATER))
