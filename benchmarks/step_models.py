"""The models and the data of `step_time.py`."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from samestep.zoo.models import GPT

CLASSES = 10
SAMPLES = 2048
_VOCABULARY, _TOKENS = 512, 64


class Block(nn.Module):
    """Two convolutions with batch norm and a shortcut, as in ResNet-18."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = _conv(inputs, outputs, stride)
        self.second = _conv(outputs, outputs, 1)
        same = inputs == outputs and stride == 1
        self.shortcut = nn.Identity() if same else _conv(inputs, outputs, stride, kernel=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(self.second(functional.relu(self.first(x))) + self.shortcut(x))


def resnet() -> nn.Module:
    """A ResNet for 32x32 images with 5.4 M parameters in 14 convolutions, each with batch norm, and a linear layer."""
    widths = (48, 48, 96, 192, 384)
    blocks: list[nn.Module] = [_conv(3, widths[0], 2), nn.ReLU()]
    for inputs, outputs in pairwise(widths):
        stride = 1 if inputs == outputs else 2
        blocks += [Block(inputs, outputs, stride)]
        blocks += [Block(outputs, outputs, 1)] if outputs == widths[-1] else []
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], CLASSES))


def small() -> nn.Module:
    """Return a net with steps of some milliseconds, so that costs beyond arithmetic are visible."""
    return nn.Sequential(
        _conv(3, 16, 2),
        nn.ReLU(),
        _conv(16, 32, 2),
        nn.ReLU(),
        _conv(32, 64, 2),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, CLASSES),
    )


class TextClassifier(nn.Module):
    """A GPT with 3.3 M parameters and 64 tokens whose logits are averaged over tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = GPT(_VOCABULARY, 256, 4, 4, _TOKENS, 0.0)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.gpt(tokens)
        return logits.mean(dim=1)


MODELS: dict[str, Callable[[], nn.Module]] = {"resnet": resnet, "small": small, "gpt": TextClassifier}


def build_model(name: str) -> nn.Module:
    """The model with the same initial weights at every call."""
    torch.manual_seed(0)
    return MODELS[name]()


def build_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def build_dataset(model: str = "resnet") -> TensorDataset:
    """Samples with a class: 32x32 images, or tokens for `gpt`."""
    generator = torch.Generator().manual_seed(0)
    if model == "gpt":
        inputs = torch.randint(_VOCABULARY, (SAMPLES, _TOKENS), generator=generator)
    else:
        inputs = torch.randn(SAMPLES, 3, 32, 32, generator=generator)
    return TensorDataset(inputs, torch.randint(CLASSES, (SAMPLES,), generator=generator))


def _conv(inputs: int, outputs: int, stride: int, kernel: int = 3) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=kernel // 2, bias=False), nn.BatchNorm2d(outputs)
    )
