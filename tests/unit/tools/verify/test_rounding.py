"""Layouts that are equal to rounding: gradients of zero except for rounding, which optimizers scale to a full step."""

from pathlib import Path

import pytest
import torch

from samestep.tools.verify.step_tensors import StepTensors
from samestep.tools.verify.trials import Trial

TOLERANCE = 1e-4
GRADIENT, STATE = torch.tensor([1e-9, 0.5, -0.5]), torch.tensor([0.010, 0.200, 0.300])


def distances(
    folder: Path, gradient: torch.Tensor, state: torch.Tensor, tolerance: float | None = TOLERANCE
) -> dict[str, dict[str, float]]:
    """Return the distances of a step from a reference with `GRADIENT` and `STATE`."""
    for name, tensors in (("reference", (GRADIENT, STATE)), ("other", (gradient, state))):
        is_reference = name == "reference"
        trial = Trial(
            tolerance=tolerance,
            folder=folder / name,
            processes=1,
            steps=1,
            writes_tensors=is_reference,
            reference=None if is_reference else folder / "reference",
        )
        trial.folder.mkdir()
        record = StepTensors(trial, rank=0)
        for kind, tensor in zip(("gradients", "state"), tensors, strict=True):
            record.add(kind, {"blocks.1.mixed.bias": tensor})
        result = record.end_step(1)
    return result


def test_state_after_a_gradient_of_rounding_is_no_false_alarm(tmp_path: Path) -> None:
    # The layers of a tensor-parallel block sum in another order: the bias of an attention key has no real gradient.
    result = distances(tmp_path, torch.tensor([-2e-9, 0.5, -0.5]), torch.tensor([-0.010, 0.200, 0.300]))
    assert result["state"]["blocks.1.mixed.bias"] == 0.0
    assert result["rounding"]["blocks.1.mixed.bias"] > TOLERANCE
    assert result["gradients"]["blocks.1.mixed.bias"] <= TOLERANCE


@pytest.mark.parametrize("element", [1, 2])
def test_state_that_differs_after_equal_gradients_is_a_difference(tmp_path: Path, element: int) -> None:
    state = STATE.clone()
    state[element] += 0.01
    result = distances(tmp_path, torch.tensor([-2e-9, 0.5, -0.5]), state)
    assert result["state"]["blocks.1.mixed.bias"] > TOLERANCE


def test_elements_of_rounding_do_not_hide_others(tmp_path: Path) -> None:
    result = distances(tmp_path, torch.tensor([-2e-9, 0.5, -0.5]), torch.tensor([-0.010, 0.250, 0.300]))
    assert result["state"]["blocks.1.mixed.bias"] == pytest.approx(0.05 / 0.3, rel=0.5)


def test_every_difference_counts_without_a_tolerance(tmp_path: Path) -> None:
    result = distances(tmp_path, torch.tensor([-2e-9, 0.5, -0.5]), torch.tensor([-0.010, 0.200, 0.300]), tolerance=None)
    assert result["state"]["blocks.1.mixed.bias"] > TOLERANCE
    assert "rounding" not in result
