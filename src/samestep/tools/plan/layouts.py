"""Layouts of a recipe on a number of devices: all meshes, checked by the validation of recipes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from samestep.config import MeshConfig, Recipe, StrategyConfig, resolve_mesh
from samestep.config.strategy import MeshShape
from samestep.errors import InputError
from samestep.microbatches import most_owned


@dataclass(frozen=True)
class Layout:
    """Strategy with its mesh on a number of devices.

    Attributes:
        strategy: strategy with the sizes of all axes.
        shape: the mesh.
        microbatches: largest number of microbatches of a rank, or of a group of ranks with the same data.
    """

    strategy: StrategyConfig
    shape: MeshShape
    microbatches: int

    @property
    def name(self) -> str:
        """Combined strategies with the sizes of the axes above 1."""
        sizes = [f"{axis} {size}" for axis, size in self.strategy.mesh.sizes.items() if size > 1]
        return f"{self.shape.name} ({', '.join(sizes)})" if len(sizes) > 1 else self.shape.name

    @property
    def options(self) -> str:
        """Options of `samestep train` for this layout."""
        if self.shape.size == 1:
            return ""
        mesh = ",".join(f"{axis}={size}" for axis, size in self.strategy.mesh.sizes.items() if size > 1)
        return f"--strategy {self.strategy.name} --mesh {mesh}"


@dataclass(frozen=True)
class Infeasible:
    """Layout that cannot run, with the reason."""

    name: str
    reason: str


def candidates(devices: int) -> Iterator[StrategyConfig]:
    """Yield a strategy for each mesh of a number of devices; FSDP and pipelines exclude each other."""
    for pipeline in _divisors(devices):
        for shard in _divisors(devices // pipeline):
            for tensor in _divisors(devices // pipeline // shard):
                replicate = devices // pipeline // shard // tensor
                sizes = {"pipeline": pipeline, "replicate": replicate, "shard": shard, "tensor": tensor}
                if shard == 1 or pipeline == 1:
                    yield _strategy({axis: size for axis, size in sizes.items() if size > 1})


def _strategy(sizes: dict[str, int]) -> StrategyConfig:
    name = "ddp"
    if "shard" in sizes:
        name = "hsdp" if "replicate" in sizes else "fsdp"
    elif "pipeline" in sizes:
        name = "pp"
    elif "tensor" in sizes:
        name = "tp"
    return StrategyConfig(name=name, mesh=MeshConfig(**sizes))  # type: ignore[arg-type]


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def find_layouts(recipe: Recipe, devices: int) -> tuple[list[Layout], list[Infeasible]]:
    """Return the layouts that the recipe allows on a number of devices, and the others with the reason.

    The model can exclude further layouts.
    """
    layouts, infeasible = [], []
    for strategy in candidates(devices):
        try:
            shape = resolve_mesh(strategy, devices, recipe.microbatch_count, recipe.batch_size)
        except InputError as error:
            infeasible.append(Infeasible(_name(strategy), error.value))
        else:
            layouts.append(Layout(strategy, shape, most_owned(recipe.microbatch_count, shape.data_size)))
    return layouts, infeasible


def _name(strategy: StrategyConfig) -> str:
    sizes = strategy.mesh.sizes
    return Layout(strategy, resolve_mesh(strategy, math.prod(sizes.values())), 1).name
