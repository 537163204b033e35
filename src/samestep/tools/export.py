"""`samestep export`: files of a trained model, and its repository for the Hugging Face Hub."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from samestep.checkpoint.store import CheckpointFolder, file_names, read_state, verify
from samestep.config import Recipe
from samestep.data.batch import map_tensors, tensors_of
from samestep.distributed.disk_operations import read_small
from samestep.errors import InputError, RunError
from samestep.loggers.logger import format_metric
from samestep.recipes.driver import as_arguments, call_model
from samestep.recipes.predict import build_task, trained_model
from samestep.recipes.recipe_files import (
    DatasetInfo,
    differences,
    make_recipe,
    read_dataset_info,
    recipe_data,
    write_dataset_info,
    write_recipe,
)
from samestep.session import start
from samestep.tools.run_log import read_run
from samestep.tools.templates import render
from samestep.tools.verify.verification import FORMAT

_ROWS = 2  # exporters treat a dimension of size 1 as a constant
# Relative to the largest output; other programs add in another order.
_TOLERANCE = 1e-4
_WEIGHTS = "model.safetensors"
_AVERAGE = {"average.safetensors"}  # of a run with a moving average, which its evaluations use


def export(
    recipe: Recipe, info: DatasetInfo, checkpoint: Path, kind: str, out: Path, like: Path | None
) -> float | None:
    """Write the model of a checkpoint to `out`, and compare its outputs with those of the file.

    The kind is `safetensors`, or `torch` (torch.export) or `onnx` with an example input `like`.

    Returns:
        Largest difference of outputs of model and file, relative to the largest output; None for
        weights.

    Raises:
        InputError: the model does not support this format, or the file cannot be written.
        RunError: outputs of the file differ from outputs of the model.
    """
    with start(device="cpu", reduction=recipe.step.reduction, threads=recipe.step.threads):
        model = trained_model(recipe, info, checkpoint)
        inputs = None
        if like is not None:
            sample = build_task(recipe, info).read(like)
            inputs = map_tensors(sample, lambda tensor: torch.stack([tensor] * _ROWS))
        try:
            program = _write(kind, model, inputs, out)
        except Exception as error:  # exporters raise many types
            message = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise InputError(
                f"{out}: no {kind} file: {message}",
                expected="a forward that the exporter can trace, samestep[zoo] for onnx, and free "
                "space",
                fix="another --format, or another --out",
                code="E_EXPORT",
            ) from error
        if program is None:
            return None
        with torch.no_grad():
            difference = _relative_difference(call_model(model, inputs), program(inputs))
    if not difference <= _TOLERANCE:
        raise RunError(
            f"outputs of the {kind} file differ from the model by {difference:.1e} of the largest "
            "output",
            expected=f"at most {_TOLERANCE:.0e}",
            fix="another format, or remove value-dependent branches and random draws from the "
            "model",
            code="E_EXPORT",
        )
    return difference


def _write(kind: str, model: nn.Module, inputs: Any, out: Path) -> Callable[[Any], Any] | None:
    """Write the file, and return a function that runs it; None for weights."""
    if kind == "safetensors":
        # Clones, since safetensors refuses tied tensors; other programs expect each name.
        state = model.state_dict().items()
        save_file({name: tensor.detach().clone().contiguous() for name, tensor in state}, out)
        return None
    arguments, keywords = as_arguments(inputs)
    rows = torch.export.Dim("rows")  # the first dimension of every tensor
    shapes = tuple({0: rows} for _ in (*arguments, *keywords))
    if kind == "onnx":
        return _write_onnx(model, arguments, keywords, shapes, out)
    program = torch.export.export(model, arguments, keywords, dynamic_shapes=shapes, strict=False)
    with warnings.catch_warnings():
        # Raised by torch's own code.
        warnings.filterwarnings("ignore", ".*LeafSpec.*", FutureWarning)
        torch.export.save(program, out)
        loaded = torch.export.load(out).module()
    return lambda inputs: call_model(loaded, inputs)


def _write_onnx(
    model: nn.Module, arguments: Any, keywords: Any, shapes: Any, out: Path
) -> Callable[[Any], Any]:
    """Write an ONNX model, run by ONNX Runtime (https://onnx.ai)."""
    import onnxruntime

    options: dict[str, Any] = {"dynamo": True, "external_data": False, "verbose": False}
    options["dynamic_shapes"] = shapes
    torch.onnx.export(model, arguments, str(out), kwargs=keywords, **options)
    session = onnxruntime.InferenceSession(str(out), providers=["CPUExecutionProvider"])
    names = [entry.name for entry in session.get_inputs()]

    def run(inputs: Any) -> Any:
        arguments, keywords = as_arguments(inputs)
        arrays = (tensor.numpy() for tensor in (*arguments, *keywords.values()))
        feed = dict(zip(names, arrays, strict=True))
        return [torch.from_numpy(array) for array in session.run(None, feed)]

    return run


def _relative_difference(outputs: Any, others: Any) -> float:
    expected = list(tensors_of(outputs))
    actual = list(tensors_of(others))
    if [t.shape for t in expected] != [t.shape for t in actual]:
        return float("inf")
    largest = max(float(t.abs().max()) for t in expected)
    distance = max(float((a - b).abs().max()) for a, b in zip(expected, actual, strict=True))
    return distance / max(largest, 1e-30)


# --- Hugging Face Hub ---------------------------------------------------------------------------


def write_repository(run: Path, which: str, certificate: Path | None, out: Path) -> dict[str, Any]:
    """Write weights, recipe, certificate and model card of the checkpoint `which` into `out`.

    Return step, metrics and SHA-256. No code of the recipe is executed.

    Raises:
        InputError: there is no such run, or the certificate is not one.
        CheckpointError: the checkpoint does not exist or is damaged.
    """
    log = read_run(run, run.name)
    checkpoint = CheckpointFolder(run / "checkpoints").find(which)
    files = [_WEIGHTS, *_AVERAGE & file_names(checkpoint)]
    verify(checkpoint, *files)
    progress = read_state(checkpoint).progress
    recipe = make_recipe(progress.recipe, (), origin=str(checkpoint))
    write_recipe(recipe, out / "recipe.yaml")
    write_dataset_info(read_dataset_info(run), out)
    weights: dict[str, torch.Tensor] = {}
    for file in files:
        weights |= load_file(checkpoint / file)
    save_file(weights, out / _WEIGHTS)
    values = log.evaluation_values(log.events.evaluations.get(progress.step)).items()
    metrics = {name: value for name, value in values if not name.startswith("train_")}
    facts = {
        "step": progress.step,
        "sha256": sha256((out / _WEIGHTS).read_bytes()).hexdigest(),
        "metrics": metrics,
    }
    verified = None
    lines = list[str]()
    if certificate is not None:
        verified = _read_certificate(certificate)
        shutil.copyfile(certificate, out / "certificate.json")
        lines = differences(verified["recipe"], recipe_data(recipe))
    start = log.starts[-1] if log.starts else {}
    card = render(
        "model_card.md",
        step=progress.step,
        sha256=facts["sha256"],
        metrics={name: format_metric(name, value) for name, value in metrics.items()},
        run=log.name,
        recipe=recipe,
        software=", ".join(
            f"{name} {start[name]}" for name in ("samestep", "torch") if name in start
        ),
        certificate=verified,
        differences=lines,
    )
    (out / "README.md").write_text(card, encoding="utf-8")
    return facts


def _read_certificate(path: Path) -> dict[str, Any]:
    """Return `holds`, `subject` and the `recipe` of a certificate, which is empty for a script.

    Raises:
        InputError: the certificate is missing, damaged or of another format.
    """
    try:
        data = json.loads(read_small(path))
        if data["format"] != FORMAT:
            raise ValueError(f"format {data['format']}, not {FORMAT}")
        return {
            "holds": bool(data["holds"]),
            "subject": " ".join([str(data["subject"]), *map(str, data["arguments"])]),
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
    """Upload the files to a repository, created if it does not exist, and return its address.

    Raises:
        RunError: the Hub refuses the repository or the files, or cannot be reached.
    """
    try:
        from huggingface_hub import HfApi

        HfApi().create_repo(name, exist_ok=True)
        message = f"Step {step}"
        commit = HfApi().upload_folder(repo_id=name, folder_path=folder, commit_message=message)
    # Versions change the errors of the client and of its HTTP library.
    except Exception as error:
        raise RunError(
            f"the upload to {name} failed: {str(error).strip() or type(error).__name__}",
            expected="USER/NAME, pip install 'samestep[hub]', a token with write access, a "
            "connection to the Hub",
            fix="hf auth login; or --out DIR, and upload the folder yourself",
            code="E_IO",
        ) from error
    return str(commit.repo_url)
