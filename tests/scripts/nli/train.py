"""Classify pairs of sentences: does one entail the other, contradict it, or neither?"""

import torch
from torch import nn
from torch.utils.data import DataLoader
#+
from orchestrator import Session, Variables  #+

import argparse

parser = argparse.ArgumentParser(description="sentence pairs")
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--batch_size", type=int, default=32)
parser.add_argument("--d_hidden", type=int, default=24)
parser.add_argument("--lr", type=float, default=5e-3)
parser.add_argument("--log_every", type=int, default=8)
parser.add_argument("--dev_every", type=int, default=8)
parser.add_argument("--save_path", default="best_snapshot.pt")
args = parser.parse_args()
torch.manual_seed(5)

WORDS = "a man woman dog cat runs sleeps eats not fast slowly outside inside".split()


def examples(count, seed):
    """Pairs of lists of words: the same, negated, or unrelated."""
    rows = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        length, label = (int(torch.randint(lo, hi, (), generator=rows)) for lo, hi in [(3, 7), (0, 3)])
        premise = torch.randint(1, len(WORDS), (length,), generator=rows)
        other = torch.randint(1, len(WORDS), (length,), generator=rows)
        negated = torch.cat([premise, torch.tensor([WORDS.index("not")])])
        found.append((premise, [premise[:-1], negated, other][label], label))
    return found


def collate(batch):
    premises, hypotheses, labels = zip(*batch)
    pad = nn.utils.rnn.pad_sequence
    return pad(premises, True), pad(hypotheses, True), torch.tensor(labels)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(len(WORDS), 16, padding_idx=0)
        self.rnn = nn.GRU(16, args.d_hidden, batch_first=True, bidirectional=True)

    def forward(self, words):
        return self.rnn(self.embed(words))[1].transpose(0, 1).flatten(1)


class SNLIClassifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = Encoder()
        self.out = nn.Sequential(
            nn.Linear(4 * args.d_hidden, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 3)
        )

    def forward(self, premise, hypothesis):
        return self.out(torch.cat([self.encoder(premise), self.encoder(hypothesis)], 1))


#-train_iter = DataLoader(examples(256, 1), args.batch_size, shuffle=True, collate_fn=collate)
dev_iter = DataLoader(examples(64, 2), args.batch_size, collate_fn=collate)
model = SNLIClassifier()
criterion = nn.CrossEntropyLoss()
opt = torch.optim.Adam(model.parameters(), lr=args.lr)
iterations = 0
best_dev_acc = -1
session = Session(model, opt, Variables(globals(), "iterations", "best_dev_acc"), microbatches=4)  #+
train_iter = session.data(DataLoader(examples(256, 1), args.batch_size, shuffle=True, collate_fn=collate))  #+
header = "  Time Epoch Iteration     Loss   Dev/Accuracy"
print(header)

#-for epoch in range(args.epochs):
for epoch in session.epochs(args.epochs):  #+
    for batch in train_iter:
        model.train()
        opt.zero_grad()
        iterations += 1
        premise, hypothesis, label = batch
#-        loss = criterion(model(premise, hypothesis), label)
#-        loss.backward()
        loss = session.backward(lambda p, h, y: criterion(model(p, h), y), premise, hypothesis, label)  #+
        opt.step()

        if iterations % args.dev_every == 0:
            model.eval()
            n_dev_correct = 0
            with torch.no_grad():
                for premise, hypothesis, label in dev_iter:
                    answer = model(premise, hypothesis)
                    n_dev_correct += (answer.argmax(1) == label).sum().item()
            dev_acc = 100.0 * n_dev_correct / len(dev_iter.dataset)
            print(f"{epoch:>5} {iterations:>9} {loss:>8.4f} {dev_acc:>12.2f}")
            if dev_acc > best_dev_acc:
                best_dev_acc = dev_acc
#-                torch.save(model.state_dict(), args.save_path)
                session.save(args.save_path)  #+
        elif iterations % args.log_every == 0:
            print(f"{epoch:>5} {iterations:>9} {loss:>8.4f}")
