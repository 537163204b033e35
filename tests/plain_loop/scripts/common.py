"""Data and output of the plain scripts: the same for all of them.

Scripts compute in float64, so that their numbers differ only by about 1e-14 for sums in another order.
"""

import hashlib
import os
import random

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

torch.set_default_dtype(torch.float64)
torch.manual_seed(1)
random.seed(1)
np.random.seed(1)

# Set by the runner to measure rounding: the rows of each batch are in another order, and models compute halves.
PERMUTE = False

# For scripts whose ranks do not do the same.
is_first_of_several = os.environ.get("RANK") == "0" and int(os.environ["WORLD_SIZE"]) > 1

ROWS = 11
STEPS = 10

_generator = torch.Generator().manual_seed(7)
inputs = torch.randn(STEPS * ROWS, 12, generator=_generator)
labels = torch.randint(0, 4, (STEPS * ROWS,), generator=_generator)


def batches(count=STEPS, rows=ROWS):
    """Return `count` pairs of inputs [rows, 12] and labels [rows] of 4 classes."""
    pairs = []
    for number in range(count):
        own = torch.arange(number * rows, (number + 1) * rows) % len(inputs)
        if PERMUTE:
            own = own[torch.randperm(rows, generator=torch.Generator().manual_seed(number))]
        pairs.append((inputs[own], labels[own]))
    return pairs


def images(count=110, channels=1, size=10, classes=5, seed=0):
    """Return a data set of images [channels, size, size] that have one pattern per class, with labels."""
    patterns = torch.randn(classes, channels, size, size, generator=torch.Generator().manual_seed(99))
    generator = torch.Generator().manual_seed(seed)
    targets = torch.randint(0, classes, (count,), generator=generator)
    noise = torch.randn(count, channels, size, size, generator=generator)
    return torch.utils.data.TensorDataset(patterns[targets] + noise, targets)


def perceptron(inputs=12, outputs=4, hidden=16):
    """Return two linear layers."""
    return nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, outputs))


def convolutions(inputs, outputs):
    """Return a convolution with batch norm."""
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU())


def classifier(outputs=5):
    """Return a small network for images [1, 10, 10] with batch norm and dropout."""
    return nn.Sequential(
        nn.Conv2d(1, 6, 3),
        nn.BatchNorm2d(6),
        nn.Tanh(),
        nn.Flatten(),
        nn.Dropout(0.1),
        nn.Linear(384, outputs),
    )


def sgd(*models, lr=0.2):
    """Return an optimizer of the parameters of some models."""
    parameters = [parameter for model in models for parameter in model.parameters()]
    return torch.optim.SGD(parameters, lr=lr, momentum=0.5)


def update(optimizer, loss):
    """Compute the gradients of a loss and make a step; return the loss as a number."""
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def train(model, loss_function, optimizer=None, count=STEPS, rows=ROWS):
    """Train a model by the plainest of loops; return the losses.

    Args:
        model: the trained model.
        loss_function: called with inputs and labels.
        optimizer: SGD if None.
        count: number of steps.
        rows: rows of a batch.
    """
    optimizer = optimizer or sgd(model)
    return [update(optimizer, loss_function(x, y)) for x, y in batches(count, rows)]


def halved(model):
    """Let a model compute the halves of each batch one after the other, to measure rounding; return the model."""
    own = type(model)

    class Halved(own):
        def forward(self, *arguments, **options):
            leaves, spec = tree_flatten((arguments, options))
            rows = next(len(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim() > 0)
            parts = []
            for start, stop in ((0, rows // 2), (rows // 2, rows)):
                cut = [_slice(leaf, rows, start, stop) for leaf in leaves]
                own_arguments, own_options = tree_unflatten(cut, spec)
                parts.append(tree_flatten(own.forward(self, *own_arguments, **own_options)))
            joined = [_join(pair, rows) for pair in zip(parts[0][0], parts[1][0], strict=True)]
            return tree_unflatten(joined, parts[0][1])

    model.__class__ = Halved
    return model


def _slice(leaf, rows, start, stop):
    if isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and len(leaf) == rows:
        return leaf[start:stop]
    return leaf


def _join(pair, rows):
    first, second = pair
    if not isinstance(first, torch.Tensor):
        return first
    if first.dim() == 0:
        return (first * (rows // 2) + second * (rows - rows // 2)) / rows
    return torch.cat(pair)


def report(losses, *models):
    """Print the losses in a line, and for each model a line of numbers and a digest of its state."""
    print("R", *(f"{float(loss):.17g}" for loss in losses), flush=True)
    for model in models:
        tensors = [tensor.detach() for tensor in model.state_dict().values() if isinstance(tensor, torch.Tensor)]
        numbers = []
        for tensor in tensors:
            values = tensor.double().flatten()
            numbers.append(values.square().sum().sqrt())
            numbers.append((values * torch.arange(len(values)).double().cos()).sum())
        print("R", *(f"{float(number):.17g}" for number in numbers), flush=True)
        digest = hashlib.sha256()
        for tensor in tensors:
            digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        print("D", digest.hexdigest(), flush=True)
