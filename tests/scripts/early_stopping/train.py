"""Early stopping with patience, a rate that falls on plateaus, and the best weights at the end."""

import argparse
import copy

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
#+
from orchestrator import Session  #+


class EarlyStopping:
    """Stops when the validation loss has not improved for `patience` epochs."""

    def __init__(self, patience=2, delta=0.0):
        self.patience = patience
        self.delta = delta
        self.counter = 0
        self.best_score = None
        self.early_stop = False
        self.best_weights = None

    def __call__(self, val_loss, model):
        score = -val_loss
        if self.best_score is None or score > self.best_score + self.delta:
            self.best_score = score
            self.best_weights = copy.deepcopy(model.state_dict())
            self.counter = 0
        else:
            self.counter += 1
            print(f"EarlyStopping counter: {self.counter} out of {self.patience}")
            self.early_stop = self.counter >= self.patience


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--patience", type=int, default=2)
    parser.add_argument("--lr", type=float, default=0.05)
    args = parser.parse_args()
    torch.manual_seed(0)
    x = torch.randn(128, 10)
    y = x[:, :1] * x[:, 1:2] + 0.5 * torch.randn(128, 1)
    train_set, (val_x, val_y) = TensorDataset(x[:96], y[:96]), (x[96:], y[96:])
#-    train_loader = DataLoader(train_set, batch_size=8, shuffle=True)
    model = nn.Sequential(nn.Linear(10, 48), nn.Tanh(), nn.Linear(48, 1))
    criterion = nn.MSELoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=1)
    early_stopping = EarlyStopping(args.patience)
    session = Session(model, optimizer, scheduler, early_stopping)  #+
    train_loader = session.data(train_set, batch_size=8, microbatches=4, shuffle=True)  #+

#-    for epoch in range(args.epochs):
    for epoch in session.epochs(args.epochs):  #+
        model.train()
#-        for inputs, targets in train_loader:
        for batch in train_loader:  #+
            optimizer.zero_grad()
#-            loss = criterion(model(inputs), targets)
#-            loss.backward()
            session.backward(lambda b: criterion(model(b[0]), b[1]), batch)  #+
            optimizer.step()
        model.eval()
        with torch.no_grad():
            val_loss = criterion(model(val_x), val_y).item()
        scheduler.step(val_loss)
        early_stopping(val_loss, model)
        print(f"epoch {epoch} val {val_loss:.4f} lr {optimizer.param_groups[0]['lr']}")
        if early_stopping.early_stop:
            print("Early stopping")
            break

    model.load_state_dict(early_stopping.best_weights)
#-    torch.save(model.state_dict(), "best.pt")
    session.save("best.pt")  #+


if __name__ == "__main__":
    main()
