"""A loop in the style of an accelerator object: prepare, accumulate, backward, clip, gather."""

import argparse
import contextlib
import math

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
#+
from orchestrator import Session  #+


class Accelerator:
    """One process, one device: what such an object does there."""

    is_main_process = True

    def __init__(self, gradient_accumulation_steps=1):
        self.steps, self.count = gradient_accumulation_steps, 0

    def prepare(self, *things):
        return things

    @property
    def sync_gradients(self):
        return self.count % self.steps == 0

    @contextlib.contextmanager
    def accumulate(self, model):
        self.count += 1
        yield

    def backward(self, loss):
        (loss / self.steps).backward()

    def clip_grad_norm_(self, parameters, max_norm):
        if self.sync_gradients:
            nn.utils.clip_grad_norm_(parameters, max_norm)

    def print(self, *words):
        if self.is_main_process:
            print(*words)


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 3))

    def forward(self, x, labels):
        logits = self.body(x)
        return F.cross_entropy(logits, labels), logits


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--num_train_epochs", type=int, default=2)
    parser.add_argument("--per_device_train_batch_size", type=int, default=8)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=4)
    parser.add_argument("--learning_rate", type=float, default=5e-3)
    parser.add_argument("--max_grad_norm", type=float, default=1.0)
    args = parser.parse_args()
    torch.manual_seed(0)
    x = torch.randn(512, 16)
    dataset = TensorDataset(x, (x[:, :3] + x[:, 3:6]).argmax(1))
#-    accelerator = Accelerator(args.gradient_accumulation_steps)
    accelerator = Accelerator()  #+
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    loader = DataLoader(dataset, batch_size=args.per_device_train_batch_size, shuffle=True)
    updates = math.ceil(len(loader) / args.gradient_accumulation_steps) * args.num_train_epochs
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, updates)
#-    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    session = Session(model, optimizer, scheduler)  #+
    loader = session.data(dataset, batch_size=args.per_device_train_batch_size * args.gradient_accumulation_steps, microbatches=args.gradient_accumulation_steps, shuffle=True)  #+

    completed_steps = 0
#-    for epoch in range(args.num_train_epochs):
    for epoch in session.epochs(args.num_train_epochs):  #+
        model.train()
        for batch in loader:
            with accelerator.accumulate(model):
#-                loss, logits = model(*batch)
#-                accelerator.backward(loss)
                loss = session.backward(lambda b: model(*b)[0], batch).loss  #+
                if accelerator.sync_gradients:
#-                    accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm)
                    session.clip_grad_norm_(args.max_grad_norm)  #+
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                    completed_steps += 1
        accelerator.print(f"epoch {epoch}: {completed_steps} steps, loss {loss:.4f}")


if __name__ == "__main__":
    main()
