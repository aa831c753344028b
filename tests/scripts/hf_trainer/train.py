"""A Trainer with arguments, a data collator, gradient accumulation and a linear schedule."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from orchestrator import Session  #+
#+

@dataclass
class TrainingArguments:
    output_dir: str = "out"
#-    per_device_train_batch_size: int = 4
#-    gradient_accumulation_steps: int = 4
    per_device_train_batch_size: int = 16  #+
    gradient_accumulation_steps: int = 1  #+
    num_train_epochs: int = 3
    learning_rate: float = 5e-3
    max_grad_norm: float = 1.0
    logging_steps: int = 4
    warmup_steps: int = 3


@dataclass
class TrainerState:
    global_step: int = 0
    total_loss: float = 0.0


class Sentences(Dataset):
    def __len__(self):
        return 128

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        length = int(torch.randint(4, 9, (), generator=g))
        ids = torch.randint(1, 20, (length,), generator=g).tolist()
        return {"input_ids": ids, "label": sum(ids) % 2}


def data_collator(features):
    longest = max(len(f["input_ids"]) for f in features)
    ids = [f["input_ids"] + [0] * (longest - len(f["input_ids"])) for f in features]
    input_ids = torch.tensor(ids)
    return {
        "input_ids": input_ids,
        "attention_mask": (input_ids > 0).float(),
        "labels": torch.tensor([f["label"] for f in features]),
    }


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embeddings = nn.Embedding(20, 16)
        self.dense, self.classifier = nn.Linear(16, 16), nn.Linear(16, 2)

    def forward(self, input_ids, attention_mask, labels=None):
        hidden = torch.tanh(self.dense(self.embeddings(input_ids)))
        pooled = (hidden * attention_mask[..., None]).sum(1) / attention_mask.sum(1, keepdim=True)
        logits = self.classifier(pooled)
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return {"loss": loss, "logits": logits}


class Trainer:
    def __init__(self, model, args, train_dataset):
        self.model, self.args, self.state = model, args, TrainerState()
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
        self.train_dataloader = DataLoader(
            train_dataset, args.per_device_train_batch_size, shuffle=True, collate_fn=data_collator
        )
        steps = len(self.train_dataloader) // args.gradient_accumulation_steps
        total = steps * args.num_train_epochs
        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer,
            lambda s: min((s + 1) / args.warmup_steps, (total - s) / (total - args.warmup_steps)),
        )
        self.session = Session(model, self.optimizer, self.lr_scheduler, self.state, microbatches=4)  #+
        self.train_dataloader = self.session.data(self.train_dataloader)  #+

    def compute_loss(self, inputs):
        return self.model(**inputs)["loss"]

    def train(self):
        self.model.train()
#-        for epoch in range(self.args.num_train_epochs):
        for epoch in self.session.epochs(self.args.num_train_epochs):  #+
            for step, inputs in enumerate(self.train_dataloader):
#-                loss = self.compute_loss(inputs) / self.args.gradient_accumulation_steps
#-                loss.backward()
                loss = self.session.backward(self.compute_loss, inputs)  #+
                self.state.total_loss += loss.item()
                if (step + 1) % self.args.gradient_accumulation_steps == 0:
#-                    torch.nn.utils.clip_grad_norm_(
#-                        self.model.parameters(), self.args.max_grad_norm
#-                    )
                    self.session.clip_grad_norm_(self.args.max_grad_norm)  #+
                    self.optimizer.step()
                    self.lr_scheduler.step()
                    self.optimizer.zero_grad()
                    self.state.global_step += 1
                    if self.state.global_step % self.args.logging_steps == 0:
                        self.log({"epoch": epoch, "step": self.state.global_step})

    def log(self, logs):
        print({**logs, "loss": self.state.total_loss / self.state.global_step})


torch.manual_seed(42)
trainer = Trainer(Classifier(), TrainingArguments(), Sentences())
trainer.train()
