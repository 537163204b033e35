"""Machine and versions of a result, and files of results."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_PACKAGES = ("samestep", "torch", "accelerate", "lightning")


@dataclass(frozen=True)
class Spread:
    """A median with its first and third quartile and its extremes."""

    median: float
    q1: float
    q3: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        several = [*values, *values] if len(values) == 1 else values
        q1, median, q3 = statistics.quantiles(several, n=4, method="inclusive")
        return cls(median, q1, q3, min(values), max(values))

    def rounded(self, digits: int) -> dict[str, float]:
        return {name: round(value, digits) for name, value in asdict(self).items()}


def describe_machine() -> dict[str, Any]:
    """Processor, cores, versions, date, and how busy the machine was when the benchmark began."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": {name: found for name in _PACKAGES if (found := _version(name))},
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "load_average": round(os.getloadavg()[0], 2),
    }


def machine_line(machine: dict[str, Any]) -> str:
    """The same in one line of Markdown."""
    versions = ", ".join(f"{name} {number}" for name, number in machine["versions"].items())
    return (
        f"{machine['cpu']}, {machine['cores']} cores; Python {machine['python']}, {versions}; {machine['date']}; "
        f"load average at the start {machine['load_average']}."
    )


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table that also reads well as plain text."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    ruled = [list(header), ["-" * width for width in widths], *rows]
    return "\n".join(_line(row, widths) for row in ruled)


def save(output: Path, result: dict[str, Any], page: str) -> None:
    """Write `result` as JSON to `output`, and `page` as Markdown next to it."""
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(result, indent=2) + "\n")
    output.with_suffix(".md").write_text(page)


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    return "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.exists() else []:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
