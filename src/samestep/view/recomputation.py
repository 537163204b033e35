"""Activation checkpointing switched off, or surrounded, where it alone could not be right."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.utils.checkpoint as checkpointing


@contextmanager
def checkpointing_off() -> Iterator[None]:
    """Keep activations: few rows need little, and a recomputation would leave the lock step."""

    def compute(function: Callable[..., Any], preserve: bool, *arguments: Any) -> Any:
        # Reentrant checkpoints have no gradients unless an argument requires one.
        is_needed = any(isinstance(one, torch.Tensor) and one.requires_grad for one in arguments)
        with torch.set_grad_enabled(torch.is_grad_enabled() and is_needed):
            return function(*arguments)

    def do_nothing(*arguments: Any, **options: Any) -> Iterator[None]:
        yield

    with _replaced(compute, do_nothing):
        yield


@contextmanager
def recomputation_inside(
    surroundings: Callable[[], AbstractContextManager[None]],
) -> Iterator[None]:
    """Let the backward compute the parts that this block checkpoints inside of `surroundings`."""
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
    # `torch.utils.checkpoint.checkpoint` looks them up at each call. Both are private.
    names: Any = checkpointing
    before = names.CheckpointFunction, names._checkpoint_without_reentrant_generator
    names.CheckpointFunction = SimpleNamespace(apply=apply)
    names._checkpoint_without_reentrant_generator = generator
    try:
        yield
    finally:
        names.CheckpointFunction, names._checkpoint_without_reentrant_generator = before
