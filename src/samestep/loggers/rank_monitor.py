"""Periodic resource samples of each rank, one JSON file per rank."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from samestep.distributed.devices import gpu_stats
from samestep.distributed.disk_operations import regular_file
from samestep.distributed.logging import logger
from samestep.distributed.world import World
from samestep.loggers.logger import ends_mid_line, to_json_line

INTERVAL_SECONDS = 2.0
_MIN_RATE_SECONDS = 0.2  # the CPU clock is too coarse for rates over less time
_JOIN_SECONDS = 5.0  # a disk that does not answer must not delay the end of a run


class RankProgress(NamedTuple):
    """Work of one rank; samples and seconds count from the start of the rank."""

    step: int  # optimizer steps of the run
    samples: int  # computed by this rank
    data_seconds: float  # time that this rank has waited for data


class _Reading(NamedTuple):
    """Counters at one moment; rates are differences of two readings."""

    time: float
    progress: RankProgress
    wait_seconds: float
    cpu_seconds: float | None


class RankMonitor:
    """Appends a sample to `ranks/rank-N.jsonl` every `interval` seconds, from a thread.

    docs/reference/events.md lists the keys. A value that cannot be read is null. A write error is
    logged once and does not end the run, because nothing in a run depends on these files.
    """

    def __init__(
        self, run: Path, world: World, first_step: int = 0, interval: float = INTERVAL_SECONDS
    ) -> None:
        self._path = run / "ranks" / f"rank-{world.rank}.jsonl"
        self._world = world
        self._interval = interval
        # Waits inside GPU collectives, and inside torch's communication for a split model, cannot
        # be observed.
        self._observes_waits = world.device.type == "cpu" and not world.mesh_shape.splits_model
        self._host = socket.gethostname()
        self._lock = threading.Lock()
        self._read_progress: Callable[[], RankProgress] = lambda: RankProgress(first_step, 0, 0.0)
        self._last = self._read()
        self._rates = self._rates_between(self._last, self._last)
        self._ends_mid_line = False
        self._has_warned = False
        self._closed = threading.Event()
        # A daemon: a write that does not return must not keep the process.
        self._thread = threading.Thread(target=self._run, name="samestep-rank-monitor", daemon=True)

    def follow(self, read_progress: Callable[[], RankProgress]) -> None:
        """Take the progress of the rank from this function, called in the monitor's thread."""
        with self._lock:
            self._read_progress = read_progress
            # Rates are differences of readings of one function.
            self._last = self._read()

    def __enter__(self) -> RankMonitor:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._closed.set()
        self._thread.join(_JOIN_SECONDS)

    def _run(self) -> None:
        try:
            # No parents: a machine without access to the run directory must not create another one.
            self._path.parent.mkdir(exist_ok=True)
            with FileIO(str(self._path), "a", opener=regular_file) as file:
                # An earlier process may have been killed during a write.
                self._ends_mid_line = ends_mid_line(self._path)
                self._append(file)
                while not self._closed.wait(self._interval):
                    self._append(file)
                self._append(file)
        except OSError as error:
            self._warn(error)

    def _append(self, file: FileIO) -> None:
        # Unbuffered, and one write for each line: a killed rank loses at most a part of a line.
        data = f"{to_json_line(self._sample())}\n".encode()
        if self._ends_mid_line:
            data = b"\n" + data
        try:
            self._ends_mid_line = file.write(data) < len(data)
        except OSError as error:
            self._ends_mid_line = True
            self._warn(error)

    def _sample(self) -> dict[str, Any]:
        with self._lock:
            now = self._read()
            # Two samples can follow each other closely, as at the end: then the rates stay.
            if now.time - self._last.time >= _MIN_RATE_SECONDS:
                self._rates = self._rates_between(self._last, now)
                self._last = now
            rates = self._rates
        status = self._world.session.status.snapshot
        return {
            "time": round(time.time(), 3),
            "rank": self._world.rank,
            "host": self._host,
            "pid": os.getpid(),
            "step": now.progress.step,
            "doing": status.activity,
            "waits": status.is_waiting,
            **rates,
            "memory_bytes": _read_or_none(lambda: psutil.Process().memory_info().rss),
            "gpu": gpu_stats(self._world.device),
        }

    def _rates_between(self, before: _Reading, now: _Reading) -> dict[str, float | None]:
        seconds = max(now.time - before.time, 1e-9)
        data_seconds = now.progress.data_seconds - before.progress.data_seconds
        wait_share = None
        if self._observes_waits:
            wait_share = _share(now.wait_seconds - before.wait_seconds, seconds)
        cpu_percent = None
        if before.cpu_seconds is not None and now.cpu_seconds is not None:
            cpu_percent = round(100 * (now.cpu_seconds - before.cpu_seconds) / seconds, 1)
        samples = now.progress.samples - before.progress.samples
        return {
            "steps_per_second": round((now.progress.step - before.progress.step) / seconds, 3),
            "samples_per_second": round(samples / seconds, 1),
            "data_share": _share(data_seconds, seconds),
            "wait_share": wait_share,
            "cpu_percent": cpu_percent,
        }

    def _read(self) -> _Reading:
        cpu_seconds = _read_or_none(lambda: sum(psutil.Process().cpu_times()[:2]))
        waited = self._world.session.status.waited_seconds
        return _Reading(time.monotonic(), self._read_progress(), waited, cpu_seconds)

    def _warn(self, error: OSError) -> None:
        if not self._has_warned:
            self._has_warned = True
            text = "rank %d cannot write %s: %s; training continues"
            logger.warning(text, self._world.rank, self._path, error.strerror or error)


def _share(seconds: float, total: float) -> float:
    return round(min(max(seconds / total, 0.0), 1.0), 3)


def _read_or_none(read: Callable[[], Any]) -> Any:
    """Return a value that psutil reads, or None if the system does not provide it."""
    try:
        return read()
    except (psutil.Error, OSError):
        return None
