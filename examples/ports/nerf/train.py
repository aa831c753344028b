"""A radiance field of a small scene, in the manner of yenchenlin/nerf-pytorch's run_nerf.py."""

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
#+
from orchestrator import Session, Variables  #+

img2mse = lambda x, y: torch.mean((x - y) ** 2)
mse2psnr = lambda x: -10.0 * torch.log(x) / torch.log(torch.Tensor([10.0]))


def embed(x, multires=4):
    return torch.cat([x, *(fn(x * 2.0**i) for i in range(multires) for fn in (torch.sin, torch.cos))], -1)


class NeRF(nn.Module):
    def __init__(self, D=3, W=32, input_ch=27, skips=(1,)):
        super(NeRF, self).__init__()
        self.skips = skips
        self.pts_linears = nn.ModuleList([nn.Linear(input_ch, W)] + [nn.Linear(W + (input_ch if i in skips else 0), W) for i in range(D - 1)])
        self.alpha_linear, self.rgb_linear = nn.Linear(W, 1), nn.Linear(W, 3)

    def forward(self, pts):
        h = pts
        for i, l in enumerate(self.pts_linears):
            h = F.relu(l(h))
            if i in self.skips:
                h = torch.cat([pts, h], -1)
        return torch.cat([self.rgb_linear(h), self.alpha_linear(h)], -1)


def raw2outputs(raw, z_vals, raw_noise_std=0.0):
    dists = torch.cat([z_vals[..., 1:] - z_vals[..., :-1], torch.Tensor([1e10]).expand(z_vals[..., :1].shape)], -1)
    rgb = torch.sigmoid(raw[..., :3])
    noise = torch.randn(raw[..., 3].shape) * raw_noise_std if raw_noise_std > 0.0 else 0.0
    alpha = 1.0 - torch.exp(-F.relu(raw[..., 3] + noise) * dists)
    weights = alpha * torch.cumprod(torch.cat([torch.ones((alpha.shape[0], 1)), 1.0 - alpha + 1e-10], -1), -1)[:, :-1]
    return torch.sum(weights[..., None] * rgb, -2)


def render_rays(rays_o, rays_d, model, N_samples=12, perturb=1.0, raw_noise_std=0.0):
    z_vals = torch.linspace(0.5, 2.5, N_samples).expand(len(rays_o), N_samples)
    if perturb > 0.0:
        # stratified samples in those intervals
        mids = 0.5 * (z_vals[..., 1:] + z_vals[..., :-1])
        upper, lower = torch.cat([mids, z_vals[..., -1:]], -1), torch.cat([z_vals[..., :1], mids], -1)
        z_vals = lower + (upper - lower) * torch.rand(z_vals.shape)
    pts = rays_o[..., None, :] + rays_d[..., None, :] * z_vals[..., :, None]
    return raw2outputs(model(embed(pts)), z_vals, raw_noise_std)


torch.manual_seed(0)
np.random.seed(0)
N_rand, N_iters, lrate, lrate_decay = 64, 50, 5e-3, 1
directions = np.stack(np.meshgrid(np.linspace(-0.5, 0.5, 16), np.linspace(-0.5, 0.5, 16), [1.0]), -1).reshape(-1, 3)
rays_rgb = np.stack([np.zeros_like(directions), directions, (np.abs(directions) < 0.25).astype(float)], 1).astype(np.float32)
np.random.shuffle(rays_rgb)
rays_rgb = torch.Tensor(rays_rgb)
i_batch = 0

model = NeRF()
optimizer = torch.optim.Adam(params=list(model.parameters()), lr=lrate, betas=(0.9, 0.999))
start = 0
global_step = start
#-for i in range(start, N_iters):
session = Session(model, optimizer, Variables(globals(), "rays_rgb", "i_batch", "global_step"), microbatches=4)  #+
for i in session.steps(N_iters):  #+
    # Random over all images
    batch = rays_rgb[i_batch : i_batch + N_rand]  # [B, 2+1, 3*?]
    batch = torch.transpose(batch, 0, 1)
    batch_rays, target_s = batch[:2], batch[2]
    i_batch += N_rand
    if i_batch >= rays_rgb.shape[0]:
        print("Shuffle data after an epoch!")
        rand_idx = torch.randperm(rays_rgb.shape[0])
        rays_rgb = rays_rgb[rand_idx]
        i_batch = 0

    #####  Core optimization loop  #####
#-    rgb = render_rays(batch_rays[0], batch_rays[1], model)
    optimizer.zero_grad()
#-    loss = img2mse(rgb, target_s)
    loss = session.backward(lambda o, d, rgb: img2mse(render_rays(o, d, model), rgb), *batch_rays, target_s)  #+
    psnr = mse2psnr(loss.detach())
#-    loss.backward()
    optimizer.step()

    ###   update learning rate   ###
    decay_rate = 0.1
    decay_steps = lrate_decay * 1000
    new_lrate = lrate * (decay_rate ** (global_step / decay_steps))
    for param_group in optimizer.param_groups:
        param_group["lr"] = new_lrate
    if i % 10 == 0:
        print(f"[TRAIN] Iter: {i} Loss: {loss.item()}  PSNR: {psnr.item()}")
    global_step += 1
