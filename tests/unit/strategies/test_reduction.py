"""Buckets of the reduction of recipes are flat gradients, with views of them."""

from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, channels_last, equal, randn

from samestep.strategies.reduction import flatten, unflatten

SHAPES = st.lists(st.integers(0, 4), min_size=4, max_size=4)
LAYOUTS = st.sampled_from(["contiguous", "channels last", "transposed", "with holes"])


def parameter(shape: list[int], layout: str) -> Tensor:
    tensor = randn(*shape)
    if layout == "channels last":
        return tensor.contiguous(memory_format=channels_last)
    if layout == "transposed":
        return tensor.transpose(0, 3)
    return randn(*shape[:3], 2 * shape[3])[..., ::2] if layout == "with holes" else tensor


@given(st.lists(st.tuples(SHAPES, LAYOUTS, LAYOUTS), min_size=1, max_size=5))
def test_round_trip(cases: list[tuple[list[int], str, str]]) -> None:
    parameters = [parameter(shape, layout) for shape, layout, _ in cases]
    tensors = [
        parameter(list(p.shape), layout).reshape(p.shape) for p, (*_, layout) in zip(parameters, cases, strict=True)
    ]
    flat = flatten(tensors, parameters)
    assert flat.shape == (sum(p.numel() for p in parameters),)
    for tensor, view, p in zip(tensors, unflatten(flat, parameters), parameters, strict=True):
        assert equal(view, tensor)
        assert view.shape == p.shape
