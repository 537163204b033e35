"""The page of `samestep report`, opened in a browser: drawn, readable in every variant, and quiet."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
from PIL import Image

from browser import NAMES, Browser, find
from rank_files import ranks_of, write_ranks
from system import events, here

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find() is None, reason=f"no browser on PATH ({', '.join(NAMES)})"),
]

STEPS, EVALUATIONS, RANKS = 46, 2, 3
VARIANTS = [(width, dark) for width in (1280, 390) for dark in (False, True)]
WRONG = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded", "Network.loadingFailed")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two real runs, one with files of its ranks and with what an evaluation wrote of its classes."""
    place = tmp_path_factory.mktemp("runs")
    for name, processes, rate in (("one", 2, 0.05), ("two", 1, 0.01)):
        setting = ("--set", "epochs=2", f"optimizer.options.lr={rate}")
        assert here("train", "digits", *setting, "--name", name, "--processes", processes, "--json", cwd=place) == 0
    run = place / "runs" / "one"
    assert here("eval", run, "--report", run / "evaluation", "--json", cwd=place) == 0
    if not (run / "ranks").exists():
        begin, end = (events(run)[place]["time"] for place in (0, -1))
        write_ranks(run, ranks_of(begin, RANKS, 20, every=(end - begin) / 20))
    assert here("report", run, place / "runs" / "two", "--out", "page.html", cwd=place) == 0
    return place / "page.html"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    binary = find()
    assert binary is not None
    with Browser(binary) as opened:
        yield opened


def happened(browser: Browser, *methods: str) -> list[dict[str, Any]]:
    return [event for event in browser.events if event.get("method") in methods]


@pytest.mark.parametrize(("width", "dark"), VARIANTS)
def test_page_is_drawn_and_asks_for_nothing(
    width: int, dark: bool, page: Path, browser: Browser, tmp_path: Path
) -> None:
    browser.open(page, width=width, dark=dark)
    assert not happened(browser, *WRONG)
    asked = [event["params"]["request"]["url"] for event in happened(browser, "Network.requestWillBeSent")]
    assert [url for url in asked if not url.startswith("data:")] == [page.as_uri()]
    wide, inner = browser.value("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
    assert wide <= inner <= width
    lines = browser.value(
        "[...document.querySelectorAll('.chart .line[data-points]')].map((line) => {"
        " const box = line.getBoundingClientRect();"
        " const plot = line.closest('.plot').getBoundingClientRect();"
        " return [line.closest('.chart').id, line.dataset.name, Number(line.dataset.points), box.width, box.height,"
        " getComputedStyle(line).stroke, box.left >= plot.left && box.right <= plot.right]; })"
    )
    found = {(chart, name): points for chart, name, points, *_ in lines}
    assert {name: found["chart-loss", name] for name in ("one", "two")} == {"one": STEPS, "two": STEPS}
    # The last batch of an epoch, of which it is not told how large it is, has no share.
    assert found["chart-data_share", "two"] == STEPS - EVALUATIONS
    assert found["chart-evaluation-accuracy", "one"] == EVALUATIONS
    assert [name for chart, name in found if chart == "chart-memory-0"]
    for chart, name, points, across, _, stroke, is_inside in lines:
        assert across > width / 8 or points == 1, (chart, name)
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
    # Every stretch as high as a window has something on it.
    colours = pixels @ (1 << 16, 1 << 8, 1)
    for top in range(0, len(colours) - 900, 900):
        assert len(numpy.unique(colours[top : top + 900])) > 20, top


def hover(browser: Browser, selector: str, across: float, down: float) -> None:
    """Move the pointer to a place of a drawing, in shares of its size."""
    left, top, width, height = browser.value(
        f"(() => {{ const drawn = document.querySelector('{selector}'); drawn.scrollIntoView({{block: 'center'}});"
        " const box = drawn.getBoundingClientRect(); return [box.left, box.top, box.width, box.height]; })()"
    )
    browser.ask("Input.dispatchMouseEvent", type="mouseMoved", x=left + width * across, y=top + height * down)


def texts(browser: Browser, selector: str) -> list[str]:
    found: list[str] = browser.value(f"[...document.querySelectorAll('{selector}')].map((one) => one.innerText)")
    return found


def test_pointer_and_keys_read_values(page: Path, browser: Browser) -> None:
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
    browser.ask("Input.dispatchKeyEvent", type="keyDown", key="ArrowRight")
    assert texts(browser, "#chart-loss .tip p")[0].startswith("step 1, after ")
    browser.ask("Input.dispatchKeyEvent", type="keyDown", key="ArrowRight")
    assert texts(browser, "#chart-loss .tip p")[0].startswith("step 2, after ")
    assert not happened(browser, *WRONG)


def test_controls_change_every_chart(page: Path, browser: Browser) -> None:
    browser.open(page, width=1280, dark=False)
    count = "document.querySelectorAll('.chart [data-name=two]').length"
    before = browser.value(count)
    assert before >= 7
    browser.value(
        "[...document.querySelectorAll('#curves > .legend button')].find((one) => one.innerText === 'two').click()"
    )
    assert browser.value(count) == 0
    browser.value("document.querySelector('#curves > .legend button[aria-pressed=false]').click()")
    assert browser.value(count) == before
    axis = "[...document.querySelectorAll('#chart-lr .plot text')].map((one) => one.textContent).join(' ')"
    assert " s" not in browser.value(axis)
    browser.value("document.querySelector('input[value=time]').click()")
    assert " s" in browser.value(axis)
    first = "document.querySelector('#chart-loss .line').getAttribute('d')"
    linear = browser.value(first)
    browser.value("document.querySelector('#chart-loss .log').click()")
    assert browser.value(first) != linear
    assert not happened(browser, *WRONG)
