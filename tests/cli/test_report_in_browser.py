"""Page of `samestep report` in a browser: drawing, layout, controls and no errors."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
from PIL import Image

from helpers.browser import NAMES, Browser, find
from helpers.rank_files import ranks_of, write_ranks
from helpers.system import events, here

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find() is None, reason=f"no browser on PATH ({', '.join(NAMES)})"),
]

STEPS, EVALUATIONS, RANKS = 46, 2, 3
VARIANTS = [(width, dark) for width in (1280, 390) for dark in (False, True)]
FAILURES = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded", "Network.loadingFailed")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two trained runs, one with rank files and a class report."""
    folder = tmp_path_factory.mktemp("runs")
    for name, processes, rate in (("one", 2, 0.05), ("two", 1, 0.01)):
        setting = ("--set", "epochs=2", f"optimizer.options.lr={rate}")
        assert here("train", "digits", *setting, "--name", name, "--processes", processes, "--json", cwd=folder) == 0
    run = folder / "runs" / "one"
    assert here("eval", run, "--report", run / "evaluation", "--json", cwd=folder) == 0
    if not (run / "ranks").exists():
        begin, end = (events(run)[index]["time"] for index in (0, -1))
        write_ranks(run, ranks_of(begin, RANKS, 20, every=(end - begin) / 20))
    assert here("report", run, folder / "runs" / "two", "--out", "page.html", cwd=folder) == 0
    return folder / "page.html"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    binary = find()
    assert binary is not None
    with Browser(binary) as browser:
        yield browser


def events_of(browser: Browser, *methods: str) -> list[dict[str, Any]]:
    return [event for event in browser.events if event.get("method") in methods]


@pytest.mark.parametrize(("width", "dark"), VARIANTS)
def test_page_is_drawn_without_requests(width: int, dark: bool, page: Path, browser: Browser, tmp_path: Path) -> None:
    browser.open(page, width=width, dark=dark)
    assert not events_of(browser, *FAILURES)
    requests = [event["params"]["request"]["url"] for event in events_of(browser, "Network.requestWillBeSent")]
    assert [url for url in requests if not url.startswith("data:")] == [page.as_uri()]
    content, inner = browser.value("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
    assert content <= inner <= width
    lines = browser.value(
        "[...document.querySelectorAll('.chart .line[data-points]')].map((line) => {"
        " const box = line.getBoundingClientRect();"
        " const plot = line.closest('.plot').getBoundingClientRect();"
        " return [line.closest('.chart').id, line.dataset.name, Number(line.dataset.points), box.width, box.height,"
        " getComputedStyle(line).stroke, box.left >= plot.left && box.right <= plot.right]; })"
    )
    counts = {(chart, name): points for chart, name, points, *_ in lines}
    assert {name: counts["chart-loss", name] for name in ("one", "two")} == {"one": STEPS, "two": STEPS}
    # The last batch of an epoch, whose size is unknown, has no share.
    assert counts["chart-data_share", "two"] == STEPS - EVALUATIONS
    assert counts["chart-evaluation-accuracy", "one"] == EVALUATIONS
    assert [name for chart, name in counts if chart == "chart-memory-0"]
    for chart, name, points, line_width, _, stroke, is_inside in lines:
        assert line_width > width / 8 or points == 1, (chart, name)
        assert stroke != "none"
        assert is_inside, (chart, name)
    areas = browser.value("[...document.querySelectorAll('#timeline-0 .area')].map((area) => area.getBBox().width)")
    assert areas
    assert max(areas) > width / 4
    browser.picture(tmp_path / "page.png")
    with Image.open(tmp_path / "page.png") as picture:
        pixels = numpy.asarray(picture.convert("RGB")).astype(int)
    assert pixels.shape[0] > 2000
    assert (pixels.mean() < 70) if dark else (pixels.mean() > 200)
    # No part of the page is empty.
    colors = pixels @ (1 << 16, 1 << 8, 1)
    for top in range(0, len(colors) - 900, 900):
        assert len(numpy.unique(colors[top : top + 900])) > 20, top


def hover(browser: Browser, selector: str, across: float, down: float) -> None:
    """Move the pointer to a position of a drawing, in shares of its size."""
    left, top, width, height = browser.value(
        f"(() => {{ const drawn = document.querySelector('{selector}'); drawn.scrollIntoView({{block: 'center'}});"
        " const box = drawn.getBoundingClientRect(); return [box.left, box.top, box.width, box.height]; })()"
    )
    browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=left + width * across, y=top + height * down)


def texts(browser: Browser, selector: str) -> list[str]:
    values: list[str] = browser.value(f"[...document.querySelectorAll('{selector}')].map((node) => node.innerText)")
    return values


def test_pointer_and_keys_show_values(page: Path, browser: Browser) -> None:
    browser.open(page, width=1280, dark=False)
    last = {run: events(page.parent / "runs" / run, "step")[-1] for run in ("one", "two")}
    hover(browser, "#chart-loss .plot svg", 0.98, 0.5)
    head, *rows = texts(browser, "#chart-loss .tip p")
    assert head.startswith(f"step {STEPS}, after ")
    assert [row.split()[0] for row in rows] == ["one", "two"]
    for row, run in zip(rows, ("one", "two"), strict=True):
        assert float(row.split()[1]) == pytest.approx(last[run]["loss"], rel=1e-4)
    hover(browser, "#timeline-0 svg", 0.4, 0.1)
    head, *rows = texts(browser, "#timeline-0 .tip p")
    assert head.startswith("rank 0, ")
    assert "waiting for data" in " ".join(rows)
    browser.value("document.querySelector('#chart-loss .plot svg').focus()")
    browser.call("Input.dispatchKeyEvent", type="keyDown", key="ArrowRight")
    assert texts(browser, "#chart-loss .tip p")[0].startswith("step 1, after ")
    browser.call("Input.dispatchKeyEvent", type="keyDown", key="ArrowRight")
    assert texts(browser, "#chart-loss .tip p")[0].startswith("step 2, after ")
    assert not events_of(browser, *FAILURES)


def test_controls_change_every_chart(page: Path, browser: Browser) -> None:
    browser.open(page, width=1280, dark=False)
    count = "document.querySelectorAll('.chart [data-name=two]').length"
    before = browser.value(count)
    assert before >= 7
    browser.value(
        "[...document.querySelectorAll('#curves > .legend button')].find((node) => node.innerText === 'two').click()"
    )
    assert browser.value(count) == 0
    browser.value("document.querySelector('#curves > .legend button[aria-pressed=false]').click()")
    assert browser.value(count) == before
    axis = "[...document.querySelectorAll('#chart-lr .plot text')].map((node) => node.textContent).join(' ')"
    assert " s" not in browser.value(axis)
    browser.value("document.querySelector('input[value=time]').click()")
    assert " s" in browser.value(axis)
    first = "document.querySelector('#chart-loss .line').getAttribute('d')"
    linear = browser.value(first)
    browser.value("document.querySelector('#chart-loss .log').click()")
    assert browser.value(first) != linear
    assert not events_of(browser, *FAILURES)
