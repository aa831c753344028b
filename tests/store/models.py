"""Small models of unlike kinds, each with an optimizer, for the store's tests."""

import torch
from torch import nn


class Tied(nn.Module):
    """An embedding that is also the output layer, blocks, a buffer, and a scalar of its own."""

    def __init__(self, width=24, blocks=3):
        super().__init__()
        self.wte = nn.Embedding(17, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.Tanh())
            for _ in range(blocks)
        )
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.head = nn.Linear(width, 17, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, x):
        x = self.wte(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x) * self.scale


class Mixed(nn.Module):
    """A convolution whose weights do not lie end to end, and parameters of several types."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.narrow = nn.Parameter(torch.randn(9, dtype=torch.bfloat16))
        self.wide = nn.Parameter(torch.randn(5, dtype=torch.float64))
        self.empty = nn.Parameter(torch.randn(0, 3))

    def forward(self, x):
        x = self.conv(x).mean()
        return x + self.narrow.float().sum() + self.wide.float().sum() + self.empty.sum()


def make(kind, seed=0):
    """A model with its optimizer and schedule, as a session holds them, and one step of training."""
    torch.manual_seed(seed)
    if kind == "mixed":
        model = Mixed()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    else:
        model = Tied()
        blocks = list(model.blocks.parameters())
        others = [item for item in model.parameters() if all(item is not one for one in blocks)]
        optimizer = torch.optim.AdamW(
            [{"params": blocks, "weight_decay": 0.1}, {"params": others, "lr": 0.02}],
            amsgrad=True,
            betas=(0.8, 0.9),
        )
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    objects = {"model": model, "opt": optimizer, "plan": schedule}

    def step(number):
        torch.manual_seed(number)
        optimizer.zero_grad()
        if kind == "mixed":
            loss = model(torch.randn(2, 3, 8, 8))
        else:
            loss = model(torch.randint(0, 17, (8,))).square().mean()
        loss.backward()
        optimizer.step()
        schedule.step(float(loss.detach()))

    return objects, step


def same(one, other):
    """Whether two states are the same, bit for bit, tensors and everything else."""
    if isinstance(one, torch.Tensor):
        return (
            isinstance(other, torch.Tensor)
            and one.dtype == other.dtype
            and one.shape == other.shape
            and torch.equal(one, other)
        )
    if isinstance(one, dict):
        return set(one) == set(other) and all(same(item, other[key]) for key, item in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and one == other


def check_same(objects, others):
    for key, thing in objects.items():
        assert same(thing.state_dict(), others[key].state_dict()), key
