"""Configuration of a recipe, every input of the mathematics of a run; options of a run.

Decisions: docs/decisions/recipes.md
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from importlib.metadata import entry_points
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt

from samestep.config.strategy import StrategyConfig
from samestep.config.validation import Constrained, require
from samestep.microbatches import default_microbatches

BadSamples = Literal["stop", "skip"]
LearningRateRule = Literal["fixed", "linear", "sqrt"]
Reduction = Literal["exact", "fast"]
Precision = Literal["fp32", "bf16", "fp16"]
DeviceKind = Literal["auto", "cpu", "cuda"]

LOGGERS = ("jsonl", "tensorboard", "progress", "wandb")
LOGGER_GROUP = "samestep.loggers"  # entry points of loggers in other packages
DEFAULT_CHECKSUM_EVERY = 10
DEFAULT_KEEP = 2
DEFAULT_PREFETCH = 2  # the default of torch's DataLoader
_MAX_WORKERS = 8
# Options of optimizers that are numbers, in torch and in libraries.
_OPTIMIZER_NUMBERS = (
    *("lr", "momentum", "weight_decay", "eps", "dampening"),
    *("alpha", "rho", "lr_decay", "lambd"),
)


@dataclass(frozen=True, kw_only=True)
class NamedConfig(Constrained):
    """Named component with options: a dataset, model, loss or optimizer.

    Attributes:
        name: short name (see `docs/guides/recipes.md`) or import path `package.module:attribute`.
        options: keyword arguments of the component.
    """

    name: str
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class DataConfig(NamedConfig, key_prefix="data."):
    """Dataset, with the treatment of samples that cannot be read.

    Attributes:
        bad_samples: `stop` ends the run with an error for the first one; `skip` leaves the sample
            out of its microbatch, and counts and logs the sample.
        drop_last: leave out the last batch of a training epoch if it has fewer samples than
            `batch_size`.
    """

    bad_samples: BadSamples = "stop"
    drop_last: bool = False


@dataclass(frozen=True, kw_only=True)
class ModelConfig(NamedConfig):
    """Model, with initial weights and frozen parameters.

    Attributes:
        pretrained: `.safetensors` file (or `.pt`/`.pth` file of plain tensors). Tensors of matching
            name and shape are loaded; the others are logged.
        pretrained_prefix: text in front of the names in the file, such as `encoder.` for weights of
            an encoder.
        freeze: shell patterns of parameter names (`layer1.*`) that are not trained. A batch norm
            with only frozen parameters keeps its running statistics.
        freeze_except: shell patterns of parameter names that are trained; the other parameters, or
            with `freeze` the others that match `freeze`, are not trained.
    """

    pretrained: str | None = None
    pretrained_prefix: str = ""
    freeze: tuple[str, ...] = ()
    freeze_except: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(NamedConfig, key_prefix="optimizer."):
    """Optimizer, with differences between parameters.

    Attributes:
        layer_decay: learning-rate factor from each block of the model to the previous block (Clark
            et al., "ELECTRA", 2020); None for one rate.
        decay_norms: apply weight decay to biases and other parameters of one dimension too.
    """

    layer_decay: Annotated[float, Gt(0), Le(1)] | None = None
    decay_norms: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value in self.options.items():
            key = f"optimizer.options.{name}"
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if name in _OPTIMIZER_NUMBERS:
                require(is_number, f"{key} is {value!r}", "a number", f"{key}=0.01")
            values = value if isinstance(value, list | tuple) else (value,)  # such as `betas`
            is_finite = all(not isinstance(one, float) or math.isfinite(one) for one in values)
            require(is_finite, f"{key} is {value!r}", "finite numbers", f"correct {key}")


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig(Constrained, key_prefix="schedule."):
    """Factor of the optimizer's learning rate as a function of the optimizer step.

    Attributes:
        name: `constant`, `cosine`, `linear` (down to `final` at the last step), or `step` (times
            `gamma` every `step_epochs`).
        warmup_epochs: epochs of linear increase from near 0 to 1.
        final: factor at the last step (`cosine` and `linear`).
        step_epochs: epochs between two decreases (`step` only).
        gamma: factor of each decrease (`step` only).
    """

    name: Literal["constant", "cosine", "linear", "step"] = "constant"
    warmup_epochs: Annotated[float, Ge(0), Lt(math.inf)] = 0.0
    final: Annotated[float, Ge(0), Le(1)] = 0.0
    step_epochs: Annotated[float, Gt(0), Lt(math.inf)] = 30.0
    gamma: Annotated[float, Gt(0), Le(1)] = 0.1


@dataclass(frozen=True, kw_only=True)
class LearningRateConfig(Constrained, key_prefix="learning_rate."):
    """Scaling of the optimizer's learning rate with the global batch size.

    Attributes:
        rule: `fixed`: no scaling; `linear`: times `batch_size / base_batch_size`; `sqrt`: times the
            square root.
        base_batch_size: batch size for which the optimizer's learning rate was chosen.
    """

    rule: LearningRateRule = "fixed"
    base_batch_size: Annotated[int, Ge(1)] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        base = self.base_batch_size
        require(
            (self.rule == "fixed") == (base is None),
            f"learning_rate.rule is {self.rule} and learning_rate.base_batch_size is {base}",
            "base_batch_size is set for the rules linear and sqrt, and only for these",
            "set both, such as learning_rate: {rule: linear, base_batch_size: 256}, or leave both "
            "out",
        )


@dataclass(frozen=True, kw_only=True)
class EmaConfig(Constrained, key_prefix="ema."):
    """Exponential moving average of the weights, used by evaluation instead of the weights.

    Attributes:
        decay: weight of the previous average at each step (Polyak & Juditsky, 1992). After step n
            the decay is at most (1 + n) / (10 + n), which reduces the influence of the initial
            weights.
    """

    decay: Annotated[float, Gt(0), Lt(1)]


@dataclass(frozen=True, kw_only=True)
class StopConfig(Constrained, key_prefix="stop."):
    """Early stopping. A run can be resumed with another one, or with `stop=null`.

    Attributes:
        patience: epochs without a better result of `best_by` after which training ends.
    """

    patience: Annotated[int, Ge(1)]


@dataclass(frozen=True, kw_only=True)
class RecipeStep(Constrained, key_prefix="step."):
    """Inputs of a step of a recipe in addition to model, loss, data and optimizer.

    Attributes:
        seed: seed of every random state (steps, samples, order, initial weights).
        reduction: `fast` adds gradients in the order of the backend: equal to one process to
            rounding; `exact` adds those of microbatches in one canonical tree: the same bits for
            every number of ranks.
        batch_norm: statistics of the whole batch (`global`), or of the rows of each rank (`local`):
            then results depend on the number of ranks.
        clip_norm: maximum of the global 2-norm of the gradient, or None for no clipping.
        non_finite: reaction to a non-finite loss or gradient: `stop` the run, or `skip` the update
            (parameters, optimizer and buffers stay unchanged; the step still counts).
        precision: `fp32`, or autocast to `bf16` or `fp16` (the latter with a gradient scaler).
        threads: intra-operation threads of a rank; a different number changes bits.
        tf32: allow products and convolutions in float32 on GPUs to round inputs to TensorFloat-32
            (10 bits of mantissa), or forbid it; None for torch's settings, which by default allow
            it in convolutions.
        channels_last: store weights and inputs of convolutions in channels-last format.
        compile: compile the model's forward with `torch.compile`.
        recompute: shell patterns of module names (`blocks.*`) with activation checkpointing:
            backward computes the activations again; less memory, more time (Chen et al., "Training
            Deep Nets with Sublinear Memory Cost", 2016).
        tensor_slices: number of slices into which the modules of `tensor_plan` divide their matrix
            products on any number of ranks; a multiple of the tensor axis; 1 for the size of the
            tensor axis, with results that depend on it by rounding.
        tensor_plan: shell patterns of module names, with the division of each product; empty for
            the plan of the model. Without slices, no effect.
    """

    seed: Annotated[int, Ge(0), Lt(2**64)] = 0
    reduction: Reduction = "fast"
    batch_norm: Literal["global", "local"] = "global"
    clip_norm: Annotated[float, Gt(0)] | None = None
    non_finite: Literal["stop", "skip"] = "stop"
    precision: Precision = "fp32"
    threads: Annotated[int, Ge(1), Le(1024)] = 1
    tf32: bool | None = None
    channels_last: bool = False
    compile: bool = False
    recompute: tuple[str, ...] = ()
    tensor_slices: Annotated[int, Ge(1), Le(1024)] = 1
    tensor_plan: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Recipe(Constrained):
    """Every input of the mathematics of a run, without any property of the machine.

    Attributes:
        data: dataset with a training and an evaluation split.
        model: model and its initial weights.
        loss: loss function.
        optimizer: optimizer and its parameter groups.
        learning_rate: scaling of the learning rate with the batch size.
        schedule: learning rate over the steps.
        ema: moving average of the weights for evaluation, if any.
        batch_size: samples of one optimizer step over all ranks.
        accumulate: parts of a batch that are computed one after another before the step; it bounds
            memory. The parts of Dice losses are weighted by samples, also where pixels are ignored.
        microbatches: fixed slices of a batch, of which each rank computes some; the largest number
            of ranks. `auto` is 8, or fewer for a small batch; the recipe of a run contains the
            number.
        epochs: passes over the training split.
        step: options of a step.
        metrics: metrics that evaluation computes in addition to the loss.
        best_by: result of evaluation that selects the best checkpoint: `loss`, a metric, or
            `loss_NAME` for a loss term; None for the first metric, or the loss without metrics.
        best_mode: `min` or `max`; None for `min` of losses and `max` of metrics.
        stop: early stopping; None for all epochs.
        strategy: parallel strategy; a run can be resumed with another one.
    """

    data: DataConfig
    model: ModelConfig
    loss: NamedConfig = field(default_factory=lambda: NamedConfig(name="cross_entropy"))
    optimizer: OptimizerConfig
    learning_rate: LearningRateConfig = field(default_factory=LearningRateConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    ema: EmaConfig | None = None
    metrics: tuple[str, ...] = ("accuracy",)
    best_by: str | None = None
    best_mode: Literal["min", "max"] | None = None
    stop: StopConfig | None = None
    batch_size: Annotated[int, Ge(1), Le(1 << 30)]
    accumulate: Annotated[int, Ge(1)] = 1
    microbatches: Annotated[int, Ge(1)] | Literal["auto"] = "auto"
    epochs: Annotated[int, Ge(1), Le(1_000_000)]
    step: RecipeStep = field(default_factory=RecipeStep)
    strategy: StrategyConfig = field(default_factory=StrategyConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.microbatches == "auto" or self.batch_size >= self.microbatches,
            f"batch_size is {self.batch_size} but there are {self.microbatches} microbatches, so "
            "some would be empty",
            "batch_size >= microbatches (batch_size counts the samples of all ranks together)",
            f"set batch_size: {self.microbatches} or more, or microbatches: {self.batch_size} or "
            "fewer",
            code="E_BATCH_SIZE",
        )
        require(
            self.batch_size >= self.accumulate,
            f"batch_size is {self.batch_size} but accumulate is {self.accumulate}, so some parts "
            "would be empty",
            "batch_size >= accumulate",
            f"set accumulate: {self.batch_size} or less",
            code="E_BATCH_SIZE",
        )
        require(
            len(set(self.metrics)) == len(self.metrics),
            f"metrics is {list(self.metrics)}, with a repeated name",
            "each metric once",
            "leave the repeated name out",
            code="E_METRIC",
        )
        results = ["loss", *self.metrics]
        require(
            # The terms of a loss are not known before the first evaluation.
            self.best_by is None or self.best_by in results or self.best_by.startswith("loss_"),
            f"best_by is {self.best_by}, which evaluation does not compute",
            f"one of {', '.join(results)}, or loss_NAME for a term of the loss",
            f"add {self.best_by} to metrics, or set best_by: loss",
            code="E_METRIC",
        )

    @property
    def microbatch_count(self) -> int:
        """Number of microbatches of a recipe with a number in place of `auto`."""
        assert self.microbatches != "auto", "with_microbatches() comes first"
        return self.microbatches

    def with_microbatches(self) -> Recipe:
        """Return the recipe with a number of microbatches in place of `auto`."""
        if self.microbatches != "auto":
            return self
        return replace(self, microbatches=default_microbatches(self.batch_size))


def default_workers(cores: int, processes: int) -> int:
    """Return the default number of loader processes per rank for samples in files."""
    # One core remains for the rank itself.
    return min(_MAX_WORKERS, max(0, cores // processes - 1))


@dataclass(frozen=True, kw_only=True)
class RunOptions(Constrained):
    """Options of a run that depend on the machine or the user and change no result.

    Attributes:
        device: `auto` selects one GPU per rank if the machine has GPUs.
        workers: loader processes per rank; None selects `default_workers` for samples in files,
            otherwise 0.
        checkpoint_every: optimizer steps between checkpoints within epochs, or None.
        keep: number of newest checkpoints that are kept, in addition to the best; None for that of
            the last start, or `DEFAULT_KEEP` in a new run.
        checksum_every: optimizer steps between logged checksums of the state, or 0 for none.
        loggers: names of the loggers of metrics and events, some of `LOGGERS`, or of entry points
            in the group `samestep.loggers` of installed packages.
        quiet: print only the summary, no progress.
    """

    device: DeviceKind = "auto"
    workers: Annotated[int, Ge(0), Le(256)] | None = None
    checkpoint_every: Annotated[int, Ge(1)] | None = None
    keep: Annotated[int, Ge(1)] | None = None
    checksum_every: Annotated[int, Ge(0)] = DEFAULT_CHECKSUM_EVERY
    loggers: tuple[str, ...] = ("jsonl", "tensorboard", "progress")
    quiet: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.loggers:
            known: tuple[str, ...] = LOGGERS
            # Only for other names: the search reads the metadata of all installed packages.
            if name not in LOGGERS:
                known += tuple(one.name for one in entry_points(group=LOGGER_GROUP))
            require(
                name in known,
                f"unknown logger {name!r}",
                f"some of {', '.join(known)}",
                f"--loggers {','.join(RunOptions.loggers)}",
                code="E_UNKNOWN_NAME",
            )

    @classmethod
    def key(cls, name: str) -> str:
        """Return the command-line option of a field."""
        return f"--{name.replace('_', '-')}"
