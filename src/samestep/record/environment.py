"""What a run ran on, one entry for each time it was started or resumed."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any


def append_environment(path: Path, facts: Mapping[str, Any]) -> None:
    """Add one entry to the list in `environment.json`."""
    entries = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    started = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    entries.append({"started": started, "samestep": version("samestep"), **facts})
    path.write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")
