"""Bootstrap your own latent, in the manner of lucidrains/byol-pytorch."""

import copy
import logging
from functools import wraps

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset
#+
from orchestrator import Session  #+

logging.basicConfig(level=logging.INFO, format="%(message)s")
log = logging.getLogger(__name__)


def singleton(cache_key):
    def inner_fn(fn):
        @wraps(fn)
        def wrapper(self, *args, **kwargs):
            instance = getattr(self, cache_key)
            if instance is not None:
                return instance
            instance = fn(self, *args, **kwargs)
            setattr(self, cache_key, instance)
            return instance

        return wrapper

    return inner_fn


def loss_fn(x, y):
    x = F.normalize(x, dim=-1, p=2)
    y = F.normalize(y, dim=-1, p=2)
    return 2 - 2 * (x * y).sum(dim=-1)


class EMA:
    def __init__(self, beta):
        self.beta = beta

    def update_average(self, old, new):
        if old is None:
            return new
        return old * self.beta + (1 - self.beta) * new


def update_moving_average(ema_updater, ma_model, current_model):
    for current_params, ma_params in zip(current_model.parameters(), ma_model.parameters()):
        old_weight, up_weight = ma_params.data, current_params.data
        ma_params.data = ema_updater.update_average(old_weight, up_weight)


def set_requires_grad(model, val):
    for p in model.parameters():
        p.requires_grad = val


def MLP(dim, projection_size, hidden_size=64):
    return nn.Sequential(nn.Linear(dim, hidden_size), nn.BatchNorm1d(hidden_size), nn.ReLU(inplace=True), nn.Linear(hidden_size, projection_size))


class NetWrapper(nn.Module):
    def __init__(self, net, projection_size, layer=-2):
        super().__init__()
        self.net = net
        self.layer = layer
        self.projector = None
        self.projection_size = projection_size
        self.hidden = {}
        self.hook_registered = False

    def _find_layer(self):
        children = [*self.net.children()]
        return children[self.layer]

    def _hook(self, _, input, output):
        device = input[0].device
        self.hidden[device] = output.reshape(output.shape[0], -1)

    def _register_hook(self):
        layer = self._find_layer()
        layer.register_forward_hook(self._hook)
        self.hook_registered = True

    @singleton("projector")
    def _get_projector(self, hidden):
        _, dim = hidden.shape
        projector = MLP(dim, self.projection_size)
        return projector.to(hidden)

    def get_representation(self, x):
        if not self.hook_registered:
            self._register_hook()
        self.hidden.clear()
        _ = self.net(x)
        hidden = self.hidden[x.device]
        self.hidden.clear()
        return hidden

    def forward(self, x, return_projection=True):
        representation = self.get_representation(x)
        if not return_projection:
            return representation
        projector = self._get_projector(representation)
        return projector(representation)


class RandomApply(nn.Module):
    def __init__(self, fn, p):
        super().__init__()
        self.fn, self.p = fn, p

    def forward(self, x):
        if torch.rand(1).item() > self.p:
            return x
        return self.fn(x)


class BYOL(nn.Module):
    def __init__(self, net, image_size, hidden_layer=-2, projection_size=32, moving_average_decay=0.9):
        super().__init__()
        self.net = net
        noise = lambda x: x + 0.1 * torch.randn_like(x)
        self.augment1 = RandomApply(noise, p=0.8)
        self.augment2 = RandomApply(lambda x: x.flip(-1), p=0.5)
        self.online_encoder = NetWrapper(net, projection_size, layer=hidden_layer)
        self.target_encoder = None
        self.target_ema_updater = EMA(moving_average_decay)
        self.online_predictor = MLP(projection_size, projection_size)
        self.forward(torch.randn(2, 3, image_size, image_size))

    @singleton("target_encoder")
    def _get_target_encoder(self):
        target_encoder = copy.deepcopy(self.online_encoder)
        set_requires_grad(target_encoder, False)
        return target_encoder

    def update_moving_average(self):
        assert self.target_encoder is not None
        update_moving_average(self.target_ema_updater, self.target_encoder, self.online_encoder)

    def forward(self, x):
        image_one, image_two = self.augment1(x), self.augment2(x)
        images = torch.cat((image_one, image_two), dim=0)
        online_projections = self.online_encoder(images)
        online_predictions = self.online_predictor(online_projections)
        online_pred_one, online_pred_two = online_predictions.chunk(2, dim=0)
        with torch.no_grad():
            target_encoder = self._get_target_encoder()
            target_projections = target_encoder(images).detach()
            target_proj_one, target_proj_two = target_projections.chunk(2, dim=0)
        loss = loss_fn(online_pred_one, target_proj_two.detach()) + loss_fn(online_pred_two, target_proj_one.detach())
        return loss.mean()


class Images(Dataset):
    def __init__(self, n):
        g = torch.Generator().manual_seed(1)
        self.x = torch.randn(n, 3, 8, 8, generator=g)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i]


def main():
    torch.manual_seed(3)
    resnet = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))
    # nn.Sequential's -2 is the flattened pooled feature
    learner = BYOL(resnet, image_size=8, hidden_layer=-2)
    opt = torch.optim.Adam(learner.parameters(), lr=3e-4)
    loader = DataLoader(Images(96), batch_size=16, shuffle=True, num_workers=1, drop_last=True)
    session = Session(learner, opt, microbatches=2)  #+
    data = session.data(loader)  #+
#-    for epoch in range(4):
    for epoch in session.epochs(4):  #+
        running = 0.0
#-        for images in loader:
#-            loss = learner(images)
        for images in data:  #+
            opt.zero_grad()
#-            loss.backward()
            loss = session.backward(learner, images)  #+
            opt.step()
            learner.update_moving_average()
            running += loss.item()
        log.info("epoch %d loss %.4f", epoch, running / len(loader))
        torch.save(resnet.state_dict(), "improved-net.pt")


if __name__ == "__main__":
    main()
