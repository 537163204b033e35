"""Export of a trained model to safetensors, torch.export or ONNX, with a comparison of the outputs."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn

from samestep.config import Recipe
from samestep.data.batch import map_tensors, tensors_of
from samestep.engine.microbatch_forward import as_arguments, call_model
from samestep.errors import InputError, RunError
from samestep.recipes.recipe_files import DatasetInfo
from samestep.recipes.run import build_task, trained_model
from samestep.session import start

_ROWS = 2  # exporters treat a dimension of size 1 as a constant
# Relative to the largest output; other programs add in another order.
_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Exported:
    """Exported file.

    Attributes:
        difference: largest difference between outputs of the model and of the file, relative to the largest output;
            None for weights.
    """

    path: str
    format: str
    difference: float | None


def export(recipe: Recipe, info: DatasetInfo, checkpoint: Path, kind: str, out: Path, like: Path | None) -> Exported:
    """Write the model of a checkpoint to `out`, as `safetensors` or as one of `PROGRAMS`.

    Programs require `like`, an example input file for tracing and comparison.

    Raises:
        InputError: the model does not support this format, or `like` is missing.
        RunError: outputs of the file differ from outputs of the model, or the file cannot be written.
    """
    with start(device="cpu", reduction=recipe.step.reduction, threads=recipe.step.threads):
        model = trained_model(recipe, info, checkpoint)
        if kind == "safetensors":
            _write_weights(model, out)
            return Exported(str(out), kind, None)
        if like is None:
            raise InputError(
                f"--format {kind} without --like",
                expected="an example input, for tracing and comparison",
                fix="--like FILE, a file as for samestep predict",
                code="E_OPTION_CONFLICT",
            )
        inputs = map_tensors(build_task(recipe, info).read(like), lambda tensor: torch.stack([tensor] * _ROWS))
        with torch.no_grad():
            expected = list(tensors_of(call_model(model, inputs)))
            actual = list(tensors_of(_write_program(kind, model, inputs, out)(inputs)))
    difference = _relative_difference(expected, actual)
    if not difference <= _TOLERANCE:
        out.unlink(missing_ok=True)
        raise RunError(
            f"outputs of the {kind} file differ from the model by {difference:.1e} of the largest output",
            expected=f"at most {_TOLERANCE:.0e}",
            fix="another format, or remove value-dependent branches and random draws from the model",
            code="E_EXPORT_DIFFERS",
        )
    return Exported(str(out), kind, difference)


def _write_weights(model: nn.Module, out: Path) -> None:
    # Clones, since safetensors refuses tied tensors; other programs expect each name.
    tensors = {name: tensor.detach().clone().contiguous() for name, tensor in model.state_dict().items()}
    try:
        save_file(tensors, out)
    except (OSError, SafetensorError) as error:
        raise _not_written(out, error) from error


def _not_written(out: Path, error: Exception) -> RunError:
    """Remove an incomplete file, and return the error."""
    with suppress(OSError):  # the disk has failed already
        out.unlink(missing_ok=True)
    return RunError(
        f"{out} cannot be written: {getattr(error, 'strerror', None) or error}",
        expected="a writable folder with free space",
        fix="free disk space, or --out in another folder",
        code="E_OUTPUT",
    )


def _write_program(kind: str, model: nn.Module, inputs: Any, out: Path) -> Callable[[Any], Any]:
    """Write the program and return a function that runs the file."""
    arguments, keywords = as_arguments(inputs)
    rows = torch.export.Dim("rows")  # the first dimension of every tensor
    try:
        return PROGRAMS[kind](model, arguments, keywords, tuple({0: rows} for _ in (*arguments, *keywords)), out)
    except InputError:
        raise
    except Exception as error:  # exporters raise many types
        if isinstance(error, OSError) and error.errno is not None:
            raise _not_written(out, error) from error
        out.unlink(missing_ok=True)
        message = str(error).strip().splitlines() or [type(error).__name__]
        raise InputError(
            f"the model cannot be exported as {kind}: {message[0]}",
            expected="a forward that the exporter can trace",
            fix="another format: " + ", ".join(other for other in ["safetensors", *PROGRAMS] if other != kind),
            code="E_EXPORT",
        ) from error


def _export_torch(model: nn.Module, arguments: Any, keywords: Any, shapes: Any, out: Path) -> Callable[[Any], Any]:
    """Write a `torch.export` program (https://docs.pytorch.org/docs/stable/export.html)."""
    program = torch.export.export(model, arguments, keywords, dynamic_shapes=shapes, strict=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*LeafSpec.*", FutureWarning)  # raised by torch's own code
        torch.export.save(program, out)
        loaded = torch.export.load(out).module()
    return lambda inputs: call_model(loaded, inputs)


def _export_onnx(model: nn.Module, arguments: Any, keywords: Any, shapes: Any, out: Path) -> Callable[[Any], Any]:
    """Write an ONNX model, run by ONNX Runtime (https://onnx.ai)."""
    try:
        import onnxruntime
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise InputError(
            f"--format onnx: {error}",
            expected="installed packages onnx, onnxscript and onnxruntime",
            fix="pip install 'samestep[zoo]'",
            code="E_NOT_INSTALLED",
        ) from error
    options: dict[str, Any] = {"dynamic_shapes": shapes, "dynamo": True, "external_data": False, "verbose": False}
    torch.onnx.export(model, arguments, str(out), kwargs=keywords, **options)
    session = onnxruntime.InferenceSession(str(out), providers=["CPUExecutionProvider"])
    names = [entry.name for entry in session.get_inputs()]

    def run(inputs: Any) -> Any:
        arguments, keywords = as_arguments(inputs)
        feed = dict(zip(names, (tensor.numpy() for tensor in (*arguments, *keywords.values())), strict=True))
        return [torch.from_numpy(array) for array in session.run(None, feed)]

    return run


PROGRAMS: dict[str, Callable[[nn.Module, Any, Any, Any, Path], Callable[[Any], Any]]] = {
    "torch": _export_torch,
    "onnx": _export_onnx,
}


def _relative_difference(expected: list[torch.Tensor], actual: list[torch.Tensor]) -> float:
    if [t.shape for t in expected] != [t.shape for t in actual]:
        return float("inf")
    largest = max(float(t.abs().max()) for t in expected)
    return max(float((a - b).abs().max()) for a, b in zip(expected, actual, strict=True)) / max(largest, 1e-30)
