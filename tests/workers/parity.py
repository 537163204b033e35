"""Rank functions for `parity/test_step_parity.py`: small trainings."""

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

import samestep
from helpers.models import Tokens, seeded
from samestep.checkpoint.contents import Progress
from samestep.checkpoint.state import MODEL, OPTIMIZER, Training, load, pack
from samestep.checkpoint.store import CheckpointFolder
from samestep.config import BatchNorm, Precision, Reduction, StepConfig
from samestep.data.loader import Loader
from samestep.engine.engine import Engine
from workers.loader import gathered

World = samestep.World
MICROBATCHES, BATCH, SIZE, EPOCHS = 8, 16, 37, 2  # the last batch of an epoch has 5 samples: too few for 8 ranks
STEPS = 6


class Images:
    """Random images with classes; augmentation uses all three random generators."""

    def __init__(self, dtype: torch.dtype, *, augment: bool) -> None:
        generator = torch.Generator().manual_seed(5)
        self._pixels = torch.randn(SIZE, 3, 8, 8, generator=generator, dtype=torch.float64)
        self._classes = torch.randint(0, 4, (SIZE,), generator=generator)
        self._dtype, self._augment = dtype, augment

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int, /) -> tuple[torch.Tensor, torch.Tensor]:
        pixels = self._pixels[index]
        if self._augment:
            pixels = pixels.flip(2) if random.random() < 0.5 else pixels
            pixels = pixels.roll(int(numpy.random.randint(-2, 3)), 1)
            pixels = pixels + 0.1 * torch.randn(pixels.shape, dtype=torch.float64)
        return pixels.to(self._dtype), self._classes[index]


class Sentences:
    """Token sequences of very different lengths; targets are the next tokens."""

    def __init__(self, *, augment: bool) -> None:
        generator = torch.Generator().manual_seed(6)
        lengths = torch.randint(2, 20, (SIZE,), generator=generator).tolist()
        self._sentences = [torch.randint(1, 11, (length,), generator=generator) for length in lengths]
        self._augment = augment

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int, /) -> torch.Tensor:
        sentence = self._sentences[index]
        if self._augment:
            hidden = torch.rand(sentence.shape) < 0.2
            sentence = sentence.masked_fill(hidden, 0)
        return sentence


