"""Tables that a module makes in its first forward, or makes anew for a longer microbatch, in a module that all blocks share: cut
all the same, with the bits of one process."""

from pathlib import Path

import pytest
from crews import Crew, ends_alike, played_alone

pytestmark = pytest.mark.processes

STEPS = 24
SCRIPT = f"""
import sys
import torch
from torch import nn
from torch.nn import functional
from orchestrator import Session
torch.manual_seed(0)
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
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
session = Session(model, optimizer, microbatches=4)
def batches(step):
    rows = torch.Generator().manual_seed(step)
    return [torch.randint(0, 16, (2, 4 + (step + 3 * each) % 7), generator=rows) for each in range(4)]
def loss_of(words):
    return functional.cross_entropy(model(words).flatten(0, 1), words.flatten())
for step in session.steps({STEPS}):
    result = session.backward(loss_of, batches(step))
    optimizer.step()
    if session.leader:
        print(f"step {{step}} loss {{result.loss!r}}")
if session.leader:
    torch.save(model.state_dict(), sys.argv[1])
"""
HOW = {
    "made in the first forward": (
        'for key in ("cos", "sin"): self.register_buffer(key, None, persistent=False)',
        "if self.cos is None or len(self.cos) < length: self.cos, self.sin = self.table(length)",
    ),
    "registered anew": (
        'for key, it in zip(("cos", "sin"), self.table(5)): self.register_buffer(key, it, persistent=False)',
        'if length > self.longest:\n            for key, it in zip(("cos", "sin"), self.table(length)): '
        "self.register_buffer(key, it, persistent=False)",
    ),
}


@pytest.mark.parametrize("how", HOW)
def test_a_table_that_all_blocks_share(crew: Crew, tmp_path: Path, how: str) -> None:
    """Who was there before has a longer one than newcomers, and whoever was alone in between has another than who was not."""
    begin, grow = HOW[how]
    script = SCRIPT.replace("BEGIN", begin).replace("GROW", grow)
    (tmp_path / "train.py").write_text(script)
    by_hand = played_alone(tmp_path / "train.py", tmp_path / "alone" / "out.pt")
    crew.depth = 2
    workers = crew.begin(2, script, str(tmp_path / "out.pt"))
    crew.reach(5)
    crew.kill(workers[1])
    crew.start(1)
    crew.reach(12)
    crew.start(2)
    crew.reach(16)
    crew.kill(workers[0])
    ends_alike(crew, by_hand, STEPS)
    assert crew.depth == 2
