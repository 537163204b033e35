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
from samestep.data.streams.tokens import TokenFiles
from samestep.distributed.world import all_gather

EPOCHS = 2
FILES = [23, 8, 0, 41, 17, 30, 12, 9, 26, 35]  # 201 samples: 12 batches and one of 9


def noisy(sample: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs with random noise, and the class."""
    file, index = sample.tolist()
    values = torch.sin(torch.arange(6.0) * (1 + file) + index) + 0.1 * torch.randn(6)
    return values, torch.tensor((file + index) % 3)


def dataset(window: int = 10) -> StreamDataset:
    """Return a stream with random noise in each sample."""
    return StreamDataset(NumberFiles(FILES), window=window, transform=noisy)


def train(
    workers: int, folder: Path | None = None, kill_at: int | None = None, window: int = 10
) -> set[tuple[str, float]]:
    """Train two epochs, from the newest checkpoint; return checksums of the weights of all ranks, and losses.

    Args:
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
        batches = samestep.loader(dataset(window), shuffle=True, seed=7, **options)
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
        evaluation = engine.evaluate(samestep.loader(dataset(window), **options))
        return {tuple(result) for result in all_gather([sha256_of(engine), evaluation["loss"]], world)}


def sha256_of(engine: samestep.Engine) -> str:
    """Return the SHA-256 of the weights."""
    total = hashlib.sha256()
    for tensor in engine.model.state_dict().values():
        total.update(tensor.detach().contiguous().numpy().tobytes())
    return total.hexdigest()


SAMPLE_BYTES = 1 << 18


def write_sparse_files(folder: Path, files: int, samples: int) -> None:
    """Write token files of zeros, which take no space on the disk."""
    folder.mkdir()
    for number in range(files):
        with (folder / f"{number:03}.bin").open("wb") as file:
            file.truncate(samples * SAMPLE_BYTES + 4)


class First(nn.Module):
    """Linear function of the first tokens of a sample."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.linear(inputs[:, :4].float())
        return outputs


class Kept:
    """Transform that keeps all samples in memory, as a dataset with a leak does."""

    def __init__(self) -> None:
        self.samples = list[torch.Tensor]()

    def __call__(self, sample: torch.Tensor) -> torch.Tensor:
        self.samples.append(sample)
        return sample


def read_large_files(folder: Path, workers: int, keeps: bool = False) -> list[int]:
    """Train one epoch; return for each rank the growth of its memory, with its workers, in bytes.

    The growth is the difference of the peaks of both halves of the epoch.
    """
    model = First()
    with samestep.start(device="cpu") as world:
        source = TokenFiles(str(folder), length=SAMPLE_BYTES // 4, dtype="uint32")
        engine = samestep.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), zero, world=world)
        data = StreamDataset(source, window=64, transform=Kept() if keeps else None)
        options: dict[str, Any] = {"batch_size": 32, "microbatches": 8, "num_workers": workers, "world": world}
        sizes = []
        for batch in samestep.loader(data, shuffle=True, **options, collate_fn=inputs_alone):
            engine.step(batch)
            sizes.append(resident_memory())
        half = len(sizes) // 2
        return [int(growth) for growth in all_gather(max(sizes[half:]) - max(sizes[:half]), world)]


def inputs_alone(samples: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the samples, and a target of zero for each."""
    return torch.stack(samples), torch.zeros(len(samples), 1)


def zero(outputs: torch.Tensor, targets: torch.Tensor) -> samestep.Loss:
    """Return the sum of squares."""
    return samestep.Loss((outputs - targets).square().sum(), len(outputs))


def resident_memory() -> int:
    """Return the resident bytes of this process and its children, without mapped files.

    Pages that a child still shares with its parent count for both, so their copies after a write are no growth.
    """
    pids = [os.getpid()]
    for thread in Path("/proc/self/task").iterdir():
        pids += map(int, (thread / "children").read_text().split())
    rows = [line for pid in pids for line in Path(f"/proc/{pid}/status").read_text().splitlines()]
    return 1024 * sum(int(row.split()[1]) for row in rows if row.startswith(("RssAnon", "RssShmem")))
