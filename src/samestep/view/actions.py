"""What a rank is about to do when it sends a word."""

from __future__ import annotations

from enum import IntEnum, auto


class Action(IntEnum):
    """First number of a word."""

    ENTER_CALL = auto()
    SUM_IN_CALL = auto()
    END_CALL = auto()
    WHOLE_CALL = auto()
    WATCH = auto()
    WATCH_RAISED = auto()
    TRIAL = auto()
    BACKWARD = auto()
    STEP = auto()
    PARALLEL = auto()
    BATCH = auto()
    AGREE = auto()
    ROWS = auto()
    ROWS_RAISED = auto()
    END = auto()

    @property
    def place(self) -> str:
        """Where in the script a rank sends the word, for errors."""
        return _PLACES[self]


_PLACES = {
    Action.ENTER_CALL: "a divided call",
    Action.SUM_IN_CALL: "a sum inside of a divided call",
    Action.END_CALL: "the end of a divided call",
    Action.WHOLE_CALL: "a call that is computed whole",
    Action.WATCH: "the first call of a kind",
    Action.WATCH_RAISED: "an exception in the first call of a kind",
    Action.TRIAL: "the second call of a kind",
    Action.BACKWARD: "a backward",
    Action.STEP: "a step of an optimizer",
    Action.PARALLEL: "samestep.parallel",
    Action.BATCH: "a batch of a loader",
    Action.AGREE: "a decision of all ranks",
    Action.ROWS: "an operation that needs all rows of a batch or an output",
    Action.ROWS_RAISED: "an exception of an operation on its rows of a batch or an output",
    Action.END: "the end of the script",
}
