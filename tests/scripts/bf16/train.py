"""Mixed precision by autocast to bfloat16, with torch.compile-style flags left off."""

import argparse
from contextlib import nullcontext

import torch
from torch import nn
from torch.nn import functional as F
#+
from orchestrator import Session  #+

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=24)
parser.add_argument("--accum", type=int, default=4)
parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
args = parser.parse_args()
torch.manual_seed(0)


class RMSNorm(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)).type_as(x) * self.weight


class SwiGLU(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.norm = RMSNorm(dim)
        self.w1, self.w3 = nn.Linear(dim, hidden, bias=False), nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)

    def forward(self, x):
        h = self.norm(x)
        return x + self.w2(F.silu(self.w1(h)) * self.w3(h))


model = nn.Sequential(nn.Linear(8, 32), SwiGLU(32, 64), SwiGLU(32, 64), nn.Linear(32, 1))
decay = [p for p in model.parameters() if p.dim() >= 2]
rest = [p for p in model.parameters() if p.dim() < 2]
groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95))
ctx = torch.autocast("cpu", torch.bfloat16) if args.dtype == "bfloat16" else nullcontext()


def microbatch(step, i):
    rows = torch.Generator().manual_seed(step * args.accum + i)
    x = torch.randn(8, 8, generator=rows)
    return x, x.square().sum(1, keepdim=True).sqrt()


def loss_of(batch):
    x, y = batch
    with ctx:
        return F.mse_loss(model(x).float(), y)


#-for step in range(args.steps):
#-    lossf = 0.0
#-    for i in range(args.accum):
#-        loss = loss_of(microbatch(step, i)) / args.accum
#-        loss.backward()
#-        lossf += loss.item()
#-    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
session = Session(model, optimizer)  #+
for step in session.steps(args.steps):  #+
    lossf = session.backward(loss_of, [microbatch(step, i) for i in range(args.accum)]).loss  #+
    norm = session.clip_grad_norm_(1.0)  #+
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if step % 8 == 0:
        print(f"step {step:4d} | loss: {lossf:.6f} | norm: {norm:.4f}")
