"""Train a character-level GPT, with gradient accumulation and mixed precision."""

import math

import torch
from torch import nn
from torch.nn import functional as F
#+
from orchestrator import Session  #+

eval_interval = 8
eval_iters = 2
batch_size = 4
gradient_accumulation_steps = 4
block_size = 16
n_layer, n_head, n_embd, dropout = 2, 2, 32, 0.0
learning_rate, min_lr = 1e-2, 1e-3
max_iters, warmup_iters = 32, 4
grad_clip = 1.0
torch.manual_seed(1337)

text = "to be, or not to be, that is the question: whether tis nobler in the mind to suffer\n" * 20
chars = sorted(set(text))
stoi = {ch: i for i, ch in enumerate(chars)}
data = torch.tensor([stoi[c] for c in text])
n = int(0.9 * len(data))
splits = {"train": data[:n], "val": data[n:]}


def get_batch(split, seed):
    d = splits[split]
    rows = torch.Generator().manual_seed(seed)
    ix = torch.randint(len(d) - block_size, (batch_size,), generator=rows)
    x = torch.stack([d[i : i + block_size] for i in ix])
    y = torch.stack([d[i + 1 : i + 1 + block_size] for i in ix])
    return x, y


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1 = nn.LayerNorm(n_embd)
        self.ln_2 = nn.LayerNorm(n_embd)
        self.c_attn = nn.Linear(n_embd, 3 * n_embd, bias=False)
        self.c_proj = nn.Linear(n_embd, n_embd)
        self.mlp = nn.Sequential(
            nn.Linear(n_embd, 4 * n_embd), nn.GELU(), nn.Linear(4 * n_embd, n_embd)
        )

    def attend(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(n_embd, dim=2)
        q, k, v = (t.view(B, T, n_head, C // n_head).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))

    def forward(self, x):
        x = x + self.attend(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(len(chars), n_embd)
        self.wpe = nn.Embedding(block_size, n_embd)
        self.h = nn.Sequential(*[Block() for _ in range(n_layer)])
        self.ln_f = nn.LayerNorm(n_embd)
        self.lm_head = nn.Linear(n_embd, len(chars), bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1)))
        logits = self.lm_head(self.ln_f(self.h(x)))
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))


@torch.no_grad()
def estimate_loss():
    model.eval()
    losses = {}
    for split in ["train", "val"]:
        found = [model(*get_batch(split, 10_000 + k))[1].item() for k in range(eval_iters)]
        losses[split] = sum(found) / eval_iters
    model.train()
    return losses


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    ratio = (it - warmup_iters) / (max_iters - warmup_iters)
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)


model = GPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95))
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
#-best_val_loss = 1e9
session = Session(model, optimizer, scaler)  #+

#-for iter_num in range(max_iters):
for iter_num in session.steps(max_iters):  #+
    lr = get_lr(iter_num)
    for param_group in optimizer.param_groups:
        param_group["lr"] = lr

    if iter_num % eval_interval == 0:
        losses = estimate_loss()
        print(f"step {iter_num}: train {losses['train']:.4f}, val {losses['val']:.4f}")
#-        if losses["val"] < best_val_loss:
#-            best_val_loss = losses["val"]
#-            torch.save({"model": model.state_dict(), "best": best_val_loss}, "ckpt.pt")
        if losses["val"] < session.state.get("best", 1e9):  #+
            session.state["best"] = losses["val"]  #+
            session.save("ckpt.pt", {"model": model.state_dict(), "best": losses["val"]})  #+

#-    for micro_step in range(gradient_accumulation_steps):
#-        X, Y = get_batch("train", iter_num * gradient_accumulation_steps + micro_step)
#-        logits, loss = model(X, Y)
#-        loss = loss / gradient_accumulation_steps
#-        scaler.scale(loss).backward()
    session.backward(lambda i: model(*get_batch("train", iter_num * gradient_accumulation_steps + i))[1], range(gradient_accumulation_steps))  #+
    scaler.unscale_(optimizer)
#-    torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    session.clip_grad_norm_(grad_clip)  #+
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
