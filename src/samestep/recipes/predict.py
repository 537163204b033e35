"""Answers of a trained model to what people have."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from samestep.config import Recipe, RunOptions
from samestep.data.tensors import map_tensors
from samestep.data.transfer import move
from samestep.engine.forward import autocast, call_model
from samestep.errors import InputError
from samestep.recipes.facts import DataFacts
from samestep.recipes.task import Answer, Task
from samestep.recipes.trained import task_of, trained_model
from samestep.runtime.session import start


def predict(
    recipe: Recipe, options: RunOptions, facts: DataFacts, checkpoint: Path, files: tuple[Path, ...], out: Path | None
) -> list[Answer]:
    """What the model says of each file, in order; pictures go to the folder `out`, if one is given.

    Raises:
        InputError: a file cannot be read, or the task has no pictures.
    """
    task = task_of(recipe, facts)
    if out is not None and task.picture is None:
        raise InputError("--out, but there is nothing to see", rule="pictures of segmentation", do="leave --out out")
    with start(device=options.device, reduction=recipe.step.reduction, threads=recipe.step.threads) as world:
        model = trained_model(recipe, facts, checkpoint).to(world.device)
        with torch.no_grad(), autocast(recipe.step.precision, world.device):
            found = _outputs(task, model, files, world.device)
            return [_answer(task, file, outputs, out) for file, outputs in found]


def complete(
    recipe: Recipe, options: RunOptions, facts: DataFacts, checkpoint: Path, prompt: str, tokens: int
) -> Answer:
    """How the model goes on after `prompt`.

    Raises:
        InputError: the model is of another kind.
    """
    task = task_of(recipe, facts)
    if task.complete is None:
        raise InputError(
            f"--prompt, but the model takes {task.reads}", rule="language models go on from a prompt", do="give files"
        )
    with start(device=options.device, reduction=recipe.step.reduction, threads=recipe.step.threads) as world:
        model = trained_model(recipe, facts, checkpoint).to(world.device)
        with torch.no_grad(), autocast(recipe.step.precision, world.device):
            return {"prompt": prompt, "text": task.complete(model, prompt, tokens)}


def _outputs(
    task: Task, model: torch.nn.Module, files: Iterable[Path], device: torch.device
) -> Iterator[tuple[Path, Any]]:
    for file in files:
        inputs = map_tensors(task.read(file), lambda tensor: tensor.unsqueeze(0))
        outputs = call_model(model, move(inputs, device))
        yield file, map_tensors(outputs, lambda tensor: tensor[0].float().cpu())


def _answer(task: Task, file: Path, outputs: Any, out: Path | None) -> Answer:
    answer = {"file": str(file), **task.tell(outputs)}
    if out is not None:
        assert task.picture is not None
        out.mkdir(parents=True, exist_ok=True)
        path = out / f"{file.stem}.png"
        task.picture(file, outputs).save(path)
        answer["picture"] = str(path)
    return answer
