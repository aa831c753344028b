"""Finetune a text classifier by gradual unfreezing with discriminative rates, in the manner of ULMFiT."""
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence
from torch.utils.data import DataLoader
#+
from orchestrator import Session  #+

torch.manual_seed(0)
VOCAB, PAD = 40, 0


class Classifier(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, width, padding_idx=PAD)
        self.rnn1 = nn.LSTM(width, width, batch_first=True)
        self.rnn2 = nn.LSTM(width, width, batch_first=True)
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(width, 2)

    def forward(self, tokens, lengths):
        x = self.embedding(tokens)
        x, _ = self.rnn1(x)
        packed = pack_padded_sequence(self.drop(x), lengths, batch_first=True, enforce_sorted=False)
        _, (hidden, _) = self.rnn2(packed)
        return self.head(self.drop(hidden[-1]))

    def groups(self):
        return [self.head, self.rnn2, self.rnn1, self.embedding]


def make(count):
    texts = [torch.randint(1, VOCAB, (4 + i % 7,)) for i in range(count)]
    return [(text, int((text > VOCAB // 2).float().mean() > 0.5)) for text in texts]


def collate(batch):
    texts, labels = zip(*batch)
    lengths = [len(text) for text in texts]
    return pad_sequence(texts, batch_first=True), lengths, torch.tensor(labels)


model = Classifier()
train_loader = DataLoader(make(64), batch_size=16, shuffle=True, collate_fn=collate)
valid = collate(make(32))

for p in model.parameters():
    p.requires_grad = False
groups = model.groups()
for p in groups[0].parameters():
    p.requires_grad = True
#-optimizer = torch.optim.AdamW(groups[0].parameters(), lr=1e-2)
optimizer = torch.optim.AdamW([{"params": g.parameters(), "lr": 1e-2 / 2.6**i} for i, g in enumerate(groups)])  #+

#-for epoch in range(4):
session = Session(model, optimizer, microbatches=4)  #+
train_loader = session.data(train_loader)  #+
#+
for epoch in session.epochs(4):  #+
    if 0 < epoch < len(groups):
        for p in groups[epoch].parameters():
            p.requires_grad = True
#-        optimizer.add_param_group({"params": groups[epoch].parameters(), "lr": 1e-2 / 2.6**epoch})
    model.train()
    for tokens, lengths, labels in train_loader:
        optimizer.zero_grad()
#-        loss = F.cross_entropy(model(tokens, lengths), labels)
#-        loss.backward()
#-        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        loss = session.backward(lambda x, n, y: F.cross_entropy(model(x, n), y), tokens, lengths, labels)  #+
        session.clip_grad_norm_(1.0)  #+
        optimizer.step()
    model.eval()
    with torch.no_grad():
        accuracy = (model(*valid[:2]).argmax(1) == valid[2]).float().mean().item()
    print(f"epoch {epoch}: loss {loss.item():.4f}, accuracy {accuracy:.3f}, groups {len(optimizer.param_groups)}")
