"""How learning rate and averaged weights follow the steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from samestep.config.check import NOTHING_UNKNOWN, require

LearningRateRule = Literal["fixed", "linear", "sqrt"]


@dataclass(frozen=True, kw_only=True)
class SchedulePart:
    """The learning rate as a factor of the optimizer's own, counted in optimizer steps.

    Attributes:
        name: `constant`, `cosine`, `linear` (down to `final` at the last step), or `step` (times `gamma` every
            `step_epochs`).
        warmup_epochs: the factor rises linearly from near 0 to 1 over so many epochs.
        final: the factor at the last step, as a fraction of the first rate (`cosine` and `linear`).
        step_epochs: epochs between two steps (`step` only).
        gamma: what each step multiplies by (`step` only).
    """

    __pydantic_config__: ClassVar = NOTHING_UNKNOWN

    name: Literal["constant", "cosine", "linear", "step"] = "constant"
    warmup_epochs: float = 0.0
    final: float = 0.0
    step_epochs: float = 30.0
    gamma: float = 0.1

    def __post_init__(self) -> None:
        require(
            self.warmup_epochs >= 0,
            f"schedule.warmup_epochs is {self.warmup_epochs}",
            "schedule.warmup_epochs >= 0",
            "set schedule.warmup_epochs: 0",
        )
        require(
            0 <= self.final <= 1,
            f"schedule.final is {self.final}",
            "0 <= schedule.final <= 1 (a fraction of the first rate)",
            "set schedule.final: 0.01",
        )
        require(
            self.step_epochs > 0 and 0 < self.gamma <= 1,
            f"schedule.step_epochs is {self.step_epochs} and schedule.gamma is {self.gamma}",
            "step_epochs > 0, and 0 < gamma <= 1",
            "set schedule.step_epochs: 30 and schedule.gamma: 0.1",
        )


@dataclass(frozen=True, kw_only=True)
class LearningRatePart:
    """How the optimizer's own rate follows the global batch size.

    Attributes:
        rule: `fixed`: not at all; `linear`: times `batch_size / base_batch_size`; `sqrt`: times its square root.
        base_batch_size: the batch size that the optimizer's own rate is meant for.
    """

    __pydantic_config__: ClassVar = NOTHING_UNKNOWN

    rule: LearningRateRule = "fixed"
    base_batch_size: int | None = None

    def __post_init__(self) -> None:
        rules, base = get_args(LearningRateRule), self.base_batch_size
        require(
            self.rule in rules,
            f"learning_rate.rule is {self.rule!r}",
            f"one of {', '.join(rules)}",
            "set learning_rate.rule: fixed",
        )
        if self.rule == "fixed":
            require(
                base is None,
                f"learning_rate.base_batch_size is {base} but learning_rate.rule is fixed",
                "a base batch size goes with linear or sqrt",
                "set learning_rate.rule: linear, or leave base_batch_size out",
            )
            return
        require(
            base is not None and base >= 1,
            f"learning_rate.rule is {self.rule} and learning_rate.base_batch_size is {base}",
            "base_batch_size >= 1: the batch size that the optimizer's lr is meant for",
            "set learning_rate.base_batch_size: 256",
        )


@dataclass(frozen=True, kw_only=True)
class EmaPart:
    """An exponential moving average of the weights, which evaluation uses in place of the weights themselves.

    Attributes:
        decay: how much of the average stays at each step (Polyak & Juditsky, 1992); after step n at most
            (1 + n) / (10 + n), so that the first weights are soon forgotten.
    """

    __pydantic_config__: ClassVar = NOTHING_UNKNOWN

    decay: float

    def __post_init__(self) -> None:
        require(0 < self.decay < 1, f"ema.decay is {self.decay}", "0 < decay < 1", "set ema.decay: 0.9999")
