"""Run directory of a custom loop: lock, events, rank files, environment and trackers.

Decisions: docs/decisions/runs.md
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from shlex import quote

from samestep.checkpoint.files import write_atomically
from samestep.checkpoint.lock import LOCK, FolderLock
from samestep.config import LOGGERS
from samestep.config.validation import require
from samestep.distributed.disk_operations import HeldFolder
from samestep.distributed.world import World, all_gather
from samestep.errors import InputError
from samestep.launcher.job import process_state
from samestep.loggers.logger import Logger, RunLogger, is_exit
from samestep.loggers.rank_monitor import RankMonitor
from samestep.loggers.trackers import create_loggers
from samestep.runs import LOOP, require_run_name
from samestep.runs.loop_events import LoopEvents
from samestep.runs.starts import append_start, environment

RUNS = Path("runs")
_RECIPE = "recipe.yaml"
_TRACKERS = tuple(name for name in LOGGERS if name not in ("jsonl", "progress"))
# Entries that a directory may have before its first run.
_OTHERS = {LOCK, "checkpoints", "logs"}


@contextmanager
def open_run(run: str | Path, loggers: Sequence[Logger | str], world: World, checksum_every: int) -> Iterator[World]:
    """Create or continue a run directory, and yield the world with its loggers and callbacks. Collective.

    Args:
        run: name of a folder in `runs`, or the path of a directory as a `Path`. Equal on every rank.
        loggers: loggers in addition to `events.jsonl`, as objects or by name.
        world: the ranks.
        checksum_every: steps between logged checksums of the state, 0 for none.

    Raises:
        InputError: `checksum_every` is negative, the name is invalid, the directory cannot be written or is of
            something else, another process writes to it, ranks have different names, or a logger is unknown.
    """
    require(checksum_every >= 0, f"checksum_every is {checksum_every}", "at least 1 step, or 0", "checksum_every=10")
    requested = run_directory(run)
    folder = requested.absolute()
    _require_trackers(loggers)
    if world.is_main:
        _require_own(requested)
    with FolderLock(requested) if world.is_main else nullcontext():
        is_new = not (folder / LOOP).exists()
        if world.is_main and is_new:
            start = {"script": sys.argv[0], "created": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
            write_atomically(folder / LOOP, json.dumps(start) + "\n")
        _require_equal(str(run), world)  # and no rank writes before the directory exists
        held = HeldFolder(folder) if world.is_main else None
        destinations = _destinations(folder, loggers) if world.is_main else []
        with RunLogger(destinations, held) as logger, RankMonitor(folder, world) as monitor:
            events = LoopEvents(logger, is_new=is_new, checksum_every=checksum_every)
            monitor.follow(lambda: events.rank_progress)
            if world.is_main:
                process_state.source_files.note_imports()
                is_function = process_state.worker is not None and not process_state.is_script
                started = {"arguments": sys.argv[1:], "directory": os.getcwd()}
                started |= {"script": sys.argv[0], "started_as": "function" if is_function else "script"}
                append_start(folder, environment(world, **started))
            context = world.context
            context = replace(context, loggers=tuple(destinations), callbacks=[*context.callbacks, events])
            try:
                yield replace(world, context=context)
            except SystemExit as end:
                if is_exit(end):
                    events.end()
                raise
            events.end()


def run_directory(run: str | Path) -> Path:
    """Return the directory of a run from its name or path.

    Raises:
        InputError: a name is not that of a folder.
    """
    if isinstance(run, Path):
        return run
    require_run_name(run, 'samestep.start(run="first"), or run=pathlib.Path("other/first") for another folder')
    return RUNS / run


def _require_own(folder: Path) -> None:
    """Require that a directory is new, or the run of a custom loop."""
    if (folder / _RECIPE).exists():
        raise InputError(
            f"{folder} is the run of a recipe",
            expected="a new name, or the run of a script",
            fix=f"another name; samestep resume {quote(str(folder))} continues the recipe",
            code="E_OUTPUT",
        )
    if folder.is_dir() and not (folder / LOOP).exists() and {path.name for path in folder.iterdir()} - _OTHERS:
        raise InputError(
            f"{folder} is a folder with other files",
            expected="a new folder, or the run of a script",
            fix="another name or path",
            code="E_OUTPUT",
        )


def _require_trackers(loggers: Sequence[Logger | str]) -> None:
    for name in loggers:
        if isinstance(name, str) and name not in _TRACKERS:
            raise InputError(
                f"unknown logger {name!r}",
                expected=f"some of {', '.join(_TRACKERS)}, or objects; events.jsonl is always written",
                fix='loggers=["tensorboard"]',
                code="E_UNKNOWN_NAME",
            )


def _require_equal(run: str, world: World) -> None:
    names = all_gather([run], world)
    for rank, (name,) in enumerate(names):
        if name != names[0][0]:
            raise InputError(
                f"rank {rank} has the run {name!r}, rank 0 has {names[0][0]!r}",
                expected="the same name on every rank",
                fix="a name that does not depend on the rank or on the time",
                code="E_RUN_NAME",
            )


def _destinations(folder: Path, loggers: Sequence[Logger | str]) -> list[Logger]:
    """Return `events.jsonl` and the loggers."""
    destinations = create_loggers(["jsonl"], folder)
    for logger in loggers:
        destinations += create_loggers([logger], folder) if isinstance(logger, str) else [logger]
    return destinations
