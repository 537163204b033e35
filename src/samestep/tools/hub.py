"""Repository of a trained model for the Hugging Face Hub: weights, recipe, certificate and model card."""

from __future__ import annotations

import json
import shutil
from hashlib import sha256
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from samestep.checkpoint.store import CheckpointFolder, file_names, read_state, verify
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
from samestep.tools.report.run import read_run
from samestep.tools.templates import render
from samestep.tools.verify.verification import FORMAT

WEIGHTS = "model.safetensors"
_AVERAGE = {"average.safetensors"}  # of a run with a moving average, which its evaluations use


def write_repository(run: Path, which: str, certificate: Path | None, out: Path) -> dict[str, Any]:
    """Write the files of the checkpoint `which` into the empty folder `out`; return step, metrics and SHA-256.

    No code of the recipe is executed.

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
    write_recipe(recipe, out / "recipe.yaml")
    write_dataset_info(read_dataset_info(run), out)
    save_file(
        {name: tensor for file in files for name, tensor in load_file(checkpoint / file).items()},
        out / WEIGHTS,
    )
    values = log.evaluation_values(log.events.evaluations.get(progress.step)).items()
    metrics = {name: value for name, value in values if not name.startswith("train_")}
    facts = {
        "step": progress.step,
        "sha256": sha256((out / WEIGHTS).read_bytes()).hexdigest(),
        "metrics": metrics,
    }
    verified = None
    lines = list[str]()
    if certificate is not None:
        verified = _read_certificate(certificate)
        shutil.copyfile(certificate, out / "certificate.json")
        lines = differences(verified["recipe"], recipe_data(recipe))
    start = log.starts[-1] if log.starts else {}
    software = ", ".join(f"{name} {start[name]}" for name in ("samestep", "torch") if name in start)
    texts = {name: format_metric(name, value) for name, value in metrics.items()}
    others = {
        "run": log.name,
        "recipe": recipe,
        "software": software,
        "certificate": verified,
        "differences": lines,
    }
    card = render("model_card.md", **{**facts, **others, "metrics": texts})
    (out / "README.md").write_text(card, encoding="utf-8")
    return facts


def _read_certificate(path: Path) -> dict[str, Any]:
    """Return `holds`, `subject` and the verified `recipe` of a certificate, which is empty for a script.

    Raises:
        InputError: the certificate is missing, damaged or of another format.
    """
    try:
        data = json.loads(path.read_bytes())
        if data["format"] != FORMAT:
            raise ValueError(f"format {data['format']}, not {FORMAT}")
        subject = " ".join([str(data["subject"]), *map(str, data["arguments"])])
        return {
            "holds": bool(data["holds"]),
            "subject": subject,
            "recipe": dict(data["recipe"] or {}),
        }
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError(
            f"{path} cannot be read: {error}",
            expected=f"a folder written by samestep verify --out, which contains {path.name}",
            fix="correct the path, or repeat samestep verify --out",
            code="E_UNREADABLE",
        ) from error


def upload(folder: Path, step: int, name: str) -> str:
    """Upload the files to a repository of the Hub, which is created if it does not exist; return its address.

    Raises:
        RunError: the Hub refuses the repository or the files, or cannot be reached.
    """
    try:
        from huggingface_hub import HfApi

        HfApi().create_repo(name, exist_ok=True)
        commit = HfApi().upload_folder(
            repo_id=name, folder_path=folder, commit_message=f"Step {step}"
        )
    except (
        Exception
    ) as error:  # errors of the client and of its HTTP library, which versions change
        raise RunError(
            f"the upload to {name} failed: {str(error).strip() or type(error).__name__}",
            expected="USER/NAME, pip install 'samestep[hub]', a token with write access, a connection to the Hub",
            fix="hf auth login; or --out DIR, and upload the folder yourself",
            code="E_IO",
        ) from error
    return str(commit.repo_url)
