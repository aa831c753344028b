"""A small GPT that learns Python's own standard library, byte by byte.

    python examples/gpt.py --steps 400                           on one process, with no manager
    orchestrator submit examples/gpt.py -- --steps 400           the same file, on whatever is cheap

Every machine that has Python has the text. The global batch of a step depends on the step only.
"""

import argparse
import math
import sysconfig
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from orchestrator import Session

FILES = (
    "argparse ast asyncio/base_events bisect calendar codecs collections/__init__ configparser copy csv "
    "dataclasses datetime decimal difflib dis doctest email/message enum fractions functools gettext "
    "heapq html/parser http/client imaplib inspect ipaddress json/decoder locale logging/__init__ mailbox "
    "mimetypes optparse os pathlib pdb pickle pickletools platform plistlib pprint pydoc random selectors "
    "shutil smtplib socket statistics string subprocess tarfile tempfile textwrap threading tokenize "
    "traceback turtle typing unittest/mock urllib/parse urllib/request uuid warnings weakref zipfile"
)


class Block(nn.Module):
    """Attention over everything before, then a small network for each byte."""

    def __init__(self, d_model: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.qkv = nn.Linear(d_model, 3 * d_model, bias=False)
        self.out = nn.Linear(d_model, d_model, bias=False)
        self.mlp = nn.Sequential(
            nn.Linear(d_model, 4 * d_model),
            nn.GELU(),
            nn.Linear(4 * d_model, d_model),
            nn.Dropout(dropout),
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, length, d_model = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, -1).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).split(d_model, dim=2)
        )
        mixed = functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, dropout_p=self.dropout if self.training else 0.0
        )
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, d_model))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, d_model: int, layers: int, heads: int, context: int, dropout: float) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, d_model)
        self.places = nn.Embedding(context, d_model)
        self.blocks = nn.Sequential(*[Block(d_model, heads, dropout) for _ in range(layers)])
        self.norm = nn.LayerNorm(d_model)
        self.head = nn.Linear(d_model, 256, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                scale = 0.02 / math.sqrt(2 * layers) if name.endswith("out.weight") else 0.02
                nn.init.normal_(parameter, std=scale)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1], device=x.device)
        return self.head(self.norm(self.blocks(self.bytes(x) + self.places(places))))


def load_text() -> Tensor:
    """The source files of the standard library, in a fixed order."""
    folder = Path(sysconfig.get_path("stdlib"))
    found = [folder / f"{name}.py" for name in FILES.split()]
    text = b"".join(path.read_bytes() for path in found if path.exists())
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def pairs(text: Tensor, count: int, context: int, seed: int) -> tuple[Tensor, Tensor]:
    """Random windows and, for every byte of them, the one that follows."""
    dice = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - context - 1, (count, 1), generator=dice)
    windows = text[starts + torch.arange(context + 1)].long()
    return windows[:, :-1], windows[:, 1:]


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(model(x).flatten(0, 1), y.flatten())


@torch.no_grad()
def evaluate(model: nn.Module, text: Tensor, context: int) -> float:
    model.eval()
    loss = loss_of(model, *pairs(text, 16, context, seed=0))
    model.train()
    return float(loss)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--microbatches", type=int, default=8, help="per step, over all workers")
    parser.add_argument("--batch", type=int, default=4, help="windows per microbatch")
    parser.add_argument("--context", type=int, default=64, help="bytes per window")
    parser.add_argument("--d-model", type=int, default=96)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--warmup", type=int, default=20, help="steps")
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--eval-every", type=int, default=50, help="steps")
    options = parser.parse_args()

    torch.manual_seed(0)
    text = load_text()
    held_out = len(text) // 10
    train, val = text[:-held_out], text[-held_out:]
    model = GPT(options.d_model, options.layers, options.heads, options.context, options.dropout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, weight_decay=0.1)

    def pace(step: int) -> float:
        """Linear warm-up, then half a cosine down to a tenth."""
        if step < options.warmup:
            return (step + 1) / options.warmup
        done = (step - options.warmup) / max(1, options.steps - options.warmup)
        return 0.55 + 0.45 * math.cos(math.pi * min(done, 1.0))

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, pace)
    session = Session(model, optimizer, scheduler, microbatches=options.microbatches)
    for step in session.steps(options.steps):
        x, y = pairs(train, options.microbatches * options.batch, options.context, seed=step + 1)
        batches = list(zip(x.split(options.batch), y.split(options.batch), strict=True))
        session.backward(lambda pair: loss_of(model, *pair), batches)
        session.clip_grad_norm_(options.clip)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if (step + 1) % options.eval_every == 0:
            print(f"step {step + 1}: held-out loss {evaluate(model, val, options.context):.4f}")
    print(f"final held-out loss {evaluate(model, val, options.context):.6f}")


if __name__ == "__main__":
    main()
