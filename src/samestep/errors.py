"""Errors of Samestep, their codes and the exit codes of the command.

An error gives the value, the expectation and the fix. It is reported once, by the rank that caused
it.
"""

from __future__ import annotations

from functools import partial

from samestep.report_text import bounded

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_INPUT = 2
EXIT_DIFFERS = 3  # a check did not hold
EXIT_STOPPED = 130  # stopped on request; 128 + SIGINT, the convention of shells

_NEWLINE = "\n"
_CONTINUED = _NEWLINE + 12 * " "  # below the text of a section

# Stable codes and their meanings; docs/reference/errors.md is generated from this table.
CODES = {
    "E_INPUT": "The input is invalid.",
    "E_RECIPE": "A recipe, or an override of a recipe, is invalid.",
    "E_DATA": "A dataset, a batch or a sample cannot be used, or a dataset has no samples.",
    "E_CHECKPOINT": "A checkpoint is missing, damaged or incomplete, or of an unknown format.",
    "E_RUN": "The run failed.",
    "E_NONFINITE": "A loss or a gradient is not finite; with `non_finite: skip`, in most steps.",
    "E_RANK_MISMATCH": "Ranks hold different models, weights, buffers or other saved state.",
    "E_RANK_SETTINGS": "Ranks have different optimizers, rates, losses or settings of a step.",
    "E_RANK_BATCH": "Ranks step or evaluate different global batches, or read different datasets.",
    "E_CHECKPOINT_WRITE": "A checkpoint cannot be written; earlier ones are unchanged.",
    "E_RANK_DESYNC": "Ranks issue different collectives, or one rank issues none.",
    "E_PEER_LOST": "A collective failed because another rank ended.",
    "E_RANK_FAILED": "The code of a rank raised an exception.",
    "E_NO_DETERMINISTIC_KERNEL": "An operator has no deterministic kernel, as `exact` needs.",
    "E_RANK_KILLED": "A signal ended a rank.",
    "E_RANK_EXITED": "A rank ended its process before the function returned or the script ended.",
    "E_HANG": "No rank made progress within `--hang-after`.",
    "E_DISK_HANG": "An operation of the disk does not return within `--hang-after`.",
    "E_STOPPED": "The run was stopped on request or by a preemption.",
    "E_RENDEZVOUS": "Ranks of a job cannot find each other: address, port, or time limit.",
    "E_DEVICES": "Devices are invalid, too few, or used by two ranks.",
    "E_LAUNCH": "A launch is invalid, nested in another, or does not fit its launcher.",
    "E_MACHINE": "A limit of the machine is too low, or its loopback does not work.",
    "E_NOT_PICKLABLE": "A function, an argument or a result cannot be sent between processes.",
    "E_SHAPE": "Outputs, targets, weights or a loss have shapes that do not fit.",
    "E_OPTIMIZER": "The optimizer does not hold the trained parameters, or does not fit.",
    "E_INCOMPATIBLE": "Two options of the recipe, or a strategy and the model, exclude each other.",
    "E_WRAPPED_MODEL": "The model is in DDP or DataParallel, or of TorchScript.",
    "E_VALUE": "A recipe value, an option, an argument or a setting is outside of its range.",
    "E_BATCH_SIZE": "`batch_size` is smaller than `microbatches`, or is set twice.",
    "E_PATTERN": "A shell pattern of the recipe matches no name.",
    "E_MESH": "The axes of a mesh do not fit the strategy or the number of processes.",
    "E_STRATEGY": "A strategy option does not fit the model, mesh or devices.",
    "E_JOB": "Slurm refused a job, or there is no job.",
    "E_PROCESSES": "`--processes` or `--devices` does not name a possible number of ranks.",
    "E_OWN_GROUP": "A script that distributes its work itself was started as one for one process.",
    "E_LAUNCHER_GONE": "The launcher, the process that forks ranks, or a store has ended.",
    "E_SCRIPT_FILES": "A script reads a file that only another process has, or that is gone.",
    "E_SCRIPT": "A command needs a recipe or a module, or a run of a script cannot start again.",
    "E_NOT_A_RUN": "A directory is not a run, or was replaced; or there is no run yet.",
    "E_NO_CHECKSUM": "A run has no checksum of a step, or two runs have none in common.",
    "E_RUN_NAME": "The name of a run is not that of a folder, or differs between ranks.",
    "E_UNTRUSTED": "The recipe of a run names code that is not known to be trusted.",
    "E_CODE_CHANGED": "A Python module of the user differs from the one with which the run began.",
    "E_OUTPUT": "An output exists, cannot be written, or would replace an input or another output.",
    "E_OPTION_CONFLICT": "Two command-line options exclude each other, or one is missing.",
    "E_FILE_MISSING": "An input file does not exist.",
    "E_LOADER": "A dataset, sampler or argument of a loader cannot be used, or no batch was.",
    "E_METRIC": "A metric is unknown, or does not support the outputs, targets or classes.",
    "E_LOCKED": "Another process writes to the directory, or its lock file cannot be used.",
    "E_RESUME_CHANGED": "A run resumes with other objects, data or options than it had.",
    "E_UNKNOWN_KEY": "A recipe or an override has a key that does not exist.",
    "E_MISSING_KEY": "A recipe key or an option without a default is missing.",
    "E_UNKNOWN_OPTION": "A dataset, model, loss, optimizer or command has no option of this name.",
    "E_UNKNOWN_NAME": "A command, recipe, component, logger or column of this name does not exist.",
    "E_NOT_INSTALLED": "An optional library that a recipe or a logger needs is missing.",
    "E_UNREADABLE": "A file is damaged, has another format, or has no equivalent here.",
    "E_CLASSES": "Classes or labels of a dataset are missing, repeated or unexpected.",
    "E_MASK": "A mask is missing, has an unknown value, or another size than its image.",
    "E_WEIGHTS": "A file of weights does not fit the model, or differs between ranks.",
    "E_IO": "The disk or the network failed or refused a file.",
    "E_EXPORT": "A model cannot be exported, or the exported one computes other outputs.",
    "E_TOO_MANY_RANKS": "More ranks share the data than the recipe or the loader has microbatches.",
    "E_LOG_WRITE": "A logger cannot write metrics or events.",
    "E_NOTHING_OBSERVED": "A command under `samestep audit` or `verify` made no step.",
    "E_PIPELINE": "The model, its inputs or `strategy.stages` do not fit a pipeline.",
}


