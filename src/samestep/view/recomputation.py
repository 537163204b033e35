"""Activation checkpointing switched off, or surrounded, where a recomputation alone could not be right."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.utils.checkpoint as checkpointing


def checkpointing_off() -> AbstractContextManager[None]:
    """Keep activations: with few rows memory is no question, and recomputation would leave region and lock step."""
    return _replaced(_kept_activations, _nothing_around)


@contextmanager
def recomputation_inside(
    surroundings: Callable[[], AbstractContextManager[None]],
) -> Iterator[None]:
    """Let the backward compute the parts that are checkpointed in this block inside of `surroundings`."""
    apply: Any = checkpointing.CheckpointFunction.apply
    generator = checkpointing._checkpoint_without_reentrant_generator

    def surrounded(compute: Callable[..., Any]) -> Callable[..., Any]:
        def computed(*arguments: Any, **options: Any) -> Any:
            if torch._C._current_graph_task_id() == -1:  # the forward
                return compute(*arguments, **options)
            with surroundings():
                return compute(*arguments, **options)

        return computed

    def apply_surrounded(compute: Callable[..., Any], *arguments: Any) -> Any:
        return apply(surrounded(compute), *arguments)

    def generate_surrounded(compute: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        return generator(surrounded(compute), *arguments, **options)

    with _replaced(apply_surrounded, generate_surrounded):
        yield


@contextmanager
def _replaced(apply: Callable[..., Any], generator: Callable[..., Any]) -> Iterator[None]:
    """Replace what `torch.utils.checkpoint.checkpoint` looks up at each call, with and without reentrant autograd."""
    names: Any = checkpointing  # both are private
    before = names.CheckpointFunction, names._checkpoint_without_reentrant_generator
    names.CheckpointFunction = SimpleNamespace(apply=apply)
    names._checkpoint_without_reentrant_generator = generator
    try:
        yield
    finally:
        names.CheckpointFunction, names._checkpoint_without_reentrant_generator = before


def _kept_activations(function: Callable[..., Any], preserve: bool, *arguments: Any) -> Any:
    """Compute the function, with the gradients of reentrant checkpointing: none, unless an argument requires one."""
    differentiable = any(
        isinstance(value, torch.Tensor) and value.requires_grad for value in arguments
    )
    with torch.set_grad_enabled(torch.is_grad_enabled() and differentiable):
        return function(*arguments)


def _nothing_around(*arguments: Any, **options: Any) -> Iterator[None]:
    yield
