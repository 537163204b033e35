"""A trained model in a form that other programs read, and a check that it says the same there."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from samestep.config import Recipe, RunOptions
from samestep.data.tensors import map_tensors
from samestep.engine.forward import call_model
from samestep.errors import InputError, RunError
from samestep.recipes.facts import DataFacts
from samestep.recipes.trained import task_of, trained_model
from samestep.runtime.session import start

_ROWS = 2  # of the example: one is taken for a constant by some exporters
# Of the largest output: other programs add up in another order.
_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Exported:
    """What was written.

    Attributes:
        difference: the largest difference between outputs of the model and of what was written, over the largest
            output; None where there is nothing to run.
    """

    path: str
    format: str
    difference: float | None


def export(
    recipe: Recipe, options: RunOptions, facts: DataFacts, checkpoint: Path, kind: str, out: Path, like: Path | None
) -> Exported:
    """Write the model of a checkpoint to `out`.

    Args:
        kind: one of `KINDS`.
        like: a file such as the model is asked about, from which the inputs of the check are made.

    Raises:
        InputError: the model cannot be written in this form, or it takes a file to check it.
        RunError: what was written says something else than the model.
    """
    with start(device="cpu", reduction=recipe.step.reduction, threads=recipe.step.threads):
        model = trained_model(recipe, facts, checkpoint)
        if kind == "safetensors":
            save_file(_distinct(model), out)
            return Exported(str(out), kind, None)
        if like is None:
            raise InputError(
                f"--format {kind} without --like",
                rule="a program is traced, and compared, with inputs like those that it will get",
                do="--like FILE, such as one that samestep predict takes",
            )
        inputs = map_tensors(task_of(recipe, facts).read(like), lambda tensor: torch.stack([tensor] * _ROWS))
        with torch.no_grad():
            expected = _tensors(call_model(model, inputs))
            found = _tensors(_written(kind, model, inputs, out)(inputs))
    difference = _difference(expected, found)
    if not difference <= _TOLERANCE:
        out.unlink(missing_ok=True)
        raise RunError(
            f"the {kind} file says something else than the model: outputs differ by {difference:.1e} of the largest",
            rule=f"at most {_TOLERANCE:.0e}",
            do="another format, or look for what in the model depends on values (branches, random draws)",
        )
    return Exported(str(out), kind, difference)


def _written(kind: str, model: nn.Module, inputs: Any, out: Path) -> Callable[[Any], Any]:
    """Write it; what runs the file."""
    try:
        return KINDS[kind](model, inputs, out)
    except InputError:
        raise
    except Exception as error:  # exporters raise of many kinds, each of them means this
        out.unlink(missing_ok=True)
        first = str(error).strip().splitlines() or [type(error).__name__]
        raise InputError(
            f"the model cannot be written as {kind}: {first[0]}",
            rule="its forward is one that the exporter can follow",
            do="another format: " + ", ".join(other for other in ["safetensors", *KINDS] if other != kind),
        ) from error


def _program(model: nn.Module, inputs: Any, out: Path) -> Callable[[Any], Any]:
    """`torch.export`: a graph of torch's own operators (https://docs.pytorch.org/docs/stable/export.html)."""
    arguments, named = _arguments(inputs)
    sizes = _sizes(arguments, named)
    program = torch.export.export(model, tuple(arguments), named, dynamic_shapes=sizes, strict=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*LeafSpec.*", FutureWarning)  # torch's own, of itself
        torch.export.save(program, out)
        loaded = torch.export.load(out).module()
    return lambda data: call_model(loaded, data)


def _script(model: nn.Module, inputs: Any, out: Path) -> Callable[[Any], Any]:
    """TorchScript, by tracing (https://docs.pytorch.org/docs/stable/jit.html)."""
    arguments, named = _arguments(inputs)
    if named:
        traced = torch.jit.trace(model, example_kwarg_inputs=named, strict=False)
    else:
        traced = torch.jit.trace(model, tuple(arguments))
    traced.save(str(out))
    loaded = torch.jit.load(str(out))
    return lambda data: call_model(loaded, data)


def _onnx(model: nn.Module, inputs: Any, out: Path) -> Callable[[Any], Any]:
    """ONNX, read back by ONNX Runtime (https://onnx.ai)."""
    try:
        import onnxruntime
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise InputError(
            f"--format onnx: {error}",
            rule="it takes onnx, onnxscript and onnxruntime",
            do="pip install 'samestep[zoo]'",
        ) from error
    arguments, named = _arguments(inputs)
    sizes = _sizes(arguments, named)
    options: dict[str, Any] = {"dynamic_shapes": sizes, "dynamo": True, "external_data": False, "verbose": False}
    torch.onnx.export(model, tuple(arguments), str(out), kwargs=named, **options)
    session = onnxruntime.InferenceSession(str(out), providers=["CPUExecutionProvider"])
    names = [entry.name for entry in session.get_inputs()]

    def run(data: Any) -> Any:
        arguments, named = _arguments(data)
        given = dict(zip(names, (tensor.numpy() for tensor in (*arguments, *named.values())), strict=True))
        return [torch.from_numpy(array) for array in session.run(None, given)]

    return run


KINDS: dict[str, Callable[[nn.Module, Any, Path], Callable[[Any], Any]]] = {
    "torch": _program,
    "torchscript": _script,
    "onnx": _onnx,
}


def _arguments(inputs: Any) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Inputs as `call_model` hands them over."""
    if isinstance(inputs, dict):
        return [], dict(inputs)
    return (list(inputs), {}) if isinstance(inputs, tuple | list) else ([inputs], {})


def _sizes(arguments: list[torch.Tensor], named: dict[str, torch.Tensor]) -> tuple[dict[int, Any], ...]:
    """Any number of rows; other sizes stay as they are."""
    rows = torch.export.Dim("rows")
    return tuple({0: rows} for _ in (*arguments, *named))


def _tensors(outputs: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    map_tensors(outputs, lambda tensor: found.append(tensor) or tensor)  # type: ignore[func-returns-value]
    return found


def _difference(expected: list[torch.Tensor], found: list[torch.Tensor]) -> float:
    if [t.shape for t in expected] != [t.shape for t in found]:
        return float("inf")
    largest = max(float(t.abs().max()) for t in expected)
    return max(float((a - b).abs().max()) for a, b in zip(expected, found, strict=True)) / max(largest, 1e-30)


def _distinct(model: nn.Module) -> dict[str, torch.Tensor]:
    """Tensors by the model's own names; of tied ones each, as other programs expect."""
    return {name: tensor.detach().clone().contiguous() for name, tensor in model.state_dict().items()}
