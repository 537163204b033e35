"""What a comparison was made on; a figure without it says nothing."""

from __future__ import annotations

import os
import platform
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from samestep.runtime.processors import read_processors


def describe(gpus: list[str]) -> dict[str, Any]:
    """Device, cores, versions, date, and how busy the machine is.

    Args:
        gpus: the names of its GPUs.
    """
    return {
        "device": gpus[0] if gpus else processor(),
        "gpus": gpus,
        "cores": read_processors().usable,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": version("torch"),
        "samestep": version("samestep"),
        "date": time.strftime("%Y-%m-%d"),
        "load_average": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
    }


def processor() -> str:
    """What the machine's processor is called."""
    facts = Path("/proc/cpuinfo")
    lines = facts.read_text(encoding="utf-8").splitlines() if facts.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())
