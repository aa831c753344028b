"""A GPT on characters, configured by globals: gradient accumulation, warm-up, best checkpoint."""

import math

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
#+
from orchestrator import Session, Variables  #+

# config
out_dir, eval_interval, log_interval = "out", 6, 3
gradient_accumulation_steps, batch_size, block_size = 4, 6, 16
n_layer, n_head, n_embd, dropout = 2, 2, 16, 0.0
learning_rate, max_iters, warmup_iters, min_lr, grad_clip = 3e-3, 18, 4, 3e-4, 1.0

torch.manual_seed(1337)
text = "it was the best of times, it was the worst of times, " * 40
chars = sorted(set(text))
data = np.array([chars.index(c) for c in text], dtype=np.int64)
train_data, val_data = data[:-400], data[-400:]


def get_batch(split):
    data = train_data if split == "train" else val_data
    ix = torch.randint(len(data) - block_size, (batch_size,))
    x = torch.stack([torch.from_numpy(data[i : i + block_size]) for i in ix])
    y = torch.stack([torch.from_numpy(data[i + 1 : i + 1 + block_size]) for i in ix])
    return x, y


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)
        self.c_attn, self.c_proj = nn.Linear(n_embd, 3 * n_embd), nn.Linear(n_embd, n_embd)
        self.mlp = nn.Sequential(
            nn.Linear(n_embd, 4 * n_embd), nn.GELU(), nn.Linear(4 * n_embd, n_embd)
        )

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (
            each.view(b, t, n_head, c // n_head).transpose(1, 2)
            for each in self.c_attn(self.ln_1(x)).split(n_embd, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).reshape(b, t, c))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(len(chars), n_embd), nn.Embedding(block_size, n_embd)
        self.h = nn.ModuleList(Block() for _ in range(n_layer))
        self.ln_f = nn.LayerNorm(n_embd)
        self.lm_head = nn.Linear(n_embd, len(chars), bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1]))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return logits, F.cross_entropy(logits.view(-1, len(chars)), targets.reshape(-1))


model = GPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95))


@torch.no_grad()
def estimate_loss():
    model.eval()
    found = torch.stack([model(*get_batch("val"))[1] for _ in range(3)]).mean().item()
    model.train()
    return found


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    ratio = (it - warmup_iters) / (max_iters - warmup_iters)
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)


#-iter_num = 0
best_val_loss = 1e9
#-while iter_num < max_iters:
session = Session(model, optimizer, Variables(globals(), "best_val_loss"))  #+
for iter_num in session.steps(max_iters):  #+
    for param_group in optimizer.param_groups:
        param_group["lr"] = get_lr(iter_num)
#-    for micro_step in range(gradient_accumulation_steps):
#-        X, Y = get_batch("train")
#-        logits, loss = model(X, Y)
#-        loss = loss / gradient_accumulation_steps
#-        loss.backward()
#-    torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    batches = [get_batch("train") for _ in range(gradient_accumulation_steps)]  #+
    loss = session.backward(lambda batch: model(*batch)[1], batches)  #+
    session.clip_grad_norm_(grad_clip)  #+
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if iter_num % log_interval == 0:
#-        print(f"iter {iter_num}: loss {loss.item() * gradient_accumulation_steps:.4f}")
        print(f"iter {iter_num}: loss {loss.item():.4f}")  #+
    if iter_num % eval_interval == eval_interval - 1:
        val_loss = estimate_loss()
        if val_loss < best_val_loss:
            best_val_loss = val_loss
#-            torch.save({"model": model.state_dict(), "iter_num": iter_num}, "ckpt.pt")
#-    iter_num += 1
            session.save("ckpt.pt", {"model": model.state_dict(), "iter_num": iter_num})  #+
