"""Options for the batch size by process, which become overrides of a recipe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from samestep.cli.options import option, parse_process_count
from samestep.errors import InputError


@dataclass(frozen=True, kw_only=True)
class BatchOptions:
    """Batch size by process."""

    per_device_batch_size: int | None = option(
        "samples of each process and part: sets batch_size of the run", "N"
    )
    accumulate: int | None = option("parts of each batch, computed one after another", "K")

    def batch_overrides(self, overrides: Sequence[str], processes: str) -> list[str]:
        """Return overrides of a recipe with those of these options.

        A batch has `per_device_batch_size` samples for each process and each of `accumulate` parts.
        """
        options = {"batch_size": self.per_device_batch_size, "accumulate": self.accumulate}
        keys = [key for key, value in options.items() if value is not None]
        others = [one for one in overrides if one.partition("=")[0] in keys]
        # The batch size must not depend on the machine, as `auto` does.
        if self.per_device_batch_size is not None and not processes.isdigit():
            others.insert(0, f"--processes {processes}")
        if others:
            value = f"--per-device-batch-size or --accumulate with {others[0]}"
            expected = "a number of processes, and one option for a key"
            fix = "--processes 2, and the option or the setting"
            raise InputError(value, expected, fix, code="E_BATCH_SIZE")
        own = list(overrides)
        if self.accumulate is not None:
            own.append(f"accumulate={self.accumulate}")
        if self.per_device_batch_size is not None:
            ranks = parse_process_count(processes)
            own.append(f"batch_size={self.per_device_batch_size * ranks * (self.accumulate or 1)}")
        return own
