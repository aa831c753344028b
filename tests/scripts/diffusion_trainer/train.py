"""A diffusion model and the trainer class that comes with it, milestones and all."""

import argparse
from copy import deepcopy
#-from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
#-from torch.utils.data import DataLoader

#-
#-def cycle(dl):
#-    while True:
#-        yield from dl
from orchestrator import Session  #+


class GaussianDiffusion(nn.Module):
    def __init__(self, model, timesteps=40):
        super().__init__()
        self.model, self.num_timesteps = model, timesteps
        betas = torch.linspace(1e-3, 0.2, timesteps)
        self.register_buffer("alphas_cumprod", torch.cumprod(1.0 - betas, dim=0))

    def forward(self, img):
        t = torch.randint(0, self.num_timesteps, (img.shape[0],))
        noise = torch.randn_like(img)
        a = self.alphas_cumprod[t][:, None]
        x = a.sqrt() * img + (1 - a).sqrt() * noise
        return F.mse_loss(self.model(torch.cat([x, t[:, None] / self.num_timesteps], 1)), noise)

    @torch.no_grad()
    def sample(self, batch_size=4):
        img = torch.randn(batch_size, 8)
        for t in reversed(range(self.num_timesteps)):
            times = torch.full((batch_size, 1), t / self.num_timesteps)
            a = self.alphas_cumprod[t]
            noise = self.model(torch.cat([img, times], 1))
            img = img - (1 - a).sqrt() * noise / self.num_timesteps
        return img


class EMA(nn.Module):
    """A moving average of a model, kept beside it."""

    def __init__(self, model, beta=0.9, update_every=2):
        super().__init__()
        self.beta, self.update_every = beta, update_every
        self.ema_model = deepcopy(model).requires_grad_(False)
        self.online_model = [model]
        self.register_buffer("step", torch.tensor(0))

    @torch.no_grad()
    def update(self):
        self.step += 1
        if self.step % self.update_every == 0:
            online = self.online_model[0].parameters()
            for ema, now in zip(self.ema_model.parameters(), online, strict=True):
                ema.lerp_(now, 1.0 - self.beta)


class Trainer:
    def __init__(self, diffusion_model, dataset, *, train_batch_size, train_lr, train_num_steps,
                 gradient_accumulate_every=4, save_and_sample_every=10, results_folder="./results"):
        self.model = diffusion_model
        self.batch_size = train_batch_size
        self.gradient_accumulate_every = gradient_accumulate_every
        self.save_and_sample_every = save_and_sample_every
        self.train_num_steps = train_num_steps
#-        self.dl = cycle(DataLoader(dataset, batch_size=train_batch_size))
        self.opt = torch.optim.Adam(diffusion_model.parameters(), lr=train_lr, betas=(0.9, 0.99))
        self.ema = EMA(diffusion_model)
#-        self.results_folder = Path(results_folder)
        self.session = Session(diffusion_model, self.ema, self.opt)  #+
        self.dl = self.session.data(dataset, batch_size=4 * train_batch_size, microbatches=4, shuffle=False)  #+
        self.results_folder = self.session.output / results_folder  #+
        self.results_folder.mkdir(exist_ok=True)
        self.step = 0

    def save(self, milestone):
        data = {"step": self.step, "model": self.model.state_dict(), "ema": self.ema.state_dict()}
        torch.save(data, str(self.results_folder / f"model-{milestone}.pt"))

    def train(self):
#-        while self.step < self.train_num_steps:
        for self.step in self.session.steps(self.train_num_steps):  #+
            self.model.train()
#-            total_loss = 0.0
#-            for _ in range(self.gradient_accumulate_every):
#-                data = next(self.dl)
#-                loss = self.model(data) / self.gradient_accumulate_every
#-                total_loss += loss.item()
#-                loss.backward()
#-            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            total_loss = self.session.backward(self.model, self.dl.at(self.step)).loss  #+
            self.session.clip_grad_norm_(1.0)  #+
            self.opt.step()
            self.opt.zero_grad()
            self.step += 1
            self.ema.update()
            if self.step % self.save_and_sample_every == 0:
                self.ema.ema_model.eval()
                sampled = self.ema.ema_model.sample()
                print(f"step {self.step} loss: {total_loss:.4f} sampled {sampled.std():.3f}")
                self.save(self.step // self.save_and_sample_every)
        print("training complete")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--results", default="./results")
    args = parser.parse_args()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(9, 32), nn.GELU(), nn.Linear(32, 8))
    diffusion = GaussianDiffusion(net)
    waves = torch.sin(torch.arange(256.0)[:, None] / 7 + torch.arange(8.0) / 2)
    trainer = Trainer(diffusion, waves, train_batch_size=8, train_lr=3e-3,
                      train_num_steps=args.steps, results_folder=args.results)
    trainer.train()


if __name__ == "__main__":
    main()