class SamestepError(Exception):
    """Base class of all errors; `str()` returns the report for the user, which is bounded.

    Args:
        value: the problem with the offending value, one sentence.
        expected: the rule that the value violates.
        fix: an action that resolves the error.
        code: a key of `CODES`; the code of the class if omitted.

    Consequences can be added with `add_note`.
    """

    exit_code = EXIT_FAILED
    default_code = "E_RUN"

    def __init__(
        self,
        value: str,
        expected: str | None = None,
        fix: str | None = None,
        *,
        code: str | None = None,
    ) -> None:
        super().__init__(value, expected, fix)
        self.value = value
        self.expected = expected
        self.fix = fix
        self.code = code or self.default_code
        assert self.code in CODES, self.code

    def __reduce__(self) -> tuple[object, ...]:
        rebuilt = partial(type(self), self.value, self.expected, self.fix, code=self.code)
        return rebuilt, (), self.__dict__

    def __str__(self) -> str:
        return bounded(self.full_text)

    @property
    def full_text(self) -> str:
        """Report of any length."""
        title, *details = self.value.split("\n")
        # Text from a file or a library can have lines that look like another report.
        lines = [
            f"{title} [{self.code}]",
            *(line if line.startswith(" ") else f"    {line}" for line in details),
        ]
        sections = [("expected:", self.expected), ("fix:", self.fix)]
        sections += [("also:", str(note)) for note in getattr(self, "__notes__", ())]
        for name, text in sections:
            if text:
                lines.append(f"  {name:<9} {text.replace(_NEWLINE, _CONTINUED)}")
        return "\n".join(lines)


class InputError(SamestepError):
    """Invalid input; nothing was overwritten."""

    exit_code = EXIT_INPUT
    default_code = "E_INPUT"


class RecipeError(InputError):
    """Invalid recipe or override."""

    default_code = "E_RECIPE"


class DataError(InputError):
    """Unusable dataset or sample."""

    default_code = "E_DATA"


class CheckpointError(InputError):
    """Damaged or incomplete checkpoint, or one of another recipe."""

    default_code = "E_CHECKPOINT"


class RunError(SamestepError):
    """Failed run."""


class NonFiniteError(RunError):
    """Non-finite loss or gradient, with `non_finite: stop` in the recipe."""

    default_code = "E_NONFINITE"


class RankMismatchError(RunError):
    """Ranks hold different weights, buffers or optimizer state."""

    default_code = "E_RANK_MISMATCH"


class CheckpointWriteError(RunError):
    """Checkpoint cannot be written; earlier checkpoints are unchanged."""

    default_code = "E_CHECKPOINT_WRITE"


class RunMovedError(RunError):
    """The directory of a run was moved, removed or replaced while the run writes to it."""

    default_code = "E_NOT_A_RUN"


class RankDesyncError(RunError):
    """Ranks issue different collectives, or one rank issues none."""

    default_code = "E_RANK_DESYNC"


class PeerLostError(RunError):
    """Collective that failed because another rank ended: a consequence, never the first cause."""

    default_code = "E_PEER_LOST"
