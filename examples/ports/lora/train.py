"""Fine-tune a small transformer by LoRA as a parametrization, in the manner of minLoRA's demo."""

import math
from functools import partial

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.nn.utils.parametrize as parametrize
#+
from orchestrator import Session  #+


class LoRAParametrization(nn.Module):
    def __init__(self, fan_in, fan_out, rank=4, lora_dropout_p=0.0, lora_alpha=1):
        super().__init__()
        self.lora_A = nn.Parameter(torch.zeros(rank, fan_in))
        self.lora_B = nn.Parameter(torch.zeros(fan_out, rank))
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))
        self.lora_alpha, self.rank = lora_alpha, rank
        self.scaling = lora_alpha / rank
        self.lora_dropout = nn.Dropout(p=lora_dropout_p) if lora_dropout_p > 0 else lambda x: x
        self.dropout_fn = self._dropout if lora_dropout_p > 0 else lambda x: x
        self.register_buffer("lora_dropout_mask", torch.ones(1, fan_in))
        self.forward_fn = self.lora_forward

    def _dropout(self, A):
        return A * self.lora_dropout(self.lora_dropout_mask)

    def lora_forward(self, X):
        return X + torch.matmul(self.lora_B, self.dropout_fn(self.lora_A)).view(X.shape) * self.scaling

    def forward(self, X):
        return self.forward_fn(X)

    @classmethod
    def from_linear(cls, layer, rank=4, lora_dropout_p=0.0, lora_alpha=1):
        fan_out, fan_in = layer.weight.shape
        return cls(fan_in, fan_out, rank, lora_dropout_p, lora_alpha)


default_lora_config = {nn.Linear: {"weight": partial(LoRAParametrization.from_linear, rank=4, lora_dropout_p=0.1, lora_alpha=8)}}


def apply_lora(layer, register=True, merge=False, lora_config=default_lora_config):
    if type(layer) in lora_config:
        for attr_name, parametrization in lora_config[type(layer)].items():
            parametrize.register_parametrization(layer, attr_name, parametrization(layer))


def add_lora(model, lora_config=default_lora_config):
    model.apply(partial(apply_lora, lora_config=lora_config))


def get_lora_params(model):
    for n, p in model.named_parameters():
        if n.split(".")[-1] in ("lora_A", "lora_B"):
            yield p


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.c_attn, self.c_proj = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.mlp = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (z.view(B, T, 2, C // 2).transpose(1, 2) for z in self.c_attn(self.ln_1(x)).split(C, 2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, T, C)
        x = x + self.c_proj(y)
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, vocab=32, d=32, layers=2, block_size=16):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, d), nn.Embedding(block_size, d)
        self.h = nn.Sequential(*[Block(d) for _ in range(layers)])
        self.ln_f = nn.LayerNorm(d)

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1]))
        logits = self.ln_f(self.h(x)) @ self.wte.weight.T
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


torch.manual_seed(1337)
data = (torch.arange(2000) * 7 % 31 + torch.arange(2000) % 2) % 32
model = GPT()
for p in model.parameters():
    p.requires_grad = False
add_lora(model)
parameters = [{"params": list(get_lora_params(model))}]
optimizer = torch.optim.AdamW(parameters, lr=1e-2)

session = Session(model, optimizer, microbatches=4)  #+
model.train()
#-for iter in range(60):
for iter in session.steps(60):  #+
    ix = torch.randint(len(data) - 17, (16,))
    x = torch.stack([data[i : i + 16] for i in ix])
    y = torch.stack([data[i + 1 : i + 17] for i in ix])
#-    logits, loss = model(x, y)
    optimizer.zero_grad(set_to_none=True)
#-    loss.backward()
#-    torch.nn.utils.clip_grad_norm_(get_lora_params(model), 1.0)
    loss = session.backward(lambda x, y: model(x, y)[1], x, y)  #+
    session.clip_grad_norm_(1.0)  #+
    optimizer.step()
    if iter % 10 == 0:
        print(f"iter {iter}: loss {loss.item():.4f}")

lora_state_dict = {k: v for k, v in model.state_dict().items() if "lora_A" in k or "lora_B" in k}
print(len(lora_state_dict))
