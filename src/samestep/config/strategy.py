"""How a model lives on devices, as a recipe says it."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import ClassVar, Literal, get_args

from samestep.config.check import NOTHING_UNKNOWN, require

StrategyName = Literal["auto", "ddp", "dp", "fsdp", "hsdp", "placed", "tp", "pp"]
GatherPrecision = Literal["fp32", "bf16"]
Hook = Literal["none", "fp16", "bf16", "powersgd"]
PipelineSchedule = Literal["gpipe", "1f1b", "interleaved", "zero_bubble"]

_WORDS = {
    "name": get_args(StrategyName),
    "gather": get_args(GatherPrecision),
    "hook": get_args(Hook),
    "schedule": get_args(PipelineSchedule),
}

_REMARKS = {
    "fp16": "gradients travel in 16 bits (fp16): equal to rounding of these, whatever the reduction",
    "bf16": "gradients travel in 16 bits (bf16): equal to rounding of these, whatever the reduction",
    "powersgd": "gradients travel as products of narrow matrices (PowerSGD): an approximation, not rounding; what a "
    "rank has not sent yet is in no checkpoint, so a resumed run is not the same",
}


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """Sizes of the axes of a layout; None where it follows from the number of ranks.

    Attributes:
        pipeline: ranks that hold the layers of a model one after another.
        replicate: copies of the model (or of what the other axes divide it into).
        shard: ranks that hold a part of every parameter, and gather it when it is needed.
        tensor: ranks that divide products of matrices among them.
    """

    __pydantic_config__: ClassVar = NOTHING_UNKNOWN

    pipeline: int | None = None
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
        name: `auto`, which is `ddp`; `ddp`, a copy a rank; `dp`, copies in one process; `fsdp`, every parameter in
            parts, one a rank, gathered when it is needed; `hsdp`, that within groups of ranks that are copies of each
            other; `placed`, parts of the model on several devices of each rank; `tp`, products of matrices divided
            among ranks; `pp`, layers one after another on different ranks.
        mesh: sizes of the axes, for products such as `ddp` with `tensor: 2`.
        hook: for `ddp`: how gradients travel; anything but `none` rounds them.
        bucket_mb: for `ddp`: megabytes of gradients that travel together; None for torch's own 25.
        offload: for a shard axis: parameters and optimizer state lie in the memory of the host.
        gather: for a shard axis: the precision in which parameters are gathered and computed with.
        meta: for a shard axis: only rank 0 builds the model with values, the others without; they get theirs part by
            part, so that no device, and no other rank, ever holds the whole model.
        plan: for a tensor axis: shell patterns of module names with how each divides its product; empty for the plan
            that comes with the model.
        stages: for a pipeline axis: names of the modules with which the second and further stages begin; empty for
            stages of like cost.
        schedule: for a pipeline axis: the order of forwards and backwards.
        devices: for `dp` and `placed`: devices of each rank; None for all there are.
        place: for `placed`: shell patterns of module names with the number of a device; empty for parts of like size.
    """

    __pydantic_config__: ClassVar = NOTHING_UNKNOWN

    name: StrategyName = "auto"
    mesh: Mesh = field(default_factory=Mesh)
    hook: Hook = "none"
    bucket_mb: float | None = None
    offload: bool = False
    gather: GatherPrecision = "fp32"
    meta: bool = False
    plan: dict[str, str] = field(default_factory=dict)
    stages: tuple[str, ...] = ()
    schedule: PipelineSchedule = "1f1b"
    devices: int | None = None
    place: dict[str, int] = field(default_factory=dict)

    @property
    def is_exact(self) -> bool:
        """Whether the same bits come out of it as out of one process, where the recipe asks for that."""
        divides = any(size > 1 for axis, size in self.mesh.given.items() if axis != "replicate")
        return self.name in ("auto", "ddp", "dp", "placed") and self.hook == "none" and not divides

    @property
    def remark(self) -> str | None:
        """What is to be said of gradients that do not travel as they are; None where they do."""
        return _REMARKS.get(self.hook)

    def __post_init__(self) -> None:
        for key, words in _WORDS.items():
            value = getattr(self, key)
            require(
                value in words,
                f"strategy.{key} is {value!r}",
                f"one of {', '.join(words)}",
                f"set strategy.{key}: {words[0]}",
            )
        size = self.bucket_mb
        require(size is None or size > 0, f"strategy.bucket_mb is {size}", "above 0", "set strategy.bucket_mb: 25")
        count = self.devices
        require(count is None or count >= 1, f"strategy.devices is {count}", "at least 1", "set strategy.devices: 2")
