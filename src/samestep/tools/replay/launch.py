"""Launch of replays: steps of a run computed again on new ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from samestep.config import DeviceKind, Recipe, RunOptions
from samestep.launcher.launch import LaunchConfig, StoppedError, run_workers
from samestep.launcher.pickling import ByName
from samestep.launcher.watchdog import HANG_AFTER
from samestep.tools.timing import stop_errors
from samestep.tools.verify.trials import Trial

_WORKER = "samestep.tools.replay.worker"


@dataclass(frozen=True)
class ScriptCommand:
    """Command of the run of a script.

    Attributes:
        path: the script, relative to the directory or absolute.
        arguments: its command-line arguments.
        directory: working directory.
    """

    path: Path
    arguments: tuple[str, ...]
    directory: Path


@dataclass(frozen=True, kw_only=True)
class ReplayRequest:
    """Steps to compute again.

    Attributes:
        run: directory of the run, which is only read.
        checkpoint: checkpoint to start from; None for the beginning.
        script: command of a script; None for a recipe.
        first: for a script, last step of a checkpoint to start from; -1 for the beginning.
        last: last step.
        logged: logged checksums in hexadecimal digits, by step.
        out: folder for a checkpoint of the state after the last step, if any.
        accept_changes: whether the user's code may differ from that of the last start of the run.
        trial: records each step as `samestep verify` does, if set.
        quiet: print no progress.
    """

    run: Path
    checkpoint: Path | None
    last: int
    logged: Mapping[int, str]
    script: ScriptCommand | None = None
    first: int = 0
    out: Path | None = None
    accept_changes: bool = False
    trial: Trial | None = None
    quiet: bool = False


@dataclass(frozen=True)
class Replayed:
    """Result of a replay.

    Attributes:
        first: step of the checkpoint, 0 for the beginning.
        checksums: checksums in hexadecimal digits by step: of the logged steps, and of the last one.
        by_name: checksum of each part of the last state, in hexadecimal digits.
        flipped: the one bit whose flip turns the last state into the logged one, as text; None if there is none.
        stopped: a stop was requested.
    """

    first: int
    checksums: dict[int, str] = field(default_factory=dict)
    by_name: dict[str, str] = field(default_factory=dict)
    flipped: str | None = None
    stopped: bool = False


@dataclass(frozen=True)
class Subject:
    """One run to compute again.

    Attributes:
        folder: directory of the run.
        command: recipe at the replayed steps, or command of a script.
        checkpoint: nearest checkpoint before the first different step, if any; its step is `first`.
        first: step of the checkpoint, 0 for the beginning. A script selects the newest checkpoint at or before this
            step, and starts from the beginning for -1.
        processes: number of ranks.
        checksums: logged checksums by step.
    """

    folder: Path
    command: Recipe | ScriptCommand
    checkpoint: Path | None
    first: int
    processes: int
    checksums: Mapping[int, str]


@dataclass(frozen=True, kw_only=True)
class ReplayOptions:
    """Options of replays."""

    device: DeviceKind = "auto"
    accept_changes: bool = False
    quiet: bool = False
    preload: tuple[str, ...] = ()
    environment: Mapping[str, str] | None = None


def run_replay(subject: Subject, last: int, options: ReplayOptions, **fields: Any) -> Replayed:
    """Compute the steps of a run up to `last` on new ranks, and return the result of rank 0.

    Args:
        subject: the run, its checkpoint and the number of ranks.
        last: last step.
        options: options of all replays.
        fields: `out` or `trial` of `ReplayRequest`.

    Raises:
        StoppedError: a stop was requested.
    """
    request = ReplayRequest(
        run=subject.folder,
        script=subject.command if isinstance(subject.command, ScriptCommand) else None,
        first=subject.first,
        checkpoint=subject.checkpoint,
        last=last,
        logged=dict(subject.checksums),
        accept_changes=options.accept_changes,
        quiet=options.quiet,
        **fields,
    )
    function = "replay_script"
    arguments: tuple[Any, ...] = (request,)
    if isinstance(subject.command, Recipe):
        function, arguments = "replay", (subject.command, RunOptions(device=options.device), request)
    with stop_errors("the replay was stopped before the last step"):
        result = run_workers(
            ByName(_WORKER, function),
            *arguments,
            processes=subject.processes,
            launch_config=LaunchConfig(HANG_AFTER),
            preload=(*options.preload, _WORKER),
            environment=options.environment,
        )
        replayed: Replayed = result.value
        if result.stop_signal is not None or replayed.stopped:
            raise StoppedError("stopped")
    return replayed
