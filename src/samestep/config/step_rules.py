"""What a step depends on besides model, loss, data and optimizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from samestep.config.check import NOTHING_UNKNOWN, require

Reduction = Literal["exact", "fast"]
BatchNorm = Literal["shard", "sync"]
NonFinite = Literal["stop", "skip"]
Precision = Literal["fp32", "bf16", "fp16"]

_WORDS = {
    "reduction": get_args(Reduction),
    "batch_norm": get_args(BatchNorm),
    "non_finite": get_args(NonFinite),
    "precision": get_args(Precision),
}


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
        tf32: float32 products of matrices on GPUs may round their inputs to TensorFloat-32 (10 bits of mantissa).
        channels_last: weights and inputs of convolutions are laid out channels last.
        compile: the model's forward goes through `torch.compile`.
        recompute: shell patterns of module names (`blocks.*`) whose activations are not kept for backward but computed
            again: less memory, more time (Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016).
    """

    __pydantic_config__: ClassVar = NOTHING_UNKNOWN

    seed: int = 0
    reduction: Reduction = "exact"
    batch_norm: BatchNorm = "shard"
    clip_norm: float | None = None
    non_finite: NonFinite = "stop"
    precision: Precision = "fp32"
    threads: int = 1
    tf32: bool = False
    channels_last: bool = False
    compile: bool = False
    recompute: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require(0 <= self.seed < 2**64, f"step.seed is {self.seed}", "0 <= seed < 2**64", "set step.seed: 0")
        for name, words in _WORDS.items():
            word = getattr(self, name)
            require(
                word in words, f"step.{name} is {word!r}", f"one of {', '.join(words)}", f"set step.{name}: {words[0]}"
            )
        require(self.threads >= 1, f"step.threads is {self.threads}", "threads >= 1", "set step.threads: 1")
        clip = self.clip_norm
        require(
            clip is None or clip > 0, f"step.clip_norm is {clip}", "clip_norm > 0, or null", "set step.clip_norm: 1.0"
        )
