"""What ranks did, from their files."""

from pathlib import Path

import pytest

from rank_files import line, write_ranks
from samestep.tools.report.ranks import read_ranks


def test_line_tells_of_the_time_since_the_last_one(tmp_path: Path) -> None:
    write_ranks(tmp_path, [line(0, 100.0, 3), line(0, 102.0, 9, data_share=0.5, wait_share=0.25), line(0, 107.0, 20)])
    (log,) = read_ranks(tmp_path / "ranks")
    assert [(span.begin, span.end, span.step) for span in log.spans] == [(100, 100, 3), (100, 102, 9), (102, 107, 20)]
    assert (log.spans[1].data, log.spans[1].others, log.spans[1].doing) == (0.5, 0.25, "in engine.step 9")
    assert log.seconds == 7.0
    assert log.mean("data") == pytest.approx((0.5 * 2 + 0.1 * 5) / 7)
    assert log.hosts == ["node-a"]


def test_new_process_begins_anew(tmp_path: Path) -> None:
    other = {"pid": 77, "host": "node-b"}
    write_ranks(tmp_path, [line(0, 100.0, 3), line(0, 900.0, 3, **other), line(0, 902.0, 8, **other)])
    (log,) = read_ranks(tmp_path / "ranks")
    assert [(span.begin, span.end) for span in log.spans] == [(100, 100), (900, 900), (900, 902)]
    assert log.hosts == ["node-a", "node-b"]


def test_waiting_that_is_not_known_stays_unknown(tmp_path: Path) -> None:
    write_ranks(tmp_path, [line(0, 100.0, 3, wait_share=None), line(0, 102.0, 3, wait_share=None)])
    (log,) = read_ranks(tmp_path / "ranks")
    assert log.spans[0].others is None
    assert log.is_untold
    assert log.mean("others") is None


def test_shares_together_are_no_more_than_all(tmp_path: Path) -> None:
    write_ranks(tmp_path, [line(0, 100.0, 3, data_share=0.7, wait_share=0.9), line(0, 102.0, 3, data_share="nan")])
    spans = read_ranks(tmp_path / "ranks")[0].spans
    assert spans[0].data + (spans[0].others or 0.0) == pytest.approx(1.0)
    assert spans[1].data == 0.0


def test_long_run_is_merged_and_keeps_means_and_peaks(tmp_path: Path) -> None:
    lines = [
        line(0, 100.0 + 2 * place, place, data_share=0.2 * (place % 2), memory_bytes=1000 + (place == 333) * 5000)
        for place in range(1000)
    ]
    write_ranks(tmp_path, lines)
    (log,) = read_ranks(tmp_path / "ranks", spans=40)
    assert 40 <= len(log.spans) <= 80
    assert log.spans[0].begin == 100.0
    assert log.spans[-1].end == 100.0 + 2 * 999
    assert all(one.end == two.begin for one, two in zip(log.spans, log.spans[1:], strict=False))
    assert log.mean("data") == pytest.approx(0.2 * 500 / 999)
    assert log.most("memory") == 6000


def test_parts_of_a_run_are_not_merged_over_the_pause(tmp_path: Path) -> None:
    lines = [line(0, begin + 2 * place, place, pid=begin) for begin in (100, 90_000) for place in range(300)]
    write_ranks(tmp_path, lines)
    (log,) = read_ranks(tmp_path / "ranks", spans=40)
    assert log.seconds == 2 * 598
    assert not [span for span in log.spans if span.begin < 10_000 < span.end]


def test_gpu_is_read_where_there_is_one(tmp_path: Path) -> None:
    gpu = {"name": "A GPU", "memory_bytes": 9, "memory_total_bytes": 20, "peak_allocated_bytes": 7}
    write_ranks(tmp_path, [line(0, 100.0, 1, gpu=gpu), line(1, 100.0, 1, gpu={"name": "A GPU", "memory_bytes": 9})])
    first, second = read_ranks(tmp_path / "ranks")
    assert (first.gpu, first.most("gpu_memory"), second.most("gpu_memory")) == ("A GPU", 7, 9)


def test_ranks_are_in_order_and_what_is_no_rank_is_left_out(tmp_path: Path) -> None:
    write_ranks(tmp_path, [line(rank, 100.0, 1) for rank in (10, 2, 0)])
    (tmp_path / "ranks" / "rank-x.jsonl").write_text("{}\n")
    with (tmp_path / "ranks" / "rank-2.jsonl").open("a") as file:
        file.write('{"time": 102.0, "ra')
    found = read_ranks(tmp_path / "ranks")
    assert [log.rank for log in found] == [0, 2, 10]
    assert [log.unreadable for log in found] == [0, 1, 0]
    assert read_ranks(tmp_path / "none") == []
