"""CUDA graphs of microbatches on a GPU: bits, random numbers and refusals, which other tests simulate."""

import pytest
import torch

from samestep.launcher.launch import launch
from workers.graphs import on_gpu

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", ["perceptron", "convolutional net", "dropout", "recurrent"])
def test_bits_are_those_without_graphs(name: str, precision: str) -> None:
    usual, graphs = (launch(on_gpu, name, mode, precision, processes=1) for mode in ("off", "auto"))
    assert graphs == [usual[0], True, None]


def test_a_wait_in_the_forward_is_a_reason_and_leaves_the_generator_usable() -> None:
    digest, used, reason = launch(on_gpu, "branch", "auto", "fp32", processes=1)
    assert (used, digest) == (False, launch(on_gpu, "branch", "off", "fp32", processes=1)[0])
    assert "synchronizing" in reason
