"""The mesh of ranks as data: how many of them share the data, and among how many a model is divided."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product

from samestep.config.strategy import StrategyPart
from samestep.errors import InputError

# From slow links to fast ones: what communicates most lies innermost, so that neighbours do it.
AXES = ("pipeline", "replicate", "shard", "tensor")
# The axes that each strategy uses; the first that is not given takes what the others leave.
_USED = {
    "ddp": ("replicate", "tensor", "pipeline"),
    "dp": (),
    "fsdp": ("shard", "tensor"),
    "hsdp": ("shard", "replicate"),
    "placed": ("replicate",),
    "tp": ("tensor", "replicate"),
    "pp": ("pipeline", "replicate", "tensor"),
}
# Settings of a strategy that mean something only with an axis, or only under some names.
_OF_AXIS = {
    "plan": "tensor",
    "offload": "shard",
    "gather": "shard",
    "meta": "shard",
    "stages": "pipeline",
    "schedule": "pipeline",
}
_OF_NAME = {
    "hook": ("auto", "ddp"),
    "bucket_mb": ("auto", "ddp"),
    "devices": ("dp", "placed"),
    "place": ("placed",),
}


@dataclass(frozen=True)
class Layout:
    """Sizes of the axes; their product is the number of ranks.

    Attributes:
        name: the strategy with what it is combined with, such as `ddp x tp`.
    """

    name: str = "single"
    pipeline: int = 1
    replicate: int = 1
    shard: int = 1
    tensor: int = 1

    @property
    def sizes(self) -> tuple[int, ...]:
        """In the order of `AXES`."""
        return tuple(getattr(self, axis) for axis in AXES)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return math.prod(self.sizes)

    @property
    def data(self) -> int:
        """Number of ranks among which the data are divided; the others see the same as one of these."""
        return self.replicate * self.shard

    @property
    def is_split(self) -> bool:
        """Whether a rank holds only a part of the model."""
        return self.size > self.replicate

    @property
    def is_in_step(self) -> bool:
        """Whether ranks with different data talk to each other in every forward, so that each makes as many."""
        return self.shard > 1

    def place(self, rank: int) -> dict[str, int]:
        """Where a rank stands on each axis."""
        found = {}
        for axis in reversed(AXES):
            rank, found[axis] = divmod(rank, getattr(self, axis))
        return {axis: found[axis] for axis in AXES}

    def picture(self) -> str:
        """Which rank holds what, a line each."""
        sizes = [f"{axis} {size}" for axis, size in zip(AXES, self.sizes, strict=True) if size > 1]
        lines = [f"layout {self.name}: {' x '.join(sizes) or 'one rank'}"]
        for rank in range(self.size):
            place = self.place(rank)
            data = place["replicate"] * self.shard + place["shard"]
            words = {"pipeline": "stage", "shard": "part", "tensor": "slice"}
            parts = [
                f"{word} {place[axis] + 1} of {getattr(self, axis)}"
                for axis, word in words.items()
                if getattr(self, axis) > 1
            ]
            lines.append(f"  rank {rank}: data {data + 1} of {self.data}, {', '.join(parts) or 'the whole model'}")
        return "\n".join(lines)


def settle(part: StrategyPart, processes: int, shards: int | None = None) -> Layout:
    """The layout that a strategy has on that many ranks.

    Args:
        shards: of the recipe; None where it is not known yet.

    Raises:
        InputError: there is none: an axis that the strategy does not use, or sizes that do not multiply.
    """
    name = "ddp" if part.name == "auto" else part.name
    used, given = _USED[name], part.mesh.given
    _require_used(name, given, processes)
    if name == "hsdp" and not given and processes > 1:
        raise InputError(
            "hsdp without the sizes of its axes",
            rule="ranks that hold a model together, and how many such groups there are",
            do=f"--mesh {_example(used, processes)}",
        )
    fixed, free = math.prod(given.values()), next((axis for axis in used if axis not in given), None)
    if processes % fixed or (free is None and fixed != processes):
        raise InputError(
            f"strategy {name} with the mesh {_said(given)} has {fixed} rank{'s' if fixed > 1 else ''}"
            f"{', or a multiple of them' if free else ''}; there are {processes}",
            rule="the sizes of the axes multiply to the number of processes",
            do=f"--processes {max(1, processes // fixed) * fixed if free else fixed}, or {_fitting(name, processes)}",
        )
    sizes = dict.fromkeys(AXES, 1) | given | ({free: processes // fixed} if free else {})
    layout = Layout(_name(name, sizes), **sizes)
    _require_shards(layout, shards)
    _require_work_for_devices(part, shards)
    _require_meaning(part, layout)
    return layout


def _name(name: str, sizes: dict[str, int]) -> str:
    if name in ("dp", "placed"):
        return "ddp x placed" if sizes["replicate"] > 1 else name
    data = {(True, True): "hsdp", (False, True): "fsdp", (True, False): "ddp"}
    parts = [data.get((sizes["replicate"] > 1, sizes["shard"] > 1))]
    parts += ["pp" if sizes["pipeline"] > 1 else None, "tp" if sizes["tensor"] > 1 else None]
    return " x ".join(word for word in parts if word) or "single"


def _require_used(name: str, given: dict[str, int], processes: int) -> None:
    used = _USED[name]
    foreign = [axis for axis, size in given.items() if axis not in used and size > 1]
    if foreign:
        others = [other for other in _USED if _has_layout(other, given, processes)]
        raise InputError(
            f"strategy {name} with a {foreign[0]} axis of {given[foreign[0]]}",
            rule=f"{name} uses {'the axes ' + ', '.join(used) if used else 'no axis: it is one process'}",
            do=f"--strategy {others[0]}" if others else f"--strategy ddp --mesh replicate={processes}",
        )


def _has_layout(name: str, given: dict[str, int], processes: int) -> bool:
    """Whether a strategy has a layout with these sizes on that many ranks."""
    fixed, used = math.prod(given.values()), _USED[name]
    fits = processes == fixed if all(axis in given for axis in used) else processes % fixed == 0
    return fits and all(axis in used for axis, size in given.items() if size > 1)


def _require_shards(layout: Layout, shards: int | None) -> None:
    if shards is not None and layout.data > shards:
        idle = layout.data - shards
        raise InputError(
            f"{layout.data} ranks share the data but the recipe has {shards} shards, "
            f"so {idle} rank{'s' if idle > 1 else ''} would have nothing to do.",
            rule="ranks that share the data <= shards",
            do=f"--processes {layout.size // layout.data * shards}, or set shards: {layout.data} "
            "(this changes batch-norm groups and dropout, so results change)",
        )


def _require_work_for_devices(part: StrategyPart, shards: int | None) -> None:
    if part.name == "dp" and shards is not None and (part.devices or 1) > shards:
        raise InputError(
            f"strategy dp has {part.devices} devices but the recipe has {shards} shards",
            rule="a device computes a shard at a time: devices <= shards",
            do=f"set strategy.devices: {shards}",
        )


def _require_meaning(part: StrategyPart, layout: Layout) -> None:
    """Refuse a setting that would have no effect; on one rank a recipe may say what it does on several."""
    unset = StrategyPart()
    for key, names in _OF_NAME.items():
        if getattr(part, key) != getattr(unset, key) and part.name not in names:
            raise InputError(
                f"strategy.{key} with strategy.name {part.name}",
                rule=f"it belongs to {' and '.join(name for name in names if name != 'auto')}",
                do=f"leave strategy.{key} out, or --strategy {names[-1]}",
            )
    if part.bucket_mb is not None and layout.is_split:
        raise InputError(
            f"strategy.bucket_mb with the layout {layout.name}",
            rule="buckets are of copies of a whole model; parts of one meet when all shards are done",
            do="leave strategy.bucket_mb out",
        )
    if part.meta and layout.tensor > 1:
        raise InputError(
            f"strategy.meta with the layout {layout.name}",
            rule="a tensor axis divides values, which rank 0 alone would have",
            do="leave strategy.meta out",
        )
    if part.bucket_mb is not None and layout.is_split:
        raise InputError(
            f"strategy.bucket_mb with the layout {layout.name}",
            rule="buckets are of copies of a whole model; parts of one meet when all shards are done",
            do="leave strategy.bucket_mb out",
        )
    for key, axis in _OF_AXIS.items():
        if getattr(part, key) != getattr(unset, key) and getattr(layout, axis) == 1 < layout.size:
            raise InputError(
                f"strategy.{key} without a {axis} axis",
                rule=f"it says how the {axis} axis works",
                do=f"leave strategy.{key} out, or --mesh {axis}={layout.size}",
            )


def _said(given: dict[str, int]) -> str:
    return ",".join(f"{axis}={size}" for axis, size in given.items()) or "of one rank"


def _fitting(name: str, processes: int) -> str:
    """A layout of that many processes, by this strategy if it can."""
    used = _USED[name]
    if not used:
        return f"--strategy ddp --mesh replicate={processes}"
    return f"--mesh {_example(used, processes) if len(used) > 1 else f'{used[0]}={processes}'}"


def _example(used: tuple[str, ...], processes: int) -> str:
    """Sizes of the first two axes that multiply to the number of processes, as even as can be."""
    first, second = used[:2]
    pairs = [(a, b) for a, b in product(range(1, processes + 1), repeat=2) if a * b == processes]
    a, b = min(pairs, key=lambda pair: (abs(pair[0] - pair[1]), -pair[0]))
    return f"{first}={a},{second}={b}"
