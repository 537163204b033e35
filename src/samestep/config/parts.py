"""The named parts of a recipe: data, model, loss, optimizer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from samestep.config.check import NOTHING_UNKNOWN, require

BadSamples = Literal["stop", "skip"]


@dataclass(frozen=True, kw_only=True)
class Part:
    """A named thing with options: a dataset, a model, a loss, an optimizer.

    Attributes:
        name: a short name (see `docs/recipes.md`) or an import path `package.module:attribute`.
        options: keyword arguments of it.
    """

    __pydantic_config__: ClassVar = NOTHING_UNKNOWN

    name: str
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class DataPart(Part):
    """A dataset, and what to do about samples of it that cannot be used.

    Attributes:
        bad_samples: `stop`, the run ends and names the first; `skip`, the sample is left out of its shard, which is
            then smaller, and is counted and named.
    """

    bad_samples: BadSamples = "stop"


@dataclass(frozen=True, kw_only=True)
class ModelPart(Part):
    """A model, the weights it starts from, and what of it stays as it is.

    Attributes:
        pretrained: a `.safetensors` file (or a `.pt`/`.pth` file of plain tensors) whose tensors are taken
            where name and shape match; what did not match is listed.
        freeze: shell patterns of parameter names (`layer1.*`) that are not trained; a batch norm all of
            whose parameters are frozen keeps its running statistics too.
    """

    pretrained: str | None = None
    freeze: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class OptimizerPart(Part):
    """An optimizer, and how its options differ between parameters.

    Attributes:
        layer_decay: each block of the model learns so much more slowly than the one after it (Clark et al., "ELECTRA",
            2020); None for one rate.
        decay_norms: weight decay also applies to biases and other parameters of one dimension.
    """

    layer_decay: float | None = None
    decay_norms: bool = True

    def __post_init__(self) -> None:
        decay = self.layer_decay
        require(
            decay is None or 0 < decay <= 1,
            f"optimizer.layer_decay is {decay}",
            "0 < layer_decay <= 1, or null",
            "set optimizer.layer_decay: 0.75",
        )
