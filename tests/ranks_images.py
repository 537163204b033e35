"""What ranks run for `recipes/images/test_bad.py` and `recipes/test_zoo.py`."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import samestep
from models import seeded
from samestep.config import BadSamples, Recipe, RunOptions
from samestep.data.loader import Loader
from samestep.engine.step import Engine
from samestep.errors import DataError
from samestep.metrics import build_metrics
from samestep.recipes.build import build
from samestep.recipes.images.folders import load_images
from samestep.recipes.images.lists import load_image_list
from samestep.recipes.splits import Splits
from samestep.runtime.gather import all_gather
from samestep.runtime.world import World

BATCH, SHARDS = 6, 4

Outcome = dict[str, Any]


class Net(nn.Sequential):
    """Without batch norm, which refuses a shard of one image."""

    def __init__(self) -> None:
        super().__init__(nn.Conv2d(3, 4, 3, stride=4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2))


def outcomes(paths: Sequence[Path]) -> list[Outcome]:
    """What becomes of two epochs and an evaluation of the images of each folder or list.

    Under `stop`: what is said. Under `skip`: the hash of the weights, the numbers of the evaluation, and what was left
    out.
    """
    with samestep.start(device="cpu") as world:
        return [_outcome(path, world) for path in paths]


def _outcome(path: Path, world: World) -> Outcome:
    splits = (load_images if path.is_dir() else load_image_list)(str(path), image_size=8, evaluation_fraction=0.4)

    def loaders(policy: BadSamples) -> list[Loader]:
        given = ((splits.train, True), (splits.evaluation, False))
        return [
            Loader(data, batch_size=BATCH, shards=SHARDS, world=world, shuffle=shuffle, bad_samples=policy)
            for data, shuffle in given
        ]

    return {"stop": _said(loaders("stop"), world), "skip": _trained(*loaders("skip"), splits, world)}


def _said(loaders: list[Loader], world: World) -> list[str]:
    """What any rank is told, without steps, in which the others would wait."""
    said = []
    for loader in loaders:
        try:
            for _ in loader:
                pass
        except DataError as error:
            said.append(str(error))
    return sorted(text for texts in all_gather(said, world) for text in texts)


def _trained(train: Loader, evaluation: Loader, splits: Splits, world: World) -> dict[str, object]:
    model = seeded(0, Net, dtype=torch.float32)
    engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.2), samestep.cross_entropy, world=world)
    for _ in range(2):
        for batch in train:
            engine.step(batch)
    values = engine.evaluate(evaluation, build_metrics(("accuracy",), len(splits.classes), world.device))
    left_out = [
        sorted(text for texts in all_gather(loader.skipped, world) for text in texts) for loader in (train, evaluation)
    ]
    return {"weights": digest(model), "values": values, "left_out": left_out}


def built(recipe: Recipe) -> list[tuple[str, tuple[str, ...]]]:
    """By rank: the hash of what a recipe's model begins with, and the notes."""
    with samestep.start(device="cpu") as world:
        made = build(recipe, RunOptions(device="cpu", workers=0), world)
        return [(text, tuple(notes)) for text, notes in all_gather([digest(made.engine.model), made.notes], world)]


def built_from_own_files(recipes: list[Recipe]) -> None:
    """Each rank builds a recipe of its own."""
    with samestep.start(device="cpu") as world:
        build(recipes[world.rank], RunOptions(device="cpu", workers=0), world)


def digest(model: nn.Module) -> str:
    state = model.state_dict()
    return hashlib.sha256(b"".join(state[name].numpy().tobytes() for name in sorted(state))).hexdigest()
