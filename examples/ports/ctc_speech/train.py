"""An end-to-end speech recognizer with CTC, in the manner of AssemblyAI's PyTorch tutorial."""

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
import torch.utils.data as data
#+
from orchestrator import Session  #+


class Utterances(data.Dataset):
    """Each character is a tone of its own, held for some frames."""

    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.texts = [torch.randint(1, 9, (int(torch.randint(2, 5, (), generator=g)),), generator=g) for _ in range(n)]

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, i):
        text = self.texts[i]
        frames = F.one_hot(text.repeat_interleave(4), 16).float()
        return frames + 0.1 * torch.randn(frames.shape), text


def data_processing(batch):
    spectrograms, labels, input_lengths, label_lengths = [], [], [], []
    for spec, label in batch:
        if torch.rand(()) < 0.3:
            spec = spec.roll(1, 1)
        spectrograms.append(spec)
        labels.append(label)
        input_lengths.append(spec.shape[0] // 2)
        label_lengths.append(len(label))
    spectrograms = nn.utils.rnn.pad_sequence(spectrograms, batch_first=True)
    labels = nn.utils.rnn.pad_sequence(labels, batch_first=True)
    return spectrograms, labels, input_lengths, label_lengths


class BidirectionalGRU(nn.Module):
    def __init__(self, rnn_dim, hidden_size, dropout):
        super(BidirectionalGRU, self).__init__()
        self.BiGRU = nn.GRU(rnn_dim, hidden_size, batch_first=True, bidirectional=True)
        self.layer_norm = nn.LayerNorm(rnn_dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        x, _ = self.BiGRU(F.gelu(self.layer_norm(x)))
        return self.dropout(x)


class SpeechRecognitionModel(nn.Module):
    def __init__(self, rnn_dim=32, n_class=10, n_feats=16, dropout=0.1):
        super(SpeechRecognitionModel, self).__init__()
        self.cnn = nn.Conv1d(n_feats, rnn_dim, 3, stride=2, padding=1)
        self.birnn_layers = nn.Sequential(*[BidirectionalGRU(rnn_dim, rnn_dim // 2, dropout) for i in range(2)])
        self.classifier = nn.Sequential(nn.Linear(rnn_dim, rnn_dim), nn.GELU(), nn.Dropout(dropout), nn.Linear(rnn_dim, n_class))

    def forward(self, x):
        x = self.cnn(x.transpose(1, 2)).transpose(1, 2)
        return self.classifier(self.birnn_layers(x))


class IterMeter(object):
    """keeps track of total iterations"""

    def __init__(self):
        self.val = 0

    def step(self):
        self.val += 1

    def get(self):
        return self.val


#-def train(model, device, train_loader, criterion, optimizer, scheduler, epoch, iter_meter):
def train(session, model, device, train_loader, criterion, optimizer, scheduler, epoch, iter_meter):  #+
    model.train()
    data_len = len(train_loader.dataset)
    for batch_idx, _data in enumerate(train_loader):
        spectrograms, labels, input_lengths, label_lengths = _data
        spectrograms, labels = spectrograms.to(device), labels.to(device)
        optimizer.zero_grad()
#-        output = model(spectrograms)  # (batch, time, n_class)
#-        output = F.log_softmax(output, dim=2)
#-        output = output.transpose(0, 1)  # (time, batch, n_class)
#-        loss = criterion(output, labels, input_lengths, label_lengths)
#-        loss.backward()
        output = lambda x: F.log_softmax(model(x), dim=2).transpose(0, 1)  # (time, batch, n_class)  #+
        loss = session.backward(lambda x, *labels: criterion(output(x), *labels), *_data)  #+
        optimizer.step()
        scheduler.step()
        iter_meter.step()
        if batch_idx % 5 == 0 or batch_idx == data_len:
            print("Train Epoch: {} [{}/{}]\tLoss: {:.6f}".format(epoch, batch_idx * len(spectrograms), data_len, loss.item()))


def test(model, device, test_loader, criterion):
    model.eval()
    test_loss = 0
    with torch.no_grad():
        for spectrograms, labels, input_lengths, label_lengths in test_loader:
            output = F.log_softmax(model(spectrograms), dim=2).transpose(0, 1)
            test_loss += criterion(output, labels, input_lengths, label_lengths).item() / len(test_loader)
    print("Test set: Average loss: {:.4f}".format(test_loss))


def main(learning_rate=5e-3, batch_size=8, epochs=3):
    torch.manual_seed(7)
    device = torch.device("cpu")
    train_loader = data.DataLoader(dataset=Utterances(96, 1), batch_size=batch_size, shuffle=True, collate_fn=data_processing)
    test_loader = data.DataLoader(dataset=Utterances(16, 2), batch_size=batch_size, shuffle=False, collate_fn=data_processing)
    model = SpeechRecognitionModel().to(device)
    optimizer = optim.AdamW(model.parameters(), learning_rate)
    criterion = nn.CTCLoss(blank=0).to(device)
    scheduler = optim.lr_scheduler.OneCycleLR(optimizer, max_lr=learning_rate, steps_per_epoch=int(len(train_loader)), epochs=epochs, anneal_strategy="linear")
    iter_meter = IterMeter()
#-    for epoch in range(1, epochs + 1):
#-        train(model, device, train_loader, criterion, optimizer, scheduler, epoch, iter_meter)
    session = Session(model, optimizer, scheduler, microbatches=4)  #+
    train_loader = session.data(train_loader)  #+
    for epoch in session.epochs(epochs):  #+
        train(session, model, device, train_loader, criterion, optimizer, scheduler, epoch, iter_meter)  #+
        test(model, device, test_loader, criterion)


main()
