"""Gradients that travel compressed, on a GPU: `pytest -m gpu` on a machine that has one."""

import pytest
import torch

import samestep
from samestep.launcher.launch import launch
from samestep.strategies.fast_reduction import PowerSGD, compressed_all_reduce
from samestep.strategies.reduction import flatten, unflatten

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
]


def sum_on(device: str, numbers: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A sum in 16 bits, of one rank."""
    with samestep.start(device=device) as world:  # type: ignore[arg-type]
        return compressed_all_reduce(world, numbers.to(world.device), dtype).cpu()


def narrow_on(device: str, matrix: torch.Tensor) -> torch.Tensor:
    """Return a matrix after compression and exchange."""
    with samestep.start(device=device) as world:  # type: ignore[arg-type]
        parameters = [torch.nn.Parameter(torch.zeros(matrix.shape, device=world.device))]
        total = flatten([matrix.to(world.device)], parameters)
        return unflatten(PowerSGD(world, parameters)(parameters, total), parameters)[0].cpu()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [1e-9, 1.0, 1e9])
def test_a_sum_in_16_bits_is_that_of_a_cpu(dtype: torch.dtype, size: float) -> None:
    numbers = size * torch.randn(1000, generator=torch.Generator().manual_seed(0))
    expected = launch(sum_on, "cpu", numbers, dtype, processes=1)
    assert torch.equal(launch(sum_on, "cuda", numbers, dtype, processes=1), expected)


def test_a_narrow_product_comes_whole() -> None:
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(60, 4, generator=generator) @ torch.randn(4, 80, generator=generator)
    torch.testing.assert_close(launch(narrow_on, "cuda", matrix, processes=1), matrix, rtol=1e-4, atol=1e-4)
