"""What each rank tells of itself while a run goes: a line every two seconds, in a file of its own."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import psutil

from samestep.record.events import one_line
from samestep.runtime.gpu_numbers import gpu_numbers
from samestep.runtime.world import World

EVERY_SECONDS = 2.0
# Of less time than this the clock ticks of the CPU say nothing.
_LEAST_SECONDS = 0.2
# A disk that does not answer must not keep a run from ending.
_PATIENCE_SECONDS = 5.0


class Done(NamedTuple):
    """What a rank has done so far.

    Attributes:
        step: optimizer steps of the run.
        samples: samples that this rank has computed since it was started.
        data_seconds: how long it has waited for data since then.
    """

    step: int
    samples: int
    data_seconds: float


class _Mark(NamedTuple):
    """Where a rank stood at a moment, to compare with the next one."""

    time: float
    done: Done
    wait_seconds: float
    cpu_seconds: Any  # None where it cannot be read


class Vitals:
    """Appends to `ranks/rank-N.jsonl` of a run from a thread of its own; `docs/runs.md` has the keys.

    A number that cannot be read is null. A line that cannot be written is told once, on standard error, and the run
    goes on: unlike events, nothing is made from it that a run is for.

    Args:
        run: the run's directory, which is there.
        first_step: the step from which the run goes on.
    """

    def __init__(self, run: Path, world: World, first_step: int = 0, every: float = EVERY_SECONDS) -> None:
        self._path = run / "ranks" / f"rank-{world.rank}.jsonl"
        self._world, self._every = world, every
        # Where GPUs communicate, and where torch does it for a model in parts, no wait is seen from here.
        self._knows_waits = world.device.type == "cpu" and not world.layout.is_split
        self._host, self._process = socket.gethostname(), psutil.Process()
        self._lock = threading.Lock()
        self._ask: Callable[[], Done] = lambda: Done(first_step, 0, 0.0)
        self._mark = self._mark_now()
        self._rates = self._rates_between(self._mark, self._mark)
        self._is_torn = self._has_told = False
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._work, name="samestep-vitals", daemon=True)

    def follow(self, ask: Callable[[], Done]) -> None:
        """From now on, `ask` tells what the rank has done; it is called in another thread."""
        with self._lock:
            self._ask = ask
            self._mark = self._mark_now()

    def __enter__(self) -> Vitals:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._closed.set()
        self._thread.join(_PATIENCE_SECONDS)

    def _work(self) -> None:
        try:
            with self._open() as file:
                self._append(file)
                while not self._closed.wait(self._every):
                    self._append(file)
                self._append(file)
        except OSError as error:
            self._tell(error)

    def _open(self) -> FileIO:
        # Without parents: who cannot see the run's directory must not make another one.
        self._path.parent.mkdir(exist_ok=True)
        file = FileIO(self._path, "a+")
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            self._is_torn = file.read(1) != b"\n"  # an earlier process was killed while it wrote
        return file

    def _append(self, file: FileIO) -> None:
        line = f"{one_line(self._numbers())}\n".encode()
        whole = b"\n" + line if self._is_torn else line
        try:
            self._is_torn = file.write(whole) < len(whole)
        except OSError as error:
            self._is_torn = True
            self._tell(error)

    def _numbers(self) -> dict[str, Any]:
        with self._lock:
            now = self._mark_now()
            if now.time - self._mark.time >= _LEAST_SECONDS:
                self._rates, self._mark = self._rates_between(self._mark, now), now
            rates = self._rates
        position = self._world.pulse.position
        return {
            "time": round(time.time(), 3),
            "rank": self._world.rank,
            "host": self._host,
            "pid": self._process.pid,
            "step": now.done.step,
            "doing": position.text,
            "waits": position.waits,
            **rates,
            "memory_bytes": _read(lambda: self._process.memory_info().rss),
            "gpu": gpu_numbers(self._world.device),
        }

    def _rates_between(self, before: _Mark, now: _Mark) -> dict[str, float | None]:
        seconds = max(now.time - before.time, 1e-9)
        waited = _share(now.wait_seconds - before.wait_seconds, seconds)
        used = None if None in (before.cpu_seconds, now.cpu_seconds) else now.cpu_seconds - before.cpu_seconds
        return {
            "steps_per_second": round((now.done.step - before.done.step) / seconds, 3),
            "samples_per_second": round((now.done.samples - before.done.samples) / seconds, 1),
            "data_share": _share(now.done.data_seconds - before.done.data_seconds, seconds),
            "wait_share": waited if self._knows_waits else None,
            "cpu_percent": None if used is None else round(100 * used / seconds, 1),
        }

    def _mark_now(self) -> _Mark:
        used = _read(lambda: sum(self._process.cpu_times()[:2]))
        return _Mark(time.monotonic(), self._ask(), self._world.pulse.waited_seconds, used)

    def _tell(self, error: OSError) -> None:
        if self._has_told:
            return
        self._has_told = True
        with suppress(OSError):  # the terminal may be gone, and the log on the same disk
            print(
                f"rank {self._world.rank} cannot tell of itself in {self._path}: {error.strerror or error}; it goes on "
                "without",
                file=sys.stderr,
                flush=True,
            )


def _share(part: float, whole: float) -> float:
    return round(min(max(part / whole, 0.0), 1.0), 3)


def _read(ask: Callable[[], Any]) -> Any:
    """What the system says of this process; None where it says nothing."""
    try:
        return ask()
    except (psutil.Error, OSError):
        return None
