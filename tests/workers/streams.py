"""Training on a stream, also killed and resumed, on the ranks of a test."""

import hashlib
import os
import signal
from pathlib import Path
from typing import Any

import torch
from torch import nn

import samestep
from helpers.number_files import NumberFiles
from samestep.data.streams.dataset import StreamDataset
from samestep.data.streams.mixture import MixtureSource
from samestep.distributed.world import all_gather

EPOCHS = 2
FILES = [23, 8, 0, 41, 17, 30, 12, 9, 26, 35]  # 201 samples: 12 batches and one of 9


def noisy(sample: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs with random noise, and the class."""
    file, index = sample.tolist()
    values = torch.sin(torch.arange(6.0) * (1 + file) + index) + 0.1 * torch.randn(6)
    return values, torch.tensor((file + index) % 3)


def dataset(kind: str, window: int = 10) -> StreamDataset:
    """Return the stream of a source or of a mixture."""
    files = NumberFiles(FILES)
    if kind == "source":
        return StreamDataset(files, window=window, transform=noisy)
    sources = {"a": files, "b": NumberFiles([13, 20], "b")}  # the second is passed through several times per epoch
    return StreamDataset(MixtureSource(sources, {"a": 0.5, "b": 0.5}), window=window, transform=noisy)


def train(
    kind: str, workers: int, folder: Path | None = None, kill_at: int | None = None, window: int = 10
) -> set[tuple[str, float]]:
    """Train two epochs, from the newest checkpoint; return checksums of the weights of all ranks, and losses.

    Args:
        kind: `source` or `mixture`.
        workers: loader workers of each rank.
        folder: folder of checkpoints, one every three steps.
        kill_at: step after which the last rank kills itself.
        window: window of the stream.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 3))
    with samestep.start(device="cpu") as world:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        engine = samestep.Engine(model, optimizer, samestep.cross_entropy, world=world)
        options: dict[str, Any] = {"batch_size": 16, "microbatches": 5, "num_workers": workers, "world": world}
        batches = samestep.loader(dataset(kind, window), shuffle=True, seed=7, **options)
        checkpoints = samestep.CheckpointManager(folder, engine, batches) if folder is not None else None
        if checkpoints is not None:
            checkpoints.resume()
        for _ in samestep.epochs(batches, EPOCHS):
            for batch in batches:
                engine.step(batch)
                if checkpoints is not None and engine.steps % 3 == 0:
                    checkpoints.save()
                if engine.steps == kill_at and world.rank == world.size - 1:
                    os.kill(os.getpid(), signal.SIGKILL)
        evaluation = engine.evaluate(samestep.loader(dataset(kind, window), **options))
        return {tuple(result) for result in all_gather([sha256_of(engine), evaluation["loss"]], world)}


def sha256_of(engine: samestep.Engine) -> str:
    """Return the SHA-256 of the weights."""
    total = hashlib.sha256()
    for tensor in engine.model.state_dict().values():
        total.update(tensor.detach().contiguous().numpy().tobytes())
    return total.hexdigest()
