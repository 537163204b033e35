"""Tests of the plan of a profile, of the number of messages of DDP, and of the merged trace of ranks."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from helpers.profile_steps import all_reduce, make_step
from samestep.config import RunOptions
from samestep.errors import InputError
from samestep.tools.profile.measurements import Step
from samestep.tools.profile.profile import CLOCK_MARK, Plan, parse_ranks, write_merged
from samestep.tools.profile.trial import bucket_count

MEGABYTE = 2**20


def test_ranks_are_all_or_a_sorted_list() -> None:
    assert parse_ranks("all", 4) is None
    assert parse_ranks("2,0,2", 4) == (0, 2)


@pytest.mark.parametrize("text", ["", "0,", "-1", "first", "4", "0-2", "٣"])
def test_invalid_ranks_are_rejected(text: str) -> None:
    with pytest.raises(InputError) as error:
        parse_ranks(text, 4)
    assert error.value.code == "E_RANKS"


def test_steps_include_the_second_warmup() -> None:
    plan = Plan(wait=1, warmup=2, active=10, traced=3, ranks=(1,), folder=Path(), options=RunOptions())
    assert plan.steps == 1 + 2 + 10 + 2 + 3
    assert [plan.traces(rank) for rank in range(3)] == [False, True, False]


@pytest.mark.parametrize(
    ("size", "buckets"), [(0, 1), (MEGABYTE, 1), (MEGABYTE + 4, 2), (26 * MEGABYTE, 2), (100 * MEGABYTE, 5)]
)
def test_first_bucket_is_small(size: int, buckets: int) -> None:
    assert bucket_count(size) == buckets


def trace(process: int, mark: float) -> list[dict[str, Any]]:
    """Return a mark, an operator 10 µs later, a kernel on the first GPU, and a flow between them."""
    return [
        {"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": {"name": "python"}},
        {"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "args": {"name": "GPU 0"}},
        {"ph": "X", "name": CLOCK_MARK, "pid": process, "tid": process, "ts": mark, "dur": 1},
        {"ph": "X", "name": "aten::mm", "pid": process, "tid": process, "ts": mark + 10, "dur": 5},
        {"ph": "X", "name": "gemm", "pid": 0, "tid": 7, "ts": mark + 12, "dur": 5},
        {"ph": "s", "id": 1, "name": "ac2g", "pid": process, "tid": process, "ts": mark + 10},
        {"ph": "X", "name": "PyTorch Profiler (0)", "pid": "Spans", "tid": "PyTorch Profiler", "ts": 0, "dur": 1},
    ]


def merged_events(
    folder: Path, traces: dict[int, list[dict[str, Any]]], marks: dict[int, float], steps: list[list[Step]]
) -> list[dict[str, Any]]:
    """Write traces of ranks and return the events of the merged trace."""
    files = {rank: folder / f"rank-{rank}.7.pt.trace.json.gz" for rank in traces}
    for rank, path in files.items():
        path.write_bytes(gzip.compress(json.dumps({"traceEvents": traces[rank]}).encode()))
    write_merged(folder / "trace.json.gz", files, marks, steps)
    return json.loads(gzip.decompress((folder / "trace.json.gz").read_bytes()))["traceEvents"]


def test_all_ranks_share_one_clock(tmp_path: Path) -> None:
    steps = [[make_step(("forward", 0.001), begin=50.0, collectives=(all_reduce(50.0, 50.0005),))] for _ in range(2)]
    events = merged_events(tmp_path, {0: trace(41, 1e9), 1: trace(42, 7e3)}, {0: 50.0, 1: 50.0002}, steps)
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert sorted(names.values()) == ["rank 0", "rank 0: GPU 0", "rank 1", "rank 1: GPU 0"]
    assert (names[0], names[1]) == ("rank 0", "rank 1")
    times = {(event["pid"], event["name"]): event["ts"] for event in events if event["ph"] == "X"}
    assert times[0, "forward"] == times[1, "forward"] == 0
    assert (times[0, "aten::mm"], times[1, "aten::mm"]) == (10, 210)
    flows = {event["id"] for event in events if event["ph"] == "s"}
    assert len(flows) == 2
    assert all(isinstance(event["pid"], int) for event in events)


def test_rank_without_a_trace_has_its_phases(tmp_path: Path) -> None:
    steps = [[make_step(("data", 0.5), ("forward", 1), begin=5.0)] for _ in range(2)]
    events = merged_events(tmp_path, {1: trace(42, 0.0)}, {1: 5.5}, steps)
    assert {event["name"] for event in events if event["pid"] == 0 and event["ph"] == "X"} == {"data", "forward"}
