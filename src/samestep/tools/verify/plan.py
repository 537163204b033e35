"""What is to be run in order to compare it: plain data, the same in the command and in its ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from samestep.config import DeviceKind, Recipe, Reduction


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What is verified: a recipe, or a person's own script.

    Attributes:
        script: a Python file that uses `samestep.start`, `Engine` and `loader`, if it is one.
        arguments: what the script is given.
    """

    name: str
    recipe: Recipe | None = None
    script: Path | None = None
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Held:
    """What an experiment keeps still, so that it cannot be the cause.

    Attributes:
        reduction: gradients meet in this order, whatever the engine was told.
        double: model and floating inputs in float64.
        one_thread: every rank computes with one thread, whatever the script sets.
        rates: learning rates of the parameter groups, by step from 1.
        generators: generators that modules hold are seeded anew for every shard.
        state: buffers, tensors and numbers of modules that steps do not average are as they were at first, in every
            forward.
        resting: this module and those in it are in evaluation mode.
        rehearsed: every shard's forward is computed once before, and forgotten.
        twice: every sample is asked for twice, and those are noted that differ.
    """

    reduction: Reduction | None = None
    double: bool = False
    one_thread: bool = False
    rates: tuple[tuple[float, ...], ...] | None = None
    generators: bool = False
    state: bool = False
    resting: str | None = None
    rehearsed: bool = False
    twice: bool = False


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One run of the subject that writes down what it computes.

    Attributes:
        folder: where each rank writes `rank-R.jsonl`, and what else the trial leaves.
        steps: optimizer steps from the first; of a recipe, the last batch of the epoch and an evaluation follow.
            None runs a script to its end.
        values: tensors are written too, for others to measure their distance from.
        reference: the folder of such a trial.
        cuts_losses: every loss is compared with that of pieces of its shard.
        kill_at: the last rank kills itself in this step; until there, every step leaves a checkpoint.
        checkpoint: the trial goes on from here.
        scratch: what `{folder}` in a script's arguments stands for: a folder of its own.
        patience: seconds without any progress after which a rank gives up.
    """

    folder: Path
    processes: int
    steps: int | None
    device: DeviceKind = "auto"
    held: Held = field(default_factory=Held)
    values: bool = False
    reference: Path | None = None
    cuts_losses: bool = False
    kill_at: int | None = None
    checkpoint: Path | None = None
    scratch: Path | None = None
    patience: float = 120.0


def in_words(processes: int) -> str:
    """`1 process`, `2 processes`."""
    return f"{processes} process{'es' if processes > 1 else ''}"
