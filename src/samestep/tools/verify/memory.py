"""What modules remember besides the state that is saved: a forward may change it, and nobody averages it."""

from __future__ import annotations

import random

import numpy
import torch

Remembered = torch.Tensor | float
Generator = torch.Generator | numpy.random.Generator | numpy.random.RandomState | random.Random
# Of torch itself.
_SETTINGS = ("training", "call_super_init", "dump_patches")


def memory_of(model: torch.nn.Module, averaged: frozenset[str]) -> dict[str, Remembered]:
    """Buffers that steps do not average, and tensors and numbers that modules hold as plain attributes, by name."""
    found: dict[str, Remembered] = {name: value for name, value in model.named_buffers() if name not in averaged}
    for path, module in model.named_modules():
        for key, value in vars(module).items():
            if isinstance(value, torch.Tensor | float | int) and key not in _SETTINGS:
                found[f"{path}.{key}" if path else key] = value
    return found


def recall(model: torch.nn.Module, memory: dict[str, Remembered]) -> None:
    """Set all of it to what it was."""
    for name, value in memory.items():
        owner, _, key = name.rpartition(".")
        setattr(model.get_submodule(owner), key, copied(value))


def copied(value: Remembered) -> Remembered:
    """As it is now, whatever becomes of the tensor."""
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def generators_of(model: torch.nn.Module) -> dict[str, Generator]:
    """Generators that modules hold as attributes, by name."""
    return {
        f"{path}.{key}" if path else key: value
        for path, module in model.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, Generator)
    }


def seed_generator(generator: Generator, seed: int) -> None:
    """Seed a generator of any of these libraries."""
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    elif isinstance(generator, numpy.random.Generator):
        bits = generator.bit_generator
        bits.state = type(bits)(seed).state
    else:
        generator.seed(seed % 2**32)
