"""How a model lives on devices, as a recipe says it."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import ClassVar, Literal, get_args

from samestep.config.check import NOTHING_UNKNOWN, require

StrategyName = Literal["auto", "ddp", "fsdp", "hsdp", "tp"]
GatherPrecision = Literal["fp32", "bf16"]


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """Sizes of the axes of a layout; None where it follows from the number of ranks.

    Attributes:
        replicate: copies of the model (or of what the other axes divide it into).
        shard: ranks that hold a part of every parameter, and gather it when it is needed.
        tensor: ranks that divide products of matrices among them.
    """

    __pydantic_config__: ClassVar = NOTHING_UNKNOWN

    replicate: int | None = None
    shard: int | None = None
    tensor: int | None = None

    def __post_init__(self) -> None:
        for axis, size in self.given.items():
            require(size >= 1, f"strategy.mesh.{axis} is {size}", "at least 1", f"set strategy.mesh.{axis}: 1")

    @property
    def given(self) -> dict[str, int]:
        """The axes whose size is said."""
        sizes = {field.name: getattr(self, field.name) for field in fields(self)}
        return {axis: size for axis, size in sizes.items() if size is not None}


@dataclass(frozen=True, kw_only=True)
class StrategyPart:
    """How a model lives on devices. What is computed is the same under each, to the bit or to rounding.

    Attributes:
        name: `auto`, which is `ddp`; `ddp`, a copy a rank; `fsdp`, every parameter in parts, one a rank, gathered when
            it is needed; `hsdp`, that within groups of ranks that are copies of each other; `tp`, products of matrices
            divided among ranks.
        mesh: sizes of the axes, for products such as `ddp` with `tensor: 2`.
        plan: for a tensor axis: shell patterns of module names with `column` or `row`; empty for the plan that
            comes with the model.
        offload: for a shard axis: parameters and optimizer state lie in the memory of the host.
        gather: for a shard axis: the precision in which parameters are gathered and computed with.
    """

    __pydantic_config__: ClassVar = NOTHING_UNKNOWN

    name: StrategyName = "auto"
    mesh: Mesh = field(default_factory=Mesh)
    plan: dict[str, str] = field(default_factory=dict)
    offload: bool = False
    gather: GatherPrecision = "fp32"

    def __post_init__(self) -> None:
        for key, value, words in (
            ("name", self.name, get_args(StrategyName)),
            ("gather", self.gather, get_args(GatherPrecision)),
        ):
            require(
                value in words,
                f"strategy.{key} is {value!r}",
                f"one of {', '.join(words)}",
                f"set strategy.{key}: {words[0]}",
            )
