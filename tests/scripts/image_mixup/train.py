"""An image classifier in timm's manner: mixup in the loader's loop, label smoothing, EMA, cosine."""

import copy

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
#+
from orchestrator import Session, supervised  #+


class ModelEma(nn.Module):
    def __init__(self, model, decay=0.9):
        super().__init__()
        self.module, self.decay = copy.deepcopy(model).eval().requires_grad_(False), decay

    @torch.no_grad()
    def update(self, model):
        for e, m in zip(self.module.state_dict().values(), model.state_dict().values(), strict=True):
            e.copy_(self.decay * e + (1.0 - self.decay) * m)


class Mixup:
    def __init__(self, alpha=0.4, classes=4):
        self.beta, self.classes = torch.distributions.Beta(alpha, alpha), classes

    def __call__(self, x, y):
        lam = self.beta.sample()
        target = F.one_hot(y, self.classes).float()
        return lam * x + (1 - lam) * x.flip(0), lam * target + (1 - lam) * target.flip(0)


def make_data(count, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(4, (count,), generator=g)
    x = torch.randn(count, 3, 8, 8, generator=g) + y.view(-1, 1, 1, 1) * 0.5
    return TensorDataset(x, y)


def soft_target_cross_entropy(output, target):
    return -(target * F.log_softmax(output, dim=-1)).sum(-1).mean()


def main():
    torch.manual_seed(42)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.SiLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(128, 4)
    )
    model_ema = ModelEma(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05)
    lr_scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4)
    mixup_fn = Mixup()
#-    loader_train = DataLoader(make_data(128, 1), batch_size=16, shuffle=True, drop_last=True)
    session = Session(model, model_ema, optimizer, lr_scheduler, microbatches=4)  #+
    loader_train = session.data(DataLoader(make_data(128, 1), batch_size=16, shuffle=True, drop_last=True))  #+
    loader_eval = DataLoader(make_data(64, 2), batch_size=32)
#-    best_metric = 0.0
#-    for epoch in range(4):
    for epoch in session.epochs(4):  #+
        model.train()
        losses_m = 0.0
        for batch_idx, (x, target) in enumerate(loader_train):
            x, target = mixup_fn(x, target)
#-            output = model(x)
#-            loss = soft_target_cross_entropy(output, target)
            loss = session.backward(supervised(model, soft_target_cross_entropy), x, target)  #+
            losses_m += loss.item()
#-            optimizer.zero_grad()
#-            loss.backward()
            optimizer.step()
            model_ema.update(model)
        lr_scheduler.step()
        model_ema.module.eval()
        with torch.no_grad():
            right = sum((model_ema.module(x).argmax(1) == y).sum().item() for x, y in loader_eval)
#-        if right > best_metric:
#-            best_metric = right
        best_metric = session.state["best"] = max(right, session.state.get("best", 0.0))  #+
        print(f"epoch {epoch} loss {losses_m / len(loader_train):.4f} ema top1 {right} best {best_metric}")


if __name__ == "__main__":
    main()
