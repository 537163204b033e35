"""What a recipe says, as frozen data: no torch, no file, no environment."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, get_args

from samestep.errors import RecipeError

Reduction = Literal["exact", "fast"]
BatchNorm = Literal["shard", "sync"]
NonFinite = Literal["stop", "skip"]
Precision = Literal["fp32", "bf16", "fp16"]
DeviceKind = Literal["auto", "cpu", "cuda"]
LearningRateRule = Literal["fixed", "linear", "sqrt"]

_WORDS = {
    "reduction": get_args(Reduction),
    "batch_norm": get_args(BatchNorm),
    "non_finite": get_args(NonFinite),
    "precision": get_args(Precision),
}

# Read by pydantic, which checks these classes against YAML; a plain mapping, so nothing is imported for it.
_NOTHING_UNKNOWN = {"extra": "forbid"}


def _require(holds: bool, value: str, rule: str, do: str) -> None:
    if not holds:
        raise RecipeError(value, rule=rule, do=do)


@dataclass(frozen=True, kw_only=True)
class StepRules:
    """What a step depends on besides model, loss, data and optimizer.

    Attributes:
        seed: base of every random state (shards, samples, order, initial weights).
        reduction: `exact`, partial sums meet in one canonical tree, the same bits for every number of
            ranks; `fast`, the backend's all-reduce, equal to rounding.
        batch_norm: `shard`, each shard by its own statistics, running statistics averaged over shards;
            `sync`, every shard by the statistics of the whole global batch.
        clip_norm: the largest global 2-norm of the gradient, or None for no clipping.
        non_finite: what a step with a non-finite loss or gradient does: `stop` the run, or `skip` the
            update (parameters, optimizer and buffers stay as they were; the step still counts).
        precision: `fp32`, or autocast to `bf16` or `fp16` (the latter with a gradient scaler).
        threads: intra-operation threads of a rank; a different number changes bits.
    """

    __pydantic_config__: ClassVar = _NOTHING_UNKNOWN

    seed: int = 0
    reduction: Reduction = "exact"
    batch_norm: BatchNorm = "shard"
    clip_norm: float | None = None
    non_finite: NonFinite = "stop"
    precision: Precision = "fp32"
    threads: int = 1

    def __post_init__(self) -> None:
        _require(0 <= self.seed < 2**64, f"step.seed is {self.seed}", "0 <= seed < 2**64", "set step.seed: 0")
        for name, words in _WORDS.items():
            word = getattr(self, name)
            _require(
                word in words, f"step.{name} is {word!r}", f"one of {', '.join(words)}", f"set step.{name}: {words[0]}"
            )
        _require(self.threads >= 1, f"step.threads is {self.threads}", "threads >= 1", "set step.threads: 1")
        clip = self.clip_norm
        _require(
            clip is None or clip > 0, f"step.clip_norm is {clip}", "clip_norm > 0, or null", "set step.clip_norm: 1.0"
        )


@dataclass(frozen=True, kw_only=True)
class Part:
    """A named thing with options: a dataset, a model, a loss, an optimizer.

    Attributes:
        name: a short name (see `docs/recipes.md`) or an import path `package.module:attribute`.
        options: keyword arguments of it.
    """

    __pydantic_config__: ClassVar = _NOTHING_UNKNOWN

    name: str
    options: dict[str, Any] = field(default_factory=dict)


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
class SchedulePart:
    """The learning rate as a factor of the optimizer's own, counted in optimizer steps.

    Attributes:
        name: `constant` or `cosine`.
        warmup_epochs: the factor rises linearly from near 0 to 1 over so many epochs.
        final: the factor at the last step, as a fraction of the first rate (`cosine` only).
    """

    __pydantic_config__: ClassVar = _NOTHING_UNKNOWN

    name: Literal["constant", "cosine"] = "constant"
    warmup_epochs: float = 0.0
    final: float = 0.0

    def __post_init__(self) -> None:
        _require(
            self.warmup_epochs >= 0,
            f"schedule.warmup_epochs is {self.warmup_epochs}",
            "schedule.warmup_epochs >= 0",
            "set schedule.warmup_epochs: 0",
        )
        _require(
            0 <= self.final <= 1,
            f"schedule.final is {self.final}",
            "0 <= schedule.final <= 1 (a fraction of the first rate)",
            "set schedule.final: 0.01",
        )


@dataclass(frozen=True, kw_only=True)
class LearningRatePart:
    """How the optimizer's own rate follows the global batch size.

    Attributes:
        rule: `fixed`: not at all; `linear`: times `batch_size / base_batch_size`; `sqrt`: times its square root.
        base_batch_size: the batch size that the optimizer's own rate is meant for.
    """

    __pydantic_config__: ClassVar = _NOTHING_UNKNOWN

    rule: LearningRateRule = "fixed"
    base_batch_size: int | None = None

    def __post_init__(self) -> None:
        rules, base = get_args(LearningRateRule), self.base_batch_size
        _require(
            self.rule in rules,
            f"learning_rate.rule is {self.rule!r}",
            f"one of {', '.join(rules)}",
            "set learning_rate.rule: fixed",
        )
        if self.rule == "fixed":
            _require(
                base is None,
                f"learning_rate.base_batch_size is {base} but learning_rate.rule is fixed",
                "a base batch size goes with linear or sqrt",
                "set learning_rate.rule: linear, or leave base_batch_size out",
            )
            return
        _require(
            base is not None and base >= 1,
            f"learning_rate.rule is {self.rule} and learning_rate.base_batch_size is {base}",
            "base_batch_size >= 1: the batch size that the optimizer's lr is meant for",
            "set learning_rate.base_batch_size: 256",
        )


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything the mathematics of a run depends on; nothing of the machine.

    Attributes:
        data: the dataset; it supplies a training and an evaluation split.
        batch_size: samples behind one optimizer step, over all ranks.
        shards: fixed slices of a global batch; the largest useful number of ranks.
        metrics: names of what evaluation computes besides the loss; the first one decides which
            checkpoint is the best.
    """

    __pydantic_config__: ClassVar = _NOTHING_UNKNOWN

    data: Part
    model: ModelPart
    loss: Part = Part(name="cross_entropy")
    optimizer: Part
    learning_rate: LearningRatePart = LearningRatePart()
    schedule: SchedulePart = SchedulePart()
    metrics: tuple[str, ...] = ("accuracy",)
    batch_size: int
    shards: int = 8
    epochs: int
    step: StepRules = StepRules()

    def __post_init__(self) -> None:
        _require(self.epochs >= 1, f"epochs is {self.epochs}", "epochs >= 1", "set epochs: 1")
        _require(self.shards >= 1, f"shards is {self.shards}", "shards >= 1", "set shards: 8")
        _require(
            self.batch_size >= self.shards,
            f"batch_size is {self.batch_size} but there are {self.shards} shards, so some would be empty",
            "batch_size >= shards (batch_size counts the samples of all ranks together)",
            f"set batch_size: {self.shards} or more, or shards: {max(1, self.batch_size)} or fewer",
        )


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """What a machine or a person decides about a run; no result depends on any of it.

    Attributes:
        device: `auto` takes a GPU a rank where there are any.
        workers: loader processes a rank; None means as many as there are cores to spare where samples are read from
            files, else none.
        checkpoint_every: optimizer steps between checkpoints besides those at the ends of epochs, or None.
        lose_at_most: seconds of work that a kill may cost; checkpoints are written often enough. None for no bound.
        keep: how many of the newest checkpoints stay, besides the best.
        check_every: optimizer steps between comparisons of what ranks hold, or None for none.
        quiet: no progress, only the summary.
    """

    device: DeviceKind = "auto"
    workers: int | None = None
    checkpoint_every: int | None = None
    lose_at_most: float | None = None
    keep: int = 2
    check_every: int | None = None
    quiet: bool = False

    def __post_init__(self) -> None:
        every, workers = self.checkpoint_every, self.workers
        _require(workers is None or workers >= 0, f"workers is {workers}", "workers >= 0", "--workers 0")
        _require(
            every is None or every >= 1, f"checkpoint_every is {every}", "at least 1 step", "--checkpoint-every 100"
        )
        lose = self.lose_at_most
        _require(
            lose is None or 0 < lose < math.inf,
            f"lose_at_most is {lose}",
            "a number of seconds above 0",
            "--lose-at-most 30s",
        )
        check = self.check_every
        _require(check is None or check >= 1, f"check_every is {check}", "at least 1 step", "--check-every 100")
        _require(self.keep >= 1, f"keep is {self.keep}", "at least 1 checkpoint stays", "--keep 1")
