"""Bootstrap your own latent: an online network predicts a slowly moving target; there are no negatives."""

import copy
import random

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader
from torchvision import transforms as T
from torchvision.datasets import FakeData

CONFIG = {"image_size": 20, "projection": 16, "hidden": 48, "momentum": 0.9, "lr": 1e-3, "batch_size": 26, "epochs": 3}


def fix_random_seeds(seed=31):
    torch.manual_seed(seed)
    torch.cuda.manual_seed_all(seed)
    np.random.seed(seed)
    random.seed(seed)


class RandomApply(nn.Module):
    def __init__(self, fn, p):
        super().__init__()
        self.fn = fn
        self.p = p

    def forward(self, x):
        if random.random() > self.p:
            return x
        return self.fn(x)


def mlp(dim, hidden_size, projection_size):
    return nn.Sequential(
        nn.Linear(dim, hidden_size, bias=False),
        nn.BatchNorm1d(hidden_size),
        nn.ReLU(inplace=True),
        nn.Linear(hidden_size, projection_size),
    )


class Backbone(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 12, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(12),
            nn.ReLU(),
            nn.Conv2d(12, 24, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(24),
            nn.ReLU(),
        )

    def forward(self, x):
        return self.layers(x).mean(dim=(2, 3))


def loss_fn(x, y):
    x = F.normalize(x, dim=-1, p=2)
    y = F.normalize(y, dim=-1, p=2)
    return 2 - 2 * (x * y).sum(dim=-1)


class BYOL(nn.Module):
    def __init__(self, net, config):
        super().__init__()
        size = config["image_size"]
        self.augment = nn.Sequential(
            RandomApply(T.ColorJitter(0.4, 0.4, 0.4), p=0.5),
            T.RandomHorizontalFlip(),
            T.RandomResizedCrop((size, size)),
        )
        self.online_encoder = nn.Sequential(net, mlp(24, config["hidden"], config["projection"]))
        self.online_predictor = mlp(config["projection"], config["hidden"], config["projection"])
        self.target_encoder = None
        self.momentum = config["momentum"]

    @torch.no_grad()
    def get_target_encoder(self):
        if self.target_encoder is None:
            self.target_encoder = copy.deepcopy(self.online_encoder)
            for p in self.target_encoder.parameters():
                p.requires_grad = False
        return self.target_encoder

    @torch.no_grad()
    def update_moving_average(self):
        for current, average in zip(self.online_encoder.parameters(), self.target_encoder.parameters()):
            average.data = average.data * self.momentum + (1 - self.momentum) * current.data

    def forward(self, x, return_embedding=False):
        if return_embedding:
            return self.online_encoder[0](x)
        image_one, image_two = self.augment(x), self.augment(x)
        images = torch.cat((image_one, image_two), dim=0)
        online_predictions = self.online_predictor(self.online_encoder(images))
        online_pred_one, online_pred_two = online_predictions.chunk(2, dim=0)
        with torch.no_grad():
            target_projections = self.get_target_encoder()(images).detach()
            target_proj_one, target_proj_two = target_projections.chunk(2, dim=0)
        loss = loss_fn(online_pred_one, target_proj_two) + loss_fn(online_pred_two, target_proj_one)
        return loss.mean()


fix_random_seeds()
dataset = FakeData(140, (3, 24, 24), 4, T.ToTensor())
loader = DataLoader(dataset, batch_size=CONFIG["batch_size"], shuffle=True)
learner = BYOL(Backbone(), CONFIG)
opt = torch.optim.Adam(learner.parameters(), lr=CONFIG["lr"])

for epoch in range(CONFIG["epochs"]):
    for step, (images, _) in enumerate(loader):
        loss = learner(images)
        opt.zero_grad()
        loss.backward()
        opt.step()
        learner.update_moving_average()
        if step % 2 == 0:
            print(f"epoch {epoch} step {step}: loss {loss.item():.4f}")
    learner.eval()
    with torch.no_grad():
        embedding = torch.cat([learner(images, return_embedding=True) for images, _ in loader])
        normalized = F.normalize(embedding, dim=1)
        collapse = (normalized @ normalized.T).mean()
    learner.train()
    print(f"epoch {epoch}: deviation of features {embedding.std(dim=0).mean():.4f}, mean cosine {collapse:.4f}")

torch.save(learner.online_encoder[0].state_dict(), "./byol-net.pt")
