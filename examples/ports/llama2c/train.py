"""Train a small language model on a stream of shards, in the manner of karpathy/llama2.c's train.py."""

import math
import os
import random
import time
from itertools import islice  #+

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
#+
from orchestrator import Session, Variables  #+

# -----------------------------------------------------------------------------
# I/O
out_dir = "out"
eval_interval = 10
log_interval = 1
eval_iters = 4
eval_only = False
always_save_checkpoint = False
# data
batch_size = 8
max_seq_len = 16
vocab_size = 48
# model
dim = 32
n_layers = 2
# adamw optimizer
gradient_accumulation_steps = 4
learning_rate = 5e-3
max_iters = 40
weight_decay = 1e-1
grad_clip = 1.0
# learning rate decay settings
decay_lr = True
warmup_iters = 5
# -----------------------------------------------------------------------------
lr_decay_iters = max_iters
min_lr = 0.0


class PretokDataset(torch.utils.data.IterableDataset):
    """Loads pretokenized examples from shards and yields them as PyTorch tensors."""

    def __init__(self, split, max_seq_len):
        super().__init__()
        self.split = split
        self.max_seq_len = max_seq_len

    def __iter__(self):
        worker_info = torch.utils.data.get_worker_info()
        worker_id = worker_info.id if worker_info else 0
        rng = random.Random(42 + worker_id)
        shards = [np.random.default_rng(i).integers(0, 4, 400).cumsum() % vocab_size for i in range(4)]
        shards = shards[1:] if self.split == "train" else shards[:1]
        while True:
            rng.shuffle(shards)
            for m in shards:
                num_batches = len(m) // self.max_seq_len - 1
                ixs = list(range(num_batches))
                rng.shuffle(ixs)
                for ix in ixs:
                    start = ix * self.max_seq_len
                    chunk = torch.from_numpy(m[start : start + self.max_seq_len + 1].astype(np.int64))
                    yield chunk[:-1], chunk[1:]


class Task:
    @staticmethod
    def iter_batches(batch_size, **dataset_kwargs):
        ds = PretokDataset(**dataset_kwargs)
        dl = torch.utils.data.DataLoader(ds, batch_size=batch_size, pin_memory=False, num_workers=0)
        for x, y in dl:
            yield x, y


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocab_size, dim)
        self.rnn = nn.ModuleList([nn.TransformerEncoderLayer(dim, 2, 4 * dim, 0.0, batch_first=True, norm_first=True) for _ in range(n_layers)])
        self.norm = nn.RMSNorm(dim)
        self.output = nn.Linear(dim, vocab_size, bias=False)
        self.output.weight = self.tok_embeddings.weight
        self.last_loss = None

    def forward(self, tokens, targets=None):
        h = self.tok_embeddings(tokens)
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        for layer in self.rnn:
            h = layer(h, src_mask=mask, is_causal=True)
        logits = self.output(self.norm(h))
        self.last_loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.reshape(-1))
        return logits


torch.manual_seed(1337)
iter_batches = lambda split: Task.iter_batches(batch_size=batch_size, split=split, max_seq_len=max_seq_len)

# init these up here, can override if init_from='resume' (i.e. from a checkpoint)
iter_num = 0
best_val_loss = 1e9

model = Transformer()
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=weight_decay)


@torch.no_grad()
def estimate_loss():
    out = {}
    model.eval()
    for split in ["train", "val"]:
        batch_iter = iter_batches(split=split)
        losses = torch.zeros(eval_iters)
        for k in range(eval_iters):
            X, Y = next(batch_iter)
            logits = model(X, Y)
            loss = model.last_loss
            losses[k] = loss.item()
        out[split] = losses.mean()
    model.train()
    return out


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * it / warmup_iters
    if it > lr_decay_iters:
        return min_lr
    decay_ratio = (it - warmup_iters) / (lr_decay_iters - warmup_iters)
    coeff = 0.5 * (1.0 + math.cos(math.pi * decay_ratio))
    return min_lr + coeff * (learning_rate - min_lr)


#-train_batch_iter = iter_batches(split="train")
#-X, Y = next(train_batch_iter)  # fetch the very first batch
session = Session(model, optimizer, Variables(globals(), "best_val_loss"))  #+
t0 = time.time()
#-while True:
for iter_num in session.steps(max_iters + 1):  #+
    lr = get_lr(iter_num) if decay_lr else learning_rate
    for param_group in optimizer.param_groups:
        param_group["lr"] = lr

    if iter_num % eval_interval == 0:
        losses = estimate_loss()
        print(f"step {iter_num}: train loss {losses['train']:.4f}, val loss {losses['val']:.4f}")
        if losses["val"] < best_val_loss or always_save_checkpoint:
            best_val_loss = losses["val"]
            if iter_num > 0:
                os.makedirs(out_dir, exist_ok=True)
                torch.save(model.state_dict(), os.path.join(out_dir, "ckpt.pt"))

#-    for micro_step in range(gradient_accumulation_steps):
#-        logits = model(X, Y)
#-        loss = model.last_loss
#-        loss = loss / gradient_accumulation_steps
#-        # immediately async prefetch next batch while model is doing the forward pass on the GPU
#-        X, Y = next(train_batch_iter)
#-        loss.backward()
    batches = list(islice(iter_batches(split="train"), iter_num * gradient_accumulation_steps, (iter_num + 1) * gradient_accumulation_steps))  #+
    loss = session.backward(lambda batch: (model(*batch), model.last_loss)[1], batches)  #+
    if grad_clip != 0.0:
#-        torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
        session.clip_grad_norm_(grad_clip)  #+
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)

    t1 = time.time()
    dt = t1 - t0
    t0 = t1
    if iter_num % log_interval == 0:
#-        lossf = loss.item() * gradient_accumulation_steps
        lossf = loss.item()  #+
        print(f"{iter_num} | loss {lossf:.4f} | lr {lr:e} | {dt * 1000:.2f}ms")
#-    iter_num += 1
#-    if iter_num > max_iters:
#-        break
