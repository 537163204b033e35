"""Activation checkpointing switched off, or surrounded, where a recomputation alone could not be right."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
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


@contextmanager
def recomputation_inside(surroundings: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Let the backward compute the parts that are checkpointed in this block inside of `surroundings`."""
    function = checkpointing.CheckpointFunction
    generator = checkpointing._checkpoint_without_reentrant_generator

    def surrounded(compute: Callable[..., Any]) -> Callable[..., Any]:
        def computed(*arguments: Any, **options: Any) -> Any:
            if torch._C._current_graph_task_id() == -1:  # the forward
                return compute(*arguments, **options)
            with surroundings():
                return compute(*arguments, **options)

        return computed

    class Surrounded:
        @staticmethod
        def apply(compute: Callable[..., Any], *arguments: Any) -> Any:
            return function.apply(surrounded(compute), *arguments)

    checkpointing.CheckpointFunction = Surrounded  # type: ignore[misc, assignment]
    checkpointing._checkpoint_without_reentrant_generator = lambda compute, *arguments, **options: generator(
        surrounded(compute), *arguments, **options
    )
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
