"""`samestep report`: content of the page, and invalid input."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helpers.run_folders import START, draw_predictions, events_of, make_run, step_event
from helpers.system import answer, here
from samestep.tools.report import speeds
from samestep.tools.run_log import read_runs


def report(capsys: pytest.CaptureFixture[str], *arguments: object, cwd: Path) -> dict[str, Any]:
    """Return the output of `--json`."""
    capsys.readouterr()
    assert here("report", *arguments, "--json", cwd=cwd) == 0
    output: dict[str, Any] = answer(capsys)
    return output


def titles(page: Path) -> list[str]:
    """Return the titles of the charts."""
    return re.findall(r"<figure[^>]*><h3>(.*?)</h3>", page.read_text(encoding="utf-8"))


def test_page_of_one_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "first", events_of(30))
    output = report(capsys, "first", cwd=tmp_path)
    page = tmp_path / output["report"]
    assert page == run / "report.html"
    assert page.stat().st_size == output["bytes"]
    (summary,) = output["runs"]
    assert (summary["state"], summary["steps"], summary["best"]["step"]) == ("finished", 30, 30)
    assert "train_loss" not in summary["best"]
    assert summary["samples_per_second"] == 64.0
    assert titles(page) == [
        "Training loss",
        "Validation loss (dashed: training)",
        "Validation accuracy",
        "Samples per second",
        "Learning rate",
        "Gradient norm",
    ]
    text = page.read_text(encoding="utf-8")
    assert len(re.findall("<polyline", text)) == 7
    assert "end at step 30" in text


def test_page_of_several_runs(tmp_path: Path) -> None:
    make_run(tmp_path / "a", events_of(30))
    make_run(tmp_path / "b", events_of(20), optimizer={"name": "sgd", "options": {"lr": 0.2}})
    assert here("report", "a", "b", "--out", "both.html", cwd=tmp_path) == 0
    text = (tmp_path / "both.html").read_text(encoding="utf-8")
    assert "<title>a, b: training report</title>" in text
    assert len(re.findall("<polyline", text)) == 14
    assert "different from a: optimizer.options.lr: 0.1 -&gt; 0.2" in text


def test_speed_is_that_of_windows_without_the_last_batch_of_an_epoch(tmp_path: Path) -> None:
    """Half of the steps take twice the time; the last one of each epoch is short."""
    events = [step_event(number, START, samples_per_second=30.0 * (1 + number % 2)) for number in range(1, 81)]
    for event in events[9::10]:
        event["samples_per_second"] = 1.0
    (run,) = read_runs([make_run(tmp_path / "a", events)])
    curve = speeds(run.events.curves["samples_per_second"])
    assert len(curve) == 24  # 72 steps, three in each window
    assert all(35.9 < speed < 45.1 for speed in curve.values())
    assert speeds({1: 0.0, 2: float("inf"), 3: 8.0}) == {3: 8.0}


def test_pictures_of_an_evaluation_are_in_the_page(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", events_of(10))
    draw_predictions(run, "<b>cat", "dog")
    assert here("report", "a", cwd=tmp_path) == 0
    text = (run / "report.html").read_text(encoding="utf-8")
    assert len(re.findall('<img src="data:image/png;base64,iVBOR[^"]+"', text)) == 1
    assert "&lt;b&gt;cat, predicted dog" in text
    (run / "evaluation" / "overlays" / "sample-000003.png").write_bytes(b"a secret")
    assert here("report", "a", cwd=tmp_path) == 0
    assert "<img" not in (run / "report.html").read_text(encoding="utf-8")


def test_page_has_no_external_resources(tmp_path: Path) -> None:
    make_run(tmp_path / "a", events_of(10))
    assert here("report", "a", cwd=tmp_path) == 0
    text = (tmp_path / "a" / "report.html").read_text(encoding="utf-8")
    assert "default-src 'none'" in text
    assert not re.findall(r"https?:|<(?:script|link|iframe|object|embed|img)|\ssrc=|@import|url\(", text)


def test_text_of_runs_is_escaped(tmp_path: Path) -> None:
    evil = "</svg><script>alert(1)</script>"
    note = {"time": START, "event": "note", "text": f"<b>{evil}"}
    logged = {"time": START, "event": "metrics", "step": 1, "values": {evil: 1.0}}
    run = make_run(tmp_path / "<i>a & b", [note, logged, *events_of(10)], title=evil)
    start = {"processes": evil, "device": "[/b]<i>"}
    (run / "environment.json").write_text(json.dumps([start]), encoding="utf-8")
    assert here("report", run, "--out", "page.html", cwd=tmp_path) == 0
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "<script" not in text
    assert "<i>" not in text
    assert "<b>" not in text
    assert text.count("&lt;script&gt;alert(1)") >= 5


def test_killed_and_resumed_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A cut line, repeated steps and a loss that is NaN."""
    first = [step_event(number, START + number) for number in range(1, 9)]
    later = [step_event(number, START + 3600 + number, loss=5.0) for number in range(7, 12)]
    later[1].update(loss="nan", skipped=True)
    run = make_run(tmp_path / "a", [*first])
    resume = {"time": START + 3606, "event": "resume", "step": 6, "epoch": 0, "samples": 192}
    with (run / "events.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"time": 17953000\n' + json.dumps(resume) + "\n")
        file.writelines(json.dumps(event) + "\n" for event in later)
        file.write('{"time": 1795')
    (summary,) = report(capsys, "a", cwd=tmp_path)["runs"]
    assert (summary["state"], summary["steps"], summary["resumed"]) == ("not ended", 11, 1)
    assert "; 1 not finite" in (run / "report.html").read_text(encoding="utf-8")


def test_run_before_its_first_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "a", [])
    (run / "events.jsonl").unlink()
    (run / "environment.json").write_text('[{"started"')
    assert report(capsys, "a", cwd=tmp_path)["runs"][0]["state"] == "not ended"
    assert "There are no curves" in (run / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        (["empty"], "empty is not a run"),
        (["missing"], "missing is not a run"),
        (["a", "../{here}/a"], "is listed twice"),
        (["a", "--out", "letter.txt"], "letter.txt is not a report"),
        (["a", "--out", "missing/page.html"], "missing/page.html cannot be written: No such file or directory"),
        (["a", "--certificate", "empty"], "--certificate"),
        (["broken"], "broken/recipe.yaml cannot be read"),
    ],
)
def test_invalid_input(refused: Callable[..., str], arguments: list[str], value: str, tmp_path: Path) -> None:
    make_run(tmp_path / "a", events_of(10))
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "recipe.yaml").write_text("a: [")
    (tmp_path / "letter.txt").write_text("a letter")
    assert value in refused("report", *(argument.format(here=tmp_path.name) for argument in arguments))


def test_earlier_report_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "a", events_of(10))
    assert report(capsys, "a", cwd=tmp_path)["runs"][0]["steps"] == 10
    with (run / "events.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(step_event(11, START + 20)) + "\n")
    assert report(capsys, "a", cwd=tmp_path)["runs"][0]["steps"] == 11
    assert sorted(path.suffix for path in run.iterdir() if path.is_file()) == [".html", ".json", ".jsonl", ".yaml"]
