"""Steps under the fast reduction, of models in float64, on the ranks of a test."""

from collections.abc import Callable
from itertools import chain
from typing import Any, ClassVar, Literal

import torch
from torch import nn
from torch.utils.data import TensorDataset

import samestep
from samestep.config import StepConfig
from samestep.distributed.world import all_gather
from samestep.engine.engine import Engine
from samestep.zoo.segmentation.unet import unet_small
from samestep.zoo.text.models import GPT

SAMPLES, BATCH, MICROBATCHES, BATCHES = 53, 21, 8, 3  # microbatches of 2 and 3 samples; the last batch has 11


def gpt() -> tuple[nn.Module, TensorDataset]:
    model = GPT(num_classes=13, n_embd=8, n_head=2, n_layer=2, block_size=6, dropout=0.2)
    return model, TensorDataset(torch.randint(13, (SAMPLES, 6)), torch.randint(13, (SAMPLES, 6)))


def unet() -> tuple[nn.Module, TensorDataset]:
    images = torch.randn(SAMPLES, 3, 16, 16, dtype=torch.float64)
    model = nn.Sequential(unet_small(num_classes=2, width=4, levels=2), nn.Dropout2d(0.2))
    return model, TensorDataset(images, torch.randint(2, (SAMPLES, 16, 16)))


def net() -> tuple[nn.Module, TensorDataset]:
    layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.3), nn.Flatten(), nn.Linear(128, 5)]
    images = torch.randn(SAMPLES, 3, 6, 6, dtype=torch.float64)
    return nn.Sequential(*layers), TensorDataset(images, torch.randint(5, (SAMPLES,)))


class LateRead(nn.Module):
    """Module that reads a value of the samples after a test sets `reads[0]`."""

    reads: ClassVar = [False]  # not a number, of which a change repeats the check of the first step

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs if not self.reads[0] or inputs.sum().item() else inputs + 1


def _begin_reading(model: nn.Module) -> None:
    LateRead.reads[0] = True


def _add_hook(model: nn.Module) -> None:
    next(model.parameters()).register_hook(torch.clone)


LATE_CHANGES: dict[str, Callable[[nn.Module], None]] = {"reads values": _begin_reading, "has a hook": _add_hook}


def train_with_late_change(merge: Literal["auto", "off"], name: str) -> list[tuple[list[float], bool]]:
    """Return the weights after steps in which the model of the last rank changes, and whether ranks still merge."""
    torch.manual_seed(0)
    model, dataset = net()
    model = nn.Sequential(LateRead(), model).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    LateRead.reads[0] = False
    with samestep.start(device="cpu") as world:
        engine = Engine(
            model, optimizer, samestep.cross_entropy, world=world, config=StepConfig(reduction="fast", merge=merge)
        )
        batches = samestep.loader(dataset, batch_size=BATCH, microbatches=MICROBATCHES, world=world)
        for number, batch in enumerate(chain(batches, batches, batches)):
            if number == BATCHES and world.rank == world.size - 1:
                LATE_CHANGES[name](model)
            engine.step(batch)
        weights = torch.cat([tensor.double().reshape(-1) for tensor in model.state_dict().values()])
        return all_gather((weights.tolist(), engine.separate_reason is None), world)


MODELS: dict[str, Callable[[], tuple[nn.Module, TensorDataset]]] = {"gpt": gpt, "unet": unet, "net": net}


def train(merge: Literal["auto", "off"], epochs: int = 2) -> dict[str, Any]:
    """Return the state, the losses and the reason for separate microbatches of each model."""
    results: dict[str, Any] = {}
    for name, build in MODELS.items():
        torch.manual_seed(0)
        model, dataset = build()
        model.double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        with samestep.start(device="cpu") as world:
            config = StepConfig(reduction="fast", merge=merge, clip_norm=1.0)
            engine = Engine(model, optimizer, samestep.cross_entropy, world=world, config=config)
            options = {"batch_size": BATCH, "microbatches": MICROBATCHES, "shuffle": True, "world": world}
            loader = samestep.loader(dataset, **options)
            losses = [engine.step(batch).loss for batch in chain.from_iterable([loader] * epochs)]
        state = torch.cat([tensor.double().reshape(-1) for tensor in model.state_dict().values()])
        results[name] = state.tolist(), losses, engine.separate_reason
    return results
