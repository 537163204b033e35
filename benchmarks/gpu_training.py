"""Short trainings for `gpu.py`: models, data, and the digest of the result."""

from __future__ import annotations

import hashlib
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from threading import Event, Thread
from typing import Any

import torch
from samestep.engine.engine import Engine
from samestep.strategies.ddp import DdpStrategy
from samestep.strategies.fast_reduction import build_reduction
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import samestep
from samestep.data.batch import GlobalBatch

CLASSES, VOCABULARY, LENGTH = 10, 29, 24


@dataclass
class Outcome:
    """Result of a check.

    Attributes:
        numbers: measured values.
        failures: expectations that do not hold, with values.
        skipped: reason why the check has no meaning here; empty otherwise.
    """

    numbers: dict[str, Any] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    skipped: str = ""

    def require(self, holds: bool, failure: str) -> None:
        """Add a failure unless `holds`."""
        if not holds:
            self.failures.append(failure)

    @contextmanager
    def attempt(self, name: str) -> Iterator[None]:
        """Record an exception of the block as a failure, so that the rest of the check still runs."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            lines = str(error).strip().splitlines() or [""]
            self.failures.append(f"{name}: {type(error).__name__}: {lines[0][:300]}")

    def require_one(self, name: str, digests: dict[str, Any]) -> None:
        """Require equal values of all variants, and record the number of different ones."""
        different = {variant: value for variant, value in digests.items() if value != next(iter(digests.values()))}
        self.numbers[name] = 1 if not different else len({str(value) for value in digests.values()})
        self.require(not different, f"{name}: {', '.join(different)} differ from {next(iter(digests))}")


class Residual(nn.Module):
    """A block of two linear layers whose elementwise operations a compiler fuses."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


def _resnet18() -> nn.Module:
    from torchvision.models import resnet18

    # 10 classes: the sizes of the last layer are no multiple of four elements of 32 bits, which moves other gradients.
    return resnet18(num_classes=CLASSES)


def _gpt() -> nn.Module:
    from samestep.zoo.text.models import GPT

    return GPT(VOCABULARY, n_embd=32, n_head=4, n_layer=2, block_size=LENGTH, dropout=0.1, fused=True)


def _tokens() -> nn.Module:
    from samestep.zoo.text.sentences import TokensNet

    return TokensNet(VOCABULARY, width=32, heads=4, blocks=2, dropout=0.1, longest=LENGTH)


def _wide() -> nn.Module:
    """About 1 MB of parameters: several buckets of a quarter of a megabyte."""
    width = 128
    return nn.Sequential(nn.Linear(32, width), *(Residual(width) for _ in range(6)), nn.Linear(width, CLASSES))


def _small() -> nn.Module:
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Dropout(0.2), nn.Linear(8, CLASSES))


def _normed() -> nn.Module:
    """The small model without dropout, whose masks differ between devices, and without a bias before batch norm.

    The gradients of such a bias are rounding errors, which AdamW scales up.
    """
    layers = [nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(8, CLASSES))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "resnet18": _resnet18,
    "gpt": _gpt,
    "tokens": _tokens,
    "wide": _wide,
    "small": _small,
    "normed": _normed,
}


def build_model(name: str) -> nn.Module:
    """Return a model with the same initial weights at every call."""
    torch.manual_seed(0)
    return MODELS[name]()


def build_dataset(name: str, samples: int, dtype: torch.dtype = torch.float32) -> TensorDataset:
    """Return samples for a model, the same at every call."""
    generator = torch.Generator().manual_seed(1)
    if name in ("gpt", "tokens"):
        tokens = torch.randint(VOCABULARY, (samples, LENGTH + 1), generator=generator)
        return TensorDataset(tokens[:, :-1], tokens[:, 1:])
    shape = (32,) if name == "wide" else (3, 32, 32)
    inputs = torch.randn(samples, *shape, generator=generator, dtype=dtype)
    return TensorDataset(inputs, torch.randint(CLASSES, (samples,), generator=generator))


