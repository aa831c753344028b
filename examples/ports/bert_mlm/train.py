"""Pretrain BERT by masked words and next sentences, in the manner of codertimo/BERT-pytorch."""

import random

import numpy as np
import torch
import torch.nn as nn
from torch.optim import Adam
from torch.utils.data import DataLoader, Dataset
#+
from orchestrator import Session  #+

VOCAB, PAD, MASK, CLS, SEP, LEN = 40, 0, 1, 2, 3, 20


class BERTDataset(Dataset):
    def __init__(self, seq_len=LEN, corpus_lines=256):
        self.seq_len = seq_len
        g = torch.Generator().manual_seed(4)
        start = torch.randint(4, VOCAB, (corpus_lines, 1), generator=g)
        self.lines = ((start + torch.arange(16) * 3) % (VOCAB - 4) + 4).tolist()

    def __len__(self):
        return len(self.lines)

    def __getitem__(self, item):
        t1, (t2, is_next_label) = self.lines[item][:8], self.random_sent(item)
        t1_random, t1_label = self.random_word(t1)
        t2_random, t2_label = self.random_word(t2)
        t1, t2 = [CLS] + t1_random + [SEP], t2_random + [SEP]
        t1_label, t2_label = [PAD] + t1_label + [PAD], t2_label + [PAD]
        segment_label = ([1 for _ in range(len(t1))] + [2 for _ in range(len(t2))])[: self.seq_len]
        bert_input, bert_label = (t1 + t2)[: self.seq_len], (t1_label + t2_label)[: self.seq_len]
        padding = [PAD for _ in range(self.seq_len - len(bert_input))]
        bert_input.extend(padding), bert_label.extend(padding), segment_label.extend(padding)
        output = {"bert_input": bert_input, "bert_label": bert_label, "segment_label": segment_label, "is_next": is_next_label}
        return {key: torch.tensor(value) for key, value in output.items()}

    def random_word(self, sentence):
        tokens, output_label = list(sentence), []
        for i, token in enumerate(tokens):
            prob = random.random()
            if prob < 0.15:
                prob /= 0.15
                if prob < 0.8:
                    tokens[i] = MASK
                elif prob < 0.9:
                    tokens[i] = random.randrange(VOCAB)
                output_label.append(token)
            else:
                output_label.append(0)
        return tokens, output_label

    def random_sent(self, index):
        if random.random() > 0.5:
            return self.lines[index][8:], 1
        return self.lines[random.randrange(len(self.lines))][8:], 0


class BERT(nn.Module):
    def __init__(self, vocab_size, hidden=32, n_layers=2, attn_heads=2, dropout=0.1):
        super().__init__()
        self.hidden = hidden
        self.token, self.position, self.segment = nn.Embedding(vocab_size, hidden, padding_idx=0), nn.Embedding(LEN, hidden), nn.Embedding(3, hidden, padding_idx=0)
        self.transformer_blocks = nn.ModuleList([nn.TransformerEncoderLayer(hidden, attn_heads, hidden * 4, dropout, batch_first=True) for _ in range(n_layers)])

    def forward(self, x, segment_info):
        mask = x == 0
        x = self.token(x) + self.position.weight[: x.shape[1]] + self.segment(segment_info)
        for transformer in self.transformer_blocks:
            x = transformer(x, src_key_padding_mask=mask)
        return x


class BERTLM(nn.Module):
    def __init__(self, bert, vocab_size):
        super().__init__()
        self.bert = bert
        self.next_sentence = nn.Sequential(nn.Linear(bert.hidden, 2), nn.LogSoftmax(dim=-1))
        self.mask_lm = nn.Sequential(nn.Linear(bert.hidden, vocab_size), nn.LogSoftmax(dim=-1))

    def forward(self, x, segment_label):
        x = self.bert(x, segment_label)
        return self.next_sentence(x[:, 0]), self.mask_lm(x)


class ScheduledOptim:
    """A simple wrapper class for learning rate scheduling"""

    def __init__(self, optimizer, d_model, n_warmup_steps):
        self._optimizer = optimizer
        self.n_warmup_steps = n_warmup_steps
        self.n_current_steps = 0
        self.init_lr = np.power(d_model, -0.5)

    def step_and_update_lr(self):
        self._update_learning_rate()
        self._optimizer.step()

    def zero_grad(self):
        self._optimizer.zero_grad()

    def _get_lr_scale(self):
        return np.min([np.power(self.n_current_steps, -0.5), np.power(self.n_warmup_steps, -1.5) * self.n_current_steps])

    def _update_learning_rate(self):
        self.n_current_steps += 1
        lr = self.init_lr * self._get_lr_scale()
        for param_group in self._optimizer.param_groups:
            param_group["lr"] = lr


class BERTTrainer:
    def __init__(self, bert, vocab_size, train_dataloader, lr=1e-3, betas=(0.9, 0.999), weight_decay=0.01, warmup_steps=10, log_freq=10):
        self.device = torch.device("cpu")
        self.bert = bert
        self.model = BERTLM(bert, vocab_size).to(self.device)
        self.train_data = train_dataloader
        self.optim = Adam(self.model.parameters(), lr=lr, betas=betas, weight_decay=weight_decay)
        self.optim_schedule = ScheduledOptim(self.optim, self.bert.hidden, n_warmup_steps=warmup_steps)
        self.criterion = nn.NLLLoss(ignore_index=0)
        self.log_freq = log_freq

    def train(self, epoch):
        self.iteration(epoch, self.train_data)

    def iteration(self, epoch, data_loader):
        avg_loss, total_correct, total_element = 0.0, 0, 0
        for i, data in enumerate(data_loader):
            data = {key: value.to(self.device) for key, value in data.items()}
#-            next_sent_output, mask_lm_output = self.model.forward(data["bert_input"], data["segment_label"])
#-            next_loss = self.criterion(next_sent_output, data["is_next"])
#-            mask_loss = self.criterion(mask_lm_output.transpose(1, 2), data["bert_label"])
#-            loss = next_loss + mask_loss
            output = lambda d: self.model.forward(d["bert_input"], d["segment_label"])  #+
            loss_of = lambda d, y, w: nn.functional.nll_loss(y, d["is_next"]) + self.criterion(w.transpose(1, 2), d["bert_label"])  #+
            self.optim_schedule.zero_grad()
#-            loss.backward()
            loss = session.backward(lambda d: loss_of(d, *output(d)), data)  #+
            self.optim_schedule.step_and_update_lr()
#-            correct = next_sent_output.argmax(dim=-1).eq(data["is_next"]).sum().item()
            correct = output(data)[0].argmax(dim=-1).eq(data["is_next"]).sum().item()  #+
            avg_loss += loss.item()
            total_correct += correct
            total_element += data["is_next"].nelement()
            if i % self.log_freq == 0:
                print({"epoch": epoch, "iter": i, "avg_loss": avg_loss / (i + 1), "avg_acc": total_correct / total_element * 100, "loss": loss.item()})
        print("EP%d, avg_loss=" % epoch, avg_loss / len(data_loader), "total_acc=", total_correct * 100.0 / total_element)


torch.manual_seed(0)
random.seed(0)
train_data_loader = DataLoader(BERTDataset(), batch_size=16, shuffle=True, num_workers=0)
trainer = BERTTrainer(BERT(VOCAB), VOCAB, train_data_loader)
#-for epoch in range(3):
session = Session(trainer.model, trainer.optim, trainer.optim_schedule, microbatches=4)  #+
trainer.train_data = session.data(train_data_loader)  #+
for epoch in session.epochs(3):  #+
    trainer.train(epoch)
