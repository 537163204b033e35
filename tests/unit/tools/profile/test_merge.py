"""Traces of ranks whose profilers count time from other moments, as one."""

import gzip
import json
from pathlib import Path
from typing import Any

from profile_steps import step, summed
from samestep.tools.profile.merge import CLOCK_MARK, merged, write_merged


def trace(process: int, mark: float) -> dict[str, Any]:
    """A mark, an operator 10 µs after it, a kernel on the first GPU, and a flow between them."""
    return {
        "traceEvents": [
            {"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": {"name": "python"}},
            {"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "args": {"name": "GPU 0"}},
            {"ph": "X", "name": CLOCK_MARK, "pid": process, "tid": process, "ts": mark, "dur": 1},
            {"ph": "X", "name": "aten::mm", "pid": process, "tid": process, "ts": mark + 10, "dur": 5},
            {"ph": "X", "name": "gemm", "pid": 0, "tid": 7, "ts": mark + 12, "dur": 5},
            {"ph": "s", "id": 1, "name": "ac2g", "pid": process, "tid": process, "ts": mark + 10},
            {"ph": "X", "name": "PyTorch Profiler (0)", "pid": "Spans", "tid": "PyTorch Profiler", "ts": 0, "dur": 1},
        ]
    }


def test_every_rank_has_its_place_by_one_clock() -> None:
    steps = [[step(("forward", 0.001), begin=50.0, meetings=(summed(50.0, 50.0005),))] for _ in range(2)]
    whole = merged({0: trace(41, 1e9), 1: trace(42, 7e3)}, {0: 50.0, 1: 50.0002}, steps)["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in whole if event["name"] == "process_name"}
    assert sorted(names.values()) == ["rank 0", "rank 0: GPU 0", "rank 1", "rank 1: GPU 0"]
    assert (names[0], names[1]) == ("rank 0", "rank 1")
    times = {(event["pid"], event["name"]): event["ts"] for event in whole if event["ph"] == "X"}
    assert times[0, "forward"] == times[1, "forward"] == 0
    assert (times[0, "aten::mm"], times[1, "aten::mm"]) == (10, 210)
    flows = {event["id"] for event in whole if event["ph"] == "s"}
    assert len(flows) == 2
    assert all(isinstance(event["pid"], int) for event in whole)


def test_a_rank_without_a_trace_still_shows_its_phases(tmp_path: Path) -> None:
    path = tmp_path / "rank-1.7.pt.trace.json.gz"
    path.write_bytes(gzip.compress(json.dumps(trace(42, 0.0)).encode()))
    steps = [[step(("data", 0.5), ("forward", 1), begin=5.0)] for _ in range(2)]
    write_merged(tmp_path / "trace.json.gz", {1: path}, {1: 5.5}, steps)
    whole = json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes()))["traceEvents"]
    assert {event["name"] for event in whole if event["pid"] == 0 and event["ph"] == "X"} == {"data", "forward"}
