"""Run directory of a custom loop: lock, events, rank files, starts and trackers."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections import ChainMap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from shlex import quote
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from samestep.checkpoint.durable_files import write_atomically
from samestep.checkpoint.folder_lock import LOCK, FolderLock
from samestep.checkpoint.store import CheckpointFolder, read_state
from samestep.config import DEFAULT_KEEP, LOGGERS
from samestep.distributed.devices import is_accelerator, machine
from samestep.distributed.disk_operations import HeldFolder, read_small
from samestep.distributed.env import read_environment
from samestep.distributed.logging import logger
from samestep.distributed.stop_request import StoppedLoop
from samestep.distributed.world import World, all_gather
from samestep.errors import InputError
from samestep.launcher.process_state import process_state
from samestep.launcher.source_files import describe_modules
from samestep.loggers.logger import Logger, RunLogger, is_exit
from samestep.loggers.rank_monitor import RankMonitor, RankProgress
from samestep.loggers.trackers import create_loggers
from samestep.runs import LOOP, RUNS, require_run_name

STEP_SECONDS = 0.1  # least time between two logged steps
_RECIPE = "recipe.yaml"
_STARTS = "environment.json"
_TRACKERS = tuple(name for name in LOGGERS if name not in ("jsonl", "progress"))
# Entries that a directory may have before its first run.
_OTHERS = {LOCK, "checkpoints", "logs"}


@contextmanager
def open_run(run: str | Path, loggers: Sequence[Logger | str], world: World) -> Iterator[World]:
    """Create or continue a run directory, and yield the world with its loggers. Collective.

    Args:
        run: name of a folder in `runs`, or the path of a directory as a `Path`. Equal on every
            rank.
        loggers: loggers in addition to `events.jsonl`, as objects or by name.
        world: the ranks.

    Raises:
        InputError: the name is invalid, the directory cannot be written or is of something else,
            another process writes to it, ranks have different names, or a logger is unknown.
    """
    requested = run_directory(run)
    folder = requested.absolute()  # the script may change the working directory
    _require_trackers(loggers)
    if world.is_main:
        _require_own(requested)
    with FolderLock(requested) if world.is_main else nullcontext():
        is_new = not (folder / LOOP).exists()
        # The mark comes first: a run that fails at once can be started again under its name.
        if world.is_main and is_new:
            start = {"script": sys.argv[0], "created": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
            write_atomically(folder / LOOP, json.dumps(start) + "\n")
        _require_equal(str(run), world)  # and no rank writes before the directory exists
        # A directory that is moved or replaced is noticed at the next write.
        held = HeldFolder(folder) if world.is_main else None
        destinations = _destinations(folder, loggers) if world.is_main else []
        with RunLogger(destinations, held) as logger, RankMonitor(folder, world) as monitor:
            events = LoopEvents(logger)
            monitor.follow(lambda: events.rank_progress)
            if world.is_main:
                events.folder = folder
                process_state.source_files.note_imports()
                is_function = process_state.worker is not None and not process_state.is_script
                started = {"arguments": sys.argv[1:], "directory": os.getcwd()}
                started |= {
                    "script": sys.argv[0],
                    "started_as": "function" if is_function else "script",
                }
                append_start(folder, environment(world, **started))
            try:
                yield replace(world, session=replace(world.session, loggers=tuple(destinations)))
            except SystemExit as end:
                if is_exit(end) or isinstance(end, StoppedLoop):
                    events.end(stopped=isinstance(end, StoppedLoop))
                raise
            finally:
                events.close()
            events.end()


def run_directory(run: str | Path) -> Path:
    """Return the directory of a run from its name or path.

    Raises:
        InputError: a name is not that of a folder.
    """
    if isinstance(run, Path):
        return run
    require_run_name(
        run, 'samestep.init(run="first"), or run=pathlib.Path("other/first") for another folder'
    )
    return RUNS / run


def _require_own(folder: Path) -> None:
    if (folder / _RECIPE).exists():
        raise InputError(
            f"{folder} is the run of a recipe",
            expected="a new name, or the run of a script",
            fix=f"another name; samestep resume {quote(str(folder))} continues the recipe",
            code="E_OUTPUT",
        )
    is_other = folder.is_dir() and not (folder / LOOP).exists()
    if is_other and {path.name for path in folder.iterdir()} - _OTHERS:
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
                expected=f"some of {', '.join(_TRACKERS)}, or objects; events.jsonl is always "
                "written",
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
    destinations = create_loggers(["jsonl"], folder)
    for one in loggers:
        if isinstance(one, str):
            destinations += create_loggers([one], folder)
        else:
            destinations.append(one)
    return destinations


def require_same_code(run: Path, checkpoint: Path | None, *, accept_changes: bool) -> list[str]:
    """Compare the user's modules with those of the last start; return lines of accepted changes.

    Modules that a run imports later than at its start are compared with those of the checkpoint.

    Raises:
        InputError: a module has changed, and changes are not accepted.
        CheckpointError: the checkpoint is damaged.
    """
    changed: list[str] = []
    starts = _read_starts(run)
    recorded = [starts[-1].get("sources")] if starts else []
    if checkpoint is not None:
        recorded.append(read_state(checkpoint).sources)
    for sources in recorded:
        if isinstance(sources, dict):
            changed += process_state.source_files.require(sources, accept_changes=accept_changes)
    return describe_modules(changed)


def recorded_keep(run: Path) -> int:
    """Return the number of checkpoints that the last start kept, or of those that are present."""
    starts = _read_starts(run)
    keep = None
    if starts:
        keep = starts[-1].get("keep")
    present = len(CheckpointFolder(run / "checkpoints").steps())
    if isinstance(keep, int) and keep > 0:
        return keep
    return max(DEFAULT_KEEP, present)


def environment(world: World, **facts: Any) -> dict[str, Any]:
    """Return the environment of a start: processes, `facts`, device and versions."""
    visible = None
    if is_accelerator(world.device):
        visible = read_environment().visible_devices
    return {
        **machine(world.device),
        "processes": world.size,
        **facts,
        "visible_devices": visible,
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        "system": platform.system(),
    }


def append_start(run: Path, environment: Mapping[str, Any]) -> None:
    """Append an entry with the time, the version of Samestep and the user's code.

    Raises:
        RunError: the file cannot be written.
    """
    started = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    entry = {"started": started, "samestep": version("samestep"), **environment}
    entries = [*_read_starts(run), {**entry, "sources": process_state.source_files.hashes}]
    write_atomically(run / _STARTS, json.dumps(entries, indent=1) + "\n")


def _read_starts(run: Path) -> list[dict[str, Any]]:
    """Return the entries; a damaged file is reported, and has none."""
    path = run / _STARTS
    try:
        entries = json.loads(read_small(path))
        if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
            raise ValueError("it is no list of entries")
    except FileNotFoundError:
        return []
    except (OSError, ValueError, RecursionError) as error:
        text = "%s cannot be read and is replaced; its earlier entries are lost: %s"
        logger.warning(text, path, error)
        return []
    return entries


class LoopEvents:
    """Logs the steps of the first optimizer that steps, and holds the progress of this rank.

    A step is logged if `STEP_SECONDS` have passed since the last logged one, and at the end. Losses
    and other values are the script's own, which logs them with `World.log`.

    Attributes:
        folder: the run directory on rank 0, whose entry of this start gets global batch and rate.

    Args:
        logger: the logger of the run, which has no destination on ranks other than 0.
    """

    folder: Path | None = None

    def __init__(self, logger: RunLogger) -> None:
        self._logger = logger
        self._optimizer: torch.optim.Optimizer | None = None
        self._steps = 0
        self._logged_step = 0
        self._began = self._logged = time.perf_counter()
        self._hook = register_optimizer_step_post_hook(self._end_step)

    @property
    def rank_progress(self) -> RankProgress:
        """Work of this rank; any thread may read it."""
        # Samples and waits for data are known to the script alone.
        return RankProgress(self._steps, 0, 0.0)

    def _end_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._optimizer is None:
            self._optimizer = optimizer
            if self.folder is not None:
                self._note_settings(self.folder, optimizer.param_groups[0])
        if optimizer is not self._optimizer:  # a GAN has several, and one count of steps
            return
        self._steps += 1
        if time.perf_counter() - self._logged >= STEP_SECONDS:
            self._log_step()

    def _note_settings(self, folder: Path, group: Mapping[str, Any]) -> None:
        """Add global batch and rate to the entry of this start, and report other ones than before.

        The global batch is known on several processes. A schedule keeps its first rate.
        """
        settings = {}
        view = process_state.view
        if view is not None and (rows := max((one.rows for one in view.modules), default=0)):
            settings["batch_size"] = rows
        if "lr" in group:
            settings["lr"] = float(group.get("initial_lr", group["lr"]))
        *earlier, start = _read_starts(folder) or [{}]
        # A start that failed before its first step has no values: the last ones that there are.
        before = dict(ChainMap(*reversed(earlier)))
        for name, value in settings.items():
            if before.get(name, value) != value:
                text = f"{name} is {value}, and was {before[name]} at an earlier start"
                logger.warning("%s: results differ from those of one run", text)
                self._logger.log_event("note", text=text)
        entries = [*earlier, {**start, **settings}]
        write_atomically(folder / _STARTS, json.dumps(entries, indent=1) + "\n")

    def _log_step(self) -> None:
        if self._optimizer is None or self._steps == self._logged_step:
            return
        now = time.perf_counter()
        rate = round((self._steps - self._logged_step) / max(now - self._logged, 1e-9), 3)
        self._logged_step = self._steps
        self._logged = now
        group = self._optimizer.param_groups[0]
        values = {}
        if "lr" in group:
            values["lr"] = float(group["lr"])
        self._logger.log_event("step", step=self._steps, **values, steps_per_second=rate)

    def close(self) -> None:
        """Stop observing, and log the last step."""
        self._hook.remove()
        self._log_step()

    def end(self, *, stopped: bool = False) -> None:
        """Log the end of the run, which a stop request can have caused."""
        self._log_step()
        seconds = round(time.perf_counter() - self._began, 3)
        self._logger.log_event("end", stopped=stopped, step=self._steps, seconds=seconds)
