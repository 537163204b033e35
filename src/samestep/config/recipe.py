"""Everything the mathematics of a run depends on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from samestep.config.check import NOTHING_UNKNOWN, require
from samestep.config.parts import DataPart, ModelPart, OptimizerPart, Part
from samestep.config.schedules import EmaPart, LearningRatePart, SchedulePart
from samestep.config.step_rules import StepRules
from samestep.config.strategy import StrategyPart


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything the mathematics of a run depends on; nothing of the machine.

    Attributes:
        data: the dataset; it supplies a training and an evaluation split.
        ema: an average of the weights to evaluate with, if any.
        batch_size: samples behind one optimizer step, over all ranks.
        shards: fixed slices of a global batch; the largest useful number of ranks.
        metrics: names of what evaluation computes besides the loss; the first one decides which
            checkpoint is the best.
        strategy: how the model lives on devices; a run may go on under another one.
    """

    __pydantic_config__: ClassVar = NOTHING_UNKNOWN

    data: DataPart
    model: ModelPart
    loss: Part = field(default_factory=lambda: Part(name="cross_entropy"))
    optimizer: OptimizerPart
    learning_rate: LearningRatePart = field(default_factory=LearningRatePart)
    schedule: SchedulePart = field(default_factory=SchedulePart)
    ema: EmaPart | None = None
    metrics: tuple[str, ...] = ("accuracy",)
    batch_size: int
    shards: int = 8
    epochs: int
    step: StepRules = field(default_factory=StepRules)
    strategy: StrategyPart = field(default_factory=StrategyPart)

    def __post_init__(self) -> None:
        require(self.epochs >= 1, f"epochs is {self.epochs}", "epochs >= 1", "set epochs: 1")
        require(self.shards >= 1, f"shards is {self.shards}", "shards >= 1", "set shards: 8")
        require(
            self.batch_size >= self.shards,
            f"batch_size is {self.batch_size} but there are {self.shards} shards, so some would be empty",
            "batch_size >= shards (batch_size counts the samples of all ranks together)",
            f"set batch_size: {self.shards} or more, or shards: {max(1, self.batch_size)} or fewer",
        )
