"""Causes of differences, with a fix for each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from samestep.tools.verify_engine.compare import Difference
from samestep.tools.verify_engine.trials import Note

# For equal remainders and for means between those of the pieces; losses are float32.
_LOSS_TOLERANCE = 1e-3


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
    LOSS_STATE = "state of the loss"
    BATCH_NORM = "batch norm statistics"
    LEARNING_RATE = "learning rate"
    SETTINGS = "step or optimizer settings"
    EVALUATION = "evaluation counting"
    UNSYNCHRONISED = "unsynchronised parameter or buffer"
    UNUSED = "unused parameters"
    KERNEL = "non-deterministic kernel"
    THREADS = "thread count"
    REDUCTION = "reduction order"
    RESUME = "incomplete resume"
    DIVERGED = "different steps on different ranks"
    FAILED = "failed run"
    UNKNOWN = "unknown"


FIXES = {
    Cause.DATA_ORDER: "give every rank the whole dataset and the same seed; samestep.loader(dataset, batch_size=..., "
    "shuffle=True, seed=0) divides it",
    Cause.ARBITRARY_ORDER: "sort: sorted(set(...)), sorted(glob(...)), sorted(os.listdir(...))",
    Cause.MICROBATCHES: "set the same number of microbatches for every number of processes, at least the largest one",
    Cause.LAST_BATCH: "step every batch of the loader, also the short last one",
    Cause.AUGMENTATION: "draw from the global generators of Python, NumPy or torch inside the dataset: the loader "
    "seeds them by (seed, epoch, sample)",
    Cause.INITIAL_WEIGHTS: "seed with a constant before the model is built: torch.manual_seed(0)",
    Cause.MODEL_RANDOM: "draw from torch's global generator in the forward: the engine seeds it by (seed, step, "
    "microbatch)",
    Cause.LOSS: "return samestep.Loss(sum, count): the sum over samples (or tokens) and their number",
    Cause.LOSS_STATE: "compute the loss from outputs and targets alone; keep averages between steps as buffers of the "
    "model, or update them after engine.step from its result",
    Cause.BATCH_NORM: "use torch's batch norm layers with batch_norm: microbatch or sync; no collectives in a forward",
    Cause.LEARNING_RATE: "make the learning rate a function of the global batch size (learning_rate: {rule: linear, "
    "base_batch_size: ...}) and of steps of the global batch",
    Cause.SETTINGS: "use settings that do not depend on the number of processes",
    Cause.EVALUATION: "use engine.evaluate with metrics of summed counts, over every sample once",
    Cause.UNSYNCHRONISED: "register state as a persistent buffer, which steps average over microbatches; change "
    "parameters on all ranks equally or on none",
    Cause.UNUSED: "freeze unused parameters (requires_grad_(False)), or use them in every microbatch",
    Cause.KERNEL: "use a deterministic kernel; otherwise fast reduction with a tolerance",
    Cause.THREADS: "set one number of threads for every rank: samestep.start(threads=...), step.threads in a recipe",
    Cause.REDUCTION: "reduction: exact; or verify with --reduction fast, which allows rounding",
    Cause.RESUME: "save and restore model, optimizer, schedule, scaler, steps and cursor: samestep.CheckpointManager",
    Cause.DIVERGED: "call engine.step and engine.evaluate on every rank, equally often",
    Cause.FAILED: "fix the error, which occurs on this number of processes only",
    Cause.UNKNOWN: "inspect the first module and tensor that differ",
}


@dataclass(frozen=True)
class Finding:
    """Cause with evidence."""

    cause: Cause
    first: Difference | None  # first difference; None if a run ended before one
    evidence: tuple[str, ...] = ()  # observations and results of experiments, one sentence each

    def data(self) -> dict[str, Any]:
        """Return the finding as plain data."""
        return {
            "cause": self.cause.value,
            "where": self.first.location if self.first else None,
            "evidence": list(self.evidence),
            "fix": FIXES[self.cause],
        }


def additivity_finding(notes: Sequence[Note]) -> Finding | None:
    """Return the mistake if the loss is not additive; comparing runs does not show it.

    A mean of means is between the means of the pieces. A term that is added once per microbatch leaves the same
    remainder at every position. A loss with neither property compares samples with each other, possibly by intention.
    """
    cuts = [cut for note in notes for cut in note["cuts"]]
    if not cuts:
        return None
    if len(cuts) > 1 and _have_equal_remainders(cuts):
        mistake = "a term is counted once per microbatch"
    elif all(_is_between(cut) for cut in cuts):
        mistake = "a mean of means: a value between those of the pieces, not weighted by their counts"
    else:
        return None
    note = next(note for note in notes if note["cuts"])
    cut = note["cuts"][0]
    first = Difference(quantity="loss", stage="loss", step=note["step"], microbatch=note["microbatch"])
    evidence = (
        f"the {note['size']} samples have a summed loss of {cut['sum']:.6g} over a count of {cut['count']:g}; split "
        f"after {cut['at']}, the two pieces give {cut['sum_of_pieces']:.6g} over {cut['count_of_pieces']:g}",
        f"so the result depends on how a batch is divided into microbatches: {mistake}",
    )
    return Finding(Cause.LOSS, first, evidence)


def repeatability_finding(notes: Sequence[Note], first: Difference | None) -> Finding | None:
    """Return the mistake if a loss that is called twice with the same outputs has different values."""
    note = next((note for note in notes if not note.get("repeats", True)), None)
    if note is None:
        return None
    seen = f"called twice with the outputs of step {note['step']}, microbatch {note['microbatch']}, the loss differs"
    return Finding(Cause.LOSS_STATE, first, (seen, "it depends on earlier calls, and ranks compute other microbatches"))


def additivity_notes(notes: Sequence[Note]) -> tuple[str, ...]:
    """Return the limits of the check for the certificate."""
    if notes and not any(note["checked"] for note in notes):
        return ("the additivity of the loss was not checked: it draws numbers, or its inputs have no rows per sample",)
    if any(note["cuts"] for note in notes) and additivity_finding(notes) is None:
        return (
            "the loss of a microbatch is neither the sum of its pieces nor a mean of them: the loss compares samples "
            "with each other. So the number of microbatches is a part of the recipe",
        )
    return ()


def _is_between(cut: Note) -> bool:
    whole, *pieces = (float(mean) for mean in cut["means"])
    slack = _LOSS_TOLERANCE * max(abs(mean) for mean in pieces)
    return min(pieces) - slack <= whole <= max(pieces) + slack


def _have_equal_remainders(cuts: Sequence[Note]) -> bool:
    remainders = [float(cut["sum_of_pieces"]) - float(cut["sum"]) for cut in cuts]
    return max(remainders) - min(remainders) <= _LOSS_TOLERANCE * max(abs(float(cut["sum"])) for cut in cuts)
