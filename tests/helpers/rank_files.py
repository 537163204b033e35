"""Synthetic rank files: `ranks/rank-N.jsonl`."""

import json
import math
from pathlib import Path
from typing import Any


def line(rank: int, time: float, step: int, **changes: Any) -> dict[str, Any]:
    """Return one line of a rank."""
    return {
        "time": time,
        "rank": rank,
        "host": "node-a",
        "pid": 4000 + rank,
        "step": step,
        "doing": f"in step {step}",
        "waits": False,
        "steps_per_second": 3.2,
        "samples_per_second": 120.5,
        "data_share": 0.1,
        "wait_share": 0.2,
        "cpu_percent": 97.0,
        "memory_bytes": 500_000_000 + 1_000_000 * step,
        "gpu": None,
        **changes,
    }


def write_ranks(run: Path, lines: list[dict[str, Any]]) -> None:
    """Append lines to the files of their ranks."""
    (run / "ranks").mkdir(exist_ok=True)
    for entry in lines:
        with (run / "ranks" / f"rank-{entry['rank']}.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")


def ranks_of(begin: float, count: int, number: int, every: float = 2.0, slow: int = 1) -> list[dict[str, Any]]:
    """Return `number + 1` lines per rank. One rank is slow, and data is sometimes late."""
    lines = [
        line(rank, begin, 0, data_share=0.0, wait_share=0.0, doing="after samestep.init()") for rank in range(count)
    ]
    for index in range(number):
        late = 0.05 + 0.3 * (index % 11 == 3) + 0.05 * math.sin(index / 3) ** 2
        for rank in range(count):
            waits = 0.03 if rank == slow else 0.35 + 0.1 * math.sin(index + rank)
            lines.append(
                line(
                    rank,
                    begin + every * (index + 1),
                    4 * index,
                    data_share=late,
                    wait_share=min(waits, 1 - late),
                    waits=rank != slow,
                    memory_bytes=400_000_000 + 30_000_000 * rank + 40_000_000 * (1 - math.exp(-index / 8)),
                )
            )
    return lines
