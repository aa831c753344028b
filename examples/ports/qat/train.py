"""Quantization-aware training, in the manner of torchvision's references/quantization/train_quantization.py."""

import copy
import time

import torch
import torch.ao.quantization
import torch.utils.data
from torch import nn
#+
from orchestrator import Session  #+


class QuantizableNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.quant, self.dequant = torch.ao.quantization.QuantStub(), torch.ao.quantization.DeQuantStub()
        self.features = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.pool = nn.AdaptiveAvgPool2d(2)
        self.fc = nn.Linear(32, 4)

    def forward(self, x):
        x = self.pool(self.features(self.quant(x)))
        return self.dequant(self.fc(torch.flatten(x, 1)))

    def fuse_model(self):
        torch.ao.quantization.fuse_modules_qat(self, [["features.0", "features.1", "features.2"]], inplace=True)


#-def train_one_epoch(model, criterion, optimizer, data_loader, device, epoch, print_freq):
def train_one_epoch(session, model, criterion, optimizer, data_loader, device, epoch, print_freq):  #+
    model.train()
    total, start_time = 0.0, time.time()
    for i, (image, target) in enumerate(data_loader):
        image, target = image.to(device), target.to(device)
#-        output = model(image)
#-        loss = criterion(output, target)
        optimizer.zero_grad()
#-        loss.backward()
        loss = session.backward(lambda image, target: criterion(model(image), target), image, target)  #+
        optimizer.step()
        total += loss.item()
        if i % print_freq == 0:
            print(f"Epoch: [{epoch}] loss: {loss.item():.4f} img/s: {len(image) / (time.time() - start_time):.0f}")
    return total / len(data_loader)


def evaluate(model, criterion, data_loader, device):
    model.eval()
    correct, total = 0, 0
    with torch.inference_mode():
        for image, target in data_loader:
            output = model(image.to(device))
            correct += (output.argmax(1) == target).sum().item()
            total += len(target)
    print(f"Test: Acc@1 {correct / total:.3f}")
    return correct / total


def main():
    torch.manual_seed(0)
    device = torch.device("cpu")
    epochs, num_observer_update_epochs, num_batch_norm_update_epochs = 4, 2, 2
    g = torch.Generator().manual_seed(1)
    y = torch.randint(4, (256,), generator=g)
    x = 0.3 * torch.randn(256, 1, 8, 8, generator=g)
    x[torch.arange(256), 0, (y // 2) * 4, (y % 2) * 4] += 3.0
    dataset, dataset_test = torch.utils.data.TensorDataset(x[:192], y[:192]), torch.utils.data.TensorDataset(x[192:], y[192:])
    data_loader = torch.utils.data.DataLoader(dataset, batch_size=16, sampler=torch.utils.data.RandomSampler(dataset), num_workers=0)
    data_loader_test = torch.utils.data.DataLoader(dataset_test, batch_size=16, sampler=torch.utils.data.SequentialSampler(dataset_test))

    print("Creating model")
    torch.backends.quantized.engine = "fbgemm"
    model = QuantizableNet()
    model.to(device)
    model.train()
    model.fuse_model()
    model.qconfig = torch.ao.quantization.get_default_qat_qconfig("fbgemm")
    torch.ao.quantization.prepare_qat(model, inplace=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    lr_scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.1)
    criterion = nn.CrossEntropyLoss()

    model.apply(torch.ao.quantization.enable_observer)
    model.apply(torch.ao.quantization.enable_fake_quant)
#-    for epoch in range(epochs):
#-        train_one_epoch(model, criterion, optimizer, data_loader, device, epoch, 6)
    model(dataset[0][0][None])  #+
    session = Session(model, optimizer, lr_scheduler, microbatches=2)  #+
    data_loader = session.data(data_loader)  #+
    for epoch in session.epochs(epochs):  #+
        train_one_epoch(session, model, criterion, optimizer, data_loader, device, epoch, 6)  #+
        lr_scheduler.step()
        with torch.inference_mode():
            if epoch >= num_observer_update_epochs:
                print("Disabling observer for subseq epochs, epoch = ", epoch)
                model.apply(torch.ao.quantization.disable_observer)
            if epoch >= num_batch_norm_update_epochs:
                print("Freezing BN for subseq epochs, epoch = ", epoch)
                model.apply(torch.nn.intrinsic.qat.freeze_bn_stats)
            print("Evaluate QAT model")
            evaluate(model, criterion, data_loader_test, device=device)
            quantized_eval_model = copy.deepcopy(model)
            quantized_eval_model.eval()
            quantized_eval_model.to(torch.device("cpu"))
            torch.ao.quantization.convert(quantized_eval_model, inplace=True)
            print("Evaluate Quantized model")
            evaluate(quantized_eval_model, criterion, data_loader_test, device=torch.device("cpu"))
        model.train()


main()
