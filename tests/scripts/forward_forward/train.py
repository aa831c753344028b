"""The forward-forward algorithm: each layer learns by itself, by an optimizer of its own."""

import torch
from torch import nn
from torch.optim import Adam
#+
from orchestrator import Session  #+

torch.manual_seed(1234)


def overlay_y_on_x(x, y):
    """The first 4 numbers are replaced by the label, one-hot."""
    x_ = x.clone()
    x_[:, :4] *= 0.0
    x_[range(x.shape[0]), y] = x.max()
    return x_


class Layer(nn.Linear):
    def __init__(self, in_features, out_features):
        super().__init__(in_features, out_features)
        self.opt = Adam(self.parameters(), lr=0.03)
        self.threshold = 2.0
        self.num_epochs = 10

    def forward(self, x):
        x_direction = x / (x.norm(2, 1, keepdim=True) + 1e-4)
        return torch.relu(x_direction @ self.weight.T + self.bias.unsqueeze(0))

    def loss(self, x_pos, x_neg):
        g_pos = self.forward(x_pos).pow(2).mean(1)
        g_neg = self.forward(x_neg).pow(2).mean(1)
        # Pushes positive samples above the threshold, and negative ones below it.
        margins = torch.cat([-g_pos + self.threshold, g_neg - self.threshold])
        return torch.log(1 + torch.exp(margins)).mean()

    def train_layer(self, x_pos, x_neg):
#-        for _ in range(self.num_epochs):
#-            loss = self.loss(x_pos, x_neg)
        for _ in session.each(range(self.num_epochs)):  #+
            self.opt.zero_grad()
#-            loss.backward()
            session.backward(lambda rows: self.loss(x_pos[rows], x_neg[rows]), parts)  #+
            self.opt.step()
        return self.forward(x_pos).detach(), self.forward(x_neg).detach()


class Net(nn.Module):
    def __init__(self, dims):
        super().__init__()
        self.layers = nn.ModuleList([Layer(a, b) for a, b in zip(dims, dims[1:])])

    def predict(self, x):
        goodness_per_label = []
        for label in range(4):
            h = overlay_y_on_x(x, torch.full((len(x),), label))
            goodness = []
            for layer in self.layers:
                h = layer(h)
                goodness += [h.pow(2).mean(1)]
            goodness_per_label += [sum(goodness).unsqueeze(1)]
        return torch.cat(goodness_per_label, 1).argmax(1)

    def train_layers(self, x_pos, x_neg):
        h_pos, h_neg = x_pos, x_neg
#-        for i, layer in enumerate(self.layers):
#-            h_pos, h_neg = layer.train_layer(h_pos, h_neg)
        for i in session.epochs(len(self.layers), range(self.layers[0].num_epochs)):  #+
            h_pos, h_neg = (nn.Sequential(*self.layers[:i])(x).detach() for x in (x_pos, x_neg))  #+
            self.layers[i].train_layer(h_pos, h_neg)  #+


y = torch.randint(4, (64,))
x = torch.randn(4, 20)[y] + 0.3 * torch.randn(64, 20)
net = Net([20, 32, 32])
x_pos = overlay_y_on_x(x, y)
x_neg = overlay_y_on_x(x, y[torch.randperm(64)])
session, parts = Session(net, *[layer.opt for layer in net.layers]), torch.arange(64).split(16)  #+
net.train_layers(x_pos, x_neg)
print("train error:", 1.0 - net.predict(x).eq(y).float().mean().item())
