"""Gradients that travel compressed, on a GPU: `pytest -m gpu` on a machine that has one."""

import pytest
import torch

import samestep
from samestep.launcher.launch import launch
from samestep.strategies.fast_reduction import compressed_all_reduce

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
]


def sum_on(device: str, numbers: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A sum in 16 bits, of one rank."""
    with samestep.start(device=device) as world:  # type: ignore[arg-type]
        return compressed_all_reduce(world, numbers.to(world.device), dtype).cpu()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [1e-9, 1.0, 1e9])
def test_a_sum_in_16_bits_is_that_of_a_cpu(dtype: torch.dtype, size: float) -> None:
    numbers = size * torch.randn(1000, generator=torch.Generator().manual_seed(0))
    expected = launch(sum_on, "cpu", numbers, dtype, processes=1)
    assert torch.equal(launch(sum_on, "cuda", numbers, dtype, processes=1), expected)
