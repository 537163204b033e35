"""Interventions of an experiment, applied in the process of a rank."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import torch

from samestep.config import StepConfig
from samestep.data.batch import Microbatch, map_tensors
from samestep.data.microbatch_dataset import MicrobatchDataset
from samestep.distributed.rng import microbatch_seed, preserved_generators
from samestep.engine.buffers import AveragedBuffers
from samestep.engine.engine import Engine
from samestep.engine.microbatch_forward import call_model
from samestep.tools.verify_engine.tensor_comparison import digest_any
from samestep.tools.verify_engine.trials import Interventions

StateValue = torch.Tensor | float | list[Any] | dict[Any, Any]
_Generator = torch.Generator | numpy.random.Generator | numpy.random.RandomState | random.Random
# Attributes of torch.nn.Module.
_MODULE_ATTRIBUTES = frozenset([*vars(torch.nn.Module()), "call_super_init", "dump_patches"])


def apply_to_process(interventions: Interventions, folder: Path, rank: int) -> None:
    """Apply the interventions that precede the subject; permanent, since a trial has its own processes."""
    if interventions.single_thread:
        torch.set_num_threads(1)
        torch.set_num_threads = lambda nthreads: None
    if interventions.repeat_samples:
        _repeat_samples(folder)
    if interventions.other_orders:
        _reorder_directories(rank)


class EngineInterventions:
    """Interventions in an engine and its model.

    Attributes:
        averaged: names of the buffers that steps average over microbatches.
    """

    def __init__(self, interventions: Interventions) -> None:
        self._interventions = interventions
        self._model: torch.nn.Module | None = None
        self.averaged: frozenset[str] = frozenset()

    def prepare(self, model: torch.nn.Module, config: StepConfig) -> StepConfig:
        """Change the model of a new engine in place and return the configuration to use."""
        self._model = model
        if self._interventions.double:
            model.double()
            model.register_forward_pre_hook(_inputs_to_double, with_kwargs=True)
            config = replace(config, precision="fp32")
        if self._interventions.reduction is not None:
            torch.use_deterministic_algorithms(self._interventions.reduction == "exact")
            config = replace(config, reduction=self._interventions.reduction)
        self.averaged = frozenset(AveragedBuffers(model).names)
        if self._interventions.reset_state:
            first = _copy_state(hidden_state(model, self.averaged))
            model.register_forward_pre_hook(lambda module, _: _restore_state(module, first))
        return config

    def begin_step(self, engine: Engine) -> None:
        rates = self._interventions.learning_rates
        if rates is not None and engine.steps < len(rates):
            for group, rate in zip(engine.optimizer.param_groups, rates[engine.steps], strict=True):
                group["lr"] = rate

    def begin_microbatch(self, step: int, microbatch: Microbatch) -> None:
        assert self._model is not None
        if self._interventions.eval_module is not None:
            self._model.get_submodule(self._interventions.eval_module).eval()
        if self._interventions.extra_forward:
            self._extra_forward(self._model, microbatch)
        if self._interventions.seed_generators:
            for module in self._model.modules():
                for generator in vars(module).values():
                    if isinstance(generator, _Generator):
                        _seed(generator, microbatch_seed("shard", 0, step, microbatch.number))

    def _extra_forward(self, model: torch.nn.Module, microbatch: Microbatch) -> None:
        """Compute a forward and restore all known state afterwards, so that only hidden state changes."""
        buffers, state = AveragedBuffers(model), _copy_state(hidden_state(model, self.averaged))
        buffers.begin()
        with torch.no_grad(), preserved_generators():
            call_model(model, microbatch.data[0])
        buffers.restore()
        _restore_state(model, state)


def hidden_state(model: torch.nn.Module, averaged: frozenset[str]) -> dict[str, StateValue]:
    """Return buffers that steps do not average, and tensors and numbers in plain attributes, lists and dicts, by name.

    A forward may change them, and neither steps nor checkpoints synchronise them.
    """
    state: dict[str, StateValue] = {name: buffer for name, buffer in model.named_buffers() if name not in averaged}
    for path, module in model.named_modules():
        for key, value in vars(module).items():
            if key not in _MODULE_ATTRIBUTES and _is_state(value):
                state[f"{path}.{key}" if path else key] = value
    return state


def _is_state(value: Any) -> bool:
    if isinstance(value, list | dict):
        return all(_is_state(item) for item in (value.values() if isinstance(value, dict) else value))
    return isinstance(value, torch.Tensor | float | int)


def _copy_state(state: dict[str, StateValue]) -> dict[str, Any]:
    return {name: _copy(value) for name, value in state.items()}


def _copy(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_copy(item) for item in value]
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _restore_state(model: torch.nn.Module, state: dict[str, StateValue]) -> None:
    for name, value in _copy_state(state).items():
        path, _, key = name.rpartition(".")
        setattr(model.get_submodule(path), key, value)


def _seed(generator: _Generator, seed: int) -> None:
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    elif isinstance(generator, numpy.random.Generator):
        bits = generator.bit_generator
        bits.state = type(bits)(seed).state
    else:
        generator.seed(seed % 2**32)


def _inputs_to_double(
    module: torch.nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    return map_tensors(arguments, _to_double), map_tensors(options, _to_double)


def _to_double(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def _repeat_samples(folder: Path) -> None:
    """Patch datasets to read samples and to collate twice with the same random state, and to write those that differ.

    The index of the sample is written to `differing.txt`, that of the first one of a microbatch to `collated.txt`.
    """

    def twice(method: Callable[..., Any], file: Path) -> Callable[..., Any]:
        def call(self: MicrobatchDataset, *arguments: Any) -> Any:
            first, second = method(self, *arguments), method(self, *arguments)
            if digest_any(first) != digest_any(second):
                with file.open("a") as differing:
                    differing.write(f"{getattr(arguments[0], 'indices', arguments[-1:])[0]}\n")
            return first

        return call

    MicrobatchDataset._sample = twice(MicrobatchDataset._sample, folder / "differing.txt")  # type: ignore[method-assign]
    MicrobatchDataset._microbatch = twice(MicrobatchDataset._microbatch, folder / "collated.txt")  # type: ignore[method-assign]


def _reorder_directories(rank: int) -> None:
    """Patch listings of directories, whose order is arbitrary: sorted, reversed on odd ranks, rotated by rank."""
    list_names, scan = os.listdir, os.scandir

    def reordered(entries: list[Any]) -> list[Any]:
        entries = sorted(entries, key=str, reverse=rank % 2 == 1)
        start = rank % (len(entries) or 1)
        return entries[start:] + entries[:start]

    os.listdir = lambda *arguments: reordered(list_names(*arguments))
    os.scandir = lambda *arguments: _Entries(reordered(list(scan(*arguments))))  # type: ignore[assignment]


class _Entries(Iterator[Any]):
    """Entries of a directory, in place of the iterator of `os.scandir`."""

    def __init__(self, entries: list[Any]) -> None:
        self._entries = iter(entries)

    def __next__(self) -> Any:
        return next(self._entries)

    def __enter__(self) -> _Entries:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self._entries = iter(())
