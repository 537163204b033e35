"""Documentation site in a browser: every page is drawn without errors, in light and dark, and the search works."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.browser import NAMES, Browser, find

pytestmark = pytest.mark.skipif(find() is None, reason=f"no browser on PATH ({', '.join(NAMES)})")

ROOT = Path(__file__).parents[2]
FAILURES = ("Runtime.exceptionThrown", "Log.entryAdded", "Network.loadingFailed")
WIDTH = 1280


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"})
    return folder


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    command = [sys.executable, "-u", "-m", "http.server", "0", "--bind", "127.0.0.1", "--directory", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        assert server.stdout is not None
        port = re.search(r"port (\d+)", server.stdout.readline())
        assert port is not None
        yield f"http://127.0.0.1:{port[1]}"
        server.terminate()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    binary = find()
    assert binary is not None
    with Browser(binary) as browser:
        yield browser


@pytest.mark.long
@pytest.mark.parametrize("dark", [False, True])
def test_pages_are_drawn_without_errors(dark: bool, folder: Path, address: str, browser: Browser) -> None:
    pages = sorted(path.parent.relative_to(folder).as_posix() for path in folder.rglob("index.html"))
    assert len(pages) > 40
    pictures = os.environ.get("SAMESTEP_TEST_PICTURES")
    for page in pages:
        url = f"{address}/" if page == "." else f"{address}/{page}/"
        browser.open(url, width=WIDTH, dark=dark)
        errors = [event for event in browser.events if event.get("method") in FAILURES]
        assert not errors, page
        hosts = {
            event["params"]["request"]["url"].split("/")[2]
            for event in browser.events
            if event.get("method") == "Network.requestWillBeSent"
            and event["params"]["request"]["url"].startswith("http")
        }
        assert hosts == {address.removeprefix("http://")}, page
        content, inner = browser.value("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
        assert content <= inner, page
        red, green, blue = browser.value(
            "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).slice(0, 3).map(Number)"
        )
        assert (red + green + blue < 3 * 128) is dark, page
        if pictures:
            name = f"{page.replace('/', '_')}-{'dark' if dark else 'light'}.png"
            browser.picture(Path(pictures) / name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("query", "page"), [("microbatches", "concepts/microbatches"), ("E_NONFINITE", "reference/errors")]
)
def test_search(query: str, page: str, address: str, browser: Browser) -> None:
    browser.open(f"{address}/", width=WIDTH, dark=False)
    links = "[...document.querySelectorAll('.md-search-result__link')].map((link) => new URL(link.href).pathname)"
    browser.value("document.querySelector('#__search').click()")
    browser.value(
        "(() => { const field = document.querySelector('.md-search__input'); field.focus();"
        f" field.value = '{query}'; field.dispatchEvent(new KeyboardEvent('keyup', {{bubbles: true}})); }})()"
    )
    deadline = time.monotonic() + 30
    while not (results := browser.value(links)):
        assert time.monotonic() < deadline, query
        time.sleep(0.1)
    assert any(page in path for path in results), results
