"""Train a residual network: meters, the best accuracy, a learning rate per epoch, resumable."""

import argparse
import shutil
import time

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
#+
from orchestrator import Session, Variables, supervised  #+

parser = argparse.ArgumentParser(description="training of an image classifier")
parser.add_argument("--epochs", default=4, type=int)
parser.add_argument("-b", "--batch-size", default=32, type=int)
parser.add_argument("--lr", default=0.05, type=float)
parser.add_argument("--momentum", default=0.9, type=float)
parser.add_argument("--wd", default=1e-4, type=float)
parser.add_argument("-p", "--print-freq", default=4, type=int)
best_acc1 = 0.0


class BasicBlock(nn.Module):
    def __init__(self, inplanes, planes, stride=1):
        super().__init__()
        self.conv1 = nn.Conv2d(inplanes, planes, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.downsample = nn.Conv2d(inplanes, planes, 1, stride, bias=False)

    def forward(self, x):
        out = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(out + self.downsample(x))


class ResNet(nn.Module):
    def __init__(self, num_classes=5):
        super().__init__()
        self.layer1 = BasicBlock(3, 8)
        self.layer2 = BasicBlock(8, 16, 2)
        self.fc = nn.Linear(16, num_classes)

    def forward(self, x):
        return self.fc(self.layer2(self.layer1(x)).mean((2, 3)))


class AverageMeter:
    """Computes and stores the average and current value."""

    def __init__(self, name, fmt=":f"):
        self.name, self.fmt = name, fmt
        self.val = self.sum = self.count = self.avg = 0

    def update(self, val, n=1):
        self.val = val
        self.sum += val * n
        self.count += n
        self.avg = self.sum / self.count

    def __str__(self):
        return ("{name} {val" + self.fmt + "} ({avg" + self.fmt + "})").format(**self.__dict__)


def accuracy(output, target):
    with torch.no_grad():
        return (output.argmax(1) == target).float().mean() * 100


def images(count, seed):
    rows = torch.Generator().manual_seed(seed)
    target = torch.randint(5, (count,), generator=rows)
    kinds = torch.randn(5, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    return TensorDataset(kinds[target] + torch.randn(count, 3, 8, 8, generator=rows), target)


def main():
    global best_acc1
    args = parser.parse_args()
    torch.manual_seed(0)
    model = ResNet()
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(
        model.parameters(), args.lr, momentum=args.momentum, weight_decay=args.wd
    )
#-    train_loader = DataLoader(images(256, 1), batch_size=args.batch_size, shuffle=True)
    session = Session(model, optimizer, Variables(globals(), "best_acc1"), microbatches=4)  #+
    train_loader = session.data(images(256, 1), batch_size=args.batch_size, shuffle=True)  #+
    val_loader = DataLoader(images(64, 2), batch_size=args.batch_size)

#-    for epoch in range(args.epochs):
    for epoch in session.epochs(args.epochs):  #+
        adjust_learning_rate(optimizer, epoch, args)
        batch_time, losses = AverageMeter("Time", ":6.3f"), AverageMeter("Loss", ":.4e")
        top1 = AverageMeter("Acc@1", ":6.2f")
        model.train()
        end = time.time()
        for i, (inputs, target) in enumerate(train_loader):
#-            output = model(inputs)
#-            loss = criterion(output, target)
            loss = session.backward(supervised(model, criterion, acc1=accuracy), inputs, target)  #+
            losses.update(loss.item(), inputs.size(0))
#-            top1.update(accuracy(output, target).item(), inputs.size(0))
#-            optimizer.zero_grad()
#-            loss.backward()
            top1.update(loss["acc1"], inputs.size(0))  #+
            optimizer.step()
            batch_time.update(time.time() - end)
            end = time.time()
            if i % args.print_freq == 0:
                print(f"Epoch: [{epoch}][{i}/{len(train_loader)}]", batch_time, losses, top1)

        acc1 = validate(val_loader, model)
        is_best = acc1 > best_acc1
        best_acc1 = max(acc1, best_acc1)
#-        save_checkpoint({"epoch": epoch + 1, "state_dict": model.state_dict()}, is_best)
        save_checkpoint({"epoch": epoch + 1, "state_dict": model.state_dict()}, is_best, session.output / "checkpoint.pth.tar")  #+

    print(f"best accuracy {best_acc1:.2f}")


def validate(val_loader, model):
    top1 = AverageMeter("Acc@1", ":6.2f")
    model.eval()
    with torch.no_grad():
        for inputs, target in val_loader:
            top1.update(accuracy(model(inputs), target).item(), inputs.size(0))
    print(f" * Acc@1 {top1.avg:.3f}")
    return top1.avg


def save_checkpoint(state, is_best, filename="checkpoint.pth.tar"):
    torch.save(state, filename)
    if is_best:
#-        shutil.copyfile(filename, "model_best.pth.tar")
        shutil.copyfile(filename, filename.with_name("model_best.pth.tar"))  #+


def adjust_learning_rate(optimizer, epoch, args):
    """The initial rate, decayed by 10 every 2 epochs."""
    for param_group in optimizer.param_groups:
        param_group["lr"] = args.lr * (0.1 ** (epoch // 2))


if __name__ == "__main__":
    main()
