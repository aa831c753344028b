"""Sort sequences of digits with a small transformer: a trainer class that calls back."""

import argparse
import time
from collections import defaultdict

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
#+
from orchestrator import Session  #+


class SortDataset(Dataset):
    """Sequences of digits, and the same digits sorted."""

    def __init__(self, length=6, num_digits=3, size=256):
        rows = torch.Generator().manual_seed(1)
        self.inputs = torch.randint(num_digits, (size, length), generator=rows)

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, idx):
        cat = torch.cat([self.inputs[idx], self.inputs[idx].sort()[0]])
        x, y = cat[:-1].clone(), cat[1:].clone()
        y[: len(self.inputs[idx]) - 1] = -1
        return x, y


class Model(nn.Module):
    def __init__(self, vocab=3, block=11, width=32):
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocab, width), nn.Embedding(block, width)
        self.block = nn.TransformerEncoderLayer(width, 2, 64, 0.0, batch_first=True, bias=False)
        self.head = nn.Linear(width, vocab)
        self.register_buffer("mask", torch.ones(block, block).triu(1).bool(), persistent=False)

    def forward(self, idx, targets=None):
        x = self.tok(idx) + self.pos.weight[: idx.size(1)]
        logits = self.head(self.block(x, src_mask=self.mask[: idx.size(1), : idx.size(1)]))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)


class Trainer:
    def __init__(self, config, model, train_dataset):
        self.config, self.model, self.train_dataset = config, model, train_dataset
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate)
        self.callbacks = defaultdict(list)
        self.iter_time = time.time()
#-        self.loss = None
        self.session = Session(model, self.optimizer)  #+

    def add_callback(self, onevent, callback):
        self.callbacks[onevent].append(callback)

    def trigger_callbacks(self, onevent):
        for callback in self.callbacks.get(onevent, []):
            callback(self)

    def batches(self):
#-        loader = DataLoader(self.train_dataset, batch_size=self.config.batch_size)
#-        while True:
#-            yield from loader
        return self.session.data(self.train_dataset, batch_size=self.config.batch_size, microbatches=4, shuffle=False)  #+

    def run(self):
        self.model.train()
        batches = self.batches()
#-        for self.iter_num in range(self.config.max_iters):
#-            batch = next(batches)
        for self.iter_num in self.session.steps(self.config.max_iters):  #+
            batch = batches.at(self.iter_num)  #+
            self.model.zero_grad(set_to_none=True)
#-            self.loss = self.model(*batch)[1]
#-            self.loss.backward()
#-            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.grad_norm_clip)
            self.loss = self.session.backward(lambda b: self.model(*b)[1], batch).loss  #+
            self.session.clip_grad_norm_(self.config.grad_norm_clip)  #+
            self.optimizer.step()
            self.trigger_callbacks("on_batch_end")
            tnow = time.time()
            self.iter_dt = tnow - self.iter_time
            self.iter_time = tnow


def batch_end_callback(trainer):
    if trainer.iter_num % 8 == 0:
        print(f"iter {trainer.iter_num}: train loss {trainer.loss:.5f}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--max-iters", type=int, default=32)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--learning-rate", type=float, default=5e-3)
    parser.add_argument("--grad-norm-clip", type=float, default=1.0)
    config = parser.parse_args()
    torch.manual_seed(3407)
    trainer = Trainer(config, Model(), SortDataset())
    trainer.add_callback("on_batch_end", batch_end_callback)
    trainer.run()


if __name__ == "__main__":
    main()
