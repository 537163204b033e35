"""Decision after a failure: whether a run restarts, and on how many ranks."""

from __future__ import annotations

from samestep.errors import EXIT_FAILED, InputError
from samestep.launcher.failure import E_DISK_HANG, RankError
from samestep.units import plural

# Failures that recur because the same state produces them again; and a device with wrong results,
# because the newest checkpoint may contain some.
_PERMANENT = ("NonFiniteError", "CheckpointWriteError")


class RestartPolicy:
    """Whether a failed run is restarted, at most `limit` times, and on how many ranks: initially `maximum`."""

    def __init__(self, limit: int, minimum: int, maximum: int) -> None:
        if limit < 0:
            raise InputError(
                f"--max-restarts {limit}",
                expected="0 or more",
                fix="--max-restarts 3",
                code="E_LAUNCH",
            )
        if not 1 <= minimum <= maximum:
            value = f"--processes {minimum}:{maximum}"
            raise InputError(
                value, expected="1 <= MIN <= MAX", fix="--processes 1:4", code="E_LAUNCH"
            )
        self._limit = limit
        self._done = 0
        self._minimum = minimum
        self._maximum = maximum
        self.processes = maximum
        self._last: tuple[str | None, int] | None = None

    @property
    def is_short(self) -> bool:
        """Whether the run has fewer ranks than initially; all ranks return at the next checkpoint."""
        return self.processes < self._maximum

    def restart(self, error: RankError, step: int) -> str | None:
        """Record a restart and return a message for the user; None if the run must not be restarted, or is to end.

        A lost rank (killed or hanging) is dropped down to the minimum. An exception after the same
        number of completed optimizer steps twice is taken for permanent.
        """
        failure = error.failure
        is_lost = failure.by_signal is not None or failure.kind == "hang"
        is_repeated = not is_lost and self._last == (failure.kind, step)
        is_permanent = failure.exit_code != EXIT_FAILED or failure.kind in _PERMANENT or is_repeated
        is_permanent = is_permanent or failure.code == E_DISK_HANG or error.is_stopping
        if is_permanent or self._done >= self._limit:
            return None
        self._last = (failure.kind, step)
        self._done += 1
        self.processes = max(self._minimum, self.processes - is_lost)
        return f"restart {self._done} of {self._limit}, on {plural(self.processes, 'process')}: {failure.title}"

    def grow(self) -> str:
        """Return to the initial number of ranks; return a message for the user."""
        self.processes = self._maximum
        return f"checkpoint written: continuing on {plural(self.processes, 'process')}"
