"""Digests and distances of tensors, and gradients of zero except for rounding: optimizers scale it to a full step."""

import math
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from samestep.tools.verify.tensor_comparison import (
    StepTensors,
    digest,
    digest_any,
    digest_rows,
    distance,
    leaves,
)

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]
TOLERANCE = 1e-4
GRADIENT, STATE = torch.tensor([1e-9, 0.5, -0.5]), torch.tensor([0.010, 0.200, 0.300])


@given(dtype=st.sampled_from(DTYPES[:-1]), size=st.integers(1, 9), bit=st.integers(0, 10**6))
def test_every_bit_changes_the_digest(dtype: torch.dtype, size: int, bit: int) -> None:
    tensor = (torch.arange(size) % 7).to(dtype)
    other = tensor.clone()
    raw = other.view(torch.uint8)
    raw[bit // 8 % len(raw)] ^= 1 << bit % 8
    assert digest(tensor) == digest(tensor.clone())
    assert digest(tensor) != digest(other)


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtype_and_shape_change_the_digest(dtype: torch.dtype) -> None:
    tensor = torch.zeros(4, dtype=dtype)
    assert digest(tensor) != digest(tensor.view(2, 2))
    assert len({digest(torch.zeros(4, dtype=dtype)) for dtype in DTYPES}) == len(DTYPES)
    assert digest(torch.zeros(0, dtype=dtype)) != digest(torch.zeros(0, 2, dtype=dtype))


def test_strides_do_not_change_the_digest() -> None:
    tensor = torch.arange(6.0).view(2, 3)
    assert digest(tensor.t().contiguous().t()) == digest(tensor)
    assert digest(torch.tensor(1.5)) == digest(torch.tensor([1.5, 2.0])[0])


def test_leaves_have_paths() -> None:
    tree = {"ids": torch.zeros(2), "more": [1, (torch.ones(1), "word")]}
    assert [path for path, _ in leaves(tree)] == ["ids", "more.0", "more.1.0", "more.1.1"]
    assert digest_any(tree) != digest_any({**tree, "more": [1, (torch.ones(1), "world")]})
    assert digest_any([torch.zeros(1), torch.ones(1)]) != digest_any([torch.ones(1), torch.zeros(1)])


def test_rows_are_those_of_the_first_tensor_with_one_row_per_sample() -> None:
    rows = digest_rows({"length": torch.tensor(3), "ids": torch.tensor([[1, 2], [3, 4], [1, 2]])}, 3)
    assert rows[0] == rows[2] != rows[1]
    assert digest_rows(torch.zeros(4), 3) == []


@given(st.floats(1e-100, 1e100), st.floats(1e-12, 1e-3))
def test_distance_is_relative_to_the_largest_element(scale: float, by: float) -> None:
    reference = torch.tensor([scale, scale / 2, 0.0], dtype=torch.float64)
    moved = reference + torch.tensor([0, 0, by * scale], dtype=torch.float64)
    assert distance(moved, reference) == pytest.approx(by, rel=1e-9)
    assert distance(reference, reference) == 0.0


def test_distance_of_incompatible_tensors_is_infinite() -> None:
    one = torch.tensor([1.0, math.nan])
    assert distance(one, one.clone()) == 0.0
    assert distance(torch.tensor([1.0, 2.0]), one) == math.inf
    assert distance(torch.ones(2), torch.ones(3)) == math.inf
    assert distance(torch.ones(2), torch.ones(2).double()) == math.inf
    assert distance(torch.ones(2), torch.zeros(2)) == math.inf
    assert distance(torch.ones(2), torch.zeros(2), min_scale=10.0) == 0.1


def distances(folder: Path, gradient: torch.Tensor, state: torch.Tensor) -> dict[str, dict[str, float]]:
    """Return the distances of a step from a reference with `GRADIENT` and `STATE`."""
    for name, tensors in (("reference", (GRADIENT, STATE)), ("other", (gradient, state))):
        (folder / name).mkdir()
        tensors_of_step = StepTensors(folder / name, None if name == "reference" else folder / "reference")
        for kind, tensor in zip(("gradients", "state"), tensors, strict=True):
            tensors_of_step.add(kind, {"blocks.1.mixed.bias": tensor})
        result = tensors_of_step.end_step(1)
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


def test_large_gradient_is_no_rounding(tmp_path: Path) -> None:
    result = distances(tmp_path, torch.tensor([1e-9, 0.5, 0.5]), torch.tensor([0.010, 0.200, 0.100]))
    assert result["state"]["blocks.1.mixed.bias"] > TOLERANCE
    assert "rounding" not in result


def test_elements_of_rounding_do_not_hide_others(tmp_path: Path) -> None:
    result = distances(tmp_path, torch.tensor([-2e-9, 0.5, -0.5]), torch.tensor([-0.010, 0.250, 0.300]))
    assert result["state"]["blocks.1.mixed.bias"] == pytest.approx(0.05 / 0.3, rel=0.5)


def test_objects_enter_a_digest_by_their_class() -> None:
    @dataclass
    class Output:
        logits: torch.Tensor
        note: object

    first, second = Output(torch.ones(2), object()), Output(torch.ones(2), object())
    assert digest_any(first) == digest_any(second)
    assert digest_any(first) != digest_any(Output(torch.zeros(2), object()))
