"""A siamese network under a triplet loss; triplets are mined anew for each item."""

import argparse
import random

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, Dataset
#+
from orchestrator import Session  #+


class TripletDataset(Dataset):
    """For each sample (anchor) a positive of its class and a negative of another, at random."""

    def __init__(self, classes=4, per_class=48):
        rows = torch.Generator().manual_seed(1)
        centers = torch.randn(classes, 1, 16, generator=rows)
        self.data = centers + 0.7 * torch.randn(classes, per_class, 16, generator=rows)

    def __len__(self):
        return self.data.size(0) * self.data.size(1)

    def __getitem__(self, index):
        label, row = divmod(index, self.data.size(1))
        other = random.choice([c for c in range(len(self.data)) if c != label])
        positive = self.data[label, random.randrange(self.data.size(1))]
        negative = self.data[other, random.randrange(self.data.size(1))]
        return self.data[label, row], positive, negative


class EmbeddingNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Sequential(nn.Linear(16, 32), nn.PReLU(), nn.Linear(32, 2))

    def forward(self, x):
        return self.fc(x)


class TripletNet(nn.Module):
    def __init__(self, embedding_net):
        super().__init__()
        self.embedding_net = embedding_net

    def forward(self, x1, x2, x3):
        return self.embedding_net(x1), self.embedding_net(x2), self.embedding_net(x3)


class TripletLoss(nn.Module):
    def __init__(self, margin):
        super().__init__()
        self.margin = margin

    def forward(self, anchor, positive, negative):
        near = (anchor - positive).pow(2).sum(1)
        far = (anchor - negative).pow(2).sum(1)
        return F.relu(near - far + self.margin).mean()


#-def fit(train_loader, model, loss_fn, optimizer, scheduler, n_epochs):
#-    for epoch in range(n_epochs):
def fit(session, train_loader, model, loss_fn, optimizer, scheduler, n_epochs):  #+
    for epoch in session.epochs(n_epochs):  #+
        model.train()
        losses = []
        for batch in train_loader:
            optimizer.zero_grad()
#-            loss = loss_fn(*model(*batch))
#-            loss.backward()
            loss = session.backward(lambda b: loss_fn(*model(*b)), batch).loss  #+
            optimizer.step()
            losses.append(float(loss))
        scheduler.step()
        print(f"Epoch: {epoch + 1}/{n_epochs}. Train set: loss {sum(losses) / len(losses):.4f}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--margin", type=float, default=1.0)
    args = parser.parse_args()
    torch.manual_seed(0)
    random.seed(0)
#-    train_loader = DataLoader(TripletDataset(), batch_size=24, shuffle=True)
    model = TripletNet(EmbeddingNet())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    scheduler = lr_scheduler.StepLR(optimizer, 2, gamma=0.1)
#-    fit(train_loader, model, TripletLoss(args.margin), optimizer, scheduler, args.epochs)
    session = Session(model, optimizer, scheduler)  #+
    train_loader = session.data(TripletDataset(), batch_size=24, microbatches=4, shuffle=True)  #+
    fit(session, train_loader, model, TripletLoss(args.margin), optimizer, scheduler, args.epochs)  #+


if __name__ == "__main__":
    main()
