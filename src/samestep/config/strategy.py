"""Parallel strategy of a recipe, and the mesh shape that the strategy has on a number of ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import Ge

from samestep.config.validation import Constrained
from samestep.errors import InputError
from samestep.microbatches import require_microbatches
from samestep.number_text import plural

StrategyName = Literal["auto", "ddp", "fsdp", "hsdp", "device_map", "tp", "pp"]
Hook = Literal["none", "fp16", "bf16"]

# From slow links to fast ones: the axis with the most communication is innermost, between
# neighbouring ranks.
AXES = ("pipeline", "replicate", "shard", "tensor")
# The axes of each strategy. The first axis without a size takes the remaining factor of the number
# of ranks.
_AXES_OF_STRATEGY = {
    "ddp": ("replicate", "tensor", "pipeline"),
    "fsdp": ("shard",),
    "hsdp": ("shard", "replicate"),
    "device_map": ("replicate",),
    "tp": ("tensor", "replicate"),
    "pp": ("pipeline", "replicate", "tensor"),
}
# Options that have an effect only with an axis, or only under some strategies.
_AXIS_OF_OPTION = {"offload": "shard", "gather": "shard", "stages": "pipeline"}
_STRATEGIES_OF_OPTION = {
    "hook": ("auto", "ddp"),
    "devices": ("device_map",),
    "place": ("device_map",),
}
# Axes on which a rank holds a part of the model, and the name of the part.
_PARTS = {"pipeline": "stage", "shard": "shard", "tensor": "tensor slice"}


@dataclass(frozen=True, kw_only=True)
class MeshConfig(Constrained, key_prefix="strategy.mesh."):
    """Sizes of the mesh axes; None for an axis that follows from the number of ranks.

    Attributes:
        pipeline: stages of consecutive layers, one per rank.
        replicate: copies of the model (or of the group of ranks that holds the model).
        shard: ranks that each store one shard of every parameter and gather parameters before use.
        tensor: ranks that divide matrix products.
    """

    pipeline: Annotated[int, Ge(1)] | None = None
    replicate: Annotated[int, Ge(1)] | None = None
    shard: Annotated[int, Ge(1)] | None = None
    tensor: Annotated[int, Ge(1)] | None = None

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes of the axes that have one."""
        return {axis: size for axis, size in vars(self).items() if size is not None}


@dataclass(frozen=True, kw_only=True)
class StrategyConfig(Constrained, key_prefix="strategy."):
    """Parallel strategy. Every strategy computes the same result, to the bit or to rounding.

    Attributes:
        name: `auto` (same as `ddp`); `ddp`, one copy of the model per rank; `fsdp`, one shard of
            every parameter per rank; `hsdp`, `fsdp` within groups of ranks, the groups being
            copies; `device_map`, model parts on several devices of each rank; `tp`, matrix products
            divided among ranks; `pp`, consecutive layers on different ranks.
        mesh: sizes of the axes, for combinations such as `ddp` with `tensor: 2`.
        hook: for `ddp` under `fast`: gradient compression; any value except `none` rounds
            gradients.
        offload: for a shard axis: keep parameters and optimizer state in host memory.
        gather: for a shard axis: precision of gathered parameters and of computation.
        stages: for a pipeline axis: names of the first modules of the second and later stages;
            empty for stages of similar cost.
        devices: for `device_map`: devices of each rank; None for all devices.
        place: for `device_map`: shell patterns of module names, with a device number.
    """

    name: StrategyName = "auto"
    mesh: MeshConfig = field(default_factory=MeshConfig)
    hook: Hook = "none"
    offload: bool = False
    gather: Literal["fp32", "bf16"] = "fp32"
    stages: tuple[str, ...] = ()
    devices: Annotated[int, Ge(1)] | None = None
    place: dict[str, int] = field(default_factory=dict)

    def is_exact(self, tensor_slices: int) -> bool:
        """Whether this strategy can give the bits of one process.

        Args:
            tensor_slices: number of slices of matrix products.
        """
        divides_products = self.name == "tp" or self.mesh.sizes.get("tensor", 1) > 1
        rounds = self.hook != "none" or self.gather != "fp32"
        return not (divides_products and tensor_slices == 1) and not rounds

    @property
    def ranks_per_model(self) -> int:
        """Number of ranks that share the data of one rank, as far as the mesh is set."""
        return math.prod(self.mesh.sizes.get(axis, 1) for axis in ("pipeline", "tensor"))

    @property
    def gradient_note(self) -> str | None:
        """Note about compressed gradients; None without compression."""
        if self.hook == "none":
            return None
        return f"gradients are sent in 16 bits ({self.hook}): equal to the rounding of this format"


