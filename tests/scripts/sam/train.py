"""Sharpness-aware minimization, in the manner of davda54/sam's example/train.py."""

import torch
import torch.nn as nn
import torch.nn.functional as F
#+
from orchestrator import Session  #+


class SAM(torch.optim.Optimizer):
    def __init__(self, params, base_optimizer, rho=0.05, adaptive=False, **kwargs):
        defaults = dict(rho=rho, adaptive=adaptive, **kwargs)
        super(SAM, self).__init__(params, defaults)
        self.base_optimizer = base_optimizer(self.param_groups, **kwargs)
        self.param_groups = self.base_optimizer.param_groups
        self.defaults.update(self.base_optimizer.defaults)

    @torch.no_grad()
    def first_step(self, zero_grad=False):
        grad_norm = self._grad_norm()
        for group in self.param_groups:
            scale = group["rho"] / (grad_norm + 1e-12)
            for p in group["params"]:
                if p.grad is None:
                    continue
                self.state[p]["old_p"] = p.data.clone()
                e_w = (torch.pow(p, 2) if group["adaptive"] else 1.0) * p.grad * scale.to(p)
                p.add_(e_w)  # climb to the local maximum "w + e(w)"
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self, zero_grad=False):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                p.data = self.state[p]["old_p"]  # get back to "w" from "w + e(w)"
        self.base_optimizer.step()  # do the actual "sharpness-aware" update
        if zero_grad:
            self.zero_grad()

    def _grad_norm(self):
        norm = torch.norm(
            torch.stack([((torch.abs(p) if group["adaptive"] else 1.0) * p.grad).norm(p=2) for group in self.param_groups for p in group["params"] if p.grad is not None]),
            p=2,
        )
        return norm

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        self.base_optimizer.param_groups = self.param_groups


class StepLR:
    def __init__(self, optimizer, learning_rate, total_epochs):
        self.optimizer = optimizer
        self.total_epochs = total_epochs
        self.base = learning_rate

    def __call__(self, epoch):
        if epoch < self.total_epochs * 3 / 10:
            lr = self.base
        elif epoch < self.total_epochs * 6 / 10:
            lr = self.base * 0.2
        else:
            lr = self.base * 0.2**2
        for param_group in self.optimizer.param_groups:
            param_group["lr"] = lr

    def lr(self):
        return self.optimizer.param_groups[0]["lr"]


def smooth_crossentropy(pred, gold, smoothing=0.1):
    n_class = pred.size(1)
    one_hot = torch.full_like(pred, fill_value=smoothing / (n_class - 1))
    one_hot.scatter_(dim=1, index=gold.unsqueeze(1), value=1.0 - smoothing)
    return F.kl_div(input=F.log_softmax(pred, dim=1), target=one_hot, reduction="none").sum(-1)


torch.manual_seed(42)
x = torch.randn(256, 16)
y = (x[:, :4].abs()).argmax(1)
train_set = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x[:192], y[:192]), batch_size=16, shuffle=True)
test_set = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x[192:], y[192:]), batch_size=16)
model = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 4))
base_optimizer = torch.optim.SGD
optimizer = SAM(model.parameters(), base_optimizer, rho=2.0, adaptive=True, lr=0.1, momentum=0.9, weight_decay=0.0005)
epochs = 3
scheduler = StepLR(optimizer, 0.1, epochs)
session = Session(model, optimizer, optimizer.base_optimizer, microbatches=4)  #+
train_set = session.data(train_set)  #+

#-for epoch in range(epochs):
for epoch in session.epochs(epochs):  #+
    model.train()
    for batch in train_set:
        inputs, targets = batch

        # first forward-backward step
#-        predictions = model(inputs)
#-        loss = smooth_crossentropy(predictions, targets)
#-        loss.mean().backward()
        loss_of = lambda inputs, targets: smooth_crossentropy(model(inputs), targets).mean()  #+
        session.backward(loss_of, inputs, targets)  #+
        optimizer.first_step(zero_grad=True)

        # second forward-backward step
#-        smooth_crossentropy(model(inputs), targets).mean().backward()
        session.backward(loss_of, inputs, targets)  #+
        optimizer.second_step(zero_grad=True)

        with torch.no_grad():
#-            correct = torch.argmax(predictions.data, 1) == targets
            scheduler(epoch)

    model.eval()
    with torch.no_grad():
        hits = sum(int((model(inputs).argmax(1) == targets).sum()) for inputs, targets in test_set)
    print(f"epoch {epoch} lr {scheduler.lr():.3f} correct {hits}/64")
