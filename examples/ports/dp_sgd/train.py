"""Private training by per-sample gradients, in the manner of opacus' examples/cifar10 with torch.func."""

import argparse

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from torch.func import functional_call, grad_and_value, vmap
from torch.utils.data import DataLoader, TensorDataset
#+
from orchestrator import Session  #+


def accuracy(preds, labels):
    return (preds == labels).mean()


def compute_norms(sample_grads):
    """Compute the norms of the per-sample gradients"""
    batch_size = sample_grads[0].shape[0]
    norms = [sample_grad.view(batch_size, -1).norm(2, dim=-1) for sample_grad in sample_grads]
    norms = torch.stack(norms, dim=0).norm(2, dim=0)
    return norms, batch_size


#-def clip_and_accumulate_and_add_noise(model, max_per_sample_grad_norm=1.0, noise_multiplier=1.0):
#-    sample_grads = tuple(param.grad_sample for param in model.parameters())
#-    sample_norms, batch_size = compute_norms(sample_grads)
#-    clip_factor = max_per_sample_grad_norm / (sample_norms + 1e-6)
#-    clip_factor = clip_factor.clamp(max=1.0)
#-    grads = tuple(torch.einsum("i,i...", clip_factor, sample_grad) for sample_grad in sample_grads)
def clip_and_accumulate_and_add_noise(model, batch_size, max_per_sample_grad_norm=1.0, noise_multiplier=1.0):  #+
    grads = tuple(param.grad * batch_size for param in model.parameters())  #+
    stddev = max_per_sample_grad_norm * noise_multiplier
    noises = tuple(torch.normal(0, stddev, grad_param.shape, device=grad_param.device) for grad_param in grads)
    grads = tuple(noise + grad_param for noise, grad_param in zip(noises, grads))
    for param, param_grad in zip(model.parameters(), grads):
        param.grad = param_grad / batch_size
#-        del param.grad_sample


def train(args, model, train_loader, optimizer, epoch, device):
    model.train()
    criterion = nn.CrossEntropyLoss()
    losses, top1_acc = [], []
    for i, (images, target) in enumerate(train_loader):
        images = images.to(device)
        target = target.to(device)

        def compute_loss_and_output(weights, image, target):
            images = image.unsqueeze(0)
            targets = target.unsqueeze(0)
            output = functional_call(model, weights, images)
            loss = criterion(output, targets)
            return loss, output.squeeze(0)

        weights = dict(model.named_parameters())
        grads_loss_output = grad_and_value(compute_loss_and_output, has_aux=True)
#-        sample_grads, (sample_loss, output) = vmap(grads_loss_output, (None, 0, 0))(weights, images, target)
#-        loss = sample_loss.mean()
#-        for name, grad_sample in sample_grads.items():
#-            weights[name].grad_sample = grad_sample.detach()

#-        clip_and_accumulate_and_add_noise(model, args.max_per_sample_grad_norm, args.sigma)
#-        preds = np.argmax(output.detach().cpu().numpy(), axis=1)
#-        labels = target.detach().cpu().numpy()
#-        losses.append(loss.item())
#-        top1_acc.append(accuracy(preds, labels))
        def loss_of(images, target):  #+
            sample_grads, (sample_loss, output) = vmap(grads_loss_output, (None, 0, 0))(weights, images, target)  #+
            sample_norms, _ = compute_norms([each.detach().flatten(1) for each in sample_grads.values()])  #+
            clip_factor = (args.max_per_sample_grad_norm / (sample_norms + 1e-6)).clamp(max=1.0)  #+
            return (clip_factor * sample_loss).mean(), {"sample_loss": sample_loss.mean(), "accuracy": (output.argmax(1) == target).float().mean()}  #+
#+
        result = args.session.backward(loss_of, images, target)  #+
        clip_and_accumulate_and_add_noise(model, len(images), args.max_per_sample_grad_norm, args.sigma)  #+
        losses.append(result["sample_loss"])  #+
        top1_acc.append(result["accuracy"])  #+
        optimizer.step()
        optimizer.zero_grad()
        if i % args.print_freq == 0:
            print(f"\tTrain Epoch: {epoch} Loss: {np.mean(losses):.6f} Acc@1: {np.mean(top1_acc):.6f} ")


def test(args, model, test_loader, device):
    model.eval()
    correct = 0
    with torch.no_grad():
        for images, target in test_loader:
            correct += (model(images).argmax(1) == target).sum().item()
    print(f"\tTest set: Acc: {correct / len(test_loader.dataset):.6f} ")
    return correct


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--sigma", type=float, default=0.2)
    parser.add_argument("--max-per-sample-grad_norm", type=float, default=1.2)
    parser.add_argument("--print-freq", type=int, default=8)
    args = parser.parse_args()
    device = "cpu"
    torch.manual_seed(0)
    x = torch.randn(320, 3, 8, 8)
    y = (x.mean((2, 3)) * 8).argmax(1)
    train_loader = DataLoader(TensorDataset(x[:256], y[:256]), args.batch_size, shuffle=True)
    test_loader = DataLoader(TensorDataset(x[256:], y[256:]), args.batch_size)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(72, 3))
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    best_acc1 = 0
#-    for epoch in range(1, args.epochs + 1):
    args.session = Session(model, optimizer, microbatches=4)  #+
    train_loader = args.session.data(train_loader)  #+
    for epoch in args.session.epochs(args.epochs):  #+
        train(args, model, train_loader, optimizer, epoch, device)
        top1_acc = test(args, model, test_loader, device)
        is_best = top1_acc > best_acc1
        best_acc1 = max(top1_acc, best_acc1)
        if is_best:
            torch.save({"epoch": epoch + 1, "state_dict": model.state_dict(), "optimizer": optimizer.state_dict()}, "checkpoint.tar")


if __name__ == "__main__":
    main()
