"""One call of a module: its arguments, rows, and the ways to compute it whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_leaves

from samestep.view.kinds import has_rows
from samestep.view.operations import Operation
from samestep.view.ranks import Slices
from samestep.view.rows import is_rows, with_all_rows


@dataclass
class Call:
    """One call of a module.

    Attributes:
        module: the module.
        parts: its submodules.
        forward: forward of the module's own class.
        eager: the same without a compiler.
        arguments: positional arguments.
        options: keyword arguments.
        leaves: leaves of both.
        spec: structure of both.
        rows: rows of the batch.
        slices: slices of the batch.
        operations: operations that the division of the call was tried with.
        is_tried_again: whether a divided computation had operations that were not tried.
    """

    module: nn.Module
    parts: Sequence[nn.Module]
    forward: Callable[..., Any]
    eager: Callable[..., Any]
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    leaves: Sequence[Any]
    spec: TreeSpec
    rows: int
    slices: Slices
    operations: Sequence[Operation] = ()
    is_tried_again: bool = False

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters that require gradients, each once."""
        collected: dict[nn.Parameter, None] = {}
        for part in self.parts:
            for parameter in part._parameters.values():
                if parameter is not None and parameter.requires_grad:
                    collected[parameter] = None
        return list(collected)

    def has_differentiated_arguments(self) -> bool:
        """Whether a backward of the call gives gradients to an argument."""
        is_needed = any(
            isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in self.leaves
        )
        return is_needed and torch.is_grad_enabled()

    def gather(self) -> None:
        """Gather arguments of which other rows are elsewhere."""
        if any(is_rows(leaf) for leaf in self.leaves):
            self.arguments, self.options = with_all_rows((self.arguments, self.options))
            self.leaves = tree_leaves((self.arguments, self.options))

    def whole_eager(self) -> Any:
        """Compute the call whole, without a compiler."""
        return self.eager(*self.arguments, **self.options)

    def cut_leaves(self) -> tuple[bool, ...]:
        """Return for each leaf whether its first dimension is as long as the batch."""
        return tuple(has_rows(leaf, self.rows) for leaf in self.leaves)
