"""Page of `samestep report` in a browser: drawing and layout, without errors and requests."""

from collections.abc import Iterator
from pathlib import Path

import numpy
import pytest
from PIL import Image

from helpers.browser import NAMES, Browser, find
from helpers.run_folders import draw_predictions, events_of, make_run
from helpers.system import here

pytestmark = [pytest.mark.slow, pytest.mark.skipif(find() is None, reason=f"no browser on PATH ({', '.join(NAMES)})")]

VARIANTS = [(1280, False), (390, True)]
FAILURES = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded", "Network.loadingFailed")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    for name, steps in (("one", 30), ("two", 2000)):
        make_run(folder / name, events_of(steps))
    draw_predictions(folder / "one", "cat", "dog")
    assert here("report", "one", "two", "--out", "page.html", cwd=folder) == 0
    return folder / "page.html"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    binary = find()
    assert binary is not None
    with Browser(binary) as browser:
        yield browser


@pytest.mark.parametrize(("width", "dark"), VARIANTS)
def test_page_is_drawn_without_requests(width: int, dark: bool, page: Path, browser: Browser, tmp_path: Path) -> None:
    browser.open(page, width=width, dark=dark)
    requests = [event for event in browser.events if event.get("method") == "Network.requestWillBeSent"]
    urls = [event["params"]["request"]["url"] for event in requests]
    assert [url for url in urls if not url.startswith("data:image/png")] == [page.as_uri()]
    assert not [event for event in browser.events if event.get("method") in FAILURES]
    content, inner = browser.value("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
    assert content <= inner <= width
    lines = browser.value(
        "[...document.querySelectorAll('polyline')].map((line) => {"
        " const box = line.getBoundingClientRect(), plot = line.closest('svg').getBoundingClientRect();"
        " return [box.width, getComputedStyle(line).stroke, box.left >= plot.left && box.right <= plot.right]; })"
    )
    assert len(lines) > 12
    assert all(stroke != "none" and is_inside for _, stroke, is_inside in lines)
    assert max(line_width for line_width, *_ in lines) > width / 4
    charts = browser.value(
        "[...document.querySelectorAll('figure:has(svg)')].map((figure) => [figure.querySelector('h3').innerText,"
        " figure.querySelectorAll('polyline').length,"
        " [...figure.querySelectorAll('figcaption div')].map((row) => [row.innerText.split(':')[0],"
        " getComputedStyle(row.querySelector('.key')).backgroundColor])])"
    )
    legends = {title: dict(legend) for title, _, legend in charts}
    assert all(lines >= len(legend) for _, lines, legend in charts)
    parts = ["one", "one, training", "two", "two, training"]
    assert list(legends["Validation loss (dashed: training)"]) == parts
    for legend in legends.values():
        assert {"one", "two"} <= legend.keys()
        assert legend["one"] != legend["two"]
    assert browser.value("[...document.images].map((image) => image.naturalWidth)") == [8]
    browser.picture(tmp_path / "page.png")
    with Image.open(tmp_path / "page.png") as picture:
        pixels = numpy.asarray(picture.convert("RGB")).astype(int)
    assert (pixels.mean() < 70) if dark else (pixels.mean() > 200)
    # No part of the page is empty.
    colors = pixels @ (1 << 16, 1 << 8, 1)
    for top in range(0, len(colors) - 900, 900):
        assert len(numpy.unique(colors[top : top + 900])) > 20, top
