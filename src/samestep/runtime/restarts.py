"""Whether a run whose ranks failed is started again, and on how many of them."""

from __future__ import annotations

from dataclasses import dataclass, field

from samestep.errors import EXIT_FAILED, InputError
from samestep.runtime.crew import RankError

# Computed from the same state, they come again.
_FOREVER = ("NonFiniteError", "CheckpointWriteError")


@dataclass
class Restarts:
    """The restarts of one run.

    Attributes:
        most: how many there may be in all.
        minimum: with how few ranks the run goes on.
        maximum: with how many ranks it begins.
        done: how many there were.
        processes: how many ranks it has now.
    """

    most: int
    minimum: int
    maximum: int
    done: int = 0
    processes: int = field(init=False)
    _last: tuple[str | None, int] | None = None

    def __post_init__(self) -> None:
        if self.most < 0:
            raise InputError(f"--max-restarts {self.most}", rule="0 or more", do="--max-restarts 3")
        if not 1 <= self.minimum <= self.maximum:
            raise InputError(f"--processes {self.minimum}:{self.maximum}", rule="1 <= MIN <= MAX", do="--processes 1:4")
        self.processes = self.maximum

    @property
    def is_short(self) -> bool:
        """Fewer ranks than the run began with: others may join it at its next checkpoint."""
        return self.processes < self.maximum

    def again(self, error: RankError, step: int) -> str | None:
        """What to tell before the run is started again; None if it is not to be.

        A rank that was lost is done without where the bounds allow it. What a rank itself raised comes again, most
        likely, if it comes at the same step twice; what was computed from the same state does in any case.

        Args:
            step: optimizer steps that the run had done when it failed.
        """
        failure = error.failure
        what = (failure.kind, step)
        is_lost = failure.by_signal is not None or failure.kind == "hang"
        if failure.exit_code != EXIT_FAILED or failure.kind in _FOREVER or self.done >= self.most:
            return None
        if not is_lost and what == self._last:
            return None
        self._last = what
        self.done += 1
        self.processes = max(self.minimum, self.processes - is_lost)
        title = failure.text.splitlines()[0].removeprefix("error: ")
        return f"restart {self.done} of {self.most}, on {ranks(self.processes)}: {title}"

    def grow(self) -> str:
        """Take back all ranks; what to tell."""
        self.processes = self.maximum
        return f"a checkpoint is there: going on with {ranks(self.processes)}"


def ranks(count: int) -> str:
    """`1 process`, `2 processes`."""
    return f"{count} process{'es' if count > 1 else ''}"
