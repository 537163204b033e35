"""Start of a run: its environment, check of the user's code, entry in `environment.json`."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from samestep.checkpoint.files import write_atomically
from samestep.checkpoint.store import CheckpointFolder, read_state
from samestep.config import DEFAULT_KEEP
from samestep.distributed.devices import accelerator_module, is_accelerator
from samestep.distributed.env import read_environment
from samestep.distributed.logging import logger
from samestep.distributed.world import World
from samestep.launcher.job import process_state
from samestep.launcher.source_files import describe_modules

_FILE = "environment.json"


def require_same_code(run: Path, checkpoint: Path | None, *, accept_changes: bool) -> list[str]:
    """Compare the user's modules with those of the last start of the run; return one line per accepted change.

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
    """Return the number of checkpoints that the last start of a run kept; without a record, the present ones."""
    starts = _read_starts(run)
    keep = starts[-1].get("keep") if starts else None
    present = len(CheckpointFolder(run / "checkpoints").steps())
    return keep if isinstance(keep, int) and keep > 0 else max(DEFAULT_KEEP, present)


def environment(world: World, **facts: Any) -> dict[str, Any]:
    """Return the environment of a start: processes, `facts`, device and versions."""
    gpu = accelerator_module().get_device_name(world.device) if is_accelerator(world.device) else None
    return {
        "processes": world.size,
        **facts,
        "visible_devices": read_environment().visible_devices if gpu else None,
        "device": gpu or platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "system": platform.system(),
    }


def append_start(run: Path, environment: Mapping[str, Any]) -> None:
    """Append an entry with the time, the version of Samestep and the user's code. A damaged file is replaced.

    Raises:
        RunError: the file cannot be written.
    """
    started = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    entry = {"started": started, "samestep": version("samestep"), **environment}
    entries = [*_read_starts(run), {**entry, "sources": process_state.source_files.hashes}]
    write_atomically(run / _FILE, json.dumps(entries, indent=1) + "\n")


def _read_starts(run: Path) -> list[dict[str, Any]]:
    """Return the entries; a damaged file is reported, and has none."""
    path = run / _FILE
    try:
        entries = json.loads(path.read_bytes())
    except FileNotFoundError:
        return []
    except (OSError, ValueError, RecursionError) as error:
        logger.warning("%s cannot be read and is replaced; its earlier entries are lost: %s", path, error)
        return []
    return entries if isinstance(entries, list) else []
