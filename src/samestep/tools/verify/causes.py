"""Causes of differences, with a fix for each."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from samestep.tools.verify.compare import Difference


class Cause(StrEnum):
    """Why results differ between numbers of processes."""

    DATA_ORDER = "data order"
    ARBITRARY_ORDER = "order of a set or of directory entries"
    MICROBATCHES = "number of microbatches"
    LAST_BATCH = "last batch"
    AUGMENTATION = "random state of the augmentation"
    INITIAL_WEIGHTS = "initial weights"
    MODEL_RANDOM = "random state in the model"
    LOSS = "loss normalisation"
    BATCH_NORM = "batch norm statistics"
    LEARNING_RATE = "learning rate"
    SETTINGS = "step or optimizer settings"
    EVALUATION = "evaluation counting"
    UNSYNCHRONISED = "unsynchronised parameter or buffer"
    KERNEL = "non-deterministic kernel"
    THREADS = "thread count"
    REDUCTION = "reduction order"
    RESUME = "incomplete resume"
    DIVERGED = "different steps on different ranks"
    FAILED = "failed run"
    UNKNOWN = "unknown"


FIXES = {
    Cause.DATA_ORDER: "read the whole data set in one order on every rank, without a sampler of "
    "ranks: samestep.loader(dataset, batch_size=..., shuffle=True, seed=0)",
    Cause.ARBITRARY_ORDER: "sort: sorted(set(...)), sorted(glob(...)), sorted(os.listdir(...))",
    Cause.MICROBATCHES: "give samestep.parallel the same microbatches= on every number of "
    "processes",
    Cause.LAST_BATCH: "step every batch of the loader, also the short last one",
    Cause.AUGMENTATION: "draw from the global generators of Python, NumPy or torch inside the "
    "dataset, seeded alike on every rank; samestep.loader seeds them by (seed, epoch, sample)",
    Cause.INITIAL_WEIGHTS: "seed with a constant before the model is built: torch.manual_seed(0)",
    Cause.MODEL_RANDOM: "draw from torch's global generator in the forward, and seed and draw "
    "alike on every rank",
    Cause.LOSS: "compute the loss from the whole outputs as on one process: no sum over ranks, no "
    "division by their number",
    Cause.BATCH_NORM: "samestep.parallel(model) without batch_norm='local': statistics of the "
    "whole batch",
    Cause.LEARNING_RATE: "make the learning rate a function of the batch size, which is that of "
    "all processes, and of steps",
    Cause.SETTINGS: "use settings that do not depend on the rank or the number of processes",
    Cause.EVALUATION: "evaluate every sample once on every rank; samestep.parallel divides the "
    "calls",
    Cause.UNSYNCHRONISED: "change parameters and buffers on all ranks equally or on none",
    Cause.KERNEL: "use a deterministic kernel: torch.use_deterministic_algorithms(True)",
    Cause.THREADS: "set one number of threads for every rank: samestep.init(threads=...)",
    Cause.REDUCTION: "samestep.parallel(model, reduction='exact'); otherwise the difference is "
    "rounding",
    Cause.RESUME: "save and restore model, optimizer, schedule, scaler, steps and cursor: "
    "samestep.CheckpointManager",
    Cause.DIVERGED: "call models and step optimizers on every rank, equally often",
    Cause.FAILED: "fix the error, which occurs on this number of processes only",
    Cause.UNKNOWN: "inspect the first call and tensor that differ",
}
# In a script that does not import Samestep.
_FIXES_OF_UNCHANGED = {
    Cause.DATA_ORDER: "give the model values of seeded generators and files, not of the process or "
    "the time",
    Cause.AUGMENTATION: "draw from the global generators of Python, NumPy or torch inside the data "
    "set",
    Cause.THREADS: "set one number of threads: torch.set_num_threads(1)",
    Cause.RESUME: "save and restore model, optimizer, schedule, scaler, steps and the position in "
    "the data",
    Cause.EVALUATION: "print and write results of seeded computations; not of the process",
    Cause.DIVERGED: "let nothing that differs between processes, such as the time, decide on calls "
    "and steps",
}


@dataclass(frozen=True)
class Finding:
    """Cause with evidence."""

    cause: Cause
    first: Difference | None  # first difference; None if a run ended before one
    evidence: tuple[str, ...] = ()  # observations and results of experiments, one sentence each

    def data(self, *, is_unchanged: bool) -> dict[str, Any]:
        """Return the finding as plain data, with the fix in a script with or without Samestep."""
        fixes = {**FIXES, **_FIXES_OF_UNCHANGED} if is_unchanged else FIXES
        return {
            "cause": self.cause.value,
            "where": self.first.location if self.first else None,
            "evidence": list(self.evidence),
            "fix": fixes[self.cause],
        }
