"""Files as ranks write them while they run: `ranks/rank-N.jsonl`."""

import json
import math
from pathlib import Path
from typing import Any


def line(rank: int, time: float, step: int, **others: Any) -> dict[str, Any]:
    """One line of a rank, with what differs from the usual."""
    return {
        "time": time,
        "rank": rank,
        "host": "node-a",
        "pid": 4000 + rank,
        "step": step,
        "doing": f"in engine.step {step}",
        "waits": False,
        "steps_per_second": 3.2,
        "samples_per_second": 120.5,
        "data_share": 0.1,
        "wait_share": 0.2,
        "cpu_percent": 97.0,
        "memory_bytes": 500_000_000 + 1_000_000 * step,
        "gpu": None,
        **others,
    }


def write_ranks(run: Path, lines: list[dict[str, Any]]) -> None:
    """Append lines to their ranks' files."""
    (run / "ranks").mkdir(exist_ok=True)
    for found in lines:
        with (run / "ranks" / f"rank-{found['rank']}.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(found) + "\n")


def ranks_of(begin: float, count: int, number: int, every: float = 2.0, slow: int = 1) -> list[dict[str, Any]]:
    """The first line of each rank, and `number` more: one is slow, others wait for it; data comes late now and then."""
    lines = [
        line(rank, begin, 0, data_share=0.0, wait_share=0.0, doing="after samestep.start()") for rank in range(count)
    ]
    for place in range(number):
        late = 0.05 + 0.3 * (place % 11 == 3) + 0.05 * math.sin(place / 3) ** 2
        for rank in range(count):
            waits = 0.03 if rank == slow else 0.35 + 0.1 * math.sin(place + rank)
            lines.append(
                line(
                    rank,
                    begin + every * (place + 1),
                    4 * place,
                    data_share=late,
                    wait_share=min(waits, 1 - late),
                    waits=rank != slow,
                    memory_bytes=400_000_000 + 30_000_000 * rank + 40_000_000 * (1 - math.exp(-place / 8)),
                )
            )
    return lines
