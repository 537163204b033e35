"""Rules of operations inside of divided calls: what they receive."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from samestep.view.region import Make, Region


class CallOperations(Protocol):
    """Operations of a call so far (`samestep.view.operations.Operations`).

    Attributes:
        region: the rows that are computed; None for a whole call.
        draws: shapes of the random draws, in order.
        is_compared: whether the call is that of a trial, which draws as its parts do.
    """

    region: Region | None
    draws: list[tuple[int, ...]]
    is_compared: bool

    def draw(self, shape: Sequence[int], make: Make, device: torch.device) -> torch.Tensor:
        """Return the numbers of a random draw inside of a divided call, for the own rows."""
        ...

    def __enter__(self) -> Any:
        """Observe the operations of the block."""
        ...

    def __exit__(self, *error: Any) -> Any:
        """End the block."""
        ...


# A rule receives the operations of the call, the function, and its arguments; it returns the
# result.
Rule = Callable[[CallOperations, Callable[..., Any], Sequence[Any], Mapping[str, Any]], Any]
