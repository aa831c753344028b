"""Microbatches of other lengths in a model that asks how long they are: cut all the same, with the bits of one process."""

from pathlib import Path

import pytest
from crews import Crew, ends_alike_in_two

pytestmark = pytest.mark.processes

STEPS = 20
SCRIPT = f"""
import sys
import torch
from torch import nn
from torch.nn import functional
from orchestrator import Session
torch.manual_seed(0)
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
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
session = Session(model, optimizer, microbatches=4)
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
for step in session.steps({STEPS}):
    result = session.backward(loss_of, batches(step))
    optimizer.step()
    if session.leader:
        print(f"step {{step}} loss {{result.loss!r}}")
if session.leader:
    torch.save(model.state_dict(), sys.argv[1])
"""


def test_microbatches_of_other_lengths(crew: Crew, tmp_path: Path) -> None:
    """Lengths and numbers of rows change from one microbatch to the next, and some have no padding, of which another graph
    is made, where each worker keeps its own layers. A newcomer begins with another one than those who were there. Microbatches are objects
    with a number in them."""
    ends_alike_in_two(crew, SCRIPT, tmp_path, STEPS)
