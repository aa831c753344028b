"""Lookahead around a hand-written optimizer that keeps counters of its own, with gradient centralisation."""
from collections import defaultdict
import torch
import torch.nn as nn
from orchestrator import Session, Variables  #+
torch.manual_seed(0)


class AdaBelief(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps))
        self.t = 0
        self.buffer = [[None, None, None] for _ in range(10)]

    def step(self, closure=None):
        self.t += 1
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                g = p.grad.data
                if g.dim() > 1:
                    g = g - g.mean(dim=tuple(range(1, g.dim())), keepdim=True)
                st = self.state[p]
                if not st:
                    st["m"], st["s"] = torch.zeros_like(p.data), torch.zeros_like(p.data)
                st["m"].mul_(b1).add_(g, alpha=1 - b1)
                st["s"].mul_(b2).add_((g - st["m"]) ** 2, alpha=1 - b2)
                buffered = self.buffer[self.t % 10]
                if buffered[0] != self.t:
                    buffered[0] = self.t
                    buffered[1] = (1 - b2 ** self.t) ** 0.5
                    buffered[2] = group["lr"] / (1 - b1 ** self.t)
                p.data.addcdiv_(st["m"], st["s"].sqrt() / buffered[1] + group["eps"], value=-buffered[2])


class Lookahead:
    def __init__(self, base, k=5, alpha=0.5):
        self.base, self.k, self.alpha, self.counter = base, k, alpha, 0
        self.param_groups = base.param_groups
        self.slow = [[p.clone().detach() for p in g["params"]] for g in self.param_groups]

    def zero_grad(self):
        self.base.zero_grad()

    def step(self):
        self.base.step()
        self.counter += 1
        if self.counter % self.k:
            return
        for g, slow in zip(self.param_groups, self.slow):
            for p, q in zip(g["params"], slow):
                q.add_(p.data - q, alpha=self.alpha)
                p.data.copy_(q)


g = torch.Generator().manual_seed(1)
X, Y = torch.randn(256, 10, generator=g), torch.randn(256, 2, generator=g)
model = nn.Sequential(nn.Linear(10, 32), nn.ELU(), nn.Linear(32, 2))
base = AdaBelief(model.parameters(), lr=5e-3)
optimizer = Lookahead(base)
criterion = nn.SmoothL1Loss()
#-for step in range(20):
session = Session(model, base, optimizer, Variables(base, "t", "buffer"), microbatches=4)  #+
for step in session.steps(20):  #+
    x, y = X[step * 32 % 256 :][:32], Y[step * 32 % 256 :][:32]
    optimizer.zero_grad()
#-    loss = criterion(model(x), y)
#-    loss.backward()
    loss = session.backward(lambda x, y: criterion(model(x), y), x, y)  #+
    optimizer.step()
print(loss.item())
