"""Repository of a trained model for the Hugging Face Hub: weights, recipe, certificate and model card."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from samestep.checkpoint.manifest import file_names, verify
from samestep.checkpoint.store import CheckpointFolder, read_state
from samestep.config import Recipe
from samestep.errors import InputError, RunError
from samestep.loggers.logger import format_metric
from samestep.recipes.recipe_files import (
    differences,
    make_recipe,
    read_dataset_info,
    recipe_data,
    write_dataset_info,
    write_recipe,
)
from samestep.tools.report.results import CERTIFICATE_FILE, read_certificate_file
from samestep.tools.report.run import Run, read_run

WEIGHTS = "model.safetensors"
_AVERAGE = {"average.safetensors"}  # of a run with a moving average, which its evaluations use
_CARD = """---
library_name: samestep
tags:
- samestep
- pytorch
---

# {run}

`{model}`, trained on `{data}` for {step} steps{software}.
{evaluation}
## Use

```text
samestep eval recipe.yaml --pretrained model.safetensors
```

## Reproduction

```text
pip install 'samestep[recipes]'
samestep train recipe.yaml --name again
samestep push runs/again --checkpoint {step} --out again
```

SHA-256 of `model.safetensors`: `{sha256}`

{notes}
"""


@dataclass(frozen=True)
class ModelRepository:
    """Contents of a repository.

    Attributes:
        step: optimizer steps of the checkpoint.
        sha256: hash of the weights.
        metrics: loss and metrics of the evaluation at this step; empty without one.
    """

    step: int
    sha256: str
    metrics: dict[str, float]


def write_repository(run: Path, which: str, certificate: Path | None, out: Path) -> ModelRepository:
    """Write the files of a checkpoint into the empty folder `out`. No code of the recipe is executed.

    Args:
        run: directory of the run.
        which: the checkpoint: `best`, `last`, `epoch-N` or a step.
        certificate: `certificate.json` of `samestep verify`, or None.
        out: the folder.

    Raises:
        InputError: there is no such run, or the certificate is not one.
        CheckpointError: the checkpoint does not exist or is damaged.
    """
    log = read_run(run, run.name)
    checkpoint = CheckpointFolder(run / "checkpoints").find(which)
    files = [WEIGHTS, *_AVERAGE & file_names(checkpoint)]
    verify(checkpoint, *files)
    progress = read_state(checkpoint).progress
    recipe = make_recipe(progress.recipe, (), origin=str(checkpoint))
    verified = None if certificate is None else read_certificate_file(certificate)
    save_file({name: tensor for file in files for name, tensor in load_file(checkpoint / file).items()}, out / WEIGHTS)
    values = log.evaluation_values(log.events.evaluations.get(progress.step)).items()
    metrics = {name: value for name, value in values if not name.startswith("train_")}
    repository = ModelRepository(progress.step, sha256((out / WEIGHTS).read_bytes()).hexdigest(), metrics)
    write_recipe(recipe, out / "recipe.yaml")
    write_dataset_info(read_dataset_info(run), out)
    if certificate is not None:
        shutil.copyfile(certificate, out / CERTIFICATE_FILE)
    (out / "README.md").write_text(_card(log, recipe, repository, verified), encoding="utf-8")
    return repository


def upload(folder: Path, repository: ModelRepository, name: str, *, private: bool) -> str:
    """Upload the files to a repository of the Hub, which is created if it does not exist; return its address.

    Raises:
        InputError: the package huggingface_hub is not installed, or the name is not one of a repository.
        RunError: the Hub refuses the repository or the files, or cannot be reached.
    """
    try:
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HFValidationError
    except ModuleNotFoundError as error:
        raise InputError(
            "samestep push needs the package huggingface_hub, which is not installed",
            expected="the client of the Hub; --out DIR writes the files without it",
            fix="pip install 'samestep[hub]'",
            code="E_NOT_INSTALLED",
        ) from error
    api = HfApi()
    try:
        api.create_repo(name, private=private, exist_ok=True)
        commit = api.upload_folder(repo_id=name, folder_path=folder, commit_message=f"Step {repository.step}")
    except HFValidationError as error:
        raise InputError(str(error), expected="USER/NAME", fix="another name", code="E_HUB") from error
    except Exception as error:  # errors of the client and of its HTTP library, which versions change
        raise RunError(
            f"the upload to {name} failed: {(str(error).strip().splitlines() or [type(error).__name__])[0]}",
            expected="a token with write access to the repository, and a connection to the Hub",
            fix="hf auth login; or --out DIR, and upload the folder yourself",
            code="E_HUB",
        ) from error
    return str(commit.repo_url)


def _card(run: Run, recipe: Recipe, repository: ModelRepository, certificate: Mapping[str, Any] | None) -> str:
    """Return the model card."""
    start: Mapping[str, Any] = run.starts[-1] if run.starts else {}
    software = ", ".join(f"{name} {start[name]}" for name in ("samestep", "torch") if name in start)
    rows = [f"| {name} | {format_metric(name, value)} |" for name, value in repository.metrics.items()]
    notes = [
        "It is the same on any number of processes with the same software and type of processor."
        if recipe.step.reduction == "exact"
        else "With `reduction: fast`, weights of other numbers of processes are equal to rounding."
    ]
    if certificate is not None:
        subject, verb = certificate["facts"]["subject"], "hold" if certificate["holds"] else "do not hold"
        notes.append(f"`{CERTIFICATE_FILE}`: the comparisons of `samestep verify` with `{subject}` {verb}.")
        if certificate["recipe"] is None:
            notes.append("It belongs to a script, not to the recipe of these weights.")
        elif lines := differences(certificate["recipe"], recipe_data(recipe)):
            notes.append(f"Its recipe differs from that of these weights: {'; '.join(f'`{line}`' for line in lines)}.")
    return _CARD.format(
        run=run.name,
        model=recipe.model.name,
        data=recipe.data.name,
        step=repository.step,
        software=f" with {software}" if software else "",
        evaluation="\n".join(["", "| evaluation | |", "| --- | --- |", *rows, ""]) if rows else "",
        sha256=repository.sha256,
        notes=" ".join(notes),
    )
