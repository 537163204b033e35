"""Cases of `plain_loop.py`: models, batches in memory, optimizers and the steps of a plain loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torchvision
from plain_loop_data import DIGITS_BATCH, image_folder, mask_dataset, text_dataset, vector_dataset
from torch import nn
from torch.nn import functional

from samestep.zoo.digits import DigitsNet
from samestep.zoo.models import UNet

PLAIN, DDP, PARALLEL, UNWATCHED = "plain loop", "DDP", "parallel", "parallel, not watched"
EXACT = "parallel, exact"  # with one microbatch for each rank
DDP_SYNC = "DDP, batch norm over ranks"  # by hand: torch has no SyncBatchNorm for CPUs
ACCELERATE, FABRIC = "Accelerate", "Fabric"

BATCHES = 4  # global batches in memory that a loop repeats
CLASSES, VOCABULARY, TOKENS = 10, 256, 64
SEGMENTS = 21  # classes of pixels
BACKWARDS = 8  # per step, of the case with accumulation

Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Goal:
    """Largest ratio of `samestep.parallel` on a number of processes to another contender.

    Attributes:
        processes: of `samestep.parallel`.
        base: the other contender, as (name, processes).
        limit: largest ratio.
        is_bound: the upper end of the ratio's interval counts instead of its median.
    """

    processes: int
    base: tuple[str, int]
    limit: float
    is_bound: bool = False


@dataclass(frozen=True)
class Case:
    """One loop.

    Attributes:
        build: returns the model.
        data: returns inputs and targets for a number of samples.
        optimizer: returns the optimizer of parameters.
        batch_size: samples of a global batch.
        kind: `train`, `evaluate`, `accumulate` for several backwards per step, or `epoch` for the recipe `digits`.
        has_batch_norm: results of DDP differ, since each rank has its own statistics.
        dataset: returns a data set that is read with a loader; None for batches in memory.
        workers: worker processes of the loader on each rank.
    """

    title: str
    build: Callable[[], nn.Module]
    data: Callable[[int], Batch]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    batch_size: int
    goals: tuple[Goal, ...]
    kind: Literal["train", "evaluate", "accumulate", "epoch"] = "train"
    has_batch_norm: bool = False
    dataset: Callable[[], Any] | None = None
    workers: int = 0


class Block(nn.Module):
    """Transformer layer with causal attention."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(width)
        self.norm_2 = nn.LayerNorm(width)
        self.attention = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        heads = self.attention(self.norm_1(x)).view(batch, tokens, 3, 4, width // 4)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(attended.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.down(functional.gelu(self.up(self.norm_2(x))))


class GPT(nn.Module):
    """Language model; 4.9 million parameters by default."""

    def __init__(self, width: int = 256, layers: int = 6) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Parameter(torch.zeros(TOKENS, width))
        self.blocks = nn.Sequential(*[Block(width) for _ in range(layers)])
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.blocks(self.embedding(tokens) + self.positions))
        return logits


def linear_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, CLASSES))


def vectors(size: int) -> Batch:
    return torch.randn(size, 64), torch.randint(CLASSES, (size,))


def images(size: int) -> Batch:
    return torch.randn(size, 3, 64, 64), torch.randint(CLASSES, (size,))


def masks(size: int) -> Batch:
    return torch.randn(size, 3, 64, 64), torch.randint(2, (size, 64, 64))


def small_masks(size: int) -> Batch:
    return torch.randn(size, 3, 32, 32), torch.randint(2, (size, 32, 32))


def digits(size: int) -> Batch:
    return torch.rand(size, 1, 8, 8), torch.randint(CLASSES, (size,))


def texts(size: int) -> Batch:
    return torch.randint(VOCABULARY, (size, TOKENS)), torch.randint(VOCABULARY, (size, TOKENS))


def dense_masks(samples: int) -> Batch:
    """Return images with a class of each pixel."""
    return torch.randn(samples, 3, 64, 64), torch.randint(0, SEGMENTS, (samples, 64, 64))


def segmentation() -> nn.Module:
    """Return a small model with large outputs."""
    layers = [nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.Conv2d(16, SEGMENTS, 1))


def loss_of(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy; outputs of language models have their classes in the last dimension."""
    if outputs.shape[:-1] == targets.shape:
        return functional.cross_entropy(outputs.flatten(0, -2), targets.flatten())
    return functional.cross_entropy(outputs, targets)


def matches_of(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return for each target whether it is the class with the largest output."""
    classes = outputs.dim() - 1 if outputs.shape[:-1] == targets.shape else 1
    return outputs.argmax(classes) == targets


def resnet() -> nn.Module:
    return torchvision.models.resnet18(num_classes=CLASSES)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-4)


def _goals(one: float, several: float, base: str = DDP) -> tuple[Goal, ...]:
    return Goal(1, (PLAIN, 1), one), Goal(2, (base, 1 if base == PLAIN else 2), several)


