"""A convolutional network for digits: train and test functions, epochs, a step schedule."""

import argparse

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset
#+
from orchestrator import Session  #+


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, 1)
        self.conv2 = nn.Conv2d(8, 16, 3, 1)
        self.dropout = nn.Dropout(0.25)
        self.fc1 = nn.Linear(16 * 16, 32)
        self.fc2 = nn.Linear(32, 10)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.relu(self.fc1(torch.flatten(self.dropout(x), 1)))
        return F.log_softmax(self.fc2(x), dim=1)


def pictures(count, seed):
    rows = torch.Generator().manual_seed(seed)
    digits = torch.randint(10, (count,), generator=rows)
    strokes = torch.randn(10, 1, 12, 12, generator=torch.Generator().manual_seed(0))
    return TensorDataset(
        strokes[digits] + 0.5 * torch.randn(count, 1, 12, 12, generator=rows), digits
    )


#-def train(args, model, train_loader, optimizer, epoch):
def train(args, model, train_loader, optimizer, epoch, session):  #+
    model.train()
#-    for batch_idx, (data, target) in enumerate(train_loader):
    for batch_idx, batch in enumerate(train_loader):  #+
        optimizer.zero_grad()
#-        loss = F.nll_loss(model(data), target)
#-        loss.backward()
        loss = session.backward(lambda b: F.nll_loss(model(b[0]), b[1]), batch).loss  #+
        optimizer.step()
        if batch_idx % args.log_interval == 0:
            print(f"Train Epoch: {epoch} [{batch_idx}/{len(train_loader)}]\tLoss: {loss:.6f}")


def test(model, test_loader):
    model.eval()
    test_loss, correct = 0.0, 0
    with torch.no_grad():
        for data, target in test_loader:
            output = model(data)
            test_loss += F.nll_loss(output, target, reduction="sum").item()
            correct += output.argmax(dim=1).eq(target).sum().item()
    count = len(test_loader.dataset)
    print(f"Test set: Average loss: {test_loss / count:.4f}, Accuracy: {correct}/{count}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=0.5)
    parser.add_argument("--gamma", type=float, default=0.7)
    parser.add_argument("--log-interval", type=int, default=4)
    args = parser.parse_args()
    torch.manual_seed(1)

#-    train_loader = DataLoader(pictures(320, 1), batch_size=args.batch_size, shuffle=True)
    test_loader = DataLoader(pictures(64, 2), batch_size=64)
    model = Net()
    optimizer = torch.optim.Adadelta(model.parameters(), lr=args.lr)
    scheduler = StepLR(optimizer, step_size=1, gamma=args.gamma)
#-    for epoch in range(1, args.epochs + 1):
#-        train(args, model, train_loader, optimizer, epoch)
    session = Session(model, optimizer, scheduler)  #+
    train_loader = session.data(pictures(320, 1), batch_size=args.batch_size, microbatches=4, shuffle=True)  #+
    for epoch in session.epochs(args.epochs):  #+
        train(args, model, train_loader, optimizer, epoch, session)  #+
        test(model, test_loader)
        scheduler.step()


if __name__ == "__main__":
    main()
