"""Norm of gradients: accuracy, and the same bits for every division of rows, address, order and number of threads."""

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from samestep.distributed.world import World
from samestep.strategies import gradient_norm
from samestep.strategies.gradient_norm import folded_squares, partial_squares, row_norms, sums_on_grids
from samestep.strategies.local_parameters import LocalParameters

CPU = torch.device("cpu")
SHAPES = [(40, 70), (33,), (8, 3, 5, 5), (1, 4099), (), (7, 33), (64, 32), (0, 50), (12, 1000)]
COUNT = 2**20


def gradients(dtype: torch.dtype, scale: float = 1.0) -> list[torch.Tensor]:
    """Gradients whose elements differ by many orders of magnitude."""
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(shape, generator=generator) for shape in SHAPES]
    return [(scale * tensor.abs().pow(8).mul(tensor.sign())).to(dtype) for tensor in tensors]


def norm_of_parts(parts: list[list[torch.Tensor]]) -> float:
    """The norm, as ranks with these parts of the gradients compute it."""
    squares = [partial_squares(part, CPU) for part in parts]
    largest = torch.cat(squares).amax()
    return float(torch.stack([sums_on_grids(values, largest, COUNT) for values in squares]).sum(0).sum().sqrt())


def expected_norm(tensors: list[torch.Tensor]) -> float:
    return math.sqrt(math.fsum(x * x for tensor in tensors for x in tensor.double().flatten().tolist()))


def moved(tensor: torch.Tensor, offset: int) -> torch.Tensor:
    """Copy a tensor to an address that is no multiple of 16 bytes."""
    memory = tensor.new_empty(tensor.numel() + offset)
    return memory[offset:].view(tensor.shape).copy_(tensor)


@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e9])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-15), (torch.float32, 1e-7), (torch.bfloat16, 1e-7)]
)
def test_norm_equals_the_exact_sum(dtype: torch.dtype, tolerance: float, scale: float) -> None:
    tensors = gradients(dtype, scale)
    assert norm_of_parts([tensors]) == pytest.approx(expected_norm(tensors), rel=tolerance, abs=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 50])
def test_norm_does_not_depend_on_the_division_of_rows(dtype: torch.dtype, ranks: int) -> None:
    tensors = gradients(dtype)
    parts: list[list[torch.Tensor]] = [[] for _ in range(ranks)]
    for tensor in tensors:
        chunks = tensor.chunk(ranks) if tensor.dim() else [tensor]
        for offset, (part, chunk) in enumerate(zip(parts, chunks, strict=False)):
            part.append(moved(chunk, offset % 5))
    assert norm_of_parts(parts) == norm_of_parts([tensors])
    random.Random(0).shuffle(parts)
    assert norm_of_parts([part[::-1] for part in parts]) == norm_of_parts([tensors])


def test_norm_does_not_depend_on_strides() -> None:
    tensors = gradients(torch.float32)
    matrices, images = [x for x in tensors if x.dim() == 2], [x for x in tensors if x.dim() == 4]
    strided = [x.t().contiguous().t() for x in matrices] + [x.to(memory_format=torch.channels_last) for x in images]
    assert norm_of_parts([strided]) == norm_of_parts([matrices + images])


@pytest.mark.parametrize("width", [33, 64, 100, 4099])
@pytest.mark.parametrize("squares", [row_norms, lambda matrix: folded_squares([matrix])], ids=["cpu", "accelerator"])
def test_sums_of_a_row_depend_on_the_row_alone(squares: Callable[[torch.Tensor], torch.Tensor], width: int) -> None:
    matrix = torch.randn(60, width, generator=torch.Generator().manual_seed(width))
    expected = squares(matrix).view(60, -1)
    threads = torch.get_num_threads()
    try:
        for number, rows in ((1, 1), (2, 1), (4, 2), (4, 7), (2, 60)):
            torch.set_num_threads(number)
            for first in range(0, 61 - rows, 3):
                part = moved(matrix[first : first + rows], first % 5)
                assert torch.equal(squares(part).view(rows, -1), expected[first : first + rows])
    finally:
        torch.set_num_threads(threads)


def test_an_accelerator_sums_the_same_squares(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = gradients(torch.float32)
    matrices = [tensor.reshape(-1, 70) for tensor in tensors[:1]] + [torch.randn(9, 70)]
    whole = folded_squares(matrices)
    assert whole.dtype == torch.float64
    assert whole.numel() == 49 * gradient_norm._LANES
    assert torch.equal(torch.cat([folded_squares([matrix]) for matrix in matrices]), whole)
    assert math.fsum(whole.tolist()) == pytest.approx(math.fsum(m.double().square().sum() for m in matrices), rel=1e-14)
    chunks = list(gradient_norm._chunks(matrices, 20))
    assert [sum(len(block) for block in chunk) for chunk in chunks] == [20, 20, 9]
    assert torch.equal(torch.cat([folded_squares(chunk) for chunk in chunks]), whole)


@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_the_norm_of_an_accelerator_does_not_depend_on_the_division_of_rows(
    ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gradient_norm, "is_accelerator", lambda device: True)
    tensors = gradients(torch.float32) + [torch.randn(9, *shape) for shape in ((512,), (64, 3, 3), (3, 7, 7), (1,))]
    parts: list[list[torch.Tensor]] = [[] for _ in range(ranks)]
    for tensor in tensors:
        for part, chunk in zip(parts, tensor.chunk(ranks) if tensor.dim() else [tensor], strict=False):
            part.append(chunk)
    assert norm_of_parts(parts) == norm_of_parts([tensors])
    assert norm_of_parts(parts) == pytest.approx(expected_norm(tensors), rel=1e-15, abs=0)


@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("shape", [(3, 4), (3, 40)])
def test_norm_of_a_non_finite_gradient_is_not_finite(bad: float, shape: tuple[int, ...]) -> None:
    tensors = gradients(torch.float32)
    spoiled = torch.ones(shape)
    spoiled[1, 1] = bad
    assert not math.isfinite(norm_of_parts([tensors, [spoiled]]))


def test_norm_of_nothing_and_of_zeros_is_zero() -> None:
    assert norm_of_parts([[]]) == norm_of_parts([[torch.zeros(5, 50), torch.zeros(3)], []]) == 0.0


def test_sums_are_exact_in_any_order() -> None:
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(5000, generator=generator, dtype=torch.float64).abs().pow(12)
    largest = values.amax()
    expected = sums_on_grids(values, largest, COUNT)
    for seed in range(5):
        order = torch.randperm(5000, generator=torch.Generator().manual_seed(seed))
        parts = values[order].split(701)
        assert torch.equal(torch.stack([sums_on_grids(part, largest, COUNT) for part in parts]).sum(0), expected)
    assert float(expected.sum()) == math.fsum(values.tolist())


def test_norm_skips_frozen_parameters_and_those_without_a_gradient() -> None:
    model = nn.Sequential(nn.Linear(40, 3), nn.Linear(3, 2), nn.Linear(2, 2))
    model[2].requires_grad_(False)
    model(torch.randn(5, 40)).square().sum().backward()
    model[1].bias.grad = None
    parameters = LocalParameters(model, World(0, 1, CPU))
    found: list[Any] = [p.grad for p in model.parameters() if p.grad is not None]
    assert len(found) == 3
    assert float(parameters.total_norm()) == pytest.approx(expected_norm(found), rel=1e-7)
    assert parameters.total_norm().dtype == torch.float64
    assert float(LocalParameters(model.requires_grad_(False), World(0, 1, CPU)).total_norm()) == 0.0
