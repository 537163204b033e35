"""Rank functions for `zoo/images/test_bad.py` and `zoo/test_model_libraries.py`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import samestep
from helpers.models import digest, seeded
from samestep.config import BadSamples, Recipe, RunOptions
from samestep.data.loader import Loader
from samestep.distributed.world import World, all_gather
from samestep.engine.engine import Engine
from samestep.errors import DataError
from samestep.metrics.metrics import build_metrics
from samestep.recipes.builder import build
from samestep.zoo.images.datasets import load_image_list, load_images
from samestep.zoo.splits import Splits

BATCH, MICROBATCHES = 6, 4

Outcome = dict[str, Any]


class Net(nn.Sequential):
    """A model without batch norm, which does not support microbatches of one image."""

    def __init__(self) -> None:
        super().__init__(nn.Conv2d(3, 4, 3, stride=4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2))


def outcomes(paths: Sequence[Path]) -> list[Outcome]:
    """Return the outcome of two epochs and an evaluation on the images of each folder or list.

    With `stop`, the messages of the errors; with `skip`, the hash of the weights, the evaluation and the skipped
    samples.
    """
    with samestep.start(device="cpu") as world:
        return [_outcome(path, world) for path in paths]


def _outcome(path: Path, world: World) -> Outcome:
    splits = (load_images if path.is_dir() else load_image_list)(str(path), image_size=8, evaluation_fraction=0.4)

    def loaders(policy: BadSamples) -> list[Loader]:
        parts = ((splits.train, True), (splits.evaluation, False))
        return [
            Loader(data, batch_size=BATCH, microbatches=MICROBATCHES, world=world, shuffle=shuffle, bad_samples=policy)
            for data, shuffle in parts
        ]

    return {"stop": _messages(loaders("stop"), world), "skip": _trained(*loaders("skip"), splits, world)}


def _messages(loaders: list[Loader], world: World) -> list[str]:
    """Return the errors of all ranks. Computes no steps, in which other ranks would wait."""
    messages = []
    for loader in loaders:
        try:
            for _ in loader:
                pass
        except DataError as error:
            messages.append(str(error))
    return sorted(text for texts in all_gather(messages, world) for text in texts)


def _trained(train: Loader, evaluation: Loader, splits: Splits, world: World) -> dict[str, object]:
    model = seeded(0, Net, dtype=torch.float32)
    engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.2), samestep.cross_entropy, world=world)
    for _ in range(2):
        for batch in train:
            engine.step(batch)
    values = engine.evaluate(evaluation, build_metrics(("accuracy",), len(splits.classes)))
    left_out = [
        sorted(text for texts in all_gather(loader.skipped, world) for text in texts) for loader in (train, evaluation)
    ]
    return {"weights": digest(model), "values": values, "left_out": left_out}


def built(recipe: Recipe) -> list[tuple[str, tuple[str, ...]]]:
    """Return the hash of the initial model and the notes, by rank."""
    with samestep.start(device="cpu") as world:
        job = build(recipe, RunOptions(device="cpu", workers=0), world)
        return [(text, tuple(notes)) for text, notes in all_gather([digest(job.engine.model), job.notes], world)]


def built_from_own_files(recipes: list[Recipe]) -> None:
    """Build a different recipe on every rank."""
    with samestep.start(device="cpu") as world:
        build(recipes[world.rank], RunOptions(device="cpu", workers=0), world)
