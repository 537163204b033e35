"""What ranks run for `unit/engine/test_switches.py` and `test_ema.py`: a small conv net that is trained a few steps."""

import hashlib
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import samestep
from models import seeded
from samestep.checkpoint.state import Progress, Training, pack
from samestep.config import StepRules
from samestep.engine.step import Engine

# Three ranks own 2 or 3 shards each, which are several subtrees; the last batch has 2 samples, so ranks have none.
SAMPLES, BATCH, SHARDS = 50, 16, 8


class Conv(nn.Module):
    """Two blocks with batch norm and dropout, and a head."""

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
    draws = torch.Generator().manual_seed(0)
    images = torch.randn(samples, 3, 8, 8, generator=draws)
    return TensorDataset(images, torch.randint(0, 4, (samples,), generator=draws))


def engine_of(world: samestep.World, ema: float | None = None, **rules: Any) -> Engine:
    model = seeded(0, Conv, dtype=torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return Engine(model, optimizer, samestep.cross_entropy, world=world, rules=StepRules(**rules), ema=ema)


def trained(rules: dict[str, Any], ema: float | None = None) -> tuple[str, float, list[str]]:
    """The SHA-256 of the state after two epochs, the loss of an evaluation, and the names in the checkpoint."""
    with samestep.start() as world:
        engine = engine_of(world, ema, **rules)
        batches = samestep.loader(data(), batch_size=BATCH, shards=SHARDS, shuffle=True, world=world)
        for _ in range(2):
            for batch in batches:
                engine.step(batch)
        whole = samestep.loader(data(), batch_size=BATCH, shards=SHARDS, world=world)
        values = engine.evaluate(whole)
        average = engine.averaged.tensors if engine.averaged is not None else None
        files = pack(Training(engine.model, engine.optimizer, None, engine.scaler, average), Progress())
        tensors = b"".join(files[name] for name in sorted(files) if name.endswith(".safetensors"))
        return hashlib.sha256(tensors).hexdigest(), values["loss"], list(engine.model.state_dict())


def trained_on(samples: int, batch_size: int) -> list[bytes]:
    """The weights after three epochs of so few samples that some batches leave ranks without any."""
    with samestep.start() as world:
        engine = engine_of(world)
        batches = samestep.loader(data(samples), batch_size=batch_size, shards=4, world=world)
        for _ in range(3):
            for batch in batches:
                engine.step(batch)
        return [parameter.detach().numpy().tobytes() for parameter in engine.model.parameters()]
