"""Random changes of the number of ranks of a run, and a recipe that is slow while they take place."""

import json
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from helpers.system import here, weights
from samestep.zoo.losses import cross_entropy

MOST = 3
_SECONDS = 0.2


def recipe(epochs: int) -> tuple[str, ...]:
    """Return the arguments of a recipe whose training is slow while the current folder has a file `slow`."""
    settings = (f"epochs={epochs}", "model.options.width=8", "metrics=[]", "loss.name=helpers.resizes:slow")
    return ("digits", "--exact", *settings)


def slow(outputs: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    """Cross entropy; a training call takes 0.2 s while there is a file `slow`."""
    if outputs.requires_grad and Path("slow").exists():
        time.sleep(_SECONDS)
    return cross_entropy(outputs, classes)


def moves(count: int, ways: Sequence[str], seed: int = 0) -> Iterator[tuple[str, int, int]]:
    """Yield changes between 1 and 3 members: `join`, or a way of leaving; the place of the leaving one; the new size.

    Members join at the end. The first one stays.
    """
    choose, size = random.Random(seed), 1
    for _ in range(count):
        leaves = size == MOST or (size > 1 and choose.random() < 0.5)
        place = choose.randrange(1, size) if leaves else size
        size += -1 if leaves else 1
        yield (choose.choice(ways) if leaves else "join"), place, size


def rank_counts(run: Path) -> list[int]:
    """Return the number of ranks of each start of a run."""
    path = run / "environment.json"
    return [start["processes"] for start in json.loads(path.read_text(encoding="utf-8"))] if path.exists() else []


def require_undisturbed(path: Path, epochs: int) -> None:
    """Require that the run `many` below `path` has the weights of an undisturbed run on one process."""
    assert here("train", *recipe(epochs), "--processes", 1, "--name", "one", cwd=path) == 0
    assert weights(path / "runs/many") == weights(path / "runs/one")
