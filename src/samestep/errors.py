"""The errors of Samestep.

    SamestepError
      InputError              what was asked for cannot be done; exit code 2
        RecipeError           a recipe, or an override of it, is wrong
        DataError             a dataset, or one sample of it, cannot be used
        CheckpointError       a checkpoint is damaged, incomplete or of another recipe
        UnusedParameterError  a parameter that is trained took no part in a loss
      RunError                the run failed; exit code 1
        NonFiniteError        a loss or a gradient is not finite
        DriftError            ranks no longer hold the same weights, buffers or optimizer state
        CheckpointWriteError  a checkpoint cannot be written; those before it are as they were
        RollCallError         ranks do not do the same things in the same order
        PeerLostError         another rank went away: a consequence, never the first cause

An error gives the value, the rule and the way out, on one screen, once, from the rank that caused it.
"""

from __future__ import annotations

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_INPUT = 2
EXIT_DIFFERS = 3  # a check did not hold
EXIT_STOPPED = 130  # ended on request, at a step boundary or before; 128 + SIGINT, as shells have it


class SamestepError(Exception):
    """Base of all errors; `str()` of it is what the user reads.

    Args:
        value: what was found, in one sentence.
        rule: the rule that it breaks.
        do: the way out.

    What else went wrong because of it can be added with `add_note`.
    """

    exit_code = EXIT_FAILED

    def __init__(self, value: str, rule: str | None = None, do: str | None = None) -> None:
        super().__init__(value, rule, do)
        self.value, self.rule, self.do = value, rule, do

    def __str__(self) -> str:
        lines = [self.value]
        if self.rule:
            lines.append(f"  rule: {self.rule}")
        if self.do:
            lines.append(f"  do:   {self.do}")
        lines += [f"  also: {note}" for note in getattr(self, "__notes__", ())]
        return "\n".join(lines)


class InputError(SamestepError):
    """What was asked for cannot be done; nothing was written over."""

    exit_code = EXIT_INPUT


class RecipeError(InputError):
    """A recipe, or an override of it, is wrong."""


class DataError(InputError):
    """A dataset, or one sample of it, cannot be used."""


class CheckpointError(InputError):
    """A checkpoint is damaged, incomplete, or belongs to another recipe."""


class UnusedParameterError(InputError):
    """A parameter that requires a gradient got none from a shard."""


class RunError(SamestepError):
    """The run failed."""


class NonFiniteError(RunError):
    """A loss or a gradient is not finite and the recipe says `non_finite: stop`."""


class DriftError(RunError):
    """Ranks no longer hold the same weights, buffers or optimizer state."""


class CheckpointWriteError(RunError):
    """A checkpoint cannot be written; those before it are as they were."""


class RollCallError(RunError):
    """Ranks are about to do different things together, or one of them does not come."""


class PeerLostError(RunError):
    """A collective failed because another rank went away."""
