"""Short trainings for `gpu.py`: models, data, and the digest of the result."""

from __future__ import annotations

import hashlib
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from threading import Event, Thread
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import samestep
from samestep.config import Reduction, StrategyConfig
from samestep.distributed.rng import seed_generators
from samestep.distributed.world import World
from samestep.parallelize import world_of_process
from samestep.session import start

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


def _resnet18() -> nn.Module:
    from torchvision.models import resnet18

    # 10 classes: the sizes of the last layer are no multiple of four elements of 32 bits, which moves other gradients.
    return resnet18(num_classes=CLASSES)


def _gpt(dropout: float = 0.1) -> nn.Module:
    from samestep.zoo.models import GPT

    return GPT(VOCABULARY, n_embd=32, n_head=4, n_layer=2, block_size=LENGTH, dropout=dropout, fused=True)


def _tokens() -> nn.Module:
    from samestep.zoo.models import TokensNet

    return TokensNet(VOCABULARY, width=32, heads=4, blocks=2, dropout=0.1, longest=LENGTH)


def _small() -> nn.Module:
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Dropout(0.2), nn.Linear(8, CLASSES))


def _normed() -> nn.Module:
    """The small model without dropout, and without a bias before batch norm, whose gradients are rounding errors."""
    layers = [nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(8, CLASSES))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "resnet18": _resnet18,
    "gpt": _gpt,
    "gpt without dropout": partial(_gpt, 0.0),
    "tokens": _tokens,
    "small": _small,
    "normed": _normed,
}


def build_model(name: str) -> nn.Module:
    """Return a model with the same initial weights at every call."""
    seed_generators(0)
    return MODELS[name]()


def build_dataset(name: str, samples: int, dtype: torch.dtype = torch.float32) -> TensorDataset:
    """Return samples for a model, the same at every call."""
    generator = torch.Generator().manual_seed(1)
    if name not in ("resnet18", "small", "normed"):
        tokens = torch.randint(VOCABULARY, (samples, LENGTH + 1), generator=generator)
        return TensorDataset(tokens[:, :-1], tokens[:, 1:])
    inputs = torch.randn(samples, 3, 32, 32, generator=generator, dtype=dtype)
    return TensorDataset(inputs, torch.randint(CLASSES, (samples,), generator=generator))


@dataclass(frozen=True)
class Plan:
    """One training.

    Attributes:
        folder: checkpoints, for `resume` and `save_after`.
        resume: continue from the newest checkpoint.
        save_after: write a checkpoint after this number of steps.
        is_strict: refuse whole calls, and divide small ones too.
    """

    model: str
    microbatches: int = 4
    steps: int = 3
    batch_size: int = 16
    num_workers: int = 0
    is_double: bool = False
    is_bf16: bool = False
    reduction: Reduction = "exact"
    folder: Path | None = None
    resume: bool = False
    save_after: int | None = None
    is_strict: bool = True


@dataclass(frozen=True)
class Trained:
    """Result of a training: a digest of weights, buffers and losses, and the full weights on the CPU."""

    digest: str
    losses: tuple[float, ...]
    weights: dict[str, torch.Tensor]


@contextmanager
def joined(device: Any, strategy: StrategyConfig | None = None, reduction: Reduction = "exact") -> Iterator[World]:
    """Join the other ranks, and divide the calls of models between them during the block."""
    with start(device=device, strategy=strategy, reduction=reduction) as world, world_of_process(world, reduction):
        yield world


def train_alone(plan: Plan, device: Any) -> Trained:
    """Train in a world of its own: calls of a later training of the same world would be known, and divided at once."""
    with joined(device, reduction=plan.reduction) as world:
        return train(plan, world)


def build_training(plan: Plan, world: World) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model with divided calls, and its optimizer."""
    model = build_model(plan.model)
    model = model.double() if plan.is_double else model
    model = samestep.parallel(
        model.to(world.device),
        strategy=world.strategy,
        reduction=plan.reduction,
        microbatches=max(plan.microbatches, world.size),
        strict=plan.is_strict,
    )
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(plan: Plan, world: World) -> Trained:
    """Train some steps."""
    dtype = torch.float64 if plan.is_double else torch.float32
    batches = samestep.loader(
        build_dataset(plan.model, plan.batch_size * 8, dtype),
        batch_size=plan.batch_size,
        shuffle=True,
        num_workers=plan.num_workers,
    )
    model, optimizer = build_training(plan, world)
    seed_generators(0, world.device)
    losses, steps = [], 0
    with ExitStack() as stack:
        if plan.folder is not None:
            manager = samestep.CheckpointManager(plan.folder, model, batches, optimizer=optimizer)
            checkpoints = stack.enter_context(manager)
            if plan.resume:
                assert checkpoints.resume()
                steps = batches.cursor.samples // plan.batch_size
        for inputs, targets in islice(batches, plan.steps - steps):
            losses.append(step(model, optimizer, inputs.to(world.device), targets.to(world.device), plan))
            steps += 1
            if steps == plan.save_after:
                checkpoints.save()
    weights = {name: tensor.cpu().clone() for name, tensor in samestep.full_state_dict(model).items()}
    return Trained(digest_of([*weights.values()]), tuple(losses), weights)


def step(
    model: nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor, targets: torch.Tensor, plan: Plan
) -> float:
    """Compute one step, and return the loss."""
    optimizer.zero_grad()
    with torch.autocast(inputs.device.type, torch.bfloat16, enabled=plan.is_bf16):
        outputs = model(inputs)
        # Of rows: torch has no deterministic kernel for more dimensions.
        loss = functional.cross_entropy(outputs.movedim(1, -1).flatten(0, -2), targets.flatten())
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return float(loss.detach())


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
