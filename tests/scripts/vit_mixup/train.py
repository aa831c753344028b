"""A vision transformer with mixup, warm-up and a cosine schedule."""

import argparse
import math

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
#+
from orchestrator import Session  #+


class ViT(nn.Module):
    def __init__(self, patch=4, dim=32, depth=2, num_classes=4):
        super().__init__()
        self.patch = nn.Conv2d(1, dim, patch, patch)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.pos = nn.Parameter(0.02 * torch.randn(1, 10, dim))
        layer = nn.TransformerEncoderLayer(dim, 2, 64, 0.0, F.gelu, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, num_classes))

    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1) + self.pos
        return self.head(self.blocks(x)[:, 0])


def mixup_data(x, y, alpha=0.4):
    """Mixed inputs, pairs of targets, and lambda."""
    lam = np.random.beta(alpha, alpha)
    index = torch.randperm(len(x))
    return lam * x + (1 - lam) * x[index], y, y[index], lam


def mixup_loss(net, criterion, inputs, targets):
    inputs, y_a, y_b, lam = mixup_data(inputs, targets)
    pred = net(inputs)
    return lam * criterion(pred, y_a) + (1 - lam) * criterion(pred, y_b)


def textures(count, seed):
    rows = torch.Generator().manual_seed(seed)
    y = torch.randint(4, (count,), generator=rows)
    kinds = torch.randn(4, 1, 12, 12, generator=torch.Generator().manual_seed(0))
    return TensorDataset(kinds[y] + torch.randn(count, 1, 12, 12, generator=rows), y)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", default=1e-3, type=float)
    parser.add_argument("--bs", default=32, type=int)
    parser.add_argument("--n_epochs", default=3, type=int)
    args = parser.parse_args()
    torch.manual_seed(0)
    np.random.seed(0)

    trainloader = DataLoader(textures(256, 1), batch_size=args.bs, shuffle=True)
    testset = textures(64, 2)
    net = ViT()
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(net.parameters(), lr=args.lr)
    total, warmup = args.n_epochs * len(trainloader), 4

    def rate(step):
        if step < warmup:
            return (step + 1) / warmup
        return 0.5 * (1 + math.cos(math.pi * (step - warmup) / (total - warmup)))

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
#-    for epoch in range(args.n_epochs):
    session = Session(net, optimizer, scheduler)  #+
    data = session.data(trainloader.dataset, batch_size=args.bs, microbatches=4, shuffle=True)  #+
    for epoch in session.epochs(args.n_epochs):  #+
        net.train()
        train_loss = 0
#-        for inputs, targets in trainloader:
#-            loss = mixup_loss(net, criterion, inputs, targets)
        for batch in data:  #+
            optimizer.zero_grad()
#-            loss.backward()
            loss = session.backward(lambda b: mixup_loss(net, criterion, *b), batch).loss  #+
            optimizer.step()
            scheduler.step()
            train_loss += float(loss)
        net.eval()
        with torch.no_grad():
            x, y = testset.tensors
            acc = (net(x).argmax(1) == y).float().mean()
        print(f"Epoch {epoch}: loss {train_loss / len(trainloader):.4f}, acc {100 * acc:.1f}")


if __name__ == "__main__":
    main()
