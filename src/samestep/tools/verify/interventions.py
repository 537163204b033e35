"""Interventions of an experiment, applied in the process of a rank."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer
from torch.utils._pytree import tree_map
from torch.utils.data._utils.fetch import _MapDatasetFetcher

from samestep.data.own_rows import OwnRows
from samestep.distributed.rng import derive_seed, preserved_generators
from samestep.script.file_journal import Entries
from samestep.tools.verify.tensor_comparison import digest_any
from samestep.tools.verify.trials import Interventions

_Generator = torch.Generator | numpy.random.Generator | numpy.random.RandomState | random.Random


def apply_to_process(interventions: Interventions, folder: Path, rank: int) -> None:
    """Apply the interventions that precede the subject, for the rest of this process."""
    if interventions.single_thread:
        torch.set_num_threads(1)
        # The script and `samestep.init` would set another number.
        torch.set_num_threads = lambda nthreads: None
    if interventions.repeat_samples:
        _repeat_samples(folder)
    if interventions.reads_alone:
        # The setter ignores the ranks that loaders assign.
        OwnRows.ranks = property(lambda self: None, lambda self, ranks: None)  # type: ignore[assignment]
    if interventions.other_orders:
        _reorder_directories(rank)


class ModelInterventions:
    """Interventions in modules and optimizers.

    The accuracy is that of gradients that ranks exchange, if it is below that of the weights.
    """

    def __init__(self, interventions: Interventions, accuracy: float) -> None:
        self._interventions = interventions
        self._accuracy = accuracy
        # An own generator: the script's streams stay as they are.
        self._generator = torch.Generator().manual_seed(0)
        # Values of parameters until the step.
        self._unperturbed: dict[torch.Tensor, torch.Tensor] = {}

    def prepare(self, module: nn.Module) -> None:
        """Change a module before its first call."""
        if self._interventions.double:
            module.double()
        if self._interventions.perturbed:
            self._perturb([*module.parameters()])

    @contextmanager
    def call(
        self, module: nn.Module, inputs: tuple[Any, Any], step: int, number: int
    ) -> Iterator[tuple[Any, Any]]:
        """Yield the arguments of a call; modes of the module are restored after the block."""
        modes = [(part, part.training) for part in module.modules()]
        self._perturb_until_step(module)
        for part in module.modules():
            is_norm = self._interventions.without_norms and isinstance(part, _NormBase)
            if is_norm or self._interventions.eval_mode:
                part.training = False
            if self._interventions.seed_generators:
                for generator in vars(part).values():
                    if isinstance(generator, _Generator):
                        _seed(generator, derive_seed("shard", 0, step, number))
        try:
            yield tree_map(_to_double, inputs) if self._interventions.double else inputs
        finally:
            for part, mode in modes:
                part.training = mode

    def before_step(self, optimizer: Optimizer, step: int) -> None:
        """Set the learning rates of an optimizer, after some steps of all optimizers."""
        rates = self._interventions.learning_rates
        if rates is not None and step < len(rates):
            for group, rate in zip(optimizer.param_groups, rates[step], strict=True):
                group["lr"] = rate
        with torch.no_grad():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter in self._unperturbed:
                        parameter.copy_(self._unperturbed.pop(parameter))

    def after_step(self, optimizer: Optimizer) -> None:
        """Perturb the weights that an optimizer has changed."""
        if self._interventions.perturbed:
            for group in optimizer.param_groups:
                self._perturb(group["params"])

    def _perturb_until_step(self, module: nn.Module) -> None:
        """Perturb weights by the accuracy of their use; the step has that of the weights."""
        kind = next((parameter.device.type for parameter in module.parameters()), "cpu")
        accuracy = self._accuracy
        if torch.is_autocast_enabled(kind):
            accuracy = max(accuracy, torch.finfo(torch.get_autocast_dtype(kind)).eps)
        if self._interventions.perturbed and accuracy:
            new = [one for one in module.parameters() if one not in self._unperturbed]
            self._unperturbed |= {parameter: parameter.detach().clone() for parameter in new}
            self._perturb(new, accuracy)

    def _perturb(self, parameters: Sequence[torch.Tensor], eps: float = 0.0) -> None:
        """Move elements by a unit in the last place, or `eps`: the size of an error of rounding."""
        with torch.no_grad():
            for parameter in parameters:
                if parameter.is_floating_point() and not nn.parameter.is_lazy(parameter):
                    own = parameter.to_local() if isinstance(parameter, DTensor) else parameter
                    signs = torch.randint(0, 2, own.shape, generator=self._generator) * 2 - 1
                    own.mul_(1 + max(eps, torch.finfo(own.dtype).eps) * signs.to(own))


def _to_double(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.double()
    return value


def _seed(generator: _Generator, seed: int) -> None:
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    elif isinstance(generator, numpy.random.Generator):
        bits = generator.bit_generator
        # A generator of NumPy cannot be seeded again.
        bits.state = type(bits)(seed).state
    else:
        generator.seed(seed % 2**32)  # the limit of `RandomState`


def _repeat_samples(folder: Path) -> None:
    """Patch torch's loaders to read and collate twice with equal states of seeded generators.

    The indices of samples that differ are written to `differing.txt`, that of the first one of a
    batch whose collation differs to `collated.txt`.
    """
    fetch: Callable[..., Any] = _MapDatasetFetcher.fetch

    def call_twice(call: Callable[[], Any], index: Any, file: str) -> Any:
        with preserved_generators():
            first = call()
        with preserved_generators():
            second = call()
        if digest_any(first) != digest_any(second):
            with (folder / file).open("a", encoding="utf-8") as opened:
                opened.write(f"{index}\n")
        return first

    def fetch_twice(self: Any, indices: Any) -> Any:
        listed = list(indices) if self.auto_collation else [indices]
        samples = []
        for index in listed:
            read = partial(self.dataset.__getitem__, index)
            samples.append(call_twice(read, index, "differing.txt"))
        if self.auto_collation:
            call_twice(partial(self.collate_fn, samples), listed[0], "collated.txt")
        return fetch(self, indices)

    _MapDatasetFetcher.fetch = fetch_twice  # type: ignore[method-assign]


def _reorder_directories(rank: int) -> None:
    """Patch listings of directories, whose order is arbitrary: one order per rank."""
    list_names = os.listdir
    scan = os.scandir

    def reordered(entries: list[Any]) -> list[Any]:
        # Sorted, so that the order does not depend on the file system: a finding can be repeated.
        entries = sorted(entries, key=str, reverse=rank % 2 == 1)
        start = rank % (len(entries) or 1)
        return entries[start:] + entries[:start]

    def listdir(path: Any = ".") -> Any:
        return reordered(list_names(path))

    def scandir(path: Any = ".") -> Any:
        return Entries(iter(reordered(list(scan(path)))))

    os.listdir = listdir
    os.scandir = scandir
