"""Rank functions for `unit/engine/test_build.py`, `test_ema.py` and `parity/test_small_batches.py`."""

import hashlib
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import samestep
from helpers.models import seeded
from samestep.checkpoint.contents import Progress
from samestep.checkpoint.state import Training, pack
from samestep.config import StepConfig
from samestep.engine.engine import Engine

# Three ranks own 2 or 3 microbatches each: several subtrees. The last batch of 2 samples leaves some ranks without any.
SAMPLES, BATCH, MICROBATCHES = 50, 16, 8


class Conv(nn.Module):
    """Convolutional model of two blocks with batch norm and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(width, 6, 3, padding=1), nn.BatchNorm2d(6), nn.GELU(), nn.Dropout(0.2))
            for width in (3, 6)
        )
        self.head = nn.Linear(6, 4)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            images = block(images)
        outputs: torch.Tensor = self.head(images.mean(dim=(2, 3)))
        return outputs


def data(samples: int = SAMPLES) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(samples, 3, 8, 8, generator=generator)
    return TensorDataset(images, torch.randint(0, 4, (samples,), generator=generator))


def engine_of(world: samestep.World, ema: float | None = None, **options: Any) -> Engine:
    model = seeded(0, Conv, dtype=torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return Engine(model, optimizer, samestep.cross_entropy, world=world, config=StepConfig(**options), ema=ema)


def train(options: dict[str, Any], ema: float | None = None) -> tuple[str, float, list[str]]:
    """Return the SHA-256 of the state after two epochs, the evaluation loss, and the names in the model's state."""
    with samestep.start() as world:
        engine = engine_of(world, ema, **options)
        batches = samestep.loader(data(), batch_size=BATCH, microbatches=MICROBATCHES, shuffle=True, world=world)
        for _ in range(2):
            for batch in batches:
                engine.step(batch)
        values = engine.evaluate(samestep.loader(data(), batch_size=BATCH, microbatches=MICROBATCHES, world=world))
        average = engine.averaged.tensors if engine.averaged is not None else None
        files = pack(Training(engine.model, engine.optimizer, None, engine.scaler, average), Progress(step=0))
        tensors = b"".join(files[name] for name in sorted(files) if name.endswith(".safetensors"))
        return hashlib.sha256(tensors).hexdigest(), values["loss"], list(engine.model.state_dict())


def train_each(options: dict[str, dict[str, Any]]) -> dict[str, tuple[str, float, list[str]]]:
    """Return the results of `train` with each of some options, from the same processes."""
    return {name: train(one) for name, one in options.items()}


def train_on(samples: int, batch_size: int) -> list[bytes]:
    """Return the weights after three epochs; some batches have no samples for some ranks."""
    with samestep.start() as world:
        engine = engine_of(world)
        batches = samestep.loader(data(samples), batch_size=batch_size, microbatches=4, world=world)
        for _ in range(3):
            for batch in batches:
                engine.step(batch)
        return [parameter.detach().cpu().numpy().tobytes() for parameter in engine.model.parameters()]
