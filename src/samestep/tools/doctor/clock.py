"""The clock: it runs, evenly, and shows a date that can be."""

from __future__ import annotations

import time
from dataclasses import dataclass

from samestep.tools.doctor.finding import Finding, fails, passes, warns

_NAP_SECONDS = 0.02
_APART_SECONDS = 0.5
# No release of Samestep is older.
_FIRST = 1735689600.0  # 2025-01-01


@dataclass(frozen=True)
class Clock:
    """What both clocks did during a short nap.

    Attributes:
        now: seconds since 1970.
        elapsed: by the clock that shows the date.
        monotonic: by the one that only goes forward.
    """

    now: float
    elapsed: float
    monotonic: float


def read_clock() -> Clock:
    """Look at both, nap, and look again."""
    date, forward = time.time(), time.monotonic()
    time.sleep(_NAP_SECONDS)
    return Clock(date, time.time() - date, time.monotonic() - forward)


def check_clock(clock: Clock) -> Finding:
    """Whether times that a run measures and writes mean something."""
    name = "clock"
    if clock.monotonic <= 0:
        return fails(
            name,
            f"the monotonic clock moved by {clock.monotonic:g} s in {_NAP_SECONDS:g} s",
            rule="it goes forward, for all time limits are measured by it",
            do="look at the machine's clock source, or its virtual machine's",
        )
    if abs(clock.elapsed - clock.monotonic) > _APART_SECONDS:
        return warns(
            name,
            f"the date moved by {clock.elapsed:.1f} s while {clock.monotonic:.1f} s went by",
            rule="the date is not set while a run writes events",
            do="wait until the time server has set it (timedatectl), then start",
        )
    if clock.now < _FIRST:
        return warns(
            name,
            f"it shows {time.strftime('%Y-%m-%d', time.gmtime(clock.now))}",
            rule="a date of today: names of runs, events and certificates bear it",
            do="set the clock, or have it follow a time server (timedatectl set-ntp true)",
        )
    return passes(name, "goes forward, and agrees with the date")
