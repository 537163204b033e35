"""Activation checkpointing switched off, or surrounded, where it alone could not be right."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.utils.checkpoint as checkpointing

# Function that `torch.utils.checkpoint.checkpoint` looks up at each call that is not reentrant. It
# is private, and torch 2.14 has given it another name.
_GENERATOR = "_checkpoint_without_reentrant_generator"
if hasattr(checkpointing, f"{_GENERATOR}_impl"):
    _GENERATOR = f"{_GENERATOR}_impl"


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
    generator = getattr(checkpointing, _GENERATOR)

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
    # `torch.utils.checkpoint.checkpoint` looks them up at each call.
    replacements = {"CheckpointFunction": SimpleNamespace(apply=apply), _GENERATOR: generator}
    before = {name: getattr(checkpointing, name) for name in replacements}
    try:
        for name, function in replacements.items():
            setattr(checkpointing, name, function)
        yield
    finally:
        for name, function in before.items():
            setattr(checkpointing, name, function)
