"""Operations on parts of tensors have the bits of the whole: what optimizers compute of divided parameters."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from samestep.strategies import dtensor_operations

ARITHMETIC: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "add": lambda a, b, c: a.add(b, alpha=0.377),
    "addcdiv": lambda a, b, c: a.addcdiv(b, c, value=-0.0123),
    "addcmul": lambda a, b, c: a.addcmul(b, c, value=0.0123),
    "clamp": lambda a, b, c: a.clamp(-0.3, 0.4),
    "div": lambda a, b, c: a / b,
    "lerp": lambda a, b, c: a.lerp(b, 0.1),
    "maximum": lambda a, b, c: torch.maximum(a, b),
    "mul": lambda a, b, c: a * 0.377,
    "reciprocal": lambda a, b, c: a.reciprocal(),
    "sqrt": lambda a, b, c: a.abs().sqrt(),
    "sub": lambda a, b, c: a.sub(b, alpha=0.377),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ARITHMETIC)
def test_parts_have_the_bits_of_the_whole(name: str, dtype: torch.dtype) -> None:
    assert name in dtensor_operations._ARITHMETIC
    generator = torch.Generator().manual_seed(0)
    for length in range(1, 70):
        tensors = [torch.randn(length, generator=generator, dtype=dtype) for _ in range(3)]
        whole = ARITHMETIC[name](*tensors)
        middle = length * 2 // 3
        parts = [ARITHMETIC[name](*[one[part] for one in tensors]) for part in (slice(middle), slice(middle, None))]
        assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize(
    ("operation", "tensor", "expected"),
    [
        (torch.ops.aten.add_.Tensor, torch.zeros(2), True),
        (torch.ops.aten._foreach_addcdiv_.ScalarList, torch.zeros(2), True),
        (torch.ops.aten.add_.Tensor, torch.zeros(2, dtype=torch.bfloat16), False),
        (torch.ops.aten.add_.Tensor, torch.zeros(2, dtype=torch.complex64), False),
        (torch.ops.aten.copy_.default, torch.zeros(2, dtype=torch.bfloat16), True),
        (torch.ops.aten.gt.Scalar, torch.zeros(2, dtype=torch.int64), True),
        (torch.ops.aten.sum.default, torch.zeros(2), False),
        (torch.ops.aten._foreach_norm.Scalar, torch.zeros(2), False),
        (torch.ops.aten._fused_sgd_.default, torch.zeros(2), False),
        (torch.ops.aten.pow.Tensor_Scalar, torch.zeros(2), False),
    ],
)
def test_operations_with_equal_parts(operation: Any, tensor: Tensor, expected: bool) -> None:
    assert dtensor_operations._has_equal_parts(operation, ([tensor],)) == expected
