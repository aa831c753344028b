"""Momentum contrast: a query encoder, its slow copy, and a queue of keys."""

import argparse

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
#+
from orchestrator import Session  #+


class TwoViews(Dataset):
    """Two random crops of one signal."""

    def __init__(self, size=256):
        self.signals = torch.randn(size, 32, generator=torch.Generator().manual_seed(1)).cumsum(1)

    def __len__(self):
        return len(self.signals)

    def crop(self, x):
        start = torch.randint(8, ()).item()
        return x[start : start + 24] + 0.1 * torch.randn(24)

    def __getitem__(self, i):
        return self.crop(self.signals[i]), self.crop(self.signals[i])


class MoCo(nn.Module):
    def __init__(self, dim=8, K=128, m=0.99, T=0.2):
        super().__init__()
        self.K, self.m, self.T = K, m, T
        self.encoder_q = nn.Sequential(nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, dim))
        self.encoder_k = nn.Sequential(nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, dim))
        self.encoder_k.load_state_dict(self.encoder_q.state_dict())
        self.encoder_k.requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(dim, K), dim=0))
        self.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def momentum_update(self):
        for q, k in zip(self.encoder_q.parameters(), self.encoder_k.parameters(), strict=True):
            k.mul_(self.m).add_(q, alpha=1 - self.m)

    @torch.no_grad()
    def dequeue_and_enqueue(self, keys):
        ptr = int(self.queue_ptr)
        self.queue[:, ptr : ptr + len(keys)] = keys.T
        self.queue_ptr[0] = (ptr + len(keys)) % self.K

    @torch.no_grad()
    def keys(self, im_k):
        return F.normalize(self.encoder_k(im_k), dim=1)

    def forward(self, im_q, k):
        q = F.normalize(self.encoder_q(im_q), dim=1)
        l_pos = (q * k).sum(1, keepdim=True)
        logits = torch.cat([l_pos, q @ self.queue.clone()], dim=1) / self.T
        return F.cross_entropy(logits, torch.zeros(len(q), dtype=torch.long))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32)
    args = parser.parse_args()
    torch.manual_seed(0)
    model = MoCo()
    optimizer = torch.optim.SGD(model.encoder_q.parameters(), 0.03, momentum=0.9)
#-    loader = DataLoader(TwoViews(), batch_size=args.batch_size, shuffle=True)
#-    for epoch in range(args.epochs):
    session = Session(model, optimizer, microbatches=4)  #+
    loader = session.data(TwoViews(), batch_size=args.batch_size, shuffle=True)  #+
    for epoch in session.epochs(args.epochs):  #+
        total = 0.0
        for im_q, im_k in loader:
            optimizer.zero_grad()  #+
            loss = session.backward(lambda q, k: model(q, model.keys(k)), im_q, im_k)  #+
            optimizer.step()  #+
            model.dequeue_and_enqueue(model.keys(im_k))  #+
            model.momentum_update()
#-            k = model.keys(im_k)
#-            loss = model(im_q, k)
#-            optimizer.zero_grad()
#-            loss.backward()
#-            optimizer.step()
#-            model.dequeue_and_enqueue(k)
            total += float(loss)
        print(f"epoch {epoch} loss {total / len(loader):.4f}")


if __name__ == "__main__":
    main()
