"""Hostile files. As a program: read each data file under a limit of memory, and print the results as JSON."""

import json
import resource
import struct
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path

_LIMIT_BYTES = 500_000_000


def controls(text: str) -> set[str]:
    """Return the control characters of a text, without newlines."""
    return {character for character in text if ord(character) < 32 or 127 <= ord(character) < 160} - {"\n"}


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def _png(width: int, height: int) -> bytes:
    head = _chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + _chunk(b"IDAT", zlib.compress(bytes(3_000_000))) + _chunk(b"IEND", b"")


_EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n%%EOF\n"


FILES: dict[str, tuple[str, bytes]] = {
    "a `.png` that is an EPS program": ("a.png", _EPS),
    "a `.png` of 100,000 x 100,000 pixels": ("b.png", _png(100_000, 100_000)),
    "a `.pdparams` that calls `os.system`": ("a.pdparams", b"\x80\x02cos\nsystem\nX\x04\x00\x00\x00true\x85R."),
}

_STEP = {"time": 1e9, "event": "step", "epoch": 0, "step_in_epoch": 3, "steps_in_epoch": 20, "loss": 0.5}
LAST_STEP = 3
_ESCAPES = "\x1b[2J\x1b]0;title\x07\x9b31m\r\n<script>alert(1)</script>"


def _line(value: object) -> bytes:
    return json.dumps(value).encode()


BAD_EVENTS = (
    b"\xff\xfe\x00",
    b'{"time": 1, "event": "step", ',
    b"[" * 100_000,
    b'{"time": ' + b"9" * 5000 + b', "event": "step", "step": 1}',
    b"[]",
    b'"step"',
    _line({**_STEP, "step": "three"}),
    _line({**_STEP, "step": None}),
    b'{"time": 1e9, "event": "step", "step": 1' + b"0" * 400 + b"}",
    _line({**_STEP, "step": -5}),
    _line({**_STEP, "step": [1]}),
    _line({**_STEP, "step": 1, "time": "now"}),
    _line({**_STEP, "step": 1, "epoch": {}}),
    _line({**_STEP, "step": 1, "steps_in_epoch": "20"}),
    _line({"time": 1e9, "event": ["step"], "step": 1}),
)
EVENTS = (
    _line({**_STEP, "step": 1}),
    *BAD_EVENTS,
    _line({**_STEP, "step": 1, "time": 1e300}),
    _line({"time": 1e9, "event": "note", "text": _ESCAPES}),
    _line({"time": 1e9, "event": "note", "text": {"a": 1}}),
    _line({"time": 1e9, "event": "evaluation", "step": 2, "epoch": 1, "loss": _ESCAPES, _ESCAPES: 0.5, "samples": "9"}),
    _line({"time": 1e9, "event": "evaluation", "step": 2, "epoch": _ESCAPES, "loss": [1], "accuracy": 1e400}),
    _line({"time": 1e9, "event": "evaluation", "step": 2, "epoch": 1, "loss": 0.25, "x" * 100_000: 0.5}),
    _line({**_STEP, "step": LAST_STEP, "loss": _ESCAPES}),
)
_RANK = {"time": 1e9, "pid": 1, "host": "a", "step": 3, "doing": "in step 3", "data_share": 0.1}
BAD_RANK_LINES = (b"\x00\x01", b"[1]", b'{"time": "now"}', b'{"time": true}', b'{"time": 1' + b"0" * 400 + b"}")
RANK_LINES = (
    _line(_RANK),
    *BAD_RANK_LINES,
    _line({**_RANK, "doing": _ESCAPES * 1000, "host": _ESCAPES, "gpu": {"name": _ESCAPES, "memory_bytes": []}}),
    _line({**_RANK, "memory_bytes": "many", "cpu_percent": 1e308, "data_share": -7, "wait_share": None, "gpu": [1]}),
    _line({**_RANK, "pid": 10**30, "step": {}, "samples_per_second": [], "doing": _ESCAPES, "data_share": "all"}),
)
ENVIRONMENT = _line([{"started": _ESCAPES, "processes": "many", _ESCAPES: _ESCAPES}, 5, {"processes": 10**12}])
RECIPES = {
    "deep recipe": b"a: " + b"[" * 50_000,
    "recipe of another type": b"- 1\n- 2\n",
    "recipe that is not UTF-8": b"epochs: \xff\n",
}


def _readers() -> dict[str, Callable[[Path], object]]:
    from samestep.zoo.image_files import read_image
    from samestep.zoo.paddle import read_arrays

    return {".png": read_image, ".pdparams": read_arrays}


def _main(folder: Path) -> None:
    from samestep.errors import SamestepError

    readers, results = _readers(), {}
    for name, content in FILES.values():
        (folder / name).write_bytes(content)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + _LIMIT_BYTES, resource.RLIM_INFINITY))
    for title, (name, _) in FILES.items():
        begin = time.process_time()
        try:
            readers[Path(name).suffix](folder / name)
            code, text = "read", ""
        except SamestepError as error:
            code, text = error.code, str(error)
        results[title] = (code, time.process_time() - begin, text)
    print(json.dumps(results))


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
