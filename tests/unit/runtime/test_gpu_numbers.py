"""What a GPU says of itself; on a GPU: tests/gpu/test_gpu_numbers.py."""

import torch

from samestep.runtime.gpu_numbers import gpu_numbers


def test_a_cpu_says_nothing() -> None:
    assert gpu_numbers(torch.device("cpu")) is None
