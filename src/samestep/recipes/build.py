"""From a recipe to the objects that train it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from samestep.config import ModelPart, OptimizerPart, Part, Recipe, RunOptions, default_workers
from samestep.data.loader import Loader
from samestep.engine.learning_rate import scale_rates
from samestep.engine.loss import LossFunction
from samestep.engine.step import Engine
from samestep.errors import RecipeError
from samestep.metrics import CountMetric, LossMetric, build_metrics
from samestep.recipes.facts import DataFacts
from samestep.recipes.groups import parameter_groups, scale_layers
from samestep.recipes.masks.foreground import with_foreground_weight
from samestep.recipes.names import DATA, LOSSES, MODELS, OPTIMIZERS, call, find, takes
from samestep.recipes.schedule import schedule_factor
from samestep.recipes.splits import Splits
from samestep.recipes.weights.start import freeze, require_same_weights, take_matching
from samestep.runtime.processors import read_processors
from samestep.runtime.random_state import derive_seed, preserved_generators, seed_generators
from samestep.runtime.session import start
from samestep.runtime.world import World


@dataclass(frozen=True)
class Built:
    """What a recipe stands for.

    Attributes:
        notes: what a person should be told: weights that did not match, parameters that are frozen, a rate that was
            scaled.
        facts: what of the data the model depends on.
    """

    engine: Engine
    train: Loader
    evaluation: Loader
    metrics: list[CountMetric | LossMetric]
    notes: tuple[str, ...]
    facts: DataFacts


def world_of(recipe: Recipe, options: RunOptions) -> AbstractContextManager[World]:
    """The world that a recipe is trained in, as `samestep.start` gives it."""
    rules = recipe.step
    return start(device=options.device, reduction=rules.reduction, threads=rules.threads, strategy=recipe.strategy)


def build(recipe: Recipe, options: RunOptions, world: World) -> Built:
    """Everything that a run needs, the same on every rank.

    Raises:
        InputError: something that the recipe names is not there or does not fit.
    """
    splits = _splits(recipe.data)
    ignored = recipe.loss.options.get("ignore_index", -100)
    metrics = build_metrics(recipe.metrics, len(splits.classes), world.device, ignore_index=ignored)
    gets_values = recipe.strategy.meta and world.layout.shard > 1
    with torch.device("meta") if gets_values and not world.is_main else nullcontext():
        model, notes = build_model(recipe, splits.classes, splits.model_options)
    if recipe.model.pretrained is not None and not gets_values:
        require_same_weights(model, world)
    notes = splits.notes + notes
    train, evaluation = _loaders(recipe, options, splits, world)
    optimizer = _optimizer(recipe.optimizer, model)
    notes += scale_rates(optimizer, recipe.batch_size, recipe.learning_rate)
    notes += scale_layers(optimizer, recipe.optimizer)
    scheduler = LambdaLR(optimizer, schedule_factor(recipe.schedule, len(train), recipe.epochs))
    weighted, told = with_foreground_weight(recipe.loss, splits, recipe.data.bad_samples, world)
    loss: LossFunction = _loss(weighted)
    notes += told
    every = options.check_every
    ema = recipe.ema.decay if recipe.ema is not None else None
    engine = Engine(
        model, optimizer, loss, world=world, scheduler=scheduler, rules=recipe.step, check_every=every, ema=ema
    )
    facts = DataFacts(splits.classes, splits.model_options)
    return Built(engine, train, evaluation, metrics, notes, facts)


def _splits(part: Part) -> Splits:
    splits = call(find(part.name, DATA, "data"), part.options, where="data.options")
    if not isinstance(splits, Splits):
        raise RecipeError(
            f"data {part.name!r} returned a {type(splits).__name__}",
            rule="a function named as data returns samestep.recipes.splits.Splits",
            do="wrap its datasets in Splits(train=..., evaluation=..., classes=...)",
        )
    return splits


def build_model(
    recipe: Recipe, classes: Sequence[str], data_options: Mapping[str, Any]
) -> tuple[torch.nn.Module, tuple[str, ...]]:
    """The model with the weights that it starts from, and what is to be told of them.

    Args:
        classes: of the data; their number is an option of models that take it.
        data_options: further options of a model that follow from the data.
    """
    part: ModelPart = recipe.model
    builder = find(part.name, MODELS, "model")
    options = dict(part.options)
    if part.name.startswith("torchvision:") or takes(builder, "num_classes"):
        options.setdefault("num_classes", len(classes))
    options = {name: value for name, value in data_options.items() if takes(builder, name)} | options
    # Initial weights are a function of the seed; what draws afterwards must not depend on how many they were.
    with preserved_generators():
        seed_generators(derive_seed("model", recipe.step.seed))
        model: torch.nn.Module = call(builder, options, where="model.options")
    notes: list[str] = []
    if part.pretrained is not None:
        matched = take_matching(model, Path(part.pretrained))
        notes += matched.notes
    if part.freeze:
        names = freeze(model, part.freeze)
        notes.append(f"frozen: {len(names)} of {len(list(model.parameters()))} parameters")
    return model, tuple(notes)


def _loaders(recipe: Recipe, options: RunOptions, splits: Splits, world: World) -> tuple[Loader, Loader]:
    workers = options.workers
    if workers is None:
        workers = default_workers(read_processors().usable, world.size) if splits.reads_files else 0
    make = partial(
        Loader,
        batch_size=recipe.batch_size,
        shards=recipe.shards,
        world=world,
        seed=recipe.step.seed,
        workers=workers,
        prefetch=options.prefetch,
        bad_samples=recipe.data.bad_samples,
        count_tokens=splits.count_tokens,
    )
    train_collate = splits.train_collate or splits.collate
    train = make(splits.train, shuffle=True, collate=train_collate, lengths=splits.train_lengths)
    return train, make(splits.evaluation, collate=splits.collate, lengths=splits.evaluation_lengths)


def _optimizer(part: OptimizerPart, model: torch.nn.Module) -> torch.optim.Optimizer:
    groups = parameter_groups(model, part)
    try:
        optimizer = call(find(part.name, OPTIMIZERS, "optimizer"), part.options, groups, where="optimizer.options")
    except ValueError as error:
        raise RecipeError(
            f"optimizer: {error}", rule=f"what {part.name} takes", do="correct optimizer.options"
        ) from error
    assert isinstance(optimizer, torch.optim.Optimizer)
    return optimizer


def _loss(part: Part) -> LossFunction:
    function = find(part.name, LOSSES, "loss")
    if isinstance(function, type):  # a criterion class, such as torch.nn:CrossEntropyLoss
        return call(function, part.options, where="loss.options")  # type: ignore[no-any-return]
    unknown = [key for key in part.options if not takes(function, key)]
    if unknown:
        raise RecipeError(
            f"loss.options.{unknown[0]} is not an option", rule=f"parameters of {part.name}", do="remove it"
        )
    return partial(function, **part.options) if part.options else function
