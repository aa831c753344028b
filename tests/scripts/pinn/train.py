"""Burgers' equation by a physics-informed network: Adam, then LBFGS, in the manner of jayroxis/PINNs."""

from collections import OrderedDict

import numpy as np
import torch
#+
from orchestrator import Session  #+

torch.manual_seed(1234)
np.random.seed(1234)
device = torch.device("cpu")


class DNN(torch.nn.Module):
    def __init__(self, layers):
        super(DNN, self).__init__()
        self.depth = len(layers) - 1
        self.activation = torch.nn.Tanh
        layer_list = list()
        for i in range(self.depth - 1):
            layer_list.append(("layer_%d" % i, torch.nn.Linear(layers[i], layers[i + 1])))
            layer_list.append(("activation_%d" % i, self.activation()))
        layer_list.append(("layer_%d" % (self.depth - 1), torch.nn.Linear(layers[-2], layers[-1])))
        self.layers = torch.nn.Sequential(OrderedDict(layer_list))

    def forward(self, x):
        return self.layers(x)


class PhysicsInformedNN:
    def __init__(self, X_u, u, X_f, layers, nu):
        self.x_u = torch.tensor(X_u[:, 0:1], requires_grad=True).float().to(device)
        self.t_u = torch.tensor(X_u[:, 1:2], requires_grad=True).float().to(device)
        self.x_f = torch.tensor(X_f[:, 0:1], requires_grad=True).float().to(device)
        self.t_f = torch.tensor(X_f[:, 1:2], requires_grad=True).float().to(device)
        self.u = torch.tensor(u).float().to(device)
        self.nu = nu
        self.dnn = DNN(layers).to(device)
        self.optimizer_Adam = torch.optim.Adam(self.dnn.parameters())
        self.optimizer = torch.optim.LBFGS(
            self.dnn.parameters(),
            lr=1.0,
            max_iter=12,
            max_eval=15,
            history_size=50,
            tolerance_grad=1e-5,
            tolerance_change=1.0 * np.finfo(float).eps,
            line_search_fn="strong_wolfe",
        )
        self.iter = 0

    def net_u(self, x, t):
        return self.dnn(torch.cat([x, t], dim=1))

    def net_f(self, x, t):
        """The pytorch autograd version of calculating residual"""
        u = self.net_u(x, t)
        u_t = torch.autograd.grad(u, t, grad_outputs=torch.ones_like(u), retain_graph=True, create_graph=True)[0]
        u_x = torch.autograd.grad(u, x, grad_outputs=torch.ones_like(u), retain_graph=True, create_graph=True)[0]
        u_xx = torch.autograd.grad(u_x, x, grad_outputs=torch.ones_like(u_x), retain_graph=True, create_graph=True)[0]
        return u_t + u * u_x - self.nu * u_xx

    def loss_of(self, x_f, t_f):  #+
        return torch.mean((self.u - self.net_u(self.x_u, self.t_u)) ** 2) + torch.mean(self.net_f(x_f, t_f) ** 2)  #+
#+
    def loss_func(self):
        self.optimizer.zero_grad()
#-        u_pred = self.net_u(self.x_u, self.t_u)
#-        f_pred = self.net_f(self.x_f, self.t_f)
#-        loss_u = torch.mean((self.u - u_pred) ** 2)
#-        loss_f = torch.mean(f_pred**2)
#-        loss = loss_u + loss_f
#-        loss.backward()
        loss = self.session.backward(self.loss_of, self.x_f, self.t_f)  #+
        self.iter += 1
        if self.iter % 20 == 0:
#-            print("Iter %d, Loss: %.5e, Loss_u: %.5e, Loss_f: %.5e" % (self.iter, loss.item(), loss_u.item(), loss_f.item()))
            print("Iter %d, Loss: %.5e" % (self.iter, loss.item()))  #+
        return loss

    def train(self, nIter):
        self.dnn.train()
#-        for epoch in range(nIter):
#-            self.optimizer_Adam.step(self.loss_func)
#-        # Backward and optimize
#-        self.optimizer.step(self.loss_func)
        self.session = Session(self.dnn, self.optimizer_Adam, self.optimizer, microbatches=4)  #+
        for epoch in self.session.steps(nIter + 1):  #+
            (self.optimizer if epoch == nIter else self.optimizer_Adam).step(self.loss_func)  #+

    def predict(self, X):
        x = torch.tensor(X[:, 0:1], requires_grad=True).float().to(device)
        t = torch.tensor(X[:, 1:2], requires_grad=True).float().to(device)
        self.dnn.eval()
        u = self.net_u(x, t)
        f = self.net_f(x, t)
        return u.detach().cpu().numpy(), f.detach().cpu().numpy()


nu = 0.01 / np.pi
X_u_train = np.random.uniform([-1.0, 0.0], [1.0, 0.0], (32, 2))
u_train = -np.sin(np.pi * X_u_train[:, 0:1])
X_f_train = np.random.uniform([-1.0, 0.0], [1.0, 1.0], (64, 2))
model = PhysicsInformedNN(X_u_train, u_train, X_f_train, [2, 20, 20, 1], nu)
model.train(30)
u_pred, f_pred = model.predict(X_u_train)
print("Error u: %e" % (np.linalg.norm(u_train - u_pred, 2) / np.linalg.norm(u_train, 2)))
