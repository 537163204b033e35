"""Content of a run's directory, and activity of ranks from their files."""

from pathlib import Path
from typing import Any

import pytest

from helpers.rank_files import line, write_ranks
from helpers.run_folders import START, events_of, make_run, step_event
from samestep.errors import InputError
from samestep.tools.report.run import Run, read_ranks, read_run, read_runs


def evaluation(step: int, **values: Any) -> dict[str, Any]:
    return {"time": START + step, "event": "evaluation", "step": step, "samples": 10, "is_best": False, **values}


def run_of(folder: Path, events: list[dict[str, Any]]) -> Run:
    return read_run(make_run(folder, events), "a")


def test_best_evaluation_is_the_last_one_marked_as_best(tmp_path: Path) -> None:
    events = [evaluation(5, is_best=True), evaluation(10, is_best=True), evaluation(15)]
    run = run_of(tmp_path / "a", events)
    assert run.best is not None
    assert run.last is not None
    assert (run.best["step"], run.last["step"]) == (10, 15)
    assert run_of(tmp_path / "b", events[2:]).best is None
    assert run_of(tmp_path / "c", []).best is None


def test_best_evaluation_of_a_custom_loop_has_the_best_value(tmp_path: Path) -> None:
    values = ({"loss": 1.0, "accuracy": 0.9}, {"loss": 0.5, "accuracy": 0.4})
    events = [evaluation(10 * number, **value) for number, value in enumerate(values, 1)]
    for event in events:
        del event["is_best"]
    best = run_of(tmp_path / "a", events).best
    assert best is not None
    assert best["step"] == 10


@pytest.mark.parametrize(
    ("values", "deciding"),
    [
        ({"train_loss": 1.0, "loss": 1.0, "accuracy": 0.5, "dice": 0.5}, "accuracy"),
        ({"loss": 1.0, "loss_dice": 1.0, "iou": "nan"}, "iou"),
        ({"loss": 1.0, "loss_dice": 1.0}, "loss"),
        ({}, None),
    ],
)
def test_first_metric_is_deciding(values: dict[str, Any], deciding: str | None, tmp_path: Path) -> None:
    assert run_of(tmp_path / "a", [evaluation(5, **values)]).deciding == deciding


def test_states(tmp_path: Path) -> None:
    step, end = step_event(1, START), {"time": START + 1, "event": "end", "stopped": False, "step": 1}
    states = [
        run_of(tmp_path / str(n), e).state for n, e in enumerate(([step], [step, end], [{**end, "stopped": True}]))
    ]
    assert states == ["not ended", "finished", "stopped"]


def test_checkpoints_have_sizes_and_names(tmp_path: Path) -> None:
    (saved,) = run_of(tmp_path / "a", events_of(10)).checkpoints
    assert (saved.step, saved.size, saved.names) == (12, 4000, ("best", "last"))
    assert saved.sizes == {"model.safetensors": 3000, "optimizer.safetensors": 1000}


def test_runs_of_the_same_name_are_named_by_their_paths(tmp_path: Path) -> None:
    folders = [make_run(tmp_path / parent / "first", []) for parent in ("a", "b")]
    assert [run.name for run in read_runs(folders)] == [str(folder) for folder in folders]
    assert [run.name for run in read_runs(folders[:1])] == ["first"]
    with pytest.raises(InputError, match="listed twice"):
        read_runs([folders[0], folders[1], folders[0]])


# --- ranks ------------------------------------------------------------


def test_line_covers_the_time_since_the_last_line(tmp_path: Path) -> None:
    write_ranks(tmp_path, [line(0, 100.0, 3), line(0, 102.0, 9, data_share=0.5, wait_share=0.25), line(0, 107.0, 20)])
    (log,) = read_ranks(tmp_path / "ranks")
    assert [(span.begin, span.end, span.step) for span in log.spans] == [(100, 100, 3), (100, 102, 9), (102, 107, 20)]
    assert (log.spans[1].data, log.spans[1].wait, log.spans[1].doing) == (0.5, 0.25, "in engine.step 9")
    assert sum(span.seconds for span in log.spans) == 7.0
    assert log.mean("data") == pytest.approx((0.5 * 2 + 0.1 * 5) / 7)
    assert log.hosts == ["node-a"]


