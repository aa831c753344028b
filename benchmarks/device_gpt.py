"""What `device.py` trains: a GPT on noise, by plain torch or by a session.

usage: device_gpt.py torch|session STEPS OUT LAYERS WIDTH

Alone it prints how many milliseconds each step has taken.
"""

import os
import sys
import time

os.environ.setdefault(
    "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
)  # or its products differ from run to run

import torch
from torch import nn
from torch.nn import functional

from orchestrator import Session

MICROBATCHES, ROWS, LENGTH, WORDS = 8, 8, 512, 8192
HOW, STEPS, OUT, LAYERS, WIDTH = sys.argv[1], int(sys.argv[2]), *sys.argv[3:]


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.heads = width // 64
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.back = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        rows, length, width = x.shape
        q, k, v = (
            part.view(rows, length, self.heads, -1).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).split(width, dim=2)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        return x + self.back(functional.gelu(self.wide(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, layers, width):
        super().__init__()
        self.embed, self.places = nn.Embedding(WORDS, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.Sequential(*[Block(width) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, WORDS, bias=False)

    def forward(self, x):
        places = torch.arange(x.shape[1], device=x.device)
        return self.head(self.norm(self.blocks(self.embed(x) + self.places(places))))


torch.manual_seed(0)
# The fast kernels of attention differ from run to run, alone and without a session too.
torch.backends.cuda.enable_flash_sdp(False)
torch.backends.cuda.enable_mem_efficient_sdp(False)
torch.backends.cuda.enable_cudnn_sdp(False)
torch.use_deterministic_algorithms(True, warn_only=True)
device = torch.accelerator.current_accelerator()
model = GPT(int(LAYERS), int(WIDTH)).to(device.type)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)


def batches(step):
    numbers = torch.Generator().manual_seed(step)
    text = torch.randint(0, WORDS, (MICROBATCHES, ROWS, LENGTH + 1), generator=numbers)
    return [*text.to(device.type)]


def loss_of(text):
    with torch.autocast(device.type, torch.bfloat16):
        return functional.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())


def torch_alone():
    for step in range(STEPS):
        for batch in batches(step):
            (loss_of(batch) / MICROBATCHES).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield


def with_session():
    session = Session(model, optimizer, microbatches=MICROBATCHES)
    for step in session.steps(STEPS):
        session.backward(loss_of, batches(step))
        session.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield
    leads.append(session.leader)


leads = []
began_s = time.perf_counter()
for _ in torch_alone() if HOW == "torch" else with_session():
    torch.accelerator.synchronize()
    print(1e3 * (time.perf_counter() - began_s))
    began_s = time.perf_counter()
if all(leads):
    torch.save({name: value.cpu() for name, value in model.state_dict().items()}, OUT)
