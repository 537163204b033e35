"""Headless Chromium, controlled with the DevTools protocol over a pipe."""

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from fcntl import F_DUPFD_CLOEXEC, fcntl
from pathlib import Path
from types import TracebackType
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--remote-debugging-pipe",
)
_TIMEOUT = 60.0


def find() -> str | None:
    """Return the path of a browser on PATH, or None."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """Browser with one page; a context manager that ends the process.

    Attributes:
        events: events since the page was opened, each with `method` and `params`.
    """

    def __init__(self, binary: str) -> None:
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        request_pipe, response_pipe = os.pipe(), os.pipe()
        self._responses, self._requests = response_pipe[0], request_pipe[1]
        # The browser reads from descriptor 3 and writes to 4, so its ends must have other numbers first.
        reader, writer = (fcntl(end, F_DUPFD_CLOEXEC, 10) for end in (request_pipe[0], response_pipe[1]))
        command = f'exec "$@" 3<&{reader} 4>&{writer} {reader}<&- {writer}>&-'
        profile = f"--user-data-dir={self._folder.name}"
        self._process = subprocess.Popen(
            ["bash", "-c", command, "bash", binary, *_FLAGS, profile, "about:blank"],
            pass_fds=(reader, writer),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        for end in (request_pipe[0], response_pipe[1], reader, writer):
            os.close(end)
        self.events: list[dict[str, Any]] = []
        self._read, self._number, self._session = b"", 0, None

    def __enter__(self) -> "Browser":
        targets = self.call("Target.getTargets")["targetInfos"]
        page = next(target["targetId"] for target in targets if target["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._session = None
        try:
            self.call("Browser.close")
            self._process.wait(_TIMEOUT)
        finally:
            if self._process.poll() is None:
                self._process.kill()
                self._process.wait()
            os.close(self._responses)
            os.close(self._requests)
            self._folder.cleanup()

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Return the result of one method of the protocol."""
        self._number += 1
        request: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            request["sessionId"] = self._session
        os.write(self._requests, json.dumps(request).encode() + b"\0")
        while True:
            message = self._next()
            if message.get("id") == self._number:
                assert "error" not in message, f"{method}: {message['error']}"
                result: dict[str, Any] = message["result"]
                return result
            self.events.append(message)

    def open(self, page: Path | str, *, width: int, dark: bool) -> None:
        """Load a file or URL in a window of `width` pixels, and wait until it is drawn."""
        url = page if isinstance(page, str) else page.resolve().as_uri()
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", media="screen", features=[scheme])
        is_phone = width < 600
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=is_phone)
        self.events.clear()
        self.call("Page.navigate", url=url)
        deadline = time.monotonic() + _TIMEOUT
        while not self.value(f"document.readyState === 'complete' && location.href === {json.dumps(url)}"):
            assert time.monotonic() < deadline, f"{url} did not load"
            time.sleep(0.05)
        # Two frames: size observers run in the first.
        self.value("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))")

    def value(self, expression: str) -> Any:
        """Return the value of an expression in the page; a promise is awaited."""
        response = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in response, response
        return response["result"].get("value")

    def picture(self, path: Path) -> None:
        """Write a PNG of the full page."""
        response = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(response["data"]))

    def print(self, path: Path) -> None:
        """Write the page as a PDF."""
        response = self.call("Page.printToPDF", printBackground=True)
        path.write_bytes(base64.b64decode(response["data"]))

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._read:
            ready, _, _ = select.select([self._responses], [], [], _TIMEOUT)
            assert ready, "the browser does not respond"
            data = os.read(self._responses, 1 << 20)
            assert data, "the browser ended"
            self._read += data
        message, _, self._read = self._read.partition(b"\0")
        event: dict[str, Any] = json.loads(message)
        return event
