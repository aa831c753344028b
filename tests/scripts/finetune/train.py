"""Fine-tune: first the head on a frozen backbone, from the second epoch on all of it."""

import argparse
import time

import torch
from torch import nn, optim
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset
#+
from orchestrator import Session  #+


def patterns(count, seed):
    rows = torch.Generator().manual_seed(seed)
    labels = torch.randint(2, (count,), generator=rows)
    kinds = torch.randn(2, 24, generator=torch.Generator().manual_seed(0))
    return TensorDataset(kinds[labels] + 2 * torch.randn(count, 24, generator=rows), labels)


def pretrained():
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(24, 32), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU())


parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--unfreeze", type=int, default=1)
args = parser.parse_args()
dataloaders = {
    "train": DataLoader(patterns(192, 1), batch_size=24, shuffle=True),
    "val": DataLoader(patterns(64, 2), batch_size=32),
}
backbone = pretrained()
model = nn.Sequential(backbone, nn.Linear(16, 2))
criterion = nn.CrossEntropyLoss()
optimizer = optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
scheduler = lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.3)
for param in backbone.parameters():
    param.requires_grad = False
session = Session(model, optimizer, scheduler)  #+
dataloaders["train"] = session.data(patterns(192, 1), batch_size=24, microbatches=4, shuffle=True)  #+

since = time.time()
best_acc = 0.0
#-for epoch in range(args.epochs):
for epoch in session.epochs(args.epochs):  #+
    if epoch == args.unfreeze:
        for param in backbone.parameters():
            param.requires_grad = True
    model.train()
    running_loss = 0.0
#-    for inputs, labels in dataloaders["train"]:
    for batch in dataloaders["train"]:  #+
        optimizer.zero_grad()
#-        loss = criterion(model(inputs), labels)
#-        loss.backward()
        loss = session.backward(lambda b: criterion(model(b[0]), b[1]), batch).loss  #+
        optimizer.step()
        running_loss += float(loss)
    scheduler.step()
    model.eval()
    corrects = 0
    with torch.no_grad():
        for inputs, labels in dataloaders["val"]:
            corrects += (model(inputs).argmax(1) == labels).sum().item()
    epoch_acc = corrects / len(dataloaders["val"].dataset)
#-    best_acc = max(best_acc, epoch_acc)
    best_acc = session.state["best_acc"] = max(session.state.get("best_acc", 0.0), epoch_acc)  #+
    print(f"Epoch {epoch} Loss: {running_loss / len(dataloaders['train']):.4f} Acc: {epoch_acc:.4f}")

print(f"Training complete in {time.time() - since:.0f}s, best val Acc: {best_acc:4f}")
