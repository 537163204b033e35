"""The causes that a difference can have, and what to do about each."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from samestep.tools.verify.difference import Difference


class Cause(StrEnum):
    """Why two numbers of processes do not compute the same."""

    DATA_ORDER = "data order"
    SHARDS = "number of shards"
    LAST_BATCH = "last batch"
    AUGMENTATION = "random state of the augmentation"
    INITIAL_WEIGHTS = "initial weights"
    MODEL_RANDOM = "random state in the model"
    LOSS = "loss normalisation"
    BATCH_NORM = "batch norm statistics"
    LEARNING_RATE = "learning rate"
    RULES = "step rules or optimizer settings"
    EVALUATION = "evaluation counting"
    UNSYNCHRONISED = "a parameter or buffer that is not synchronised"
    UNUSED = "unused parameters"
    KERNEL = "non-deterministic kernel"
    THREADS = "thread count"
    REDUCTION = "plain reduction order"
    RESUME = "what a resumed run does not take up"
    DIVERGED = "ranks that do not do the same steps"
    FAILED = "the run failed"
    UNKNOWN = "not found"


ADVICE = {
    Cause.DATA_ORDER: "give every rank the whole dataset and one seed: samestep.loader(dataset, batch_size=..., "
    "shuffle=True, seed=0) cuts it",
    Cause.SHARDS: "say one number of shards, as large as the largest number of processes: it is a fact of the recipe",
    Cause.LAST_BATCH: "step every batch that the loader gives, the short last one too",
    Cause.AUGMENTATION: "draw from Python's, NumPy's or torch's global generators while a sample is made: the loader "
    "seeds them by (seed, epoch, sample)",
    Cause.INITIAL_WEIGHTS: "seed before the model is built, with a constant: torch.manual_seed(0)",
    Cause.MODEL_RANDOM: "draw from torch's global generator in the forward: the engine seeds it by (seed, step, shard)",
    Cause.LOSS: "return samestep.Loss(sum, count): the sum over samples (or tokens), and how many there were",
    Cause.BATCH_NORM: "use torch's batch norm layers and batch_norm: shard or sync; no collectives in a forward",
    Cause.LEARNING_RATE: "make it a function of the global batch (learning_rate: {rule: linear, base_batch_size: ...}) "
    "and count steps of the global batch",
    Cause.RULES: "let nothing that the step depends on be a function of the number of processes",
    Cause.EVALUATION: "use engine.evaluate with metrics of summed counts, over every sample once",
    Cause.UNSYNCHRONISED: "register state as a persistent buffer, which steps average over shards; change parameters "
    "on every rank alike, or on none",
    Cause.UNUSED: "freeze what takes no part (requires_grad_(False)), or let every shard use it",
    Cause.KERNEL: "use a deterministic kernel; fast reduction with a tolerance if there is none",
    Cause.THREADS: "set one number of threads for every rank: samestep.start(threads=...), step.threads in a recipe",
    Cause.REDUCTION: "reduction: exact; or verify with --reduction fast, which allows rounding",
    Cause.RESUME: "save and restore all of model, optimizer, schedule, scaler, steps and cursor: samestep.Checkpoints",
    Cause.DIVERGED: "call engine.step and engine.evaluate on every rank, equally often",
    Cause.FAILED: "look at the error; it appears on this number of processes only",
    Cause.UNKNOWN: "look at the module and the tensor that differ first",
}


@dataclass(frozen=True)
class Finding:
    """A cause with its evidence.

    Attributes:
        first: where it first shows; None where a run did not get that far.
        evidence: what was seen and tried, a sentence each.
    """

    cause: Cause
    first: Difference | None
    evidence: tuple[str, ...] = field(default_factory=tuple)

    def data(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "cause": self.cause.value,
            "where": where(self.first) if self.first else None,
            "evidence": list(self.evidence),
            "do": ADVICE[self.cause],
        }


def where(difference: Difference) -> str:
    """A place in words: `step 2, shard 3, module layer1.0.bn1, outputs`."""
    words = ["evaluation" if difference.step is None else f"step {difference.step}"]
    if difference.shard is not None:
        words.append(f"shard {difference.shard}")
    if difference.module:
        words.append(f"module {difference.module}")
    if difference.tensor and difference.stage != "evaluation":
        words.append(difference.tensor)
    words.append(_STAGE_WORDS.get(difference.stage, difference.stage))
    if difference.ranks:
        words.append(f"ranks {difference.ranks[0]} and {difference.ranks[1]}")
    text = ", ".join(words)
    return f"{text}: {difference.detail}" if difference.detail else text


_STAGE_WORDS = {
    "before": "before the step",
    "order": "order of samples",
    "shards": "shards of the batch",
    "settings": "settings of the optimizer",
    "rates": "learning rates",
    "gradients": "gradient",
    "after": "after the step",
    "optimizer": "optimizer state",
    "steps": "number of steps",
    "evaluation": "values",
}
