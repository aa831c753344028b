"""Segmentation by a U-Net, followed by an experiment tracker."""

import argparse
import json
import logging
import os

import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, random_split
#+
from orchestrator import Session  #+


class Run:
    """An experiment tracker: it appends to a file, and wants a key unless it is offline."""

    def __init__(self, project, config, mode="online"):
        if mode == "online" and not os.environ.get("TRACKER_API_KEY"):
            raise RuntimeError("no TRACKER_API_KEY configured")
        os.makedirs(project, exist_ok=True)
        self.path = os.path.join(project, "history.jsonl")

    def log(self, row):
        with open(self.path, "a") as file:
            file.write(json.dumps(row) + "\n")


class Circles(Dataset):
    def __len__(self):
        return 160

    def __getitem__(self, i):
        rows = torch.Generator().manual_seed(i)
        x, y, r = torch.rand(3, generator=rows) * torch.tensor([16.0, 16.0, 5.0])
        grid = torch.arange(16.0)
        mask = ((grid[None] - x) ** 2 + (grid[:, None] - y) ** 2 < (r + 2) ** 2).long()
        return {"image": mask[None] + 0.5 * torch.randn(1, 16, 16, generator=rows), "mask": mask}


class DoubleConv(nn.Sequential):
    def __init__(self, i, o):
        super().__init__(
            nn.Conv2d(i, o, 3, padding=1, bias=False), nn.BatchNorm2d(o), nn.ReLU(inplace=True),
            nn.Conv2d(o, o, 3, padding=1, bias=False), nn.BatchNorm2d(o), nn.ReLU(inplace=True),
        )


class UNet(nn.Module):
    def __init__(self, n_channels=1, n_classes=2):
        super().__init__()
        self.inc, self.down = DoubleConv(n_channels, 6), DoubleConv(6, 12)
        self.up = nn.ConvTranspose2d(12, 6, 2, 2)
        self.conv, self.outc = DoubleConv(12, 6), nn.Conv2d(6, n_classes, 1)

    def forward(self, x):
        x1 = self.inc(x)
        x2 = self.down(F.max_pool2d(x1, 2))
        return self.outc(self.conv(torch.cat([x1, self.up(x2)], 1)))


def dice_loss(pred, mask):
    probs = pred.softmax(1)[:, 1]
    inter = 2 * (probs * mask).sum()
    return 1 - (inter + 1e-6) / (probs.sum() + mask.sum() + 1e-6)


def compute_loss(model, criterion, batch):
    masks_pred = model(batch["image"])
    return criterion(masks_pred, batch["mask"]) + dice_loss(masks_pred, batch["mask"])


def evaluate(net, dataloader):
    net.eval()
    with torch.no_grad():
        scores = [1 - dice_loss(net(b["image"]), b["mask"]).item() for b in dataloader]
    net.train()
    return sum(scores) / len(scores)


def train_model(model, epochs, batch_size, learning_rate, project):
    train_set, val_set = random_split(Circles(), [128, 32], torch.Generator().manual_seed(0))
#-    train_loader = DataLoader(train_set, batch_size=batch_size, shuffle=True)
    val_loader = DataLoader(val_set, batch_size=batch_size)
#-    experiment = Run(project, {"epochs": epochs}, mode="offline")
    optimizer = optim.RMSprop(model.parameters(), lr=learning_rate, momentum=0.9)
    scheduler = optim.lr_scheduler.ReduceLROnPlateau(optimizer, "max", patience=1)
    criterion = nn.CrossEntropyLoss()
#-    global_step = 0
    session = Session(model, optimizer, scheduler)  #+
    train_loader = session.data(train_set, batch_size=batch_size, microbatches=4, shuffle=True)  #+
    experiment = Run(session.output / project, {"epochs": epochs}, mode="offline")  #+

#-    for epoch in range(1, epochs + 1):
    for epoch in session.epochs(epochs):  #+
        model.train()
        epoch_loss = 0
        for batch in train_loader:
#-            loss = compute_loss(model, criterion, batch)
            optimizer.zero_grad()
#-            loss.backward()
#-            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            loss = session.backward(lambda b: compute_loss(model, criterion, b), batch).loss  #+
            session.clip_grad_norm_(1.0)  #+
            optimizer.step()
#-            global_step += 1
            global_step = session.step + 1  #+
            epoch_loss += float(loss)
            experiment.log({"train loss": float(loss), "step": global_step, "epoch": epoch})
        val_score = evaluate(model, val_loader)
        scheduler.step(val_score)
        logging.info(f"Validation Dice score: {val_score}")
        experiment.log({"validation Dice": val_score, "step": global_step})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train the UNet on images and target masks")
    parser.add_argument("--epochs", "-e", type=int, default=3)
    parser.add_argument("--batch-size", "-b", type=int, default=16)
    parser.add_argument("--learning-rate", "-l", type=float, default=1e-3)
    parser.add_argument("--project", default="U-Net")
    args = parser.parse_args()
    torch.manual_seed(0)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s: %(message)s")
    model = UNet()
    train_model(model, args.epochs, args.batch_size, args.learning_rate, args.project)
