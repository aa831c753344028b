"""Semi-supervised learning by pseudo-labels, in the manner of kekmodel/FixMatch-pytorch's train.py."""

import math
from copy import deepcopy

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset, RandomSampler, TensorDataset
#+
from orchestrator import Session  #+


class TransformFixMatch(Dataset):
    def __init__(self, x):
        self.x = x

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        weak = self.x[i] + 0.05 * torch.randn(16)
        strong = self.x[i] * (torch.rand(16) > 0.2) + 0.2 * torch.randn(16)
        return (weak, strong), 0


class ModelEMA(object):
    def __init__(self, args, model, decay):
        self.ema = deepcopy(model)
        self.ema.eval()
        self.decay = decay
        self.param_keys = [k for k, _ in self.ema.named_parameters()]
        self.buffer_keys = [k for k, _ in self.ema.named_buffers()]
        for p in self.ema.parameters():
            p.requires_grad_(False)

    def update(self, model):
        with torch.no_grad():
            msd = model.state_dict()
            esd = self.ema.state_dict()
            for k in self.param_keys:
                model_v = msd[k].detach()
                ema_v = esd[k]
                esd[k].copy_(ema_v * self.decay + (1.0 - self.decay) * model_v)
            for k in self.buffer_keys:
                esd[k].copy_(msd[k])


def get_cosine_schedule_with_warmup(optimizer, num_warmup_steps, num_training_steps, num_cycles=7.0 / 16.0, last_epoch=-1):
    def _lr_lambda(current_step):
        if current_step < num_warmup_steps:
            return float(current_step) / float(max(1, num_warmup_steps))
        no_progress = float(current_step - num_warmup_steps) / float(max(1, num_training_steps - num_warmup_steps))
        return max(0.0, math.cos(math.pi * num_cycles * no_progress))

    return LambdaLR(optimizer, _lr_lambda, last_epoch)


class args:
    eval_step, epochs, mu, threshold, T, lambda_u, batch_size = 12, 3, 3, 0.8, 1.0, 1.0, 8


torch.manual_seed(5)
centres = 2 * torch.randn(4, 16)
y = torch.arange(256) % 4
x = centres[y] + torch.randn(256, 16)
labeled_dataset, unlabeled_dataset, test_dataset = TensorDataset(x[:32], y[:32]), TransformFixMatch(x[:192]), TensorDataset(x[192:], y[192:])
labeled_trainloader = DataLoader(labeled_dataset, sampler=RandomSampler(labeled_dataset), batch_size=args.batch_size, drop_last=True)
unlabeled_trainloader = DataLoader(unlabeled_dataset, sampler=RandomSampler(unlabeled_dataset), batch_size=args.batch_size * args.mu, drop_last=True)

model = nn.Sequential(nn.Linear(16, 32), nn.LeakyReLU(0.1), nn.Linear(32, 4))
optimizer = optim.SGD(model.parameters(), lr=0.03, momentum=0.9, nesterov=True)
scheduler = get_cosine_schedule_with_warmup(optimizer, 0, args.epochs * args.eval_step)
ema_model = ModelEMA(args, model, 0.99)
session = Session(model, optimizer, scheduler, ema_model.ema, microbatches=4)  #+
labeled, unlabeled = session.data(labeled_trainloader), session.data(unlabeled_trainloader)  #+

#-labeled_iter = iter(labeled_trainloader)
#-unlabeled_iter = iter(unlabeled_trainloader)
model.train()
#-for epoch in range(args.epochs):
for epoch in session.epochs(args.epochs, range(args.eval_step)):  #+
    losses = 0.0
#-    for batch_idx in range(args.eval_step):
#-        try:
#-            inputs_x, targets_x = next(labeled_iter)
#-        except StopIteration:
#-            labeled_iter = iter(labeled_trainloader)
#-            inputs_x, targets_x = next(labeled_iter)
#-        try:
#-            (inputs_u_w, inputs_u_s), _ = next(unlabeled_iter)
#-        except StopIteration:
#-            unlabeled_iter = iter(unlabeled_trainloader)
#-            (inputs_u_w, inputs_u_s), _ = next(unlabeled_iter)
    for batch_idx in session.each(range(args.eval_step)):  #+
        inputs_x, targets_x = labeled.at(session.step)  #+
        (inputs_u_w, inputs_u_s), _ = unlabeled.at(session.step)  #+

#-        batch_size = inputs_x.shape[0]
#-        logits = model(torch.cat((inputs_x, inputs_u_w, inputs_u_s)))
#-        logits_x = logits[:batch_size]
#-        logits_u_w, logits_u_s = logits[batch_size:].chunk(2)
#-        Lx = F.cross_entropy(logits_x, targets_x, reduction="mean")
#-        pseudo_label = torch.softmax(logits_u_w.detach() / args.T, dim=-1)
#-        max_probs, targets_u = torch.max(pseudo_label, dim=-1)
#-        mask = max_probs.ge(args.threshold).float()
#-        Lu = (F.cross_entropy(logits_u_s, targets_u, reduction="none") * mask).mean()
#-        loss = Lx + args.lambda_u * Lu
#-        loss.backward()
        def loss_of(inputs_x, targets_x, *inputs_u):  #+
            batch_size = inputs_x.shape[0]  #+
            logits = model(torch.cat((inputs_x, *(each.flatten(0, 1) for each in inputs_u))))  #+
            logits_x = logits[:batch_size]  #+
            logits_u_w, logits_u_s = logits[batch_size:].chunk(2)  #+
            Lx = F.cross_entropy(logits_x, targets_x, reduction="mean")  #+
            pseudo_label = torch.softmax(logits_u_w.detach() / args.T, dim=-1)  #+
            max_probs, targets_u = torch.max(pseudo_label, dim=-1)  #+
            mask = max_probs.ge(args.threshold).float()  #+
            Lu = (F.cross_entropy(logits_u_s, targets_u, reduction="none") * mask).mean()  #+
            return Lx + args.lambda_u * Lu  #+
#+
        loss = session.backward(loss_of, inputs_x, targets_x, inputs_u_w.view(-1, args.mu, 16), inputs_u_s.view(-1, args.mu, 16))  #+
        losses += loss.item()
        optimizer.step()
        scheduler.step()
        ema_model.update(model)
        model.zero_grad()
    with torch.no_grad():
        acc = (ema_model.ema(test_dataset.tensors[0]).argmax(1) == test_dataset.tensors[1]).float().mean()
    print(f"Epoch: {epoch + 1} loss {losses / args.eval_step:.4f} top-1 acc: {acc:.2f}")
