"""Comparison of the outputs of an exported model."""

import math

import torch

from samestep.tools.export import _relative_difference


def test_outputs_are_compared_with_nan_and_truth_values() -> None:
    one = torch.tensor([1.0, -2.0])
    assert _relative_difference(one, one + 0.5) == 0.25
    assert math.isnan(_relative_difference((one, one), (one, one * math.nan)))
    assert _relative_difference(one > 0, one < 0) == 1.0
    for others in ((), one[:1]):
        assert _relative_difference(one, others) == math.inf
    assert _relative_difference((), ()) == math.inf
