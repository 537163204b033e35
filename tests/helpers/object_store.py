"""Web server of a folder whose answers fail, in place of an object store."""

import functools
import http.server
from collections import Counter
from pathlib import Path
from typing import Any


class Server(http.server.ThreadingHTTPServer):
    """Web server of a folder that fails as `faults` describes: name of a file to status codes of its next answers.

    The code 206 is a body that ends early, 203 one with other contents.
    """

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), functools.partial(Handler, directory=str(folder)))
        self.faults: dict[str, list[int]] = {}
        self.requests: Counter[str] = Counter()
        self.address = f"http://127.0.0.1:{self.server_port}"


class Handler(http.server.SimpleHTTPRequestHandler):
    server: Server

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        name = self.path.strip("/")
        self.server.requests[name] += 1
        faults = self.server.faults.get(name, [])
        fault = faults.pop(0) if faults else 200
        data = Path(self.translate_path(self.path))
        if fault == 200 or not data.is_file():
            super().do_GET()
        elif fault == 206:  # the body ends before its announced length
            content = data.read_bytes()
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content[: len(content) // 2])
        elif fault == 203:  # complete, with another content
            self.send_response(200)
            self.send_header("Content-Length", str(data.stat().st_size))
            self.end_headers()
            self.wfile.write(bytes(data.stat().st_size))
        else:
            self.send_error(fault)
