"""A compiled model, a compiled activation, and sequences of several lengths."""

import torch
from torch import nn
from torch.nn import functional as F
#+
from orchestrator import Session  #+

STEPS, MICRO = 24, 4
torch.manual_seed(0)


@torch.compile
def squared_relu(x):
    return F.relu(x).square()


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.blocks = nn.Sequential(Block(16), Block(16))
        self.head = nn.Linear(16, 5)

    def forward(self, ids):
        h = self.blocks(self.embed(ids))
        weights = torch.softmax(h.mean(-1), -1).unsqueeze(-1)
        return self.head((weights * h).sum(1))


model = torch.compile(Tagger())
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)


def microbatch(step, i):
    rows = torch.Generator().manual_seed(step * MICRO + i)
    ids = torch.randint(0, 20, (6, 7 + step % 3 * 5), generator=rows)
    return ids, ids.sum(1) % 5


def loss_of(batch):
    ids, tags = batch
    return F.cross_entropy(squared_relu(model(ids)), tags)


#-for step in range(STEPS):
#-    lossf = 0.0
#-    for i in range(MICRO):
#-        loss = loss_of(microbatch(step, i)) / MICRO
#-        loss.backward()
#-        lossf += loss.item()
session = Session(model, optimizer)  #+
for step in session.steps(STEPS):  #+
    lossf = session.backward(loss_of, [microbatch(step, i) for i in range(MICRO)]).loss  #+
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if step % 8 == 0:
        print(f"step {step:4d} | loss: {lossf:.6f}")
