"""Launch of replays: steps of a run computed again on new ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from samestep.config import DeviceKind, Recipe
from samestep.tools.timing import run_trial


@dataclass(frozen=True)
class Subject:
    """One run to compute again."""

    folder: Path  # directory of the run, which is only read
    recipe: Recipe
    checkpoint: Path | None  # to start from; None for the beginning
    processes: int
    checksums: Mapping[int, str]  # logged checksums in hexadecimal digits, by step


@dataclass(frozen=True, kw_only=True)
class ReplayOptions:
    """Options of replays."""

    device: DeviceKind = "auto"
    accept_changes: bool = (
        False  # whether the user's code may differ from that of the last start of the run
    )
    preload: tuple[str, ...] = ()
    environment: Mapping[str, str] | None = None


@dataclass
class Replayed:
    """Result of a replay."""

    run: str
    processes: int
    first: int = 0  # step of the checkpoint, 0 for the beginning
    checksums: dict[int, str] = field(
        default_factory=dict
    )  # of the logged steps and of the last one
    by_name: dict[str, str] = field(default_factory=dict)  # checksum of each part of the last state
    compared: int = 0  # number of steps with a logged checksum
    first_different: int | None = None  # first step whose logged checksum is another one


def replay(subject: Subject, last: int, options: ReplayOptions) -> Replayed:
    """Compute the steps of a run up to `last` on new ranks, and return the result of rank 0.

    Raises:
        StoppedError: a stop was requested.
    """
    replayed: Replayed = run_trial(
        "samestep.tools.replay.worker",
        "replay_recipe",
        *(subject, last, options),
        processes=subject.processes,
        preload=options.preload,
        environment=options.environment,
    )
    return replayed
