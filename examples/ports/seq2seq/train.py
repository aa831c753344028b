"""Sequence to sequence with teacher forcing, in the manner of bentrevett/pytorch-seq2seq's notebooks."""

import math
import random
import time

import numpy as np
import torch
import torch.nn as nn
import torch.optim as optim
#+
from orchestrator import Session, Variables  #+

SEED = 1234
random.seed(SEED)
np.random.seed(SEED)
torch.manual_seed(SEED)


class Encoder(nn.Module):
    def __init__(self, input_dim, emb_dim, hid_dim, dropout):
        super().__init__()
        self.hid_dim = hid_dim
        self.embedding = nn.Embedding(input_dim, emb_dim)
        self.rnn = nn.LSTM(emb_dim, hid_dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, src):
        embedded = self.dropout(self.embedding(src))
        outputs, (hidden, cell) = self.rnn(embedded)
        return hidden, cell


class Decoder(nn.Module):
    def __init__(self, output_dim, emb_dim, hid_dim, dropout):
        super().__init__()
        self.output_dim = output_dim
        self.hid_dim = hid_dim
        self.embedding = nn.Embedding(output_dim, emb_dim)
        self.rnn = nn.LSTM(emb_dim, hid_dim)
        self.fc_out = nn.Linear(hid_dim, output_dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, input, hidden, cell):
        input = input.unsqueeze(0)
        embedded = self.dropout(self.embedding(input))
        output, (hidden, cell) = self.rnn(embedded, (hidden, cell))
        prediction = self.fc_out(output.squeeze(0))
        return prediction, hidden, cell


class Seq2Seq(nn.Module):
    def __init__(self, encoder, decoder, device):
        super().__init__()
        self.encoder = encoder
        self.decoder = decoder
        self.device = device

    def forward(self, src, trg, teacher_forcing_ratio=0.5):
        # src = [src len, batch size]; trg = [trg len, batch size]
        batch_size = trg.shape[1]
        trg_len = trg.shape[0]
        trg_vocab_size = self.decoder.output_dim
        outputs = torch.zeros(trg_len, batch_size, trg_vocab_size).to(self.device)
        hidden, cell = self.encoder(src)
        input = trg[0, :]
        for t in range(1, trg_len):
            output, hidden, cell = self.decoder(input, hidden, cell)
            outputs[t] = output
            teacher_force = random.random() < teacher_forcing_ratio
            top1 = output.argmax(1)
            input = trg[t] if teacher_force else top1
        return outputs


def init_weights(m):
    for name, param in m.named_parameters():
        nn.init.uniform_(param.data, -0.08, 0.08)


class BucketIterator:
    """Batches of sequences of like lengths: the target is the source, reversed."""

    def __init__(self, n, batch_size):
        g = torch.Generator().manual_seed(n)
        self.batches = []
        for _ in range(n):
            src = torch.randint(3, 16, (int(torch.randint(4, 7, (), generator=g)), batch_size), generator=g)
            sos, eos = torch.full((1, batch_size), 1), torch.full((1, batch_size), 2)
            self.batches.append((torch.cat([sos, src, eos]), torch.cat([sos, src.flip(0), eos])))

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        return iter(random.sample(self.batches, len(self.batches)))


def train(model, iterator, optimizer, criterion, clip, ratio):
    model.train()
    epoch_loss = 0
#-    for i, (src, trg) in enumerate(iterator):
    for i, (src, trg) in enumerate(session.each(list(iterator))):  #+
        optimizer.zero_grad()
#-        output = model(src, trg, ratio)
#-        output_dim = output.shape[-1]
#-        output = output[1:].view(-1, output_dim)
#-        trg = trg[1:].reshape(-1)
#-        loss = criterion(output, trg)
#-        loss.backward()
#-        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        loss_of = lambda output, trg: criterion(output[1:].view(-1, output.shape[-1]), trg[1:].reshape(-1))  #+
        loss = session.backward(lambda src, trg: loss_of(model(src, trg, ratio), trg), src, trg, dim=1)  #+
        session.clip_grad_norm_(clip)  #+
        optimizer.step()
        epoch_loss += loss.item()
    return epoch_loss / len(iterator)


def evaluate(model, iterator, criterion):
    model.eval()
    epoch_loss = 0
    with torch.no_grad():
        for i, (src, trg) in enumerate(iterator):
            output = model(src, trg, 0)  # turn off teacher forcing
            output = output[1:].view(-1, output.shape[-1])
            loss = criterion(output, trg[1:].reshape(-1))
            epoch_loss += loss.item()
    return epoch_loss / len(iterator)


train_iterator, valid_iterator = BucketIterator(16, 16), BucketIterator(4, 16)
device = torch.device("cpu")
model = Seq2Seq(Encoder(16, 16, 32, 0.2), Decoder(16, 16, 32, 0.2), device).to(device)
model.apply(init_weights)
optimizer = optim.Adam(model.parameters(), lr=5e-3)
criterion = nn.CrossEntropyLoss(ignore_index=0)
N_EPOCHS = 3
CLIP = 1
best_valid_loss = float("inf")
#-for epoch in range(N_EPOCHS):
session = Session(model, optimizer, Variables(globals(), "best_valid_loss"), microbatches=4)  #+
for epoch in session.epochs(N_EPOCHS, train_iterator):  #+
    start_time = time.time()
    train_loss = train(model, train_iterator, optimizer, criterion, CLIP, max(0.2, 1.0 - 0.3 * epoch))
    valid_loss = evaluate(model, valid_iterator, criterion)
    if valid_loss < best_valid_loss:
        best_valid_loss = valid_loss
        torch.save(model.state_dict(), "tut1-model.pt")
    print(f"Epoch: {epoch + 1:02} | Time: {time.time() - start_time:.0f}s")
    print(f"\tTrain Loss: {train_loss:.3f} | Train PPL: {math.exp(train_loss):7.3f}")
    print(f"\t Val. Loss: {valid_loss:.3f} |  Val. PPL: {math.exp(valid_loss):7.3f}")
