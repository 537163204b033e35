"""Search of the documentation site in a browser."""

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
