"""Optimizer with a memory fault, and loss that depends on the number of ranks, for recipes of tests."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from helpers.recorded import loss


class FlippingAdamW(torch.optim.AdamW):
    """Flips bit 12 of an element of the last weight on each rank after step 7, if the file `flip` exists."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._steps = 0

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        self._steps += 1
        if self._steps == 7 and Path("flip").exists():
            weights = [p for group in self.param_groups for p in group["params"] if p.dim() == 2]
            weights[-1].data.view(torch.int32)[1, 3] ^= 1 << 12
        return result


def uneven(outputs: torch.Tensor, indices: torch.Tensor, *, sample: int) -> torch.Tensor:
    """Return the loss of `recorded`, with a small error for one sample if there are two ranks."""
    value = loss(outputs, indices)
    is_wrong = dist.get_world_size() == 2 and outputs.requires_grad and bool((indices == sample).any())
    return value * (1 + 1e-6) if is_wrong else value