@dataclass(frozen=True)
class Plan:
    """One training.

    Attributes:
        is_wrapped: compute under DistributedDataParallel, in a world of one rank too.
        folder: checkpoints, for `resume` and `save_after`.
        resume: continue from the newest checkpoint.
        save_after: write a checkpoint after this number of steps.
    """

    model: str
    microbatches: int = 4
    steps: int = 3
    batch_size: int = 16
    num_workers: int = 0
    is_wrapped: bool = False
    is_double: bool = False
    config: samestep.StepConfig = field(default_factory=lambda: samestep.StepConfig(clip_norm=1.0))
    folder: Path | None = None
    resume: bool = False
    save_after: int | None = None


@dataclass(frozen=True)
class Trained:
    """Result of a training: a digest of weights, buffers and losses, and the full weights on the CPU."""

    digest: str
    losses: tuple[float, ...]
    weights: dict[str, torch.Tensor]


def build_engine(plan: Plan, world: samestep.World) -> Engine:
    model = build_model(plan.model)
    model = model.double() if plan.is_double else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine = Engine(model, optimizer, samestep.cross_entropy, world=world, config=plan.config)
    if plan.is_wrapped and world.size == 1:
        wrap(engine)
    return engine


def wrap(engine: Engine) -> None:
    """Compute under DistributedDataParallel in a world of one rank, with the hook, the buckets and their stream."""
    parameters = list(engine.local_parameters.names)
    reduction = build_reduction(engine.config.reduction, engine.world, parameters)
    engine._components.runner.strategy = DdpStrategy(engine.model, parameters, reduction, engine.world)


def train(plan: Plan, world: samestep.World) -> Trained:
    """Train some steps."""
    dtype = torch.float64 if plan.is_double else torch.float32
    batches = samestep.loader(
        build_dataset(plan.model, plan.batch_size * 8, dtype),
        batch_size=plan.batch_size,
        microbatches=plan.microbatches,
        shuffle=True,
        num_workers=plan.num_workers,
        world=world,
    )
    engine, losses = build_engine(plan, world), []
    with ExitStack() as stack:
        if plan.folder is not None:
            checkpoints = stack.enter_context(samestep.CheckpointManager(plan.folder, engine, batches))
            if plan.resume:
                checkpoints.resume()
        for batch in islice(batches, plan.steps - engine.steps):
            losses.append(engine.step(batch).loss)
            if engine.steps == plan.save_after:
                checkpoints.save()
    weights = full_weights(engine)
    return Trained(digest_of([*weights.values(), *engine.model.buffers()]), tuple(losses), weights)


def full_weights(engine: Engine) -> dict[str, torch.Tensor]:
    local = engine.local_parameters
    return {name: local.full_tensor(name, p.detach()).cpu().clone() for name, p in local.local.items()}


def digest_of(tensors: list[torch.Tensor]) -> str:
    """Return a hash of the bits of tensors."""
    total = hashlib.sha256()
    for tensor in tensors:
        total.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return total.hexdigest()[:16]


def distance(tensors: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Return the largest difference, relative to the largest element of each tensor."""
    return max(
        float((tensors[name].double() - value.double()).abs().max() / value.double().abs().max().clamp(min=1e-3))
        for name, value in expected.items()
    )


def ready_batches(
    dataset: TensorDataset, batch_size: int, microbatches: int, count: int, world: samestep.World
) -> list[GlobalBatch]:
    """Return batches in memory of the device, for measurements without a loader."""
    batches = samestep.loader(dataset, batch_size=batch_size, microbatches=microbatches, world=world)
    return list(islice(batches, count))


def synchronize(device: torch.device) -> None:
    """Wait for the work of a device; nothing on a CPU."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)


@contextmanager
def rival_work(device: torch.device, size: int = 512) -> Iterator[None]:
    """Multiply matrices in another thread, on a GPU in another stream, during the block."""
    is_done = Event()
    module = torch.get_device_module(device) if device.type != "cpu" else None
    stream = module.Stream(device) if module is not None else None

    def work() -> None:
        with module.stream(stream) if module is not None else nullcontext():
            matrix = torch.ones(size, size, device=device)
            while not is_done.is_set():
                torch.mm(matrix, matrix)
                if stream is not None:
                    stream.synchronize()

    thread = Thread(target=work, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_done.set()
        thread.join()
