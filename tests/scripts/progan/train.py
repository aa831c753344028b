"""Progressive growing: each stage fades in a new block, whose weights come as a new group; alpha rises each step."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from orchestrator import Session  #+
torch.manual_seed(0)


class Generator(nn.Module):
    def __init__(self, z=8, c=8):
        super().__init__()
        self.first = nn.Linear(z, c * 16)
        self.blocks = nn.ModuleList([nn.Conv2d(c, c, 3, padding=1) for _ in range(2)])
        self.rgb = nn.ModuleList([nn.Conv2d(c, 1, 1) for _ in range(3)])
        self.depth, self.alpha = 0, 1.0

    def forward(self, z):
        x = self.first(z).view(-1, 8, 4, 4)
        for d in range(self.depth):
            prev = x
            x = F.leaky_relu(self.blocks[d](F.interpolate(x, scale_factor=2)), 0.2)
        img = self.rgb[self.depth](x)
        if self.depth and self.alpha < 1:
            img = self.alpha * img + (1 - self.alpha) * F.interpolate(self.rgb[self.depth - 1](prev), scale_factor=2)
        return img


class Critic(nn.Module):
    def __init__(self, c=8):
        super().__init__()
        self.rgb = nn.ModuleList([nn.Conv2d(1, c, 1) for _ in range(3)])
        self.blocks = nn.ModuleList([nn.Conv2d(c, c, 3, padding=1) for _ in range(2)])
        self.last = nn.Linear(c * 16, 1)

    def forward(self, x, depth, alpha):
        h = F.leaky_relu(self.rgb[depth](x), 0.2)
        for d in reversed(range(depth)):
            h = F.avg_pool2d(F.leaky_relu(self.blocks[d](h), 0.2), 2)
            if d == depth - 1 and alpha < 1:
                h = alpha * h + (1 - alpha) * F.leaky_relu(self.rgb[depth - 1](F.avg_pool2d(x, 2)), 0.2)
        return self.last(h.flatten(1))


G, D = Generator(), Critic()
real = torch.rand(64, 1, 16, 16, generator=torch.Generator().manual_seed(1))
for m in (*G.blocks, *G.rgb[1:], *D.blocks, *D.rgb[1:]):
    m.requires_grad_(False)
opt_g = torch.optim.Adam([p for p in G.parameters() if p.requires_grad], lr=1e-3, betas=(0.0, 0.99))
opt_d = torch.optim.Adam([p for p in D.parameters() if p.requires_grad], lr=1e-3, betas=(0.0, 0.99))


def grow(depth):
    G.depth = depth
    for net, opt in ((G, opt_g), (D, opt_d)):
        new = [*net.blocks[depth - 1].parameters(), *net.rgb[depth].parameters()]
        for p in new:
            p.requires_grad_(True)
        opt.add_param_group({"params": new, "lr": 5e-4})


def d_loss(x, z):
    return F.softplus(D(G(z).detach(), G.depth, G.alpha)).mean() + F.softplus(-D(x, G.depth, G.alpha)).mean()


def g_loss(z):
    return F.softplus(-D(G(z), G.depth, G.alpha)).mean()


PER = 8
#-for it in range(3 * PER):
session = Session(G, D, opt_g, opt_d, microbatches=4, unfreezes=True)  #+
for it in session.steps(3 * PER):  #+
    if it % PER == 0 and it:
        grow(it // PER)
    G.alpha = min(1.0, (it % PER + 1) / (PER / 2)) if G.depth else 1.0
    gen = torch.Generator().manual_seed(it)
    x = F.adaptive_avg_pool2d(real[torch.randint(0, 64, (16,), generator=gen)], 4 * 2 ** G.depth)
    z = torch.randn(16, 8, generator=gen)
    opt_d.zero_grad()
#-    ld = d_loss(x, z)
#-    ld.backward()
    ld = session.backward(d_loss, x, z)  #+
    opt_d.step()
    opt_g.zero_grad()
#-    lg = g_loss(z)
#-    lg.backward()
    lg = session.backward(g_loss, z)  #+
    opt_g.step()
    if it % PER == PER - 1:
        print(G.depth, ld.item(), lg.item())
