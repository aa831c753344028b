"""Neural style transfer: the picture itself is what is optimized; the network stays as it is."""

import argparse

import torch
from torch import nn, optim
from torch.nn import functional as F
#+
from orchestrator import Session  #+

parser = argparse.ArgumentParser()
parser.add_argument("--num_steps", type=int, default=24)
parser.add_argument("--style_weight", type=float, default=1e3)
parser.add_argument("--content_weight", type=float, default=1.0)
args = parser.parse_args()
torch.manual_seed(0)

cnn = nn.Sequential(
    nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()
)
cnn.eval().requires_grad_(False)
ramp = torch.linspace(0, 1, 16)
content_img = torch.stack([ramp.expand(16, 16), ramp[:, None].expand(16, 16), ramp.outer(ramp)])[None]
style_img = (torch.arange(16)[:, None] // 2 % 2).expand(1, 3, 16, 16).float()


def gram_matrix(features):
    a, b, c, d = features.size()
    flat = features.view(a * b, c * d)
    return flat @ flat.t() / (a * b * c * d)


class Picture(nn.Module):
    def __init__(self, start):
        super().__init__()
        self.pixels = nn.Parameter(start.clone())


def style_loss():
    return args.style_weight * F.mse_loss(gram_matrix(cnn(input_img)), target_style)


def content_loss():
    return args.content_weight * F.mse_loss(cnn(input_img), target_content)


with torch.no_grad():
    target_content = cnn(content_img)
    target_style = gram_matrix(cnn(style_img))
picture = Picture(content_img)
input_img = picture.pixels
optimizer = optim.Adam([input_img], lr=0.02)
session = Session(picture, optimizer)  #+

#-for run in range(args.num_steps):
for run in session.steps(args.num_steps):  #+
    optimizer.zero_grad()  #+
    loss = session.backward(lambda part: 2 * part(), [style_loss, content_loss]).loss  #+
    optimizer.step()  #+
    with torch.no_grad():
        input_img.clamp_(0, 1)
#-    optimizer.zero_grad()
#-    loss = style_loss() + content_loss()
#-    loss.backward()
#-    optimizer.step()
    if run % 8 == 0:
        print(f"run {run}: loss {loss:4f}")

with torch.no_grad():
    input_img.clamp_(0, 1)
