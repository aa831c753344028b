"""Sample rare classes as often as common ones, in the manner of ufoym/imbalanced-dataset-sampler."""

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
import torch.utils.data
#+
from orchestrator import Session  #+


class ImbalancedDatasetSampler(torch.utils.data.sampler.Sampler):
    """Samples elements randomly from a given list of indices for imbalanced dataset"""

    def __init__(self, dataset, num_samples=None):
        self.indices = list(range(len(dataset)))
        self.num_samples = len(self.indices) if num_samples is None else num_samples
        labels = [int(dataset[idx][1]) for idx in self.indices]
        label_to_count = {label: labels.count(label) for label in set(labels)}
        weights = [1.0 / label_to_count[label] for label in labels]
        self.weights = torch.DoubleTensor(weights)

    def __iter__(self):
        return (self.indices[i] for i in torch.multinomial(self.weights, self.num_samples, replacement=True))

    def __len__(self):
        return self.num_samples


class Net(nn.Module):
    def __init__(self):
        super(Net, self).__init__()
        self.conv1 = nn.Conv2d(1, 4, kernel_size=3)
        self.conv2_drop = nn.Dropout2d()
        self.fc1 = nn.Linear(4 * 9, 16)
        self.fc2 = nn.Linear(16, 4)

    def forward(self, x):
        x = F.relu(F.max_pool2d(self.conv2_drop(self.conv1(x)), 2))
        x = F.relu(self.fc1(x.flatten(1)))
        x = F.dropout(x, training=self.training)
        return F.log_softmax(self.fc2(x), dim=1)


torch.manual_seed(0)
g = torch.Generator().manual_seed(1)
labels = torch.multinomial(torch.tensor([0.7, 0.2, 0.07, 0.03]), 320, replacement=True, generator=g)
images = torch.randn(320, 1, 8, 8, generator=g) * 0.5 + torch.eye(8) * labels[:, None, None, None]
train_dataset = torch.utils.data.TensorDataset(images[:256], labels[:256])
test_dataset = torch.utils.data.TensorDataset(images[256:], labels[256:])
train_loader = torch.utils.data.DataLoader(train_dataset, sampler=ImbalancedDatasetSampler(train_dataset), batch_size=16)
test_loader = torch.utils.data.DataLoader(test_dataset, batch_size=16, shuffle=False)

model = Net()
optimizer = optim.SGD(model.parameters(), lr=0.01, momentum=0.5)


session = Session(model, optimizer, microbatches=4)  #+
train_loader = session.data(train_dataset, batch_size=16, order=lambda epoch: list(ImbalancedDatasetSampler(train_dataset)))  #+
#+
#+
def train(epoch):
    model.train()
    for batch_idx, (data, target) in enumerate(train_loader):
        optimizer.zero_grad()
#-        output = model(data)
#-        loss = F.nll_loss(output, target)
#-        loss.backward()
        loss = session.backward(lambda data, target: F.nll_loss(model(data), target), data, target)  #+
        optimizer.step()
        if batch_idx % 8 == 0:
            print("Train Epoch: {} [{}/{}]\tLoss: {:.6f}".format(epoch, batch_idx * len(data), len(train_loader.dataset), loss.item()))


def test():
    model.eval()
    test_loss = 0
    correct = 0
    with torch.no_grad():
        for data, target in test_loader:
            output = model(data)
            test_loss += F.nll_loss(output, target, reduction="sum").item()
            pred = output.max(1, keepdim=True)[1]
            correct += pred.eq(target.view_as(pred)).sum().item()
    test_loss /= len(test_loader.dataset)
    print("\nTest set: Average loss: {:.4f}, Accuracy: {}/{}\n".format(test_loss, correct, len(test_loader.dataset)))


#-for epoch in range(1, 4):
for epoch in session.epochs(3):  #+
    train(epoch)
    test()
