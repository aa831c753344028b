"""A GPT with Muon, Lion and Adam, in the manner of KellerJordan/modded-nanogpt."""

import math
import time
import uuid
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
#+
from orchestrator import Session  #+


def zeropower_via_newtonschulz5(G, steps=5, eps=1e-7):
    a, b, c = (3.4445, -4.7750, 2.0315)
    X = G.bfloat16()
    X /= X.norm() + eps
    if G.size(0) > G.size(1):
        X = X.T
    for _ in range(steps):
        A = X @ X.T
        B = b * A + c * A @ A
        X = a * X + B @ X
    if G.size(0) > G.size(1):
        X = X.T
    return X


class Muon(torch.optim.Optimizer):
    def __init__(self, params, lr=0.02, momentum=0.95, nesterov=True, ns_steps=5):
        defaults = dict(lr=lr, momentum=momentum, nesterov=nesterov, ns_steps=ns_steps)
        super().__init__(params, defaults)

    def step(self):
        for group in self.param_groups:
            lr, momentum = group["lr"], group["momentum"]
            total_params = sum(p.numel() for p in group["params"])
            updates_flat = torch.zeros(total_params, dtype=torch.bfloat16)
            curr_idx = 0
            for p in group["params"]:
                g = p.grad
                assert g is not None
                state = self.state[p]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(g)
                buf = state["momentum_buffer"]
                buf.mul_(momentum).add_(g)
                g = g.add(buf, alpha=momentum) if group["nesterov"] else buf
                g = zeropower_via_newtonschulz5(g, steps=group["ns_steps"])
                g *= max(1, g.size(0) / g.size(1)) ** 0.5
                updates_flat[curr_idx : curr_idx + p.numel()] = g.flatten()
                curr_idx += p.numel()
            curr_idx = 0
            for p in group["params"]:
                g = updates_flat[curr_idx : curr_idx + p.numel()].view_as(p.data).type_as(p.data)
                p.data.add_(g, alpha=-lr)
                curr_idx += p.numel()


