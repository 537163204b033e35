"""Chromium without a window, driven by its DevTools protocol over a pipe: no driver, no port, no network."""

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
_PATIENCE = 60.0


def find() -> str | None:
    """The browser on PATH, if there is one."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page of a browser of its own, which ends with the block.

    Attributes:
        events: what the page told since it was opened, each with `method` and `params`.
    """

    def __init__(self, binary: str) -> None:
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        ours, theirs = os.pipe(), os.pipe()
        self._answers, self._requests = theirs[0], ours[1]
        # The browser reads from 3 and writes to 4; its ends are moved out of the way of these numbers first.
        reads, writes = (fcntl(end, F_DUPFD_CLOEXEC, 10) for end in (ours[0], theirs[1]))
        command = f'exec "$@" 3<&{reads} 4>&{writes} {reads}<&- {writes}>&-'
        profile = f"--user-data-dir={self._folder.name}"
        self._process = subprocess.Popen(
            ["bash", "-c", command, "bash", binary, *_FLAGS, profile, "about:blank"],
            pass_fds=(reads, writes),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        for end in (ours[0], theirs[1], reads, writes):
            os.close(end)
        self.events: list[dict[str, Any]] = []
        self._read, self._number, self._session = b"", 0, None

    def __enter__(self) -> "Browser":
        found = self.ask("Target.getTargets")["targetInfos"]
        page = next(target["targetId"] for target in found if target["type"] == "page")
        self._session = self.ask("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._session = None
        try:
            self.ask("Browser.close")
            self._process.wait(_PATIENCE)
        finally:
            if self._process.poll() is None:
                self._process.kill()
                self._process.wait()
            os.close(self._answers)
            os.close(self._requests)
            self._folder.cleanup()

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call one method of the protocol."""
        self._number += 1
        request: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            request["sessionId"] = self._session
        os.write(self._requests, json.dumps(request).encode() + b"\0")
        while True:
            message = self._next()
            if message.get("id") == self._number:
                assert "error" not in message, f"{method}: {message['error']}"
                answer: dict[str, Any] = message["result"]
                return answer
            self.events.append(message)

    def open(self, path: Path, *, width: int, dark: bool) -> None:
        """Load a file in a window of this width, and wait until it is drawn."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.ask("Emulation.setEmulatedMedia", media="screen", features=[scheme])
        is_phone = width < 600
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=is_phone)
        self.events.clear()
        self.ask("Page.navigate", url=path.resolve().as_uri())
        deadline = time.monotonic() + _PATIENCE
        while not self.value("document.readyState === 'complete' && location.protocol === 'file:'"):
            assert time.monotonic() < deadline, f"{path} does not load"
            time.sleep(0.05)
        # Two frames: observers of sizes are called in the first.
        self.value("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))")

    def value(self, expression: str) -> Any:
        """What an expression is worth in the page, waited for where it is a promise."""
        found = self.ask("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def picture(self, path: Path) -> None:
        """A PNG of the whole page, however long it is."""
        found = self.ask("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(found["data"]))

    def print(self, path: Path) -> None:
        """The page as a PDF."""
        found = self.ask("Page.printToPDF", printBackground=True)
        path.write_bytes(base64.b64decode(found["data"]))

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._read:
            ready, _, _ = select.select([self._answers], [], [], _PATIENCE)
            assert ready, "the browser does not answer"
            more = os.read(self._answers, 1 << 20)
            assert more, "the browser ended"
            self._read += more
        message, _, self._read = self._read.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found
