"""Automatic mixed precision, in the manner of PyTorch's amp_recipe tutorial."""

import time

import torch
#+
from orchestrator import Session  #+

start_time = None


def start_timer():
    global start_time
    start_time = time.time()


def end_timer_and_print(local_msg):
    end_time = time.time()
    print("\n" + local_msg)
    print("Total execution time = {:.3f} sec".format(end_time - start_time))


def make_model(in_size, out_size, num_layers):
    layers = []
    for _ in range(num_layers - 1):
        layers.append(torch.nn.Linear(in_size, in_size))
        layers.append(torch.nn.ReLU())
    layers.append(torch.nn.Linear(in_size, out_size))
    return torch.nn.Sequential(*tuple(layers))


torch.manual_seed(0)
device = "cpu"
batch_size = 16
in_size = 64
out_size = 8
num_layers = 3
num_batches = 12
epochs = 3

data = [torch.randn(batch_size, in_size) for _ in range(num_batches)]
targets = [torch.randn(batch_size, out_size) for _ in range(num_batches)]
loss_fn = torch.nn.MSELoss()

use_amp = True
net = make_model(in_size, out_size, num_layers)
opt = torch.optim.SGD(net.parameters(), lr=0.01)
scaler = torch.amp.GradScaler(device, enabled=use_amp, growth_interval=8)

session = Session(net, opt, scaler, microbatches=4)  #+
autocast = torch.autocast(device_type=device, dtype=torch.bfloat16, enabled=use_amp)  #+
start_timer()
#-for epoch in range(epochs):
#-    for input, target in zip(data, targets):
#-        with torch.autocast(device_type=device, dtype=torch.bfloat16, enabled=use_amp):
#-            output = net(input)
#-            loss = loss_fn(output.float(), target)
#-        scaler.scale(loss).backward()
for epoch in session.epochs(epochs, data):  #+
    for input, target in session.each(list(zip(data, targets))):  #+
        session.backward(autocast(lambda x, y: loss_fn(net(x).float(), y)), input, target)  #+

        # Gradients are unscaled, then clipped as usual.
        scaler.unscale_(opt)
#-        torch.nn.utils.clip_grad_norm_(net.parameters(), max_norm=0.1)
        session.clip_grad_norm_(0.1)  #+

        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
end_timer_and_print("Mixed precision:")

checkpoint = {"model": net.state_dict(), "optimizer": opt.state_dict(), "scaler": scaler.state_dict()}
torch.save(checkpoint, "filename.pt")