class Lion(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, dict(lr=lr, betas=betas, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if len(state) == 0:
                    state["exp_avg"] = torch.zeros_like(p)
                beta1, beta2 = group["betas"]
                p.mul_(1 - group["lr"] * group["weight_decay"])
                update = (state["exp_avg"] * beta1 + p.grad * (1 - beta1)).sign_()
                p.add_(update, alpha=-group["lr"])
                state["exp_avg"].lerp_(p.grad, 1 - beta2)


class Rotary(nn.Module):
    def __init__(self, dim, base=10000):
        super().__init__()
        self.inv_freq = 1.0 / (base ** (torch.arange(0, dim, 2).float() / dim))
        self.seq_len_cached = None
        self.cos_cached = None
        self.sin_cached = None

    def forward(self, x):
        seq_len = x.shape[1]
        if seq_len != self.seq_len_cached:
            self.seq_len_cached = seq_len
            t = torch.arange(seq_len, device=x.device).type_as(self.inv_freq)
            freqs = torch.outer(t, self.inv_freq)
            self.cos_cached = freqs.cos().bfloat16()
            self.sin_cached = freqs.sin().bfloat16()
        return self.cos_cached[None, :, None, :], self.sin_cached[None, :, None, :]


def apply_rotary_emb(x, cos, sin):
    d = x.shape[3] // 2
    x1, x2 = x[..., :d], x[..., d:]
    return torch.cat([x1 * cos + x2 * sin, x1 * (-sin) + x2 * cos], 3).type_as(x)


class Block(nn.Module):
    def __init__(self, n_embd, n_head):
        super().__init__()
        self.n_head = n_head
        self.c_q, self.c_k, self.c_v, self.c_proj = (nn.Linear(n_embd, n_embd, bias=False) for _ in range(4))
        self.c_proj.weight.data.zero_()
        self.rotary = Rotary(n_embd // n_head)
        self.c_fc, self.c_out = nn.Linear(n_embd, 2 * n_embd, bias=False), nn.Linear(2 * n_embd, n_embd, bias=False)
        self.lamb = nn.Parameter(torch.tensor(0.5))

    def forward(self, x, v1=None):
        B, T, C = x.size()
        h = F.rms_norm(x, (C,))
        q, k, v = (f(h).view(B, T, self.n_head, C // self.n_head) for f in (self.c_q, self.c_k, self.c_v))
        if v1 is None:
            v1 = v
        v = (1 - self.lamb) * v + self.lamb * v1.view_as(v)
        cos, sin = self.rotary(q)
        q, k = apply_rotary_emb(q, cos, sin), apply_rotary_emb(k, cos, sin)
        y = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).contiguous().view_as(x))
        return x + self.c_out(F.relu(self.c_fc(F.rms_norm(x, (C,)))).square()), v1


class GPT(nn.Module):
    def __init__(self, vocab, n_layer, n_head, n_embd):
        super().__init__()
        self.transformer = nn.ModuleDict(dict(wte=nn.Embedding(vocab, n_embd), h=nn.ModuleList([Block(n_embd, n_head) for _ in range(n_layer)])))
        self.lm_head = nn.Linear(n_embd, vocab, bias=False)
        self.lm_head.weight.data.zero_()

    def forward(self, idx, target):
        x = F.rms_norm(self.transformer.wte(idx), (self.transformer.wte.embedding_dim,))
        v1 = None
        for block in self.transformer.h:
            x, v1 = block(x, v1)
        logits = self.lm_head(F.rms_norm(x, (x.size(-1),)))
        logits = 30 * torch.tanh(logits / 30)
        return F.cross_entropy(logits.float().view(-1, logits.size(-1)), target.view(-1))


class DistributedDataLoader:
    def __init__(self, tokens, B, T):
        self.tokens, self.B, self.T = tokens, B, T
        self.reset()

    def reset(self):
        self.current_position = 0

    def next_batch(self):
        B, T = self.B, self.T
        buf = self.tokens[self.current_position : self.current_position + B * T + 1]
        x, y = buf[:-1].view(B, T), buf[1:].view(B, T)
        self.current_position += B * T
        if self.current_position + B * T + 1 > len(self.tokens):
            self.reset()
        return x, y


@dataclass
class Hyperparameters:
    batch_size: int = 8
    device_batch_size: int = 4
    sequence_length: int = 16
    num_iterations: int = 14
    warmup_iters: int = 2
    warmdown_iters: int = 5
    val_loss_every: int = 5


args = Hyperparameters()
torch.manual_seed(0)
g = torch.Generator().manual_seed(1)
tokens = (torch.arange(3000) * 7 + torch.randint(0, 3, (3000,), generator=g)) % 32
B, T = args.device_batch_size, args.sequence_length
train_accumulation_steps = args.batch_size // B
train_loader, val_loader = DistributedDataLoader(tokens[:2000], B, T), DistributedDataLoader(tokens[2000:], B, T)
#-x, y = train_loader.next_batch()
model = GPT(32, 2, 2, 32)
optimizer1 = torch.optim.Adam([model.transformer.wte.weight], lr=0.3, betas=(0.9, 0.95), fused=True)
optimizer2 = torch.optim.Adam([model.lm_head.weight], lr=0.002, betas=(0.9, 0.95), fused=True)
params = list(model.transformer.h.parameters())
optimizer3 = Muon([p for p in params if p.ndim == 2], lr=0.02, momentum=0.95)
optimizer4 = Lion([p for p in params if p.ndim < 2], lr=0.02)
optimizers = [optimizer1, optimizer2, optimizer3, optimizer4]


def get_lr(it):
    if it < args.warmup_iters:
        return (it + 1) / args.warmup_iters
    elif it < args.num_iterations - args.warmdown_iters:
        return 1.0
    return (args.num_iterations - it) / args.warmdown_iters


schedulers = [torch.optim.lr_scheduler.LambdaLR(opt, get_lr) for opt in optimizers]
run_id = str(uuid.uuid4())
training_time_ms, t0 = 0, time.time()
session = Session(model, *optimizers, *schedulers, train_loader)  #+
#-for step in range(args.num_iterations + 1):
for step in session.steps(args.num_iterations):  #+
    last_step = step == args.num_iterations
    if last_step or step % args.val_loss_every == 0:
        model.eval()
        val_loader.reset()
        val_loss = 0.0
        for _ in range(4):
            with torch.no_grad():
                x_val, y_val = val_loader.next_batch()
                val_loss += model(x_val, y_val)
        val_loss /= 4
        print(f"step:{step}/{args.num_iterations} val_loss:{val_loss:.4f} train_time:{training_time_ms:.0f}ms")
#-    if last_step:
#-        break
    model.train()
#-    for i in range(1, train_accumulation_steps + 1):
#-        loss = model(x, y)
#-        train_loss = loss.detach()
#-        x, y = train_loader.next_batch()
#-        loss.backward()
#-    for p in model.parameters():
#-        p.grad /= train_accumulation_steps
    micro = [train_loader.next_batch() for _ in range(train_accumulation_steps)]  #+
    train_loss = session.backward(lambda xy: model(*xy), micro)  #+
    frac = min(step / 6, 1)
    optimizer3.param_groups[0]["momentum"] = (1 - frac) * 0.85 + frac * 0.95
    for opt, sched in zip(optimizers, schedulers):
        opt.step()
        sched.step()
    model.zero_grad(set_to_none=True)
    print(f"step:{step + 1}/{args.num_iterations} train_loss:{train_loss.item():.4f}")
