"""The mesh of ranks as data: how many of them share the data, and among how many a model is divided."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product

from samestep.config.strategy import StrategyPart
from samestep.errors import InputError

# From slow links to fast ones: what communicates most lies innermost, so that neighbours do it.
AXES = ("replicate", "shard", "tensor")
# The axes that may be larger than 1 together, by the strategy's name; the first takes what the others leave.
_USED = {
    "ddp": ("replicate", "tensor"),
    "fsdp": ("shard", "tensor"),
    "hsdp": ("shard", "replicate"),
    "tp": ("tensor", "replicate"),
}


@dataclass(frozen=True)
class Layout:
    """Sizes of the axes; their product is the number of ranks.

    Attributes:
        name: the strategy with what it is combined with, such as `ddp x tp`.
    """

    name: str = "single"
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
        """Number of ranks among which the data are divided; those of one tensor group see the same."""
        return self.replicate * self.shard

    @property
    def is_split(self) -> bool:
        """Whether a rank holds only a part of some parameters."""
        return self.size > self.replicate

    @property
    def is_in_step(self) -> bool:
        """Whether ranks talk to each other in every forward, so that each has to make as many as the others."""
        return self.shard > 1

    def place(self, rank: int) -> dict[str, int]:
        """Where a rank stands on each axis."""
        found = {}
        for axis in reversed(AXES):
            rank, found[axis] = divmod(rank, getattr(self, axis))
        return {axis: found[axis] for axis in AXES}

    def picture(self) -> str:
        """Which rank holds what, a line each."""
        lines = [f"layout {self.name}: " + (" x ".join(self._shown()) or "one rank")]
        for rank in range(self.size):
            place = self.place(rank)
            data = place["replicate"] * self.shard + place["shard"]
            parts = [
                f"{axis} part {place[axis] + 1} of {getattr(self, axis)}"
                for axis in ("shard", "tensor")
                if getattr(self, axis) > 1
            ]
            lines.append(f"  rank {rank}: data {data + 1} of {self.data}, {', '.join(parts) or 'the whole model'}")
        return "\n".join(lines)

    def _shown(self) -> list[str]:
        return [f"{axis} {size}" for axis, size in zip(AXES, self.sizes, strict=True) if size > 1]


def settle(part: StrategyPart, processes: int, shards: int | None = None) -> Layout:
    """The layout that a strategy has on that many ranks.

    Args:
        shards: of the recipe; None where it is not known yet.

    Raises:
        InputError: there is none: an axis that the strategy does not use, or sizes that do not multiply.
    """
    name = "ddp" if part.name == "auto" else part.name
    used, given = _USED[name], part.mesh.given
    _require_used(name, used, given)
    free = [axis for axis in used if axis not in given]
    fixed = math.prod(given.values())
    home = free[0] if free else None
    if name == "hsdp" and len(free) == len(used):
        raise InputError(
            "hsdp without the sizes of its axes",
            rule="groups of ranks that hold a model together, and how many such groups there are",
            do=f"--mesh {_example(used, processes)}",
        )
    if processes % fixed or (home is None and fixed != processes):
        raise InputError(
            f"the mesh {_said(given)} needs {'a multiple of ' if home else ''}{fixed} ranks, and there are {processes}",
            rule="the sizes of the axes multiply to the number of processes",
            do=f"--processes {max(1, processes // fixed) * fixed}, or --mesh {_example(used, processes)}",
        )
    sizes = {axis: 1 for axis in AXES} | given | ({home: processes // fixed} if home else {})
    layout = Layout(name=_name(name, sizes), **sizes)
    _require_shards(layout, shards)
    _require_options(part, layout)
    return layout


def _name(name: str, sizes: dict[str, int]) -> str:
    if math.prod(sizes.values()) == 1:
        return "single"
    data = "hsdp" if sizes["shard"] > 1 and sizes["replicate"] > 1 else "fsdp" if sizes["shard"] > 1 else "ddp"
    parts = [data] if sizes["replicate"] * sizes["shard"] > 1 else []
    return " x ".join([*parts, *(["tp"] if sizes["tensor"] > 1 else [])])


def _require_used(name: str, used: tuple[str, ...], given: dict[str, int]) -> None:
    foreign = [axis for axis, size in given.items() if axis not in used and size > 1]
    if foreign:
        fitting = [other for other, axes in _USED.items() if all(axis in axes for axis, n in given.items() if n > 1)]
        raise InputError(
            f"strategy {name} with a {foreign[0]} axis of {given[foreign[0]]}",
            rule=f"{name} uses the axes {' and '.join(used)}",
            do=f"--strategy {fitting[0]}" if fitting else f"leave {foreign[0]} out of the mesh",
        )


def _require_shards(layout: Layout, shards: int | None) -> None:
    if shards is not None and layout.data > shards:
        raise InputError(
            f"{layout.data} ranks share the data but the recipe has {shards} shards, "
            f"so {layout.data - shards} of them would have nothing to do.",
            rule="ranks that share the data <= shards",
            do=f"--processes {shards * layout.tensor}, or set shards: {layout.data} "
            "(this changes batch-norm groups and dropout, so results change)",
        )


def _require_options(part: StrategyPart, layout: Layout) -> None:
    """Refuse what would have no effect; on one rank everything is left aside, so that a recipe can be compared."""
    if layout.size == 1:
        return
    for key, said, axis in (
        ("plan", bool(part.plan), "tensor"),
        ("offload", part.offload, "shard"),
        ("gather", part.gather != "fp32", "shard"),
    ):
        if said and getattr(layout, axis) == 1:
            raise InputError(
                f"strategy.{key} without a {axis} axis",
                rule=f"it says how the {axis} axis works",
                do=f"--mesh {axis}={layout.size}, or leave strategy.{key} out",
            )


def _said(given: dict[str, int]) -> str:
    return ",".join(f"{axis}={size}" for axis, size in given.items()) or "without sizes"


def _example(used: tuple[str, ...], processes: int) -> str:
    """Sizes that multiply to the number of processes, as even as can be."""
    first, second = used
    pairs = [(a, b) for a, b in product(range(1, processes + 1), repeat=2) if a * b == processes]
    a, b = min(pairs, key=lambda pair: (abs(pair[0] - pair[1]), -pair[0]))
    return f"{first}={a},{second}={b}"
