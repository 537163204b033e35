"""Restarts of a failed run: whether, how often, and on how many ranks."""

from __future__ import annotations

from samestep.errors import (
    EXIT_FAILED,
    InputError,
)
from samestep.launcher.failure import E_DISK_HANG, RankError
from samestep.number_text import plural

# A restart would compute the same values, and write to the same disk.
_PERMANENT = ("NonFiniteError", "CheckpointWriteError")


class RestartPolicy:
    """Whether a failed run is restarted, at most `limit` times, and on how many ranks."""

    def __init__(self, limit: int, minimum: int, maximum: int) -> None:
        if limit < 0:
            raise InputError(
                f"--max-restarts {limit}", "0 or more", "--max-restarts 3", code="E_LAUNCH"
            )
        if not 1 <= minimum <= maximum:
            value = f"--processes {minimum}:{maximum}"
            raise InputError(value, "1 <= MIN <= MAX", "--processes 1:4", code="E_LAUNCH")
        self._limit = limit
        self._done = 0
        self._minimum = minimum
        self.processes = maximum
        self._last: tuple[str | None, int] | None = None

    def restart(self, error: RankError, step: int) -> str | None:
        """Record a restart and return a message; None if the run must not be restarted.

        A lost rank (killed or hanging) is dropped down to the minimum. An exception after the same
        number of completed optimizer steps twice is taken for permanent.
        """
        failure = error.failure
        is_lost = failure.by_signal is not None or failure.kind == "hang"
        is_repeated = not is_lost and self._last == (failure.kind, step)
        is_permanent = (
            failure.exit_code != EXIT_FAILED
            or failure.kind in _PERMANENT
            or failure.code == E_DISK_HANG
            or is_repeated
        )
        if is_permanent or error.is_stopping or self._done >= self._limit:
            return None
        self._last = (failure.kind, step)
        self._done += 1
        self.processes = max(self._minimum, self.processes - is_lost)
        return (
            f"restart {self._done} of {self._limit}, on {plural(self.processes, 'process')}: "
            f"{failure.title}"
        )
