"""What `half_billion.py` trains: a GPT on noise, handed over unbuilt.

usage: half_billion_gpt.py STEPS LAYERS WIDTH MICROBATCHES LENGTH EXCHANGE
"""

import sys

import torch
from torch import nn
from torch.nn import functional

from orchestrator import Session, unbuilt

STEPS, LAYERS, WIDTH, MICROBATCHES, LENGTH = map(int, sys.argv[1:6])
EXCHANGE = sys.argv[6]
WORDS = 16384


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide, self.back = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        rows, length, _ = x.shape
        q, k, v = (
            part.view(rows, length, WIDTH // 64, 64).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).split(WIDTH, dim=2)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, WIDTH))
        return x + self.back(functional.gelu(self.wide(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(LAYERS)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, words):
        x = self.words(words) + self.places.weight
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss_of(words):
    scores = model(words[:, :-1])
    return functional.cross_entropy(scores.flatten(0, 1), words[:, 1:].flatten())


def batches(step):
    draw = torch.Generator().manual_seed(step)
    return torch.randint(0, WORDS, (MICROBATCHES, LENGTH + 1), generator=draw).chunk(MICROBATCHES)


torch.set_num_threads(1)
torch.manual_seed(0)
model = unbuilt(GPT)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
session = Session(model, optimizer, exchange=EXCHANGE)
for step in session.steps(STEPS):
    result = session.backward(loss_of, batches(step))
    optimizer.step()
    optimizer.zero_grad()
    print(step, result.loss)
