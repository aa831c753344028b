"""Redundancy reduction between two views, in the manner of facebookresearch/barlowtwins' main.py."""

import argparse
import json
import math
import time
from pathlib import Path

import torch
from torch import nn, optim
#+
from orchestrator import Session  #+

parser = argparse.ArgumentParser(description="Barlow Twins Training")
parser.add_argument("--epochs", default=3, type=int)
parser.add_argument("--batch-size", default=32, type=int)
parser.add_argument("--learning-rate-weights", default=0.2, type=float)
parser.add_argument("--learning-rate-biases", default=0.0048, type=float)
parser.add_argument("--weight-decay", default=1e-6, type=float)
parser.add_argument("--lambd", default=0.0051, type=float)
parser.add_argument("--print-freq", default=4, type=int)
parser.add_argument("--checkpoint-dir", default="./checkpoint/", type=Path)


class Transform:
    def __call__(self, x):
        return self.view(x), self.view(x)

    def view(self, x):
        return x.roll(int(torch.randint(3, ())), -1) + 0.1 * torch.randn(x.shape)


class Images(torch.utils.data.Dataset):
    def __init__(self, transform):
        self.images = torch.randn(256, 32, generator=torch.Generator().manual_seed(1)).cumsum(1)
        self.transform = transform

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        return self.transform(self.images[i]), 0


class BarlowTwins(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.args = args
        self.backbone = nn.Sequential(nn.Linear(32, 32, bias=False), nn.BatchNorm1d(32), nn.ReLU())
        self.projector = nn.Sequential(nn.Linear(32, 32, bias=False), nn.BatchNorm1d(32), nn.ReLU(inplace=True), nn.Linear(32, 16, bias=False))
        # normalization layer for the representations z1 and z2
        self.bn = nn.BatchNorm1d(16, affine=False)

    def forward(self, y1, y2):
        z1 = self.projector(self.backbone(y1))
        z2 = self.projector(self.backbone(y2))
        # empirical cross-correlation matrix
        c = self.bn(z1).T @ self.bn(z2)
        c.div_(len(y1))
        on_diag = torch.diagonal(c).add_(-1).pow_(2).sum()
        off_diag = off_diagonal(c).pow_(2).sum()
        return on_diag + self.args.lambd * off_diag


def off_diagonal(x):
    n, m = x.shape
    assert n == m
    return x.flatten()[:-1].view(n - 1, n + 1)[:, 1:].flatten()


class LARS(optim.Optimizer):
    def __init__(self, params, lr, weight_decay=0, momentum=0.9, eta=0.001, weight_decay_filter=False, lars_adaptation_filter=False):
        defaults = dict(
            lr=lr,
            weight_decay=weight_decay,
            momentum=momentum,
            eta=eta,
            weight_decay_filter=weight_decay_filter,
            lars_adaptation_filter=lars_adaptation_filter,
        )
        super().__init__(params, defaults)

    def exclude_bias_and_norm(self, p):
        return p.ndim == 1

    @torch.no_grad()
    def step(self):
        for g in self.param_groups:
            for p in g["params"]:
                dp = p.grad
                if dp is None:
                    continue
                if not g["weight_decay_filter"] or not self.exclude_bias_and_norm(p):
                    dp = dp.add(p, alpha=g["weight_decay"])
                if not g["lars_adaptation_filter"] or not self.exclude_bias_and_norm(p):
                    param_norm = torch.norm(p)
                    update_norm = torch.norm(dp)
                    one = torch.ones_like(param_norm)
                    q = torch.where(param_norm > 0.0, torch.where(update_norm > 0, (g["eta"] * param_norm / update_norm), one), one)
                    dp = dp.mul(q)
                param_state = self.state[p]
                if "mu" not in param_state:
                    param_state["mu"] = torch.zeros_like(p)
                mu = param_state["mu"]
                mu.mul_(g["momentum"]).add_(dp)
                p.add_(mu, alpha=-g["lr"])


def adjust_learning_rate(args, optimizer, loader, step):
    max_steps = args.epochs * len(loader)
    warmup_steps = len(loader)
    base_lr = args.batch_size / 256
    if step < warmup_steps:
        lr = base_lr * step / warmup_steps
    else:
        step -= warmup_steps
        max_steps -= warmup_steps
        q = 0.5 * (1 + math.cos(math.pi * step / max_steps))
        end_lr = base_lr * 0.001
        lr = base_lr * q + end_lr * (1 - q)
    optimizer.param_groups[0]["lr"] = lr * args.learning_rate_weights
    optimizer.param_groups[1]["lr"] = lr * args.learning_rate_biases


def main():
    args = parser.parse_args()
    args.checkpoint_dir.mkdir(parents=True, exist_ok=True)
    stats_file = open(args.checkpoint_dir / "stats.txt", "a", buffering=1)
    torch.manual_seed(0)
    model = BarlowTwins(args)
    param_weights = []
    param_biases = []
    for param in model.parameters():
        if param.ndim == 1:
            param_biases.append(param)
        else:
            param_weights.append(param)
    parameters = [{"params": param_weights}, {"params": param_biases}]
    optimizer = LARS(parameters, lr=0, weight_decay=args.weight_decay, weight_decay_filter=True, lars_adaptation_filter=True)
    loader = torch.utils.data.DataLoader(Images(Transform()), batch_size=args.batch_size, shuffle=True)
    start_time = time.time()
#-    for epoch in range(args.epochs):
#-        for step, ((y1, y2), _) in enumerate(loader, start=epoch * len(loader)):
    session = Session(model, optimizer, microbatches=4)  #+
    loader = session.data(loader)  #+
    for epoch in session.epochs(args.epochs):  #+
        for (y1, y2), _ in loader:  #+
            step = session.step  #+
            adjust_learning_rate(args, optimizer, loader, step)
            optimizer.zero_grad()
#-            loss = model.forward(y1, y2)
#-            loss.backward()
            loss = session.backward(model, y1, y2)  #+
            optimizer.step()
            if step % args.print_freq == 0:
                stats = dict(epoch=epoch, step=step, loss=loss.item(), time=int(time.time() - start_time))
                print(json.dumps(stats))
                print(json.dumps(stats), file=stats_file)
        # save checkpoint
        state = dict(epoch=epoch + 1, model=model.state_dict(), optimizer=optimizer.state_dict())
        torch.save(state, args.checkpoint_dir / "checkpoint.pth")
    torch.save(model.backbone.state_dict(), args.checkpoint_dir / "resnet50.pth")


if __name__ == "__main__":
    main()
