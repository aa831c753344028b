"""A word-level LSTM language model, whose hidden state goes on from batch to batch."""

import argparse
import math

import torch
from torch import nn
from torch.nn import functional as F
#+
from orchestrator import Session, Variables  #+

parser = argparse.ArgumentParser()
parser.add_argument("--emsize", type=int, default=24)
parser.add_argument("--nhid", type=int, default=24)
parser.add_argument("--lr", type=float, default=4.0)
parser.add_argument("--clip", type=float, default=0.25)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--batch_size", type=int, default=16)
parser.add_argument("--bptt", type=int, default=8)
args = parser.parse_args()
torch.manual_seed(1111)


class RNNModel(nn.Module):
    def __init__(self, ntoken, ninp, nhid):
        super().__init__()
        self.nhid = nhid
        self.encoder = nn.Embedding(ntoken, ninp)
        self.rnn = nn.LSTM(ninp, nhid)
        self.decoder = nn.Linear(nhid, ntoken)

    def forward(self, source, hidden):
        output, hidden = self.rnn(self.encoder(source), hidden)
        return self.decoder(output).flatten(0, 1), hidden

    def init_hidden(self, bsz):
        return torch.zeros(1, bsz, self.nhid), torch.zeros(1, bsz, self.nhid)


def batchify(data, bsz):
    nbatch = len(data) // bsz
    return data[: nbatch * bsz].view(bsz, -1).t().contiguous()


def get_batch(source, i):
    seq_len = min(args.bptt, len(source) - 1 - i)
    return source[i : i + seq_len], source[i + 1 : i + 1 + seq_len]


def repackage_hidden(h):
    """Detached from their history."""
    return tuple(v.detach() for v in h)


words = "the cat sat on the mat and the dog lay by the door while rain fell on the old roof".split()
vocab = sorted(set(words))
corpus = torch.tensor([vocab.index(word) for word in words * 100])
train_data, val_data = batchify(corpus[:1600], args.batch_size), batchify(corpus[1600:], 4)

model = RNNModel(len(vocab), args.emsize, args.nhid)
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)


def evaluate(data_source):
    model.eval()
    total_loss, hidden = 0.0, model.init_hidden(data_source.size(1))
    with torch.no_grad():
        for i in range(0, data_source.size(0) - 1, args.bptt):
            data, targets = get_batch(data_source, i)
            output, hidden = model(data, hidden)
            total_loss += len(data) * F.cross_entropy(output, targets.flatten()).item()
    return total_loss / (len(data_source) - 1)


best_val_loss = None
session = Session(model, optimizer, Variables(globals(), "best_val_loss", "hidden"), microbatches=4)  #+
starts = range(0, train_data.size(0) - 1, args.bptt)
#-for epoch in range(args.epochs):
for epoch in session.epochs(args.epochs, starts):  #+
    model.train()
    hidden = model.init_hidden(args.batch_size)
#-    for i in starts:
    for i in session.each(starts):  #+
        data, targets = get_batch(train_data, i)
#-        hidden = repackage_hidden(hidden)
#-        output, hidden = model(data, hidden)
#-        loss = F.cross_entropy(output, targets.flatten())
#-        loss.backward()
#-        torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        loss = session.backward(lambda x, y, h: F.cross_entropy(model(x, h)[0], y.flatten()), data, targets, hidden, dim=1)  #+
        hidden = repackage_hidden(model(data, hidden)[1])  #+
        session.clip_grad_norm_(args.clip)  #+
        optimizer.step()
        optimizer.zero_grad()
    val_loss = evaluate(val_data)
    print(f"| end of epoch {epoch} | valid loss {val_loss:.2f} | ppl {math.exp(val_loss):.2f}")
    if best_val_loss is None or val_loss < best_val_loss:
        best_val_loss = val_loss
    else:
        # Anneal the learning rate if no improvement has been seen in the validation data.
        for group in optimizer.param_groups:
            group["lr"] /= 4.0