@dataclass(frozen=True)
class MeshShape:
    """Sizes of the mesh axes; the product is the number of ranks.

    Attributes:
        name: combined strategies, such as `ddp x tp`.
    """

    name: str = "single"
    pipeline: int = 1
    replicate: int = 1
    shard: int = 1
    tensor: int = 1

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes in the order of `AXES`."""
        return tuple(getattr(self, axis) for axis in AXES)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return math.prod(self.sizes)

    @property
    def data_size(self) -> int:
        """Number of ranks, or groups of ranks, with different data."""
        return self.replicate * self.shard

    @property
    def splits_model(self) -> bool:
        """Whether a rank holds only a part of the model."""
        return self.size > self.replicate

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the coordinate of a rank on each axis."""
        coordinates = {}
        for axis in reversed(AXES):
            rank, coordinates[axis] = divmod(rank, getattr(self, axis))
        return {axis: coordinates[axis] for axis in AXES}

    def describe(self) -> str:
        """Return the axes and the coordinates of each rank, one line per rank."""
        sizes = [f"{axis} {size}" for axis, size in zip(AXES, self.sizes, strict=True) if size > 1]
        lines = [f"mesh {self.name}: {' x '.join(sizes) or 'one rank'}"]
        for rank in range(self.size):
            coordinates = self.coordinates(rank)
            data = coordinates["replicate"] * self.shard + coordinates["shard"]
            parts = [
                f"{label} {coordinates[axis] + 1} of {getattr(self, axis)}"
                for axis, label in _PARTS.items()
                if getattr(self, axis) > 1
            ]
            text = ", ".join(parts or ["complete model"])
            lines.append(f"  rank {rank}: data {data + 1} of {self.data_size}, {text}")
        return "\n".join(lines)


def resolve_mesh(
    strategy: StrategyConfig, processes: int, microbatches: int | None = None
) -> MeshShape:
    """Return the mesh shape of a strategy on a number of ranks.

    Args:
        strategy: the strategy.
        processes: number of ranks.
        microbatches: number of microbatches; None if not known yet.

    Raises:
        InputError: the strategy has no such axis, the sizes do not multiply to `processes`, there
            are too few microbatches, or an option has no effect.
    """
    name = "ddp" if strategy.name == "auto" else strategy.name
    axes = _AXES_OF_STRATEGY[name]
    sizes = strategy.mesh.sizes
    fixed = math.prod(sizes.values())
    free = next((axis for axis in axes if axis not in sizes), None)
    has_other_axes = any(size > 1 for axis, size in sizes.items() if axis not in axes)
    has_other_size = processes % fixed > 0 or (free is None and fixed != processes)
    # Without a size, all ranks would be one group of shards, which is `fsdp`.
    lacks_sizes = name == "hsdp" and not sizes and processes > 1
    if has_other_axes or has_other_size or lacks_sizes:
        mesh = "no mesh"
        if sizes:
            mesh = f"the mesh {','.join(f'{axis}={size}' for axis, size in sizes.items())}"
        raise InputError(
            f"strategy {name} with {mesh} on {plural(processes, 'rank')}",
            expected=f"sizes of the axes {', '.join(axes)} that multiply to the number of "
            "processes",
            fix=f"--mesh {axes[0]}={processes}",
            code="E_MESH",
        )
    resolved = dict.fromkeys(AXES, 1) | sizes
    if free is not None:
        resolved[free] = processes // fixed
    shape = MeshShape(_combined_name(name, resolved), **resolved)
    if microbatches is not None:
        ranks_per_model = shape.size // shape.data_size
        require_microbatches(microbatches, shape.data_size, ranks_per_model=ranks_per_model)
    _require_effect(strategy, shape)
    return shape


def _combined_name(name: str, sizes: dict[str, int]) -> str:
    if name == "device_map":
        if sizes["replicate"] > 1:
            return "ddp x device_map"
        return name
    names = {"replicate": "ddp", "shard": "fsdp", "pipeline": "pp", "tensor": "tp"}
    parts = [names[axis] for axis in names if sizes[axis] > 1]
    if parts[:2] == ["ddp", "fsdp"]:
        parts[:2] = ["hsdp"]
    return " x ".join(parts) or "single"


def _require_effect(strategy: StrategyConfig, shape: MeshShape) -> None:
    """Reject options without an effect. On one rank, options for several ranks are valid."""

    def error(key: str, circumstance: str, expected: str, alternative: str) -> InputError:
        fix = f"leave strategy.{key} out{alternative}"
        return InputError(f"strategy.{key} {circumstance}", expected, fix, code="E_STRATEGY")

    defaults = vars(StrategyConfig())
    changed = {key for key, default in defaults.items() if getattr(strategy, key) != default}
    for key, names in _STRATEGIES_OF_OPTION.items():
        if key in changed and strategy.name not in names:
            circumstance = f"with strategy.name {strategy.name}"
            expected = f"strategy.{key} belongs to {names[-1]}"
            raise error(key, circumstance, expected, f", or --strategy {names[-1]}")
    for key, axis in _AXIS_OF_OPTION.items():
        if key in changed and getattr(shape, axis) == 1 < shape.size:
            expected = f"strategy.{key} configures the {axis} axis"
            raise error(key, f"without a {axis} axis", expected, f", or --mesh {axis}={shape.size}")
