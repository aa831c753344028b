"""Translate sequences (reverse them): an encoder and a decoder, label smoothing, a Noam schedule."""

import argparse

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
#+
from orchestrator import Session  #+

PAD, BOS, VOCAB = 0, 1, 12


class ScheduledOptim:
    """A simple wrapper class for learning rate scheduling."""

    def __init__(self, optimizer, lr_mul, d_model, n_warmup_steps):
        self._optimizer = optimizer
        self.lr_mul = lr_mul
        self.d_model = d_model
        self.n_warmup_steps = n_warmup_steps
        self.n_steps = 0

    def step_and_update_lr(self):
        self._update_learning_rate()
        self._optimizer.step()

    def zero_grad(self):
        self._optimizer.zero_grad()

    def _update_learning_rate(self):
        self.n_steps += 1
        scale = min(self.n_steps**-0.5, self.n_steps * self.n_warmup_steps**-1.5)
        for param_group in self._optimizer.param_groups:
            param_group["lr"] = self.lr_mul * self.d_model**-0.5 * scale


class Translator(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.source, self.target = nn.Embedding(VOCAB, width), nn.Embedding(VOCAB, width)
        self.position = nn.Parameter(0.1 * torch.randn(16, width))
        self.transformer = nn.Transformer(width, 2, 1, 1, 64, 0.1, batch_first=True)
        self.generator = nn.Linear(width, VOCAB)

    def forward(self, src, trg):
        causal = torch.ones(trg.size(1), trg.size(1)).triu(1).bool()
        hidden = self.transformer(
            self.source(src) + self.position[: src.size(1)],
            self.target(trg) + self.position[: trg.size(1)],
            tgt_mask=causal,
        )
        return self.generator(hidden)


def cal_performance(pred, gold, smoothing):
    """Loss with label smoothing, and the number of right words."""
    loss = F.cross_entropy(pred.flatten(0, 1), gold.flatten(), label_smoothing=smoothing)
    n_correct = pred.argmax(-1).eq(gold).sum()
#-    return loss, n_correct
    return loss, {"correct": n_correct}  #+


def make_pairs(size, length=6):
    rows = torch.Generator().manual_seed(1)
    src = torch.randint(2, VOCAB, (size, length), generator=rows)
    trg = torch.cat([torch.full((size, 1), BOS), src.flip(1)], 1)
    return TensorDataset(src, trg)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("-epoch", type=int, default=3)
    parser.add_argument("-b", "--batch_size", type=int, default=16)
    parser.add_argument("-warmup", "--n_warmup_steps", type=int, default=10)
    parser.add_argument("-lr_mul", type=float, default=0.5)
    parser.add_argument("-label_smoothing", type=float, default=0.1)
    opt = parser.parse_args()
    torch.manual_seed(0)
#-    training_data = DataLoader(make_pairs(192), batch_size=opt.batch_size, shuffle=True)
    transformer = Translator()
    adam = torch.optim.Adam(transformer.parameters(), betas=(0.9, 0.98), eps=1e-09)
    optimizer = ScheduledOptim(adam, opt.lr_mul, 32, opt.n_warmup_steps)
    session = Session(transformer, adam, optimizer)  #+
    training_data = session.data(make_pairs(192), batch_size=opt.batch_size, microbatches=4, shuffle=True)  #+

    transformer.train()
#-    for epoch_i in range(opt.epoch):
    for epoch_i in session.epochs(opt.epoch):  #+
        total_loss, n_word_correct = 0.0, 0
#-        for src_seq, trg_seq in training_data:
        for batch in training_data:  #+
            optimizer.zero_grad()
#-            pred = transformer(src_seq, trg_seq[:, :-1])
#-            loss, n_correct = cal_performance(pred, trg_seq[:, 1:], opt.label_smoothing)
#-            loss.backward()
            result = session.backward(lambda b: cal_performance(transformer(b[0], b[1][:, :-1]), b[1][:, 1:], opt.label_smoothing), batch)  #+
            optimizer.step_and_update_lr()
            loss, n_correct = result.loss, result["correct"] * len(batch)  #+
            n_word_correct += float(n_correct)
            total_loss += float(loss)
        lr = adam.param_groups[0]["lr"]
        print(f"[Epoch {epoch_i}] loss {total_loss:.3f} right {n_word_correct:.0f} lr {lr:.5f}")


if __name__ == "__main__":
    main()
