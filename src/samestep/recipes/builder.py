"""Names of datasets, models and losses, and construction of the objects of a recipe.

A component that is missing or invalid raises `InputError`, mostly `RecipeError`.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from samestep.checkpoint.contents import SavedParameters
from samestep.config import NamedConfig, Recipe, RunOptions, default_workers
from samestep.config.key_suggestions import did_you_mean
from samestep.data.whole_batches import WholeBatches
from samestep.distributed.resources import usable_processors
from samestep.distributed.rng import derive_seed, preserved_generators, seed_generators
from samestep.distributed.world import World
from samestep.errors import RecipeError
from samestep.launcher.process_state import process_state
from samestep.loading import loader
from samestep.metrics.metrics import Accuracy, CountMetric, LossMetric, build_metrics
from samestep.parallelize import parallel, world_of_process
from samestep.recipes.bad_samples import IndexedSamples, collate_usable
from samestep.recipes.loss import LossFunction, RecipeLoss
from samestep.recipes.models import (
    check_same_weights,
    freeze,
    load_matching,
    set_training_mode,
    transform_model,
    uses_batch_statistics,
)
from samestep.recipes.optimizers import (
    OPTIMIZERS,
    apply_layer_decay,
    build_optimizer,
    scale_rates,
    schedule_factor,
)
from samestep.recipes.training_step import Driver
from samestep.session import start
from samestep.strategies.divided_parameters import divided_parameters
from samestep.zoo.model_libraries import find_in_library, torchvision_model, torchvision_names
from samestep.zoo.options import call, returned, takes, unknown_option
from samestep.zoo.splits import Splits

# Short names and import paths.
# Texts, not functions: data of images import torchvision, which other recipes do not need.
DATA = {
    "digits": "samestep.zoo.digits:load_digits",
    "images": "samestep.zoo.images:load_images",
    "image_list": "samestep.zoo.images:load_image_list",
    "language": "samestep.zoo.language:load_language",
    "segmentation": "samestep.zoo.segmentation:load_segmentation",
    "texts": "samestep.zoo.texts:load_texts",
    "tokens": "samestep.zoo.language:load_tokens",
}
MODELS = {
    "digits_net": "samestep.zoo.digits:DigitsNet",
    "gpt": "samestep.zoo.models:GPT",
    "gpt2": "samestep.zoo.models:gpt2",
    "tokens_net": "samestep.zoo.models:TokensNet",
    "unet": "samestep.zoo.models:unet",
    "unet_vgg16": "samestep.zoo.models:unet_vgg16",
    "unet_resnet34": "samestep.zoo.models:unet_resnet34",
    "unet_resnet101": "samestep.zoo.models:unet_resnet101",
    "unet_small": "samestep.zoo.models:UNet",
}
LOSSES = {
    "cross_entropy": "samestep.zoo.losses:cross_entropy",
    "bce_with_logits": "samestep.zoo.losses:bce_with_logits",
    "dice_loss": "samestep.zoo.losses:dice_loss",
    "dice_plus": "samestep.zoo.losses:dice_plus",
}
# Functions from the class names and the options of the data to a `samestep.zoo.splits.Task`.
TASKS: dict[str, str] = {
    "digits": "samestep.zoo.digits:digits_task",
    "language": "samestep.zoo.language:language_task",
    "texts": "samestep.zoo.texts:text_task",
    "images": "samestep.zoo.images:image_task",
    "image_list": "samestep.zoo.images:image_task",
    "segmentation": "samestep.zoo.segmentation:segmentation_task",
}


def find(name: str, known: Mapping[str, str], kind: str) -> Callable[..., Any]:
    """Return the object of a short name of `known`, or of an import path `package.module:name`.

    Models can also be `torchvision:MODEL` (or `MODEL` alone), `timm:MODEL` and
    `transformers:MODEL`. Import paths may refer to modules of the current directory. `kind` names
    the kind of the object in errors, such as `model`.
    """
    if known is MODELS and name not in known and (builder := find_in_library(name)) is not None:
        return builder
    module, colon, attribute = known.get(name, name).partition(":")
    if not colon:
        models = torchvision_names() if known is MODELS else []
        if name in models:
            return torchvision_model(name)
        library = ", a model of torchvision" if models else ""
        expected = f"one of {', '.join(known)}{library}, or package.module:attribute"
        fix = did_you_mean(name, [*known, *models], "give the import path")
        raise _unknown(f"{kind} {name!r} is unknown", fix, expected)
    if not all(part.isidentifier() for part in (*module.split("."), attribute)):
        raise _unknown(f"{kind} {name!r} is no import path", "such as my_module:MyModel")
    directory = str(Path.cwd())
    if directory not in sys.path and find_spec(module.partition(".")[0]) is None:
        # Last, and for the user's own modules only: installed packages take precedence.
        sys.path.append(directory)
    try:
        imported = import_module(module)
        # Now: the file can be edited while the data are read.
        process_state.source_files.note_imports()
        result = getattr(imported, attribute)
    except ModuleNotFoundError as error:
        if error.name is None or not module.startswith(error.name):
            raise  # the module exists, one of its own imports does not
        raise _unknown(f"{kind} {name!r}: no module {module}", "correct the import path") from error
    except AttributeError as error:
        raise _unknown(f"{kind} {name!r}: {error}", "correct the name after the colon") from error
    if not callable(result):
        problem = f"{kind} {name!r} is a {type(result).__name__}"
        expected = "a function or a class"
        raise _unknown(problem, f"give the import path of {expected}", expected)
    return result  # type: ignore[no-any-return]


def _unknown(problem: str, fix: str, expected: str = "package.module:attribute") -> RecipeError:
    return RecipeError(problem, expected=expected, fix=fix, code="E_UNKNOWN_NAME")


@dataclass(frozen=True)
class Built:
    """Objects of a recipe."""

    driver: Driver
    train: WholeBatches  # training data, whose cursor is the position of the run
    evaluation: WholeBatches
    metrics: list[CountMetric | LossMetric]
    notes: list[str]  # for the user, such as frozen parameters or a scaled learning rate
    splits: Splits  # data sets and their facts
    workers: int  # loader processes of a rank


def without_pretrained(recipe: Recipe) -> Recipe:
    """Return the recipe without its file of weights, for a model that loads a checkpoint."""
    return replace(recipe, model=replace(recipe.model, pretrained=None))


@contextmanager
def start_world(recipe: Recipe, options: RunOptions) -> Iterator[World]:
    """Join the other ranks, which divide the calls of parallel models, and yield the world."""
    reduction = recipe.step.reduction
    session = start(
        device=options.device,
        reduction=reduction,
        threads=recipe.step.threads,
        strategy=recipe.strategy,
    )
    with session as world, world_of_process(world, reduction):
        yield world


def build(recipe: Recipe, options: RunOptions, world: World) -> Built:
    """Return the objects of a recipe, in the world of `start_world`. A collective operation."""
    recipe = recipe.with_microbatches()
    splits = _splits(recipe.data)
    loss = RecipeLoss(build_loss(recipe, world.device))
    metrics = build_metrics(recipe.metrics, len(splits.classes), ignore_index=loss.ignore_index)
    model, notes = build_model(recipe, splits.classes, splits.model_options)
    # A file can differ between machines; other initial weights are a function of the seed.
    if recipe.model.pretrained is not None:
        check_same_weights(model, world)
    workers = options.workers
    if workers is None:
        workers = 0
        if splits.reads_files:
            workers = default_workers(usable_processors(), world.size)
    has_norm = uses_batch_statistics(model)
    train, evaluation = _loaders(recipe, splits, workers, has_batch_norm=has_norm)
    if train.samples_of(0) < len(splits.train) and not recipe.data.drop_last:
        notes.append(
            "the last batch of an epoch has 1 sample, too few for batch norm, and is left out"
        )
    model = _parallel_model(model, recipe, world)
    kind = find(recipe.optimizer.name, OPTIMIZERS, "optimizer")
    # After the division, which can replace parameters: the optimizer has those of this rank.
    optimizer = build_optimizer(recipe.optimizer, kind, model)
    notes += scale_rates(optimizer, recipe.batch_size, recipe.learning_rate)
    notes += apply_layer_decay(optimizer, recipe.optimizer)
    factor = schedule_factor(recipe.schedule, len(train), recipe.epochs)
    driver = Driver(
        model,
        optimizer,
        loss,
        world=world,
        recipe=recipe,
        # After all changes of rates: `LambdaLR` takes the present ones as those of factor 1.
        scheduler=LambdaLR(optimizer, factor),
        parameters=divided_parameters(model) or SavedParameters(model),
        accuracies=[metric for metric in metrics if isinstance(metric, Accuracy)],
    )
    return Built(
        driver=driver,
        train=train,
        evaluation=evaluation,
        metrics=metrics,
        notes=notes,
        splits=splits,
        workers=workers,
    )


def _parallel_model(model: torch.nn.Module, recipe: Recipe, world: World) -> torch.nn.Module:
    """Return the model on the device of this rank, with calls that ranks divide."""
    config = recipe.step
    model.to(world.device)
    # Before the division: the trial of a call compares the model as it will be trained.
    transform_model(model, config, world.device)
    return parallel(
        model,
        strategy=recipe.strategy,
        reduction=config.reduction,
        batch_norm=config.batch_norm,
        microbatches=recipe.microbatch_count,
        tensor_slices=config.tensor_slices,
        tensor_plan=config.tensor_plan,
    )


def _splits(config: NamedConfig) -> Splits:
    splits = call(find(config.name, DATA, "data"), config.options, where="data.options")
    fix = "wrap the datasets in Splits(train=..., evaluation=..., classes=...)"
    return returned(splits, Splits, f"data {config.name!r}", fix)


def build_model(
    recipe: Recipe, classes: Sequence[str], data_options: Mapping[str, Any]
) -> tuple[torch.nn.Module, list[str]]:
    """Return the model with its initial weights, and notes for the user.

    The number of classes is passed to models with an option `num_classes`; `data_options` are model
    options that follow from the data.
    """
    config = recipe.model
    builder = find(config.name, MODELS, "model")
    facts = {"num_classes": len(classes), **data_options}
    options = {name: value for name, value in facts.items() if takes(builder, name)}
    options |= config.options  # the recipe takes precedence over facts of the data
    # Initial weights are a function of the seed; later random numbers must not depend on their
    # number.
    with preserved_generators():
        seed_generators(derive_seed("model", recipe.step.seed))
        model = call(builder, options, where="model.options")
    model = returned(model, torch.nn.Module, f"model {config.name!r}", "return the module")
    notes: list[str] = []
    if config.pretrained is not None:
        notes += load_matching(model, Path(config.pretrained), config.pretrained_prefix)
    if config.freeze or config.freeze_except:
        names = freeze(model, config.freeze, config.freeze_except)
        notes.append(f"frozen: {len(names)} of {len(list(model.parameters()))} parameters")
    set_training_mode(model)
    return model, notes


def _loaders(
    recipe: Recipe, splits: Splits, workers: int, *, has_batch_norm: bool
) -> tuple[WholeBatches, WholeBatches]:
    skips = recipe.data.bad_samples == "skip"
    # Batch norm has no variance of one sample.
    samples = len(splits.train)
    is_single = has_batch_norm and samples % recipe.batch_size == 1 < samples
    options: dict[str, Any] = {
        "seed": recipe.step.seed,
        "num_workers": workers,
        "persistent_workers": workers > 0,  # torch refuses True without workers
    }
    train = loader(
        IndexedSamples(splits.train, skips=skips),
        batch_size=recipe.batch_size,
        shuffle=True,
        collate_fn=partial(collate_usable, collate=splits.train_collate or splits.collate),
        lengths=splits.train_lengths,
        drop_last=recipe.data.drop_last or is_single,
        **options,
    )
    evaluation = loader(
        IndexedSamples(splits.evaluation, skips=skips),
        batch_size=recipe.batch_size,
        collate_fn=partial(collate_usable, collate=splits.collate),
        lengths=splits.evaluation_lengths,
        **options,
    )
    return train, evaluation


def build_loss(recipe: Recipe, device: torch.device) -> LossFunction:
    """Return the loss function of a recipe, with class weights on a device.

    Raises:
        RecipeError: the loss cannot be trained with, or not with the other settings.
    """
    config = recipe.loss
    function = find(config.name, LOSSES, "loss")
    options = dict(config.options)
    if options.get("reduction") == "sum" and recipe.accumulate > 1:
        raise RecipeError(
            f"loss.options.reduction is 'sum' and accumulate is {recipe.accumulate}",
            expected="the mean over a batch: parts of a batch are weighted by their targets",
            fix="remove loss.options.reduction, or set accumulate: 1",
            code="E_INCOMPATIBLE",
        )
    if function.__module__.startswith("torch.nn."):  # the weights of PyTorch's losses are tensors
        for key in ("weight", "pos_weight"):
            if isinstance(options.get(key), list):
                # Float, whatever the numbers: torch refuses integers.
                options[key] = torch.tensor(options[key], dtype=torch.float32, device=device)
    if isinstance(function, type):  # a criterion class, such as torch.nn:CrossEntropyLoss
        criterion = call(function, options, where="loss.options")
        if any(parameter.requires_grad for parameter in getattr(criterion, "parameters", list)()):
            raise RecipeError(
                f"loss {config.name!r} has parameters, which no optimizer updates",
                expected="a loss without parameters: those of the model are trained",
                fix="make the parameters a part of the model, or set requires_grad to False",
                code="E_OPTIMIZER",
            )
        return criterion  # type: ignore[no-any-return]
    for key in options:
        if not takes(function, key):
            names = list(inspect.signature(function).parameters)[2:]  # after outputs and targets
            raise unknown_option("loss.options", key, names)
    if options:
        return partial(function, **options)
    return function
