"""`samestep export`: files of a trained model for other programs."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from samestep.config import Recipe
from samestep.data.batch import map_tensors, tensors_of
from samestep.errors import InputError, RunError
from samestep.recipes.predict import build_task, trained_model
from samestep.recipes.recipe_files import DatasetInfo
from samestep.recipes.training_step import as_arguments, call_model
from samestep.session import start

_ROWS = 2  # exporters treat a dimension of size 1 as a constant
# Relative to the largest output; other programs add in another order.
_TOLERANCE = 1e-4


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
    # On the CPU: a program of torch.export keeps the devices of its tensors.
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
    if not difference <= _TOLERANCE:  # also if the difference is NaN
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
    # Not strict: Python itself runs the forward, so more models can be traced.
    program = torch.export.export(model, arguments, keywords, dynamic_shapes=shapes, strict=False)
    with warnings.catch_warnings():
        # Raised by torch's own code.
        warnings.filterwarnings("ignore", ".*LeafSpec.*", FutureWarning)
        torch.export.save(program, out)
        loaded = torch.export.load(out).module()  # not `program`: the file is compared
    return lambda inputs: call_model(loaded, inputs)


def _write_onnx(
    model: nn.Module, arguments: Any, keywords: Any, shapes: Any, out: Path
) -> Callable[[Any], Any]:
    """Write an ONNX model, run by ONNX Runtime (https://onnx.ai)."""
    import onnxruntime

    # External data would be a second file beside `out`.
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
    if not expected or [t.shape for t in expected] != [t.shape for t in actual]:
        return float("inf")
    pairs = zip(expected, actual, strict=True)
    # By torch, whose maximum of numbers with a NaN is NaN; in float64, also of truth values.
    distance = torch.stack([(a.double() - b.double()).abs().max() for a, b in pairs]).max()
    largest = torch.stack([tensor.double().abs().max() for tensor in expected]).max()
    return float(distance) / max(float(largest), 1e-30)
