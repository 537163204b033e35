"""Sharpness-aware minimization: an optimizer with two forward and backward passes in each step."""

import argparse
import random

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset


class SAM(torch.optim.Optimizer):
    def __init__(self, params, base_optimizer, rho=0.05, adaptive=False, **kwargs):
        assert rho >= 0.0, f"Invalid rho, should be non-negative: {rho}"
        defaults = {"rho": rho, "adaptive": adaptive, **kwargs}
        super().__init__(params, defaults)
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
        self.base_optimizer.step()
        if zero_grad:
            self.zero_grad()

    def step(self, closure=None):
        raise NotImplementedError("SAM does not work like the other optimizers, use first_step and second_step")

    def _grad_norm(self):
        shared_device = self.param_groups[0]["params"][0].device
        return torch.norm(
            torch.stack(
                [
                    ((torch.abs(p) if group["adaptive"] else 1.0) * p.grad).norm(p=2).to(shared_device)
                    for group in self.param_groups
                    for p in group["params"]
                    if p.grad is not None
                ]
            ),
            p=2,
        )


def disable_running_stats(model):
    def _disable(module):
        if isinstance(module, nn.BatchNorm2d):
            module.backup_momentum = module.momentum
            module.momentum = 0

    model.apply(_disable)


def enable_running_stats(model):
    def _enable(module):
        if isinstance(module, nn.BatchNorm2d) and hasattr(module, "backup_momentum"):
            module.momentum = module.backup_momentum

    model.apply(_enable)


def smooth_crossentropy(pred, gold, smoothing=0.1):
    """Loss of each row."""
    n_class = pred.size(1)
    one_hot = torch.full_like(pred, fill_value=smoothing / (n_class - 1))
    one_hot.scatter_(dim=1, index=gold.unsqueeze(1), value=1.0 - smoothing)
    return F.kl_div(input=F.log_softmax(pred, dim=1), target=one_hot, reduction="none").sum(-1)


def make_model():
    return nn.Sequential(
        nn.Conv2d(1, 12, 3, padding=1, bias=False),
        nn.BatchNorm2d(12),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(12, 24, 3, padding=1, bias=False),
        nn.BatchNorm2d(24),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(24, 10),
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--adaptive", action="store_true")
    parser.add_argument("--batch_size", default=40, type=int)
    parser.add_argument("--epochs", default=2, type=int)
    parser.add_argument("--learning_rate", default=0.1, type=float)
    parser.add_argument("--rho", default=0.05, type=float)
    args = parser.parse_args()
    random.seed(42)
    np.random.seed(42)
    torch.manual_seed(42)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    digits = load_digits()
    images = torch.Tensor(digits.images / 16).unsqueeze(1)
    targets = torch.LongTensor(digits.target)
    train_loader = DataLoader(TensorDataset(images[:450], targets[:450]), batch_size=args.batch_size, shuffle=True)
    test_loader = DataLoader(TensorDataset(images[450:800], targets[450:800]), batch_size=100)
    model = make_model().to(device)
    optimizer = SAM(
        model.parameters(), torch.optim.SGD, rho=args.rho, adaptive=args.adaptive, lr=args.learning_rate, momentum=0.9
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer.base_optimizer, step_size=1, gamma=0.5)

    for epoch in range(args.epochs):
        model.train()
        for step, batch in enumerate(train_loader):
            inputs, labels = (b.to(device) for b in batch)
            enable_running_stats(model)
            predictions = model(inputs)
            loss = smooth_crossentropy(predictions, labels)
            loss.mean().backward()
            optimizer.first_step(zero_grad=True)

            disable_running_stats(model)
            second = smooth_crossentropy(model(inputs), labels)
            second.mean().backward()
            optimizer.second_step(zero_grad=True)
            with torch.no_grad():
                correct = torch.argmax(predictions.data, 1) == labels
                if step % 4 == 0:
                    print(
                        f"epoch {epoch} step {step}: loss {loss.mean().item():.4f}, loss at the maximum "
                        f"{second.mean().item():.4f}, correct {correct.sum().item()}/{len(labels)}"
                    )
        scheduler.step()
        model.eval()
        correct, losses = [], []
        with torch.no_grad():
            for inputs, labels in test_loader:
                predictions = model(inputs.to(device))
                losses.append(smooth_crossentropy(predictions, labels.to(device)))
                correct.append(predictions.argmax(1).cpu() == labels)
        accuracy = torch.cat(correct).sum().item() / 350
        print(f"epoch {epoch}: test loss {torch.cat(losses).mean().item():.4f}, accuracy {accuracy:.4f}")