def test_new_process_starts_with_an_empty_span(tmp_path: Path) -> None:
    process = {"pid": 77, "host": "node-b"}
    write_ranks(tmp_path, [line(0, 100.0, 3), line(0, 900.0, 3, **process), line(0, 902.0, 8, **process)])
    (log,) = read_ranks(tmp_path / "ranks")
    assert [(span.begin, span.end) for span in log.spans] == [(100, 100), (900, 900), (900, 902)]
    assert log.hosts == ["node-a", "node-b"]


def test_unknown_wait(tmp_path: Path) -> None:
    write_ranks(tmp_path, [line(0, 100.0, 3, wait_share=None), line(0, 102.0, 3, wait_share=None)])
    (log,) = read_ranks(tmp_path / "ranks")
    assert log.spans[0].wait is None
    assert log.has_unknown_wait
    assert log.mean("wait") is None


def test_sum_of_shares_is_at_most_one(tmp_path: Path) -> None:
    write_ranks(tmp_path, [line(0, 100.0, 3, data_share=0.7, wait_share=0.9), line(0, 102.0, 3, data_share="nan")])
    spans = read_ranks(tmp_path / "ranks")[0].spans
    assert spans[0].data + (spans[0].wait or 0.0) == pytest.approx(1.0)
    assert spans[1].data == 0.0


def test_merging_preserves_means_and_peaks(tmp_path: Path) -> None:
    lines = [
        line(0, 100.0 + 2 * number, number, data_share=0.2 * (number % 2), memory_bytes=1000 + (number == 333) * 5000)
        for number in range(1000)
    ]
    write_ranks(tmp_path, lines)
    (log,) = read_ranks(tmp_path / "ranks", spans=40)
    assert 40 <= len(log.spans) <= 80
    assert log.spans[0].begin == 100.0
    assert log.spans[-1].end == 100.0 + 2 * 999
    assert all(one.end == two.begin for one, two in zip(log.spans, log.spans[1:], strict=False))
    assert log.mean("data") == pytest.approx(0.2 * 500 / 999)
    assert log.largest("memory") == 6000


def test_spans_are_not_merged_over_a_pause(tmp_path: Path) -> None:
    lines = [line(0, begin + 2 * number, number, pid=begin) for begin in (100, 90_000) for number in range(300)]
    write_ranks(tmp_path, lines)
    (log,) = read_ranks(tmp_path / "ranks", spans=40)
    assert sum(span.seconds for span in log.spans) == 2 * 598
    assert not [span for span in log.spans if span.begin < 10_000 < span.end]


def test_gpu_memory_prefers_the_peak_of_the_process(tmp_path: Path) -> None:
    gpu = {"name": "A GPU", "memory_bytes": 9, "memory_total_bytes": 20, "peak_allocated_bytes": 7}
    write_ranks(tmp_path, [line(0, 100.0, 1, gpu=gpu), line(1, 100.0, 1, gpu={"name": "A GPU", "memory_bytes": 9})])
    first, second = read_ranks(tmp_path / "ranks")
    assert (first.gpu, first.largest("gpu_memory"), second.largest("gpu_memory")) == ("A GPU", 7, 9)


def test_ranks_are_ordered_and_other_files_ignored(tmp_path: Path) -> None:
    write_ranks(tmp_path, [line(rank, 100.0, 1) for rank in (10, 2, 0)])
    (tmp_path / "ranks" / "rank-x.jsonl").write_text("{}\n")
    with (tmp_path / "ranks" / "rank-2.jsonl").open("a") as file:
        file.write('{"time": 102.0, "ra')
    logs = read_ranks(tmp_path / "ranks")
    assert [log.rank for log in logs] == [0, 2, 10]
    assert [log.unreadable for log in logs] == [0, 1, 0]
    assert read_ranks(tmp_path / "none") == []
