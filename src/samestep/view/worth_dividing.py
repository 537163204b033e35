"""Whether the division of a call saves more time than its messages take.

The size of a call is decided by arithmetic, not by measured time: times differ between ranks and
runs, and a whole call has other bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

_OPERATIONS_PER_ELEMENT = 4.0  # of functions that are no products, which wait for memory


@dataclass(frozen=True)
class _Speeds:
    """Magnitudes of a device: operations and bytes per second, seconds per call and per sum."""

    operations: float
    bytes: float
    call: float
    sum: float


_CPU = _Speeds(5e10, 1e9, 5e-4, 7e-4)
_GPU = _Speeds(2e13, 2e10, 3e-4, 1e-4)


class WorkCounter(TorchDispatchMode):
    """Counts the floating-point operations of its block."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations = 0.0

    def __torch_dispatch__(
        self,
        function: Any,
        types: Any,
        arguments: Sequence[Any] = (),
        options: Mapping[str, Any] | None = None,
    ) -> Any:
        options = options or {}
        result = function(*arguments, **options)
        count: Callable[..., int] | None = flop_registry.get(function._overloadpacket)
        if count is not None:
            self.operations += count(*arguments, **options, out_val=result)
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.operations += _OPERATIONS_PER_ELEMENT * leaf.numel()
        return result


def is_worth_dividing(
    *,
    operations: float,
    gradient_bytes: int,
    output_bytes: int,
    sums: int,
    parts: int,
    has_gradients: bool,
    is_cpu: bool,
) -> bool:
    """Whether dividing a call saves more than it costs.

    Args:
        operations: floating-point operations of the forward of the whole batch.
        gradient_bytes: size of the gradients that are summed.
        output_bytes: size of the outputs that are gathered.
        sums: number of sums over ranks inside of the forward, as of batch norm; the backward has as
            many.
        parts: largest number of ranks.
        has_gradients: whether a backward follows, which has twice the operations of the forward.
        is_cpu: whether the call is computed on CPUs.
    """
    speeds = _CPU if is_cpu else _GPU
    moved = output_bytes
    if has_gradients:
        operations *= 3
        sums *= 2
        moved = 2 * output_bytes + gradient_bytes
    saved = operations * (1 - 1 / parts) / speeds.operations
    return saved > speeds.call + sums * speeds.sum + moved / speeds.bytes
