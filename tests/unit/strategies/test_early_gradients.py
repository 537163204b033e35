"""Gradients of large parameters that are added during backward."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import samestep
from samestep.strategies.fast_reduction import build_reduction
from samestep.strategies.pipeline.early_gradients import EarlyGradients
from samestep.strategies.reduction import MicrobatchTree

TREE = MicrobatchTree(4, 8)


def sums_of(early: EarlyGradients, layer: nn.Linear, *, reentrant: bool) -> torch.Tensor:
    """Return the gradient of one step of four microbatches."""
    for number in range(TREE.microbatches):
        outputs = torch.full((2, 256), number + 1.0, requires_grad=True)
        for _ in range(2):
            outputs = checkpoint(layer, outputs, use_reentrant=True) if reentrant else layer(outputs)
        early.begin(TREE, number)
        outputs.sum().backward()
        early.end()
        if layer.weight not in early.taken:
            early.reductions[layer.weight].accumulate(TREE, number)
    early.end_step()
    early.reductions[layer.weight].set_total(TREE)
    gradient = layer.weight.grad
    assert gradient is not None
    layer.weight.grad = layer.bias.grad = None
    return gradient


@pytest.mark.parametrize("reentrant", [False, True])
def test_steps_have_equal_sums(reentrant: bool) -> None:
    layer = nn.Linear(256, 256)
    early = EarlyGradients(
        list(layer.parameters()), partial(build_reduction, "exact", samestep.World(0, 1, torch.device("cpu")))
    )
    assert list(early.reductions) == [layer.weight]
    first = sums_of(early, layer, reentrant=reentrant)
    assert not early.taken
    second = sums_of(early, layer, reentrant=reentrant)
    # A layer in two reentrant checkpoints receives its gradient in two parts.
    assert bool(early.taken) is not reentrant
    assert torch.equal(second, first)
    early.close()
