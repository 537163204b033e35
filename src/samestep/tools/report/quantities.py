"""Numbers as a person reads them."""

from __future__ import annotations

import time


def in_bytes(value: float | None) -> str:
    """Bytes with a unit of the power of two."""
    if value is None:
        return "–"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.3g} {unit}"
        value /= 1024
    return f"{value:,.3g} TiB"


def in_time(seconds: float) -> str:
    """Seconds with the two largest units that they fill."""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, left = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    parts = ((hours, "h"), (minutes, "min")) if hours else ((minutes, "min"), (left, "s"))
    return " ".join(f"{number} {unit}" for number, unit in parts if number)


def in_percent(share: float | None) -> str:
    """A share of 0 to 1."""
    return "–" if share is None else f"{share:.1%}"


def count(value: float | None) -> str:
    """A number of samples, steps or the like."""
    return "–" if value is None else f"{value:,.0f}"


def moment(seconds: float) -> str:
    """A time of day, in that of this machine."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def of_kind(value: float | None, kind: str) -> str:
    """A value of a chart's kind: `percent`, `bytes`, `count` or `number`."""
    if kind == "bytes" or value is None:
        return in_bytes(value)
    return {"percent": f"{value:.2%}", "count": f"{value:,.1f}"}.get(kind, f"{value:.5g}")
