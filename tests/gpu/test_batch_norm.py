"""Kernels of batch norm on a GPU, with the statistics of several slices: `pytest -m gpu` on a machine with one."""

import pytest
import torch
from torch.nn import functional

from samestep.view.batch_norm import _normalize
from samestep.view.slice_threads import AllHere

DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")]
    ),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("is_affine", [True, False])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-4), (torch.bfloat16, 3e-2)]
)
def test_results_are_those_of_the_whole_batch(
    dtype: torch.dtype, tolerance: float, is_affine: bool, memory_format: torch.memory_format, device: str
) -> None:
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(12, 16, 5, 7, generator=generator, dtype=torch.float64).mul_(3).add_(1)
    slope = torch.randn(whole.shape, generator=generator, dtype=torch.float64)
    weight, bias = (torch.randn(16, generator=generator, dtype=torch.float64) for _ in range(2))

    def leaf(values: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
        copy = values.to(device, kind, copy=True)
        if copy.dim() == 4:
            copy = copy.contiguous(memory_format=memory_format)
        return copy.requires_grad_()

    # Of the rounded inputs, so that only the computation differs.
    inputs = leaf(whole.to(dtype), torch.float64)
    affine = [leaf(values.float(), torch.float64) if is_affine else None for values in (weight, bias)]
    expected = functional.batch_norm(inputs, None, None, *affine, training=True)
    expected.backward(slope.to(device, dtype).double())

    kind = torch.float64 if dtype == torch.float64 else torch.float32
    own = [leaf(rows.to(dtype), dtype) for rows in whole.split([5, 7])]
    own_affine = [leaf(values.float(), kind) if is_affine else None for values in (weight, bias)]
    outputs = _normalize(AllHere(), [(rows, *own_affine, None) for rows in own], eps=1e-5)
    torch.autograd.backward(outputs, [part.to(device, dtype) for part in slope.split([5, 7])])

    found = [torch.cat(outputs), torch.cat([rows.grad for rows in own if rows.grad is not None])]
    wanted = [expected, inputs.grad]
    found += [values.grad for values in own_affine if values is not None and values.grad is not None]
    wanted += [values.grad for values in affine if values is not None]
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert other is not None
        accuracy = tolerance
        if device == "cuda" and dtype == torch.bfloat16 and one.dim() == 1:
            accuracy = 0.3  # torch's kernels of gradients add 420 products in 16 bits: its own layer is 0.14 away
        torch.testing.assert_close(one.double(), other, rtol=tolerance, atol=accuracy)