def padded(sentences: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return padded inputs, and targets whose padding is ignored."""
    inputs = pad_sequence([sentence[:-1] for sentence in sentences], batch_first=True)
    return inputs, pad_sequence([sentence[1:] for sentence in sentences], batch_first=True, padding_value=-100)


class Convolutions(nn.Sequential):
    """Convolutions with batch norm and dropout, without bias: before batch norm its gradient is only rounding."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, 6, 3, padding=1, bias=False),
            nn.BatchNorm2d(6),
            nn.ReLU(),
            nn.Dropout2d(0.2),
            nn.Conv2d(6, 8, 3, stride=2, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Flatten(),
            nn.Dropout(0.3),
            nn.Linear(72, 4),
        )


class Branches(nn.Module):
    """A residual model with norm layers on both branches, one called twice, and one after pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6, momentum=None))
        self.first, self.first_norm = nn.Conv2d(6, 8, 3, stride=2, bias=False), nn.BatchNorm2d(8)
        self.second, self.again = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.SyncBatchNorm(8)
        self.shortcut = nn.Sequential(nn.Conv2d(6, 8, 3, stride=2, bias=False), nn.BatchNorm2d(8, affine=False))
        self.drop, self.flat = nn.Dropout2d(0.2), nn.BatchNorm1d(8)
        self.out = nn.Linear(8, 4)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.stem(images))
        main = self.drop(torch.relu(self.first_norm(self.first(hidden))))
        main = self.again(self.second(main)) + self.shortcut(hidden) + main
        main = torch.relu(main + self.again(self.second(main)))
        noise = 1 + 0.1 * float(numpy.random.normal()) + 0.1 * random.gauss(0, 1)
        return self.out(self.flat(main.mean((2, 3))) * noise)


class Hits:
    """Accuracy over counted targets."""

    name = "hits"

    def __init__(self) -> None:
        self._hits = torch.zeros(2, dtype=torch.float64)

    def update(self, outputs: torch.Tensor, targets: torch.Tensor) -> None:
        self._hits += torch.tensor([(outputs.argmax(1) == targets).sum(), (targets != -100).sum()])

    def compute(self, world: World) -> float:
        world.all_reduce(self._hits)
        return float(self._hits[0] / self._hits[1])


@dataclass(frozen=True)
class Case:
    """Configuration of a training."""

    data: str
    optimizer: str
    reduction: Reduction = "exact"
    dtype: torch.dtype = torch.float32
    precision: Precision = "fp32"
    batch_norm: BatchNorm = "microbatch"


CASES = {
    "images": Case("images", "sgd"),
    "images adamw": Case("images", "adamw"),
    "images bf16": Case("images", "sgd", precision="bf16"),
    "images fp16": Case("images", "sgd", precision="fp16"),
    "sentences": Case("sentences", "sgd"),
    "sentences adamw": Case("sentences", "adamw"),
    "images sync": Case("images", "sgd", batch_norm="sync"),
    "branches sync": Case("branches", "adamw", batch_norm="sync"),
    "branches sync bf16": Case("branches", "sgd", precision="bf16", batch_norm="sync"),
    "branches sync fp16": Case("branches", "sgd", precision="fp16", batch_norm="sync"),
}
DOUBLE = {
    "images": Case("images", "sgd", dtype=torch.float64),
    "images adamw": Case("images", "adamw", dtype=torch.float64),
    "sentences": Case("sentences", "sgd", dtype=torch.float64),
    "sentences adamw": Case("sentences", "adamw", dtype=torch.float64),
    "branches sync": Case("branches", "adamw", dtype=torch.float64, batch_norm="sync"),
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.2, momentum=0.9, weight_decay=1e-3),
    "adamw": partial(torch.optim.AdamW, lr=0.02, weight_decay=1e-2),
}


class Run:
    """A training that can be resumed after any step."""

    def __init__(self, case: Case, world: World, workers: int) -> None:
        self._case, self._world, self._workers = case, world, workers
        model = seeded(1, *self._model(), dtype=case.dtype)
        optimizer = OPTIMIZERS[case.optimizer](model.parameters())
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
        config = StepConfig(
            seed=4,
            reduction=case.reduction,
            clip_norm=2.0,
            precision=case.precision,
            batch_norm=case.batch_norm,
        )
        self.engine = Engine(
            model,
            optimizer,
            samestep.cross_entropy,
            world=world,
            scheduler=scheduler,
            scheduler_interval="step",
            config=config,
        )
        self.loader = self._loader(augment=True)
        self.losses: list[float] = []

    @property
    def training(self) -> Training:
        engine = self.engine
        return Training(engine.model, engine.optimizer, engine.scheduler, engine.scaler)

    def train(self, steps: int) -> None:
        """Train until `steps` steps are done."""
        while self.engine.steps < steps:
            for batch in self.loader:
                self.losses.append(self.engine.step(batch).loss)
                if self.engine.steps == steps:
                    break

    def evaluate(self) -> dict[str, float]:
        return self.engine.evaluate(self._loader(augment=False), [Hits()])

    def progress(self) -> Progress:
        return Progress(step=self.engine.steps, cursor=self.loader.cursor)

    def resume(self, progress: Progress) -> None:
        self.engine.steps, self.loader.cursor = progress.step, progress.cursor

    def _model(self) -> tuple[Any, ...]:
        return {"images": (Convolutions,), "branches": (Branches,), "sentences": (Tokens, 11, 6, 0.2)}[self._case.data]

    def _loader(self, *, augment: bool) -> Loader:
        images = self._case.data != "sentences"
        dataset: Any = Images(self._case.dtype, augment=augment) if images else Sentences(augment=augment)
        collate = {} if images else {"collate_fn": padded}
        return Loader(
            dataset,
            batch_size=BATCH,
            microbatches=MICROBATCHES,
            world=self._world,
            seed=4,
            shuffle=augment,
            num_workers=self._workers,
            **collate,
        )


def outcome(run: Run) -> dict[str, Any]:
    """Return hashes of the checkpoint files, losses, evaluation and weights."""
    files = pack(run.training, run.progress())
    weights = torch.cat([tensor.double().flatten() for tensor in run.engine.model.state_dict().values()])
    return {
        "bits": {name: hashlib.sha256(content).hexdigest() for name, content in files.items()},
        "losses": run.losses,
        "evaluation": run.evaluate(),
        "weights": weights.tolist(),
        "has_optimizer_state": len(files[OPTIMIZER]) > len(files[MODEL]) // 2,
    }


def train(cases: dict[str, Case], workers: int) -> dict[str, list[dict[str, Any]]]:
    """Return the outcomes of all ranks, by case."""
    outcomes = {}
    with samestep.start(device="cpu") as world:
        for name, case in cases.items():
            run = Run(case, world, workers)
            run.train(STEPS)
            outcomes[name] = outcome(run)
        all_ranks = gathered(outcomes)
    return {name: [rank[name] for rank in all_ranks] for name in cases}


def train_in_part(case: Case, folder: Path, steps: int) -> None:
    """Train from the last checkpoint, if any, to step `steps` and write a checkpoint."""
    with samestep.start(device="cpu") as world:
        run, checkpoints = Run(case, world, 0), CheckpointFolder(folder)
        if checkpoints.steps():
            run.resume(load(checkpoints.find("last"), run.training))
        run.train(steps)
        world.barrier()
        if world.is_main:
            checkpoints.write(steps, pack(run.training, run.progress()))