_LINEAR, _NORMED, _PLAIN, _EVALUATION = (
    _goals(1.05, 1.3),
    _goals(1.02, 1.15),
    _goals(1.02, 1.03),
    _goals(1.02, 0.6, PLAIN),
)
_SEGMENTED = _goals(1.02, 1.05)
_ACCUMULATION = (Goal(2, (DDP, 2), 1.05),)
_EXACT = tuple(Goal(processes, (DDP, processes), 1.03) for processes in (2, 4))
_CHECKS = (Goal(1, (PLAIN, 1), 1.03, is_bound=True), Goal(2, (UNWATCHED, 2), 1.03, is_bound=True))
_LOADER = (Goal(1, (PLAIN, 1), 1.25),)
_DIGITS = (Goal(1, (PLAIN, 1), 1.02), Goal(2, (DDP_SYNC, 2), 1.02))
_EPOCH = (Goal(1, (PLAIN, 1), 1.1), Goal(2, (DDP_SYNC, 2), 1.02))
_IMAGES = (Goal(2, (DDP_SYNC, 2), 1.02),)


def _unet() -> nn.Module:
    return UNet(num_classes=2)


def _digits_net() -> nn.Module:
    return DigitsNet(dropout=0.0)  # which ranks of DDP would draw differently


CASES = {
    "linear-32": Case("two linear layers, batch 32", linear_layers, vectors, sgd, 32, _LINEAR),
    "linear-64": Case("two linear layers, batch 64", linear_layers, vectors, sgd, 64, _LINEAR),
    "loader-32": Case(
        "two linear layers with loader, batch 32", linear_layers, vectors, sgd, 32, _LOADER, dataset=vector_dataset
    ),
    "loader-64": Case(
        "two linear layers with loader, batch 64", linear_layers, vectors, sgd, 64, _LOADER, dataset=vector_dataset
    ),
    "digits": Case(
        "digits without dropout, batch 64", _digits_net, digits, sgd, DIGITS_BATCH, _DIGITS, has_batch_norm=True
    ),
    "digits-epoch": Case(
        "recipe digits: an epoch with evaluation", DigitsNet, digits, sgd, DIGITS_BATCH, _EPOCH, "epoch", True
    ),
    "jpeg-resnet": Case(
        "JPEG folder, ResNet-18, 64 px, batch 32, 2 loader workers per process",
        resnet,
        images,
        sgd,
        32,
        _IMAGES,
        has_batch_norm=True,
        dataset=image_folder,
        workers=2,
    ),
    "resnet-16": Case("ResNet-18, 64 px, batch 16", resnet, images, sgd, 16, _NORMED, has_batch_norm=True),
    "resnet-64": Case("ResNet-18, 64 px, batch 64", resnet, images, sgd, 64, _NORMED, has_batch_norm=True),
    "unet-16": Case("U-Net, 64 px, batch 16", _unet, masks, sgd, 16, _NORMED, has_batch_norm=True),
    "segmentation": Case("segmentation, 21 classes, 64 px, batch 16", segmentation, dense_masks, sgd, 16, _SEGMENTED),
    "gpt-8": Case("GPT, 5 million parameters, batch 8", GPT, texts, adamw, 8, _PLAIN),
    "gpt-32": Case("GPT, 5 million parameters, batch 32", GPT, texts, adamw, 32, _PLAIN),
    "eval-resnet-16": Case("evaluation: ResNet-18, batch 16", resnet, images, sgd, 16, _EVALUATION, "evaluate"),
    "eval-resnet-64": Case("evaluation: ResNet-18, batch 64", resnet, images, sgd, 64, _EVALUATION, "evaluate"),
    "eval-unet-16": Case("evaluation: U-Net, batch 16", _unet, masks, sgd, 16, _EVALUATION, "evaluate"),
    "eval-gpt-8": Case("evaluation: GPT, batch 8", GPT, texts, adamw, 8, _EVALUATION, "evaluate"),
    "eval-gpt-32": Case("evaluation: GPT, batch 32", GPT, texts, adamw, 32, _EVALUATION, "evaluate"),
    "no-sync": Case(f"GPT, batch 8, {BACKWARDS} backwards per step", GPT, texts, adamw, 8, _ACCUMULATION, "accumulate"),
    "exact-gpt-8": Case("exact: GPT, batch 8", GPT, texts, adamw, 8, _EXACT),
    "exact-resnet-16": Case("exact: ResNet-18, 64 px, batch 16", resnet, images, sgd, 16, _EXACT, has_batch_norm=True),
    "checks-gpt": Case(
        "checks: GPT with 2 layers and loader, a step of about 20 ms",
        lambda: GPT(width=128, layers=2),
        texts,
        adamw,
        4,
        _CHECKS,
        dataset=text_dataset,
    ),
    "checks-unet": Case(
        "checks: U-Net, 32 px, with loader, a step of about 20 ms",
        _unet,
        small_masks,
        sgd,
        4,
        _CHECKS,
        has_batch_norm=True,
        dataset=mask_dataset,
    ),
}
