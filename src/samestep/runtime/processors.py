"""The processors that this process may use."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

from samestep.runtime.cgroups import read_control_groups


@dataclass(frozen=True)
class Processors:
    """How many there are.

    Attributes:
        online: of the machine.
        allowed: on which this process may run, by its affinity.
        quota: processors' worth of time that its control group gives it, if that has a limit.
    """

    online: int
    allowed: int
    quota: float | None = None

    @property
    def usable(self) -> int:
        """How many compute at the same time; 1 at least."""
        return max(1, min(self.allowed, math.floor(self.quota) if self.quota is not None else self.allowed))


def read_processors() -> Processors:
    """Those of this process."""
    online = os.cpu_count() or 1
    # macOS has no affinity.
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else online
    return Processors(online, allowed, read_control_groups().cpus)
