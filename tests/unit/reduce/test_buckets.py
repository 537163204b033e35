"""Layout of gradients in buckets."""

import pytest
import torch

from samestep.reduce import buckets
from samestep.reduce.buckets import Bucket, plan_buckets


def filled(*parameters: torch.Tensor) -> tuple[Bucket, torch.Tensor, list[torch.Tensor]]:
    bucket = Bucket(parameters)
    gradients = [torch.randn(parameter.shape, dtype=parameter.dtype) for parameter in parameters]
    return bucket, bucket.fill(gradients), gradients


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_gradients_come_back(dtype: torch.dtype) -> None:
    shapes = [(3, 5), (), (1,), (130,), (0, 4), (2, 3, 4, 5)]
    bucket, flat, gradients = filled(*[torch.empty(shape, dtype=dtype) for shape in shapes])
    assert flat.dim() == 1
    assert flat.dtype == dtype
    for found, gradient in zip(bucket.gradients(flat), gradients, strict=True):
        assert found is not None
        assert found.shape == gradient.shape
        assert torch.equal(found, gradient)
        assert found.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()


def test_each_gradient_starts_at_a_multiple_of_128_bytes() -> None:
    bucket, flat, _ = filled(torch.empty(1), torch.empty(33), torch.empty(32), torch.empty(7))
    offsets = [view.storage_offset() * 4 for view in bucket.views(flat)]
    assert offsets == [0, 128, 128 * 3, 128 * 4]
    assert flat.numel() * 4 == 128 * 6  # with the flags


PARAMETERS = {
    "contiguous": torch.empty(4, 3, 2, 2),
    "channels last": torch.empty(4, 3, 2, 2).to(memory_format=torch.channels_last),
    "channels last, one channel": torch.empty(4, 1, 2, 2).to(memory_format=torch.channels_last),
    "transposed": torch.empty(5, 4).t(),
    "permuted": torch.empty(2, 3, 4).permute(2, 0, 1),
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_strides_are_those_of_a_dense_parameter(name: str) -> None:
    parameter = PARAMETERS[name]
    bucket, flat, (gradient,) = filled(parameter)
    (view,) = bucket.views(flat)
    assert view.stride() == parameter.stride()
    assert torch.equal(view, gradient)


@pytest.mark.parametrize(
    "parameter",
    [torch.empty(4, 6)[:, ::2], torch.empty(4, 1).expand(4, 5), torch.empty(8, 6)[:, :3], torch.empty(9)[::3]],
    ids=["steps", "expanded", "part", "steps of one dimension"],
)
def test_a_parameter_with_gaps_has_contiguous_gradients(parameter: torch.Tensor) -> None:
    bucket, flat, gradients = filled(parameter, torch.empty(2))
    view, after = bucket.views(flat)
    assert view.is_contiguous()
    assert after.storage_offset() >= view.numel()
    assert torch.equal(view, gradients[0])


def test_gradients_do_not_overlap() -> None:
    parameters = [*PARAMETERS.values(), torch.empty(4, 1).expand(4, 5)]
    bucket = Bucket(parameters)
    flat = torch.zeros_like(bucket.fill([None] * len(parameters)))
    for view in bucket.views(flat):
        view.add_(1)
    assert flat.max() == 1
    assert flat.sum() == sum(parameter.numel() for parameter in parameters)


def test_an_absent_gradient_is_zero_and_has_no_flag() -> None:
    parameters = [torch.empty(3), torch.empty(2, 2), torch.empty(5)]
    bucket = Bucket(parameters)
    flat = bucket.fill([None, torch.ones(2, 2), None])
    assert [view.abs().sum().item() for view in bucket.views(flat)] == [0, 4, 0]
    gradients = bucket.gradients(flat)
    assert gradients[0] is None
    assert gradients[2] is None
    assert gradients[1] is not None
    assert gradients[1].tolist() == [[1, 1], [1, 1]]


def test_a_gradient_of_one_rank_is_one_of_all() -> None:
    parameters = [torch.empty(3), torch.empty(2), torch.empty(1)]
    bucket = Bucket(parameters)
    total = bucket.fill([None, torch.ones(2), None]) + bucket.fill([torch.ones(3), torch.ones(2), None])
    gradients = [None if one is None else one.tolist() for one in bucket.gradients(total)]
    assert gradients == [[1, 1, 1], [2, 2], None]


def test_no_gradient_at_all() -> None:
    bucket = Bucket([torch.empty(3), torch.empty(2)])
    flat = bucket.fill([None, None])
    assert bucket.gradients(flat) == [None, None]
    assert not flat[:3].any()


def test_a_gradient_of_zero_is_present() -> None:
    bucket = Bucket([torch.empty(3)])
    (gradient,) = bucket.gradients(bucket.fill([torch.zeros(3)]))
    assert gradient is not None


def test_each_fill_has_memory_of_its_own() -> None:
    bucket = Bucket([torch.empty(3)])
    first = bucket.fill([torch.ones(3)])
    bucket.fill([torch.zeros(3)])
    assert first[:3].tolist() == [1, 1, 1]


def test_the_last_parameters_come_first() -> None:
    parameters = [torch.empty(10) for _ in range(4)]
    assert plan_buckets(parameters, first_bytes=40) == [[3], [2, 1, 0]]


def test_the_first_bucket_is_small_and_the_others_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 120)
    parameters = [torch.empty(10) for _ in range(7)]
    assert plan_buckets(parameters, first_bytes=50) == [[6, 5], [4, 3, 2], [1, 0]]


def test_a_bucket_has_one_dtype_and_every_parameter_is_in_one() -> None:
    dtypes = [torch.float32, torch.bfloat16, torch.float32, torch.float64, torch.bfloat16]
    parameters = [torch.empty(10, dtype=dtype) for dtype in dtypes]
    plan = plan_buckets(parameters)
    assert plan == [[4, 1], [3], [2, 0]]


def test_large_parameters_stand_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 100)
    assert plan_buckets([torch.empty(100), torch.empty(100), torch.empty(100)], 1) == [[2], [1], [0]]


def test_without_parameters_there_are_no_buckets() -> None:
    assert plan_buckets([]) == []


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
