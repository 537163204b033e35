"""Rank functions for `unit/data/test_bad_samples.py`."""

import hashlib

import torch
from torch import nn

import samestep
from helpers.models import seeded
from samestep.distributed.world import all_gather
from samestep.engine.engine import Engine
from samestep.errors import DataError
from samestep.metrics.metrics import build_metrics

SIZE = 26
BATCH, MICROBATCHES = 8, 4  # the last batch has 2 samples: a microbatch of one sample each


class Faulty:
    """Dataset with some unusable rows."""

    def __init__(self, bad: frozenset[int]) -> None:
        draws = torch.Generator().manual_seed(0)
        self._rows, self._labels = torch.randn(SIZE, 6, generator=draws), torch.arange(SIZE) % 4
        self._bad = bad

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if index in self._bad:
            raise DataError(f"row {index} is damaged", expected="intact rows", fix="remove the row")
        return self._rows[index], self._labels[index]


class Net(nn.Sequential):
    """Model with dropout and without batch norm, which fails for a microbatch of one row."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 5), nn.ReLU(), nn.Dropout(0.3), nn.Linear(5, 4))


def mean_of_a_microbatch(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs, targets)


def trained(bad: frozenset[int], workers: int = 0, plain: bool = False) -> tuple[str, dict[str, float], list[str]]:
    """Return the hash of the weights after two epochs, evaluation metrics, and the skipped samples."""
    with samestep.start() as world:
        model = seeded(0, Net, dtype=torch.float32)
        loss = mean_of_a_microbatch if plain else samestep.cross_entropy
        engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.2), loss, world=world)
        arguments = {
            "batch_size": BATCH,
            "microbatches": MICROBATCHES,
            "world": world,
            "bad_samples": "skip",
            "num_workers": workers,
        }
        batches = samestep.loader(Faulty(bad), shuffle=True, **arguments)  # type: ignore[arg-type]
        for _ in range(2):
            for batch in batches:
                engine.step(batch)
        evaluation = samestep.loader(Faulty(bad), **arguments)  # type: ignore[arg-type]
        values = engine.evaluate(evaluation, build_metrics(("accuracy",), 4))
        skipped = [text for texts in all_gather(batches.skipped, world) for text in texts]
        weights = b"".join(tensor.numpy().tobytes() for tensor in model.state_dict().values())
        return hashlib.sha256(weights).hexdigest(), values, sorted(skipped)


def stopped(bad: frozenset[int]) -> str:
    """Return the error of the first unusable sample with `bad_samples="stop"`."""
    with samestep.start() as world:
        try:
            for _ in samestep.loader(Faulty(bad), batch_size=BATCH, microbatches=MICROBATCHES, world=world):
                pass
        except DataError as error:
            return str(error)
        return ""
