"""Buckets of gradients."""

import torch

from samestep.reduce.buckets import Bucket


def test_added_gradients_are_those_of_one_sum() -> None:
    parameters = [torch.zeros(3, 2), torch.zeros(5), torch.zeros(1)]
    bucket = Bucket(parameters)
    first = [torch.ones(3, 2), None, None]
    second = [torch.full((3, 2), 2.0), torch.ones(5), None]
    flat = bucket.fill(first)
    bucket.add(flat, second)
    weights, bias, unused = bucket.gradients(flat)
    assert weights is not None
    assert bias is not None
    assert weights.equal(torch.full((3, 2), 3.0))
    assert bias.equal(torch.ones(5))
    assert unused is None
