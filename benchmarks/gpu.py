"""Checks on one GPU in at most ten minutes: bits, ranks that share the GPU, faults, speed and checkpoints.

Each check runs in a process of its own, so a failed one, or one that hangs, ends no other. Each prints one line of
JSON. Checks that measure no time run side by side, and the others afterwards, one by one. The results are written to
`results/gpu/DATE-DEVICE.json`, and as a table next to it; they replace those of the same checks on the same day. The
exit code is 3 if a check failed. With `--device cpu`, every check that has a meaning on a CPU runs at a small size.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from machine import describe_machine, machine_line, markdown_table, save

HERE = Path(__file__).parent
ROOT = HERE.parent
FAILED = 3


@dataclass(frozen=True)
class Check:
    """One check: the function `module.function(device) -> Outcome`."""

    module: str
    function: str
    seconds: int  # time limit
    expected: str
    alone: bool = False  # needs a machine without other work, as measurements of time do


# In the order of value: the time may not suffice for the last ones.
CHECKS = {
    "facts": Check("gpu_bits", "facts", 60, "versions; doctor finds no fault"),
    "bits": Check("gpu_bits", "bits", 120, "one digest per model and number of microbatches"),
    "batch_norm": Check("gpu_bits", "batch_norm", 45, "as on a CPU, 1e-10 in float64"),
    "shared": Check("gpu_ranks", "shared", 150, "bits of 1 rank on 2, 3 and 4; fsdp, hsdp, tp 1e-10"),
    "faults": Check("gpu_ranks", "faults", 90, "reports name rank and cause; resumed with the same bits"),
    "sanitizer": Check("gpu_bits", "sanitizer", 40, "no race between streams"),
    "zoo": Check("gpu_bits", "zoo", 90, "computed, or the operator is named"),
    "speed": Check("gpu_speed", "speed", 150, "one process within 1.03 of a hand-written loop (images)", alone=True),
    "attention": Check(
        "gpu_speed", "attention", 30, "equal bits of repeated gradients, fused and written out", alone=True
    ),
    "checkpoint": Check("gpu_speed", "checkpoint", 90, "the loaded weights are the saved ones", alone=True),
    "tests": Check("gpu_ranks", "tests", 240, "pytest -m gpu passes", alone=True),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", nargs="+", choices=CHECKS, default=list(CHECKS), metavar="CHECK", help=f"{[*CHECKS]}")
    parser.add_argument("--seconds", type=float, default=540, help="time limit of all checks (default: 540)")
    parser.add_argument("--jobs", type=int, help="checks side by side (default: a third of the cores, at most 6)")
    parser.add_argument("--logs", type=Path, metavar="DIR", help="keep the output of each check in DIR")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "gpu", help="folder of the results")
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)  # of one check, in a process of its own
    options = parser.parse_args()
    if options.result is not None:
        run_check(CHECKS[options.only[0]], options.device, options.result)
        return
    if options.logs is not None:
        options.logs.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + options.seconds
    machine = describe_machine()
    title = _device_name() if options.device == "cuda" else options.device
    results = options.output / f"{machine['date']}-{''.join(c if c.isalnum() else '-' for c in title)}.json"
    earlier = json.loads(results.read_text(encoding="utf-8"))["checks"] if results.exists() else []
    lines: dict[str, dict[str, Any]] = {line["check"]: line for line in earlier}

    def run(name: str) -> dict[str, Any]:
        return run_process(name, options.device, min(CHECKS[name].seconds, deadline - time.monotonic()), options.logs)

    def add(line: dict[str, Any]) -> None:
        lines[line["check"]] = line
        print(json.dumps(line), flush=True)
        write(results, title, machine, [lines[check] for check in CHECKS if check in lines])

    jobs = options.jobs or max(1, min(6, (os.cpu_count() or 1) // 3))
    with ThreadPoolExecutor(jobs) as pool:
        for future in as_completed([pool.submit(run, name) for name in options.only if not CHECKS[name].alone]):
            add(future.result())
    for name in options.only:
        if CHECKS[name].alone:
            add(run(name))
    raise SystemExit(FAILED if any(lines[check]["verdict"] == "fail" for check in options.only) else 0)


def _device_name() -> str:
    if shutil.which("nvidia-smi") is None:
        return "cuda"
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0].strip()


def run_check(check: Check, device: str, result: Path) -> None:
    """Run a check in this process, and write its outcome."""
    outcome = getattr(import_module(check.module), check.function)(device)
    result.write_text(json.dumps(asdict(outcome)), encoding="utf-8")


def run_process(name: str, device: str, seconds: float, logs: Path | None) -> dict[str, Any]:
    """Run a check in a new process; return its line."""
    line: dict[str, Any] = {"check": name, "verdict": "fail", "expected": CHECKS[name].expected}
    if seconds < 1:
        return line | {"verdict": "skipped", "skipped": "no time left"}
    with tempfile.TemporaryDirectory(prefix="samestep-gpu-") as folder:
        result, log = Path(folder) / "result.json", Path(folder) / "output"
        command = [sys.executable, str(HERE / "gpu.py"), "--device", device, "--only", name, "--result", str(result)]
        began = time.monotonic()
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, stdout=output, stderr=output, cwd=folder, env=_environment(), start_new_session=True
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
    verdict = "fail" if outcome["failures"] else "skipped" if outcome["skipped"] else "pass"
    return line | outcome | {"verdict": verdict}


def _environment() -> dict[str, str]:
    """Return an environment in which a checkout that is not installed, and helpers of its tests, can be imported."""
    paths = [str(ROOT / "src"), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


def _wait(process: subprocess.Popen[bytes], seconds: float) -> int | None:
    """Return the exit code; end all processes of the check after the time limit, and return None."""
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return None


def write(results: Path, title: str, machine: dict[str, Any], lines: list[dict[str, Any]]) -> None:
    """Write all lines and the table."""
    facts = next((line.get("numbers", {}) for line in lines if line["check"] == "facts"), {})
    content = {"machine": machine, "device": title, "facts": facts, "checks": lines}
    rows = [
        [line["check"], line["verdict"], f"{line.get('seconds', 0):.0f}", line["expected"], _short(line)]
        for line in lines
    ]
    table = markdown_table(["check", "verdict", "seconds", "expected", "result"], rows)
    versions = ", ".join(f"{key} {value}" for key, value in facts.items() if key != "doctor")
    save(results, content, f"# Checks on {title}\n\n{machine_line(machine)}\n\n{versions}\n\n{table}\n")


def _short(line: dict[str, Any]) -> str:
    values = line.get("failures") or [f"{key}: {value}" for key, value in line.get("numbers", {}).items()]
    text = (line.get("skipped") or "; ".join(values)).replace("|", "/").replace("\n", " ")
    return text if len(text) <= 240 else text[:237] + "..."


if __name__ == "__main__":
    main()
