"""Activation checkpointing switched off, where a recomputation in the backward could not be right."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.checkpoint as checkpointing


@contextmanager
def checkpointing_off() -> Iterator[None]:
    """Keep activations: with few rows memory is no question, and recomputation would leave region and lock step.

    The two names are private; they are looked up by `torch.utils.checkpoint.checkpoint` at each call.
    """
    function = checkpointing.CheckpointFunction
    generator = checkpointing._checkpoint_without_reentrant_generator
    checkpointing.CheckpointFunction = _KeepActivations  # type: ignore[misc, assignment]
    checkpointing._checkpoint_without_reentrant_generator = _nothing_around
    try:
        yield
    finally:
        checkpointing.CheckpointFunction = function  # type: ignore[misc]
        checkpointing._checkpoint_without_reentrant_generator = generator


class _KeepActivations:
    """Replacement of reentrant checkpointing with the same gradients: none, unless an argument requires one."""

    @staticmethod
    def apply(function: Callable[..., Any], preserve: bool, *arguments: Any) -> Any:
        """Compute the function."""
        differentiable = any(isinstance(value, torch.Tensor) and value.requires_grad for value in arguments)
        with torch.set_grad_enabled(torch.is_grad_enabled() and differentiable):
            return function(*arguments)


def _nothing_around(*arguments: Any, **options: Any) -> Iterator[None]:
    yield
