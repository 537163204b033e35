"""Rank functions for `unit/engine/test_device_rules.py`: gradients in buckets."""

import hashlib
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn

import samestep
from helpers.batches import batch_of
from helpers.models import seeded
from samestep.config import StepConfig, StrategyConfig
from samestep.engine.callbacks import Callback
from samestep.engine.engine import Engine
from workers.loader import gathered

CLASSES = 29  # no multiple of four: the gradients behind this layer in a bucket begin at odd addresses
MICROBATCHES = 6


class OddSizes(nn.Sequential):
    """Layers of more than a megabyte, and an output layer of odd size."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 560), nn.Tanh(), nn.Linear(560, 560), nn.Tanh(), nn.Linear(560, CLASSES))


class Blocks(nn.Sequential):
    """Residual blocks; fused operations of a compiled model round less often to bf16."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 256), *[Block() for _ in range(4)], nn.Linear(256, CLASSES))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first, self.second = nn.LayerNorm(256), nn.Linear(256, 256), nn.Linear(256, 256)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = inputs + self.second(nn.functional.gelu(self.first(self.norm(inputs))))
        return outputs


class ReducingSgd(torch.optim.SGD):
    """SGD, for the engine an optimizer that may reduce over a gradient."""


class Addresses(Callback):
    """Counts the gradients of each step whose addresses are no multiples of 16 bytes."""

    def __init__(self) -> None:
        self.odd: list[int] = []

    def end_gradients(self, engine: Engine) -> None:
        gradients = [p.grad for p in engine.local_parameters.names if p.grad is not None]
        self.odd.append(sum(gradient.data_ptr() % 16 != 0 for gradient in gradients))


def train(world: samestep.World, model: type[nn.Module], callback: Callback, **options: Any) -> str:
    """Return the SHA-256 of the weights after three steps."""
    module = seeded(0, model, dtype=torch.float32)
    optimizer = ReducingSgd(module.parameters(), lr=0.1)
    config = StepConfig(clip_norm=0.1, **options)
    engine = Engine(module, optimizer, samestep.cross_entropy, world=world, config=config, callbacks=[callback])
    generator = torch.Generator().manual_seed(0)
    inputs, targets = torch.randn(24, 8, generator=generator), torch.randint(0, CLASSES, (24,), generator=generator)
    for size in (18, 24, 24):  # a compiled model is compiled again in the second step, now inside of DDP
        engine.step(batch_of(world, inputs[:size], targets[:size], MICROBATCHES))
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in module.parameters())).hexdigest()


def observe() -> list[Any]:
    """Return weights, odd addresses by step, and the sizes of gradients that the backend added, by rank."""
    sizes, all_reduce = [], dist.all_reduce

    def record(tensor: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        sizes.append(tensor.numel())
        return all_reduce(tensor, *arguments, **options)

    with samestep.start(device="cpu") as world, patch.object(dist, "all_reduce", record):
        addresses = Addresses()
        digest = train(world, OddSizes, addresses)
        large = [size for size in sizes if size > 1000]
        return gathered((digest, addresses.odd, large))


def train_compiled() -> str:
    """Return the weights of a compiled model of more than two buckets in bf16."""
    with samestep.start(device="cpu", strategy=StrategyConfig(name="ddp", bucket_mb=0.5)) as world:
        return train(world, Blocks, Callback(), precision="bf16", compile=True)
