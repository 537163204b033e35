"""Plans of buckets: order, size, and types."""

import pytest
import torch

from samestep.view import bucket_layout
from samestep.view.bucket_layout import plan_buckets


def test_the_last_parameters_come_first() -> None:
    parameters = [torch.empty(10) for _ in range(4)]
    assert plan_buckets(parameters, first_bytes=40) == [[3], [2, 1, 0]]


def test_the_first_bucket_is_small_and_the_others_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket_layout, "BUCKET_BYTES", 120)
    parameters = [torch.empty(10) for _ in range(7)]
    assert plan_buckets(parameters, first_bytes=50) == [[6, 5], [4, 3, 2], [1, 0]]


def test_a_bucket_has_one_dtype_and_every_parameter_is_in_one() -> None:
    dtypes = [torch.float32, torch.bfloat16, torch.float32, torch.float64, torch.bfloat16]
    parameters = [torch.empty(10, dtype=dtype) for dtype in dtypes]
    plan = plan_buckets(parameters)
    assert plan == [[4, 1], [3], [2, 0]]


def test_large_parameters_stand_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket_layout, "BUCKET_BYTES", 100)
    assert plan_buckets([torch.empty(100), torch.empty(100), torch.empty(100)], 1) == [[2], [1], [0]]


def test_without_parameters_there_are_no_buckets() -> None:
    assert plan_buckets([]) == []
