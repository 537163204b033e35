"""Checks of `gpu.py` and `gpu_nccl.py`: a process with a time limit for each, and the file of their results.

`python gpu_checks.py MODULE FUNCTION DEVICE RESULT` runs one check in this process.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from machine import describe_machine, machine_line, markdown_table, save

HERE = Path(__file__).parent
ROOT = HERE.parent
FAILED = 3  # exit code
Line = dict[str, Any]
Target = Literal["gpu", "nccl", "gpus"]  # of make
_ADDRESS = re.compile(r"\b\d{1,3}(\.\d{1,3}){3}\b")
_UUID = re.compile(r"\b[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\b")  # of a GPU


@dataclass(frozen=True)
class Check:
    """One check: the function `module.function(device) -> Outcome`."""

    module: str
    function: str
    seconds: int  # time limit
    expected: str
    alone: bool = False  # needs a machine without other work, as measurements of time do
    sharing: Literal["0", "1", "nccl"] = "0"  # how ranks share a GPU (SAMESTEP_SHARE_GPU)


class Results:
    """Lines of checks, in a JSON file and a table next to it; they replace those of the same checks in the file.

    Args:
        path: JSON file.
        title: name of the device.
        target: target of make, for the table of docs/guides/gpu.md.
        checks: all checks, in the order of the file.
    """

    def __init__(self, path: Path, title: str, target: Target, checks: Mapping[str, Check]) -> None:
        self.path = path
        self._head = {"machine": describe_machine(), "device": title, "target": target, "commit": _commit()}
        self._order = list(checks)
        earlier = json.loads(path.read_text(encoding="utf-8"))["checks"] if path.exists() else []
        self._lines: dict[str, Line] = {line["check"]: line for line in earlier}

    def add(self, line: Line) -> None:
        """Write all lines and a new one."""
        self._lines[line["check"]] = line
        lines = [self._lines[name] for name in self._order if name in self._lines]
        facts = self._lines.get("facts", {}).get("numbers", {})
        content = {**self._head, "facts": _without_names(facts), "checks": _without_names(lines)}
        save(self.path, content, _page(content))

    def verdicts(self, names: list[str]) -> Counter[str]:
        """Return the number of checks by verdict: `pass`, `fail` or `skipped`."""
        return Counter(self._lines[name]["verdict"] for name in names)


def run_check(name: str, check: Check, device: str, seconds: float, logs: Path | None = None) -> Line:
    """Run a check in a new process, and return its line.

    Args:
        name: name of the check.
        check: the check.
        device: `cuda` or `cpu`.
        seconds: time limit; below one second the check is skipped.
        logs: folder for the output; None keeps only the end of it, of a check without a result.
    """
    line: Line = {"check": name, "verdict": "fail", "expected": check.expected}
    if seconds < 1:
        return line | {"verdict": "skipped", "skipped": "no time left"}
    with tempfile.TemporaryDirectory(prefix="samestep-gpu-") as folder:
        result = Path(folder) / "result.json"
        log = Path(folder) / "output"
        command = [sys.executable, str(HERE / "gpu_checks.py"), check.module, check.function, device, str(result)]
        began = time.monotonic()
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, stdout=output, stderr=output, cwd=folder, env=_environment(check), start_new_session=True
            )
            code = _wait(process, seconds)
        line["seconds"] = round(time.monotonic() - began, 1)
        text = log.read_text(encoding="utf-8", errors="replace")
        if logs is not None:
            (logs / f"{name}.txt").write_text(text, encoding="utf-8")
        tail = text[-1500:]
        if not result.exists():
            ending = f"ended after the limit of {seconds:.0f} s" if code is None else f"exit code {code}"
            last = ([*filter(None, tail.splitlines())] or [""])[-1]
            return line | {"failures": [f"{ending}: {last}"], "output": tail}
        outcome = json.loads(result.read_text(encoding="utf-8"))
    verdict = "pass"
    if outcome["failures"]:
        verdict = "fail"
        outcome["output"] = tail
    elif outcome["skipped"]:
        verdict = "skipped"
    return line | outcome | {"verdict": verdict}


def device_name(device: str) -> str:
    """Return the name of the first GPU, or the kind of another device."""
    if device == "cpu" or shutil.which("nvidia-smi") is None:
        return device
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0].strip()


def file_name(*parts: str) -> str:
    """Return the name of a file of results: the date and parts."""
    text = "-".join([describe_machine()["date"], *parts])
    return "".join(letter if letter.isalnum() else "-" for letter in text) + ".json"


def _short(line: Line) -> str:
    """Return the failures of a check, or its numbers, in one line."""
    values = line.get("failures") or [f"{key}: {value}" for key, value in line.get("numbers", {}).items()]
    return (line.get("skipped") or "; ".join(values)).replace("|", "/").replace("\n", " ")


def cut(text: str, length: int) -> str:
    """Return a text of at most some letters."""
    return text if len(text) <= length else text[: length - 3] + "..."


def _environment(check: Check) -> dict[str, str]:
    """Return an environment in which a checkout that is not installed, and helpers of its tests, can be imported."""
    paths = [str(ROOT / "src"), str(ROOT / "tests"), str(HERE), os.environ.get("PYTHONPATH", "")]
    variables = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "SAMESTEP_SHARE_GPU": check.sharing}
    return os.environ | variables


def _wait(process: subprocess.Popen[bytes], seconds: float) -> int | None:
    """Return the exit code; end all processes of the check after the time limit, and return None."""
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return None


def _page(content: dict[str, Any]) -> str:
    rows = [
        [line["check"], line["verdict"], f"{line.get('seconds', 0):.0f}", line["expected"], cut(_short(line), 240)]
        for line in content["checks"]
    ]
    table = markdown_table(["check", "verdict", "seconds", "expected", "result"], rows)
    simple = {key: value for key, value in content["facts"].items() if not isinstance(value, (dict, list))}
    versions = ", ".join(f"{key} {value}" for key, value in simple.items() if key != "topology")
    return f"# Checks on {content['device']}\n\n{machine_line(content['machine'])}\n\n{versions}\n\n{table}\n"


def _commit() -> str | None:
    """Return the commit of the checkout, or None without git."""
    if shutil.which("git") is None:
        return None
    command = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or None


def _without_names(value: Any) -> Any:
    """Return a value without what identifies the machine or its owner: the file leaves the machine."""
    if isinstance(value, dict):
        return {key: _without_names(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_names(item) for item in value]
    if not isinstance(value, str):
        return value
    text = _UUID.sub("UUID", _ADDRESS.sub("ADDRESS", value)).replace(str(Path.home()), "~")
    return re.sub(rf"\b{re.escape(socket.gethostname())}\b", "HOST", text)


def main() -> None:
    module, function, device, result = sys.argv[1:]
    outcome = getattr(import_module(module), function)(device)
    Path(result).write_text(json.dumps(asdict(outcome)), encoding="utf-8")


if __name__ == "__main__":
    main()
