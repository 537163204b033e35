"""Three small training tasks, on which each script of this folder places one obstacle."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.set_default_dtype(torch.float64)  # printed digits are those of any order of sums


class Lstm(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(16, 64, batch_first=True)
        self.norm = nn.BatchNorm1d(64)
        self.head = nn.Linear(64, 3)

    def forward(self, x):
        hidden, _ = self.lstm(x)
        return self.head(self.norm(hidden[:, -1]))


def build(name):
    """Return a model and a data set of 240 samples in 3 classes; `name` is mlp, cnn or lstm."""
    torch.manual_seed(1)
    if name == "mlp":
        model = nn.Sequential(
            nn.Linear(64, 384), nn.BatchNorm1d(384), nn.ReLU(), nn.Linear(384, 384), nn.ReLU(), nn.Linear(384, 3)
        )
        shape = (64,)
    elif name == "cnn":
        convolutions = nn.Conv2d(3, 24, 3, padding=1), nn.BatchNorm2d(24), nn.ReLU(), nn.Conv2d(24, 24, 3), nn.ReLU()
        model = nn.Sequential(*convolutions, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, 3))
        shape = (3, 12, 12)
    else:
        model = Lstm()
        shape = (12, 16)
    labels = torch.randint(0, 3, (240,))
    patterns = 0.3 * torch.randn(3, *shape)
    return model, TensorDataset(patterns[labels] + torch.randn(240, *shape), labels)


def batches_of(dataset, shuffle=True):
    """Return a loader of 3 batches."""
    return DataLoader(dataset, batch_size=80, shuffle=shuffle)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def train_epoch(model, optimizer, loader):
    """Return the mean loss of an epoch."""
    model.train()
    total = 0.0
    for x, y in loader:  # named
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item()
    return total / len(loader)


@torch.no_grad()
def evaluate(model, dataset):
    """Return loss and accuracy."""
    model.eval()
    x, y = dataset.tensors
    logits = model(x)
    return F.cross_entropy(logits, y).item(), (logits.argmax(dim=1) == y).double().mean().item()
