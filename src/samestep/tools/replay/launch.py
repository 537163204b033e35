"""Launch of replays: steps of a run computed again on new ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from samestep.config import DeviceKind, Recipe
from samestep.tools.timing import run_trial
from samestep.tools.verify.trials import Trial


@dataclass(frozen=True)
class ScriptCommand:
    """Command of the run of a script."""

    path: Path  # the script, relative to the directory or absolute
    arguments: tuple[str, ...]
    directory: Path  # working directory


@dataclass(frozen=True)
class Subject:
    """One run to compute again."""

    folder: Path  # directory of the run, which is only read
    command: Recipe | ScriptCommand
    checkpoint: Path | None  # checkpoint of a recipe to start from; None for the beginning
    first: int  # step of the checkpoint; a script selects the newest checkpoint at or before this step
    processes: int
    checksums: Mapping[int, str]  # logged checksums in hexadecimal digits, by step


@dataclass(frozen=True, kw_only=True)
class ReplayOptions:
    """Options of replays."""

    device: DeviceKind = "auto"
    accept_changes: bool = False  # whether the user's code may differ from that of the last start of the run
    preload: tuple[str, ...] = ()
    environment: Mapping[str, str] | None = None


@dataclass
class Replayed:
    """Result of a replay."""

    run: str
    processes: int
    first: int = 0  # step of the checkpoint, 0 for the beginning
    checksums: dict[int, str] = field(default_factory=dict)  # of the logged steps and of the last one
    by_name: dict[str, str] = field(default_factory=dict)  # checksum of each part of the last state
    compared: int = 0  # number of steps with a logged checksum
    first_different: int | None = None  # first step whose logged checksum is another one


def replay(subject: Subject, last: int, trial: Trial | None, options: ReplayOptions) -> Replayed:
    """Compute the steps of a run up to `last` on new ranks, recorded with a trial, and return the result of rank 0.

    Raises:
        StoppedError: a stop was requested.
    """
    function = "replay_recipe" if isinstance(subject.command, Recipe) else "replay_script"
    replayed: Replayed = run_trial(
        "samestep.tools.replay.worker",
        function,
        *(subject, last, trial, options),
        processes=subject.processes,
        preload=options.preload,
        environment=options.environment,
    )
    return replayed
