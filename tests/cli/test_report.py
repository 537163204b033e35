"""`samestep report`: content of the page, and invalid input."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from helpers.rank_files import ranks_of, write_ranks
from helpers.run_folders import CERTIFICATE, START, events_of, make_run, step_event
from helpers.system import answer, here


def data_of(page: Path) -> dict[str, Any]:
    """Return the data for the scripts of the page."""
    text = page.read_text(encoding="utf-8")
    matches = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert len(matches) == 1
    data: dict[str, Any] = json.loads(matches[0])
    return data


def chart(page: Path, key: str) -> list[dict[str, Any]]:
    """Return the curves of one chart."""
    charts = {chart["key"]: chart for chart in data_of(page)["charts"]}
    curves: list[dict[str, Any]] = charts[key]["curves"]
    return curves


def report(capsys: pytest.CaptureFixture[str], *arguments: object, cwd: Path) -> dict[str, Any]:
    """Return the output of `--json`."""
    capsys.readouterr()
    assert here("report", *arguments, "--json", cwd=cwd) == 0
    output: dict[str, Any] = answer(capsys)
    return output


def test_page_of_one_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "first", events_of(30))
    write_ranks(run, ranks_of(START, 3, 7))
    output = report(capsys, "first", cwd=tmp_path)
    page = tmp_path / output["report"]
    assert page == run / "report.html"
    assert page.stat().st_size == output["bytes"]
    (summary,) = output["runs"]
    assert (summary["state"], summary["steps"], summary["deciding"], summary["best"]["step"]) == (
        "finished",
        30,
        "accuracy",
        30,
    )
    assert summary["seconds"] == pytest.approx(15.2)
    assert summary["data_share"] == pytest.approx(0.1)
    assert summary["checkpoints"] == [{"step": 33 + 1, "bytes": 4000, "names": ["best", "last"]}]
    assert [rank["rank"] for rank in summary["ranks"]] == [0, 1, 2]
    keys = [chart["key"] for chart in data_of(page)["charts"]]
    assert keys == [
        "loss",
        "evaluation-loss",
        "evaluation-accuracy",
        "lr",
        "samples_per_second",
        "data_share",
        "grad_norm",
        "memory-0",
    ]
    assert chart(page, "loss")[0]["data"]["points"]["x"] == list(range(1, 31))
    assert [len(curve["data"]["points"]["x"]) for curve in chart(page, "memory-0")] == [8, 8, 8]
    (timeline,) = data_of(page)["timelines"]
    assert [(rank["rank"], len(rank["spans"])) for rank in timeline["ranks"]] == [(0, 8), (1, 8), (2, 8)]


def test_page_of_several_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path / "a", events_of(30))
    make_run(tmp_path / "b", events_of(20), optimizer={"name": "sgd", "options": {"lr": 0.2}})
    output = report(capsys, "a", "b", "--out", "both.html", cwd=tmp_path)
    assert output["differences"] == {"optimizer.options.lr": ["0.1", "0.2"]}
    curves = chart(tmp_path / "both.html", "loss")
    assert [(curve["run"], len(curve["data"]["points"]["x"])) for curve in curves] == [(0, 30), (1, 20)]
    text = (tmp_path / "both.html").read_text(encoding="utf-8")
    assert "<title>a and b: training report</title>" in text
    assert "a has no rank files" in text


def test_page_has_no_external_resources(tmp_path: Path) -> None:
    make_run(tmp_path / "a", events_of(10))
    assert here("report", "a", cwd=tmp_path) == 0
    text = (tmp_path / "a" / "report.html").read_text(encoding="utf-8")
    assert "default-src 'none'" in text
    # The namespace of SVG is only a name.
    assert set(re.findall(r"https?:[^\s\"'<]+", text)) == {"http://www.w3.org/2000/svg"}
    assert not re.findall(r"<(?:link|iframe|object|embed)|\ssrc=\"(?!data:)|@import|url\(", text)


def test_names_and_notes_are_escaped(tmp_path: Path) -> None:
    evil = "</script><script>alert(1)</script>"
    note = {"time": START, "event": "note", "text": f"<b>{evil}"}
    run = make_run(tmp_path / "<i>a & b", [note, *events_of(10)], title=evil)
    write_ranks(run, [{**line, "doing": evil, "host": evil} for line in ranks_of(START, 1, 2)])
    assert here("report", run, "--out", "page.html", cwd=tmp_path) == 0
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "<script>alert" not in text
    assert "<i>a" not in text
    assert "&lt;b&gt;&lt;/script&gt;" in text
    assert data_of(tmp_path / "page.html")["timelines"][0]["ranks"][0]["spans"][0][5] == evil
    assert data_of(tmp_path / "page.html")["runs"][0]["name"] == "<i>a & b"


def test_killed_and_resumed_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A cut line, a pause of an hour, repeated steps and a loss that is NaN."""
    first = [step_event(number, START + number) for number in range(1, 9)]
    later = [step_event(number, START + 3600 + number, loss=5.0) for number in range(7, 12)]
    later[1].update(loss="nan", skipped=True)
    run = make_run(tmp_path / "a", [*first])
    resume = {"time": START + 3606, "event": "resume", "step": 6, "epoch": 0, "samples": 192}
    with (run / "events.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"time": 17953000' + json.dumps(resume) + "\n")
        file.writelines(json.dumps(event) + "\n" for event in later)
        file.write('{"time": 1795')
    output = report(capsys, "a", cwd=tmp_path)
    (summary,) = output["runs"]
    assert (summary["state"], summary["steps"], summary["resumed"]) == ("not ended", 11, 1)
    assert summary["seconds"] == pytest.approx(8 - 1 + 11 - 6)
    assert output["notes"] == ["a: events.jsonl: 2 unreadable lines skipped"]
    data = chart(run / "report.html", "loss")[0]["data"]
    assert data["points"]["x"] == [1, 2, 3, 4, 5, 6, 7, 9, 10, 11]
    assert data["points"]["y"][-4:] == [5.0] * 4
    assert (data["nonfinite"]["x"], data["nonfinite_count"]) == ([8], 1)
    assert data_of(run / "report.html")["runs"][0]["resumed"] == [[6, pytest.approx(7.0)]]


def test_certificates_in_runs_and_from_the_option(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "a", events_of(10))
    for folder in (run / "certificate", tmp_path / "other"):
        folder.mkdir()
        (folder / "certificate.json").write_text(json.dumps(CERTIFICATE))
    output = report(capsys, "a", "--certificate", "other", cwd=tmp_path)
    assert [certificate["path"] for certificate in output["certificates"]] == [
        "other/certificate.json",
        "a/certificate/certificate.json",
    ]
    assert "holds: 2 runs computed the same, bit for bit" in (run / "report.html").read_text(encoding="utf-8")
    # A certificate is included once; a damaged one in a run is a note.
    assert len(report(capsys, "a", "--certificate", "a/certificate", cwd=tmp_path)["certificates"]) == 1
    (run / "certificate" / "certificate.json").write_text("{}")
    output = report(capsys, "a", cwd=tmp_path)
    assert output["certificates"] == []
    assert "certificate.json cannot be read" in output["notes"][0]


def test_run_before_its_first_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "a", [])
    (run / "events.jsonl").unlink()
    (run / "environment.json").write_text('[{"started"')
    output = report(capsys, "a", cwd=tmp_path)
    assert output["runs"][0]["state"] == "not ended"
    assert "environment.json cannot be read" in output["notes"][0]
    assert "There are no curves" in (run / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        (["empty"], "empty is not a run"),
        (["missing"], "missing is not a run"),
        (["a", "../{here}/a"], "is listed twice"),
        (["a", "--out", "letter.txt"], "letter.txt is not a report"),
        (["a", "--out", "missing/page.html"], "missing/page.html cannot be written: No such file or directory"),
        (["a", "--out", "empty"], "empty cannot be written: Is a directory"),
        (["a", "--certificate", "empty"], "--certificate empty: empty/certificate.json cannot be read: No such"),
        (["a", "--evaluation", "empty"], "--evaluation empty: empty/classes.json cannot be read: No such file"),
        (["broken"], "broken/recipe.yaml cannot be read"),
    ],
)
def test_invalid_input(arguments: list[str], value: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path / "a", events_of(10))
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "recipe.yaml").write_text("a: [")
    (tmp_path / "letter.txt").write_text("a letter")
    code = here("report", *(argument.format(here=tmp_path.name) for argument in arguments), cwd=tmp_path)
    error = capsys.readouterr().err
    assert code == 2
    assert value in error
    assert "\n  expected: " in error
    assert "\n  fix:      " in error
    assert (tmp_path / "letter.txt").read_text() == "a letter"
    assert not list(tmp_path.rglob(".*.html-*"))


def test_earlier_report_is_overwritten(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", events_of(10))
    assert here("report", "a", cwd=tmp_path) == 0
    with (run / "events.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(step_event(11, START + 20)) + "\n")
    assert here("report", "a", cwd=tmp_path) == 0
    assert len(chart(run / "report.html", "loss")[0]["data"]["points"]["x"]) == 11
    assert sorted(path.name for path in run.iterdir()) == [
        "checkpoints",
        "environment.json",
        "events.jsonl",
        "recipe.yaml",
        "report.html",
    ]
