"""What every rank of a `samestep` command does."""

from __future__ import annotations

import platform
import warnings
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import samestep.checkpoint.state as checkpoints
from samestep.checkpoint.lock import FolderLock
from samestep.checkpoint.store import CheckpointFolder
from samestep.config import Recipe, RunOptions
from samestep.data.loader import MANY_WORKERS
from samestep.recipes.build import Built, build, world_of
from samestep.recipes.by_class import evaluate_by_class
from samestep.recipes.facts import write_facts
from samestep.recipes.parse import recipe_data
from samestep.recipes.pictures import draw_first
from samestep.recipes.trained import without_pretrained
from samestep.recipes.weights.start import take_all
from samestep.record.curves import Curves
from samestep.record.environment import append_environment
from samestep.record.events import EventFile, Recorder
from samestep.record.progress import ProgressLine
from samestep.record.vitals import Vitals
from samestep.runtime.env import read_environment
from samestep.runtime.world import World
from samestep.trainer import Trainer


def train(recipe: Recipe, options: RunOptions, run: Path, checkpoint: Path | None, first_step: int) -> dict[str, Any]:
    """Train `recipe` in the run directory `run`, from `checkpoint` if there is one; the summary as plain data.

    `stop_signal` in it is the signal that asked this rank to end, if one did.
    """
    if options.tuned is not None:
        warnings.filterwarnings("ignore", message=MANY_WORKERS)  # that as many are faster has been measured
    with (
        world_of(recipe, options) as world,
        FolderLock(run) if world.is_main else nullcontext(),
        Vitals(run, world, first_step) as vitals,
    ):
        return _train(recipe, options, run, checkpoint, first_step, world, vitals)


def _train(
    recipe: Recipe,
    options: RunOptions,
    run: Path,
    checkpoint: Path | None,
    first_step: int,
    world: World,
    vitals: Vitals,
) -> dict[str, Any]:
    built = build(recipe if checkpoint is None else without_pretrained(recipe), options, world)
    folder = CheckpointFolder(run / "checkpoints", options.keep)
    recorder = _recorder(world, options, run, first_step)
    trainer = Trainer(
        built.engine,
        built.train,
        built.evaluation,
        list(built.metrics),
        folder=folder,
        recorder=recorder,
        recipe=recipe_data(recipe),
        epochs=recipe.epochs,
        options=options,
    )
    if world.is_main:
        folder.clean()
        append_environment(run / "environment.json", _environment(built, world, recipe, options, first_step))
        write_facts(built.facts, run)
    if checkpoint is not None:
        trainer.resume(checkpoint)
    else:
        for note in built.notes:
            recorder.tell("note", text=note)
    if world.layout.is_split:
        recorder.tell("note", text=world.layout.picture())
    if world.layout.replicate > 1 and recipe.strategy.remark is not None:
        recorder.tell("note", text=recipe.strategy.remark)
    if options.tuned is not None:
        recorder.tell("note", text=_told_of_tuning(options))
    vitals.follow(lambda: trainer.done)
    with recorder:
        summary = trainer.fit()
    return {**asdict(summary), "stop_signal": world.stop_signal}


def evaluate(recipe: Recipe, options: RunOptions, checkpoint: Path, report: Path | None = None) -> dict[str, Any]:
    """Evaluate the weights of a checkpoint, or of a file; `loss`, `samples` and the recipe's metrics.

    Args:
        report: also how often each class was taken for each other one, as `by_class`; where a model says something of
            each pixel, pictures of the first samples go to `overlays` in this folder.
    """
    with world_of(recipe, options) as world:
        built = build(replace(without_pretrained(recipe), ema=None), options, world)
        if checkpoint.is_dir():
            checkpoints.load_model(checkpoint, built.engine.model, built.engine.pieces, averaged=recipe.ema is not None)
        else:
            take_all(built.engine.model, checkpoint)
        if report is not None:
            values = evaluate_by_class(built, recipe)
            values["by_class"]["pictures"] = draw_first(built, recipe, report / "overlays")
            return values
        return built.engine.evaluate(built.evaluation, built.metrics)


def gpu_names() -> list[str]:
    """What the GPUs that torch sees are called, in torch's order."""
    return [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]


def _recorder(world: World, options: RunOptions, run: Path, first_step: int) -> Recorder:
    if not world.is_main:
        return Recorder([])
    console = Console(stderr=True, quiet=options.quiet)
    return Recorder([EventFile(run / "events.jsonl"), Curves(run / "tensorboard", first_step), ProgressLine(console)])


def _told_of_tuning(options: RunOptions) -> str:
    many = f"workers {options.workers}" + (f", prefetch {options.prefetch}" if options.workers else "")
    return f"{many}: tuned on this machine, {options.tuned}; --no-tuned leaves it"


def _environment(built: Built, world: World, recipe: Recipe, options: RunOptions, first_step: int) -> dict[str, Any]:
    gpu = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else None
    return {
        "from_step": first_step,
        "processes": world.size,
        "strategy": built.engine.strategy,
        "remark": recipe.strategy.remark if world.layout.replicate > 1 else None,
        "visible_devices": read_environment().visible_devices if gpu else None,
        "device": gpu or platform.processor() or platform.machine(),
        "threads": recipe.step.threads,
        "workers": built.train.workers,
        "prefetch": built.train.prefetch,
        "tuned": options.tuned,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "system": platform.system(),
    }
