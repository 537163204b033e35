"""Rank functions for `zoo/test_bad_images.py` and `zoo/test_model_libraries.py`."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import samestep
from helpers.models import digest, seeded
from samestep.config import Recipe, RunOptions
from samestep.distributed.world import all_gather
from samestep.errors import DataError
from samestep.recipes.bad_samples import IndexedSamples, collate_usable
from samestep.recipes.builder import build, start_world
from samestep.zoo.images import load_image_list, load_images
from samestep.zoo.splits import Splits

BATCH, MICROBATCHES = 6, 4


class Net(nn.Sequential):
    """A small model without batch norm."""

    def __init__(self) -> None:
        super().__init__(nn.Conv2d(3, 4, 3, stride=4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2))


def outcomes(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """Return the outcome of two epochs on the images of each folder or list.

    With `stop`, the messages of the errors; with `skip`, the hash of the weights and the skipped samples.
    """
    samestep.init(device="cpu", reduction="exact")
    found = []
    for path in paths:
        splits = (load_images if path.is_dir() else load_image_list)(str(path), image_size=8, evaluation_fraction=0.4)
        found.append({"stop": _messages(splits), "skip": _trained(splits)})
    return found


def _messages(splits: Splits) -> list[str]:
    messages = []
    for data in (splits.train, splits.evaluation):
        try:
            for _ in samestep.loader(data, BATCH):
                pass
        except DataError as error:
            messages.append(str(error))
    return sorted(messages)


def _trained(splits: Splits) -> dict[str, object]:
    collate = partial(collate_usable, collate=splits.collate)
    train, evaluation = (
        samestep.loader(IndexedSamples(data, skips=True), BATCH, collate_fn=collate)
        for data in (splits.train, splits.evaluation)
    )
    model = samestep.parallel(seeded(0, Net, dtype=torch.float32), reduction="exact", microbatches=MICROBATCHES)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    left_out: list[str] = []
    for _ in range(2):
        for batch in train:
            left_out += batch.skipped
            if batch.data is not None:
                images, targets = batch.data
                optimizer.zero_grad()
                functional.cross_entropy(model(images), targets).backward()
                optimizer.step()
    of_evaluation = [text for batch in evaluation for text in batch.skipped]
    return {"weights": digest(model), "left_out": [sorted(left_out), sorted(of_evaluation)]}


def built(recipe: Recipe) -> list[tuple[str, tuple[str, ...]]]:
    """Return the hash of the initial model and the notes, by rank."""
    options = RunOptions(device="cpu", workers=0)
    with start_world(recipe, options) as world:
        job = build(recipe, options, world)
        return [(text, tuple(notes)) for text, notes in all_gather([digest(job.driver.model), job.notes], world)]


def built_from_own_files(recipes: list[Recipe]) -> None:
    """Build a different recipe on every rank."""
    with start_world(recipes[0], RunOptions(device="cpu")) as world:
        build(recipes[world.rank], RunOptions(device="cpu", workers=0), world)
