"""Keeps things still in a rank of a trial, as an experiment asks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from samestep.config import StepRules
from samestep.data.batch import Shard
from samestep.data.samples import ShardDataset
from samestep.data.tensors import map_tensors
from samestep.engine.buffers import ShardedBuffers
from samestep.engine.forward import call_model
from samestep.engine.observer import Observed
from samestep.runtime.random_state import derive_seed, preserved_generators
from samestep.tools.verify.digest import digest_any
from samestep.tools.verify.memory import Remembered, copied, generators_of, memory_of, recall, seed_generator
from samestep.tools.verify.plan import Held


def hold_process(held: Held, folder: Path) -> None:
    """What has to be held before the subject begins; for the life of this process, which a trial has for itself."""
    if held.one_thread:
        torch.set_num_threads(1)
        torch.set_num_threads = _ignore
    if held.twice:
        _ask_twice(folder / "twice.txt")


class Holding:
    """What is held in an engine and its model.

    Attributes:
        averaged: names of the buffers that steps average over shards.
    """

    def __init__(self, held: Held) -> None:
        self._held = held
        self._model: torch.nn.Module | None = None
        self._first: dict[str, Remembered] = {}
        self.averaged: frozenset[str] = frozenset()

    def prepare(self, model: torch.nn.Module, rules: StepRules) -> StepRules:
        """Change the model that an engine is about to take, and the rules that it follows."""
        held, self._model = self._held, model
        if held.double:
            model.double()
            model.register_forward_pre_hook(_in_double, with_kwargs=True)
            rules = replace(rules, precision="fp32")
        if held.reduction is not None:
            torch.use_deterministic_algorithms(held.reduction == "exact")
            rules = replace(rules, reduction=held.reduction)
        self.averaged = frozenset(ShardedBuffers(model).names)
        if held.state:
            self._first = {name: copied(value) for name, value in memory_of(model, self.averaged).items()}
            model.register_forward_pre_hook(lambda module, _: recall(module, self._first))
        return rules

    def begin_step(self, engine: Observed) -> None:
        """Before anything of a step is computed."""
        if self._held.rates is not None and engine.steps < len(self._held.rates):
            for group, rate in zip(engine.optimizer.param_groups, self._held.rates[engine.steps], strict=True):
                group["lr"] = rate

    def begin_shard(self, step: int, part: Shard) -> None:
        """Before the forward of a shard."""
        assert self._model is not None
        if self._held.resting is not None:
            self._model.get_submodule(self._held.resting).eval()
        if self._held.rehearsed:
            self._rehearse(self._model, part)
        if self._held.generators:
            for generator in generators_of(self._model).values():
                seed_generator(generator, derive_seed("shard", 0, step, part.number))

    def _rehearse(self, model: torch.nn.Module, part: Shard) -> None:
        """Leave nothing of a forward but what the model hides."""
        buffers, memory = ShardedBuffers(model), memory_of(model, self.averaged)
        kept = {name: copied(value) for name, value in memory.items()}
        buffers.begin()
        with torch.no_grad(), preserved_generators():
            call_model(model, part.data[0])
        buffers.restore()
        recall(model, kept)


def _ignore(nthreads: int) -> None:
    """In the place of torch.set_num_threads."""


def _in_double(
    module: torch.nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    return map_tensors(arguments, _double), map_tensors(options, _double)


def _double(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def _ask_twice(file: Path) -> None:
    """Have datasets make every sample twice, with the same random state, and note where the second one differs."""
    make = ShardDataset._sample

    def sample(self: ShardDataset, epoch: int, index: int) -> Any:
        first, second = make(self, epoch, index), make(self, epoch, index)
        if digest_any(first) != digest_any(second):
            with file.open("a") as notes:
                notes.write(f"{index}\n")
        return first

    ShardDataset._sample = sample  # type: ignore[method-assign]
