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
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from gpu_checks import FAILED, HERE, Check, Line, Results, device_name, file_name, run_check

# In the order of value: the time may not suffice for the last ones.
CHECKS = {
    "facts": Check("gpu_machine", "versions", 60, "versions; doctor finds no fault"),
    "bits": Check("gpu_bits", "bits", 120, "one digest per model and number of microbatches"),
    "batch_norm": Check("gpu_bits", "batch_norm", 45, "as on a CPU, 1e-10 in float64"),
    "shared": Check("gpu_ranks", "shared", 150, "bits of 1 rank on 2, 3 and 4; fsdp, hsdp, tp 1e-10", sharing="1"),
    "faults": Check("gpu_faults", "resumed", 90, "reports name rank and cause; same bits after resuming", sharing="1"),
    "sanitizer": Check("gpu_bits", "sanitizer", 40, "no race between streams"),
    "zoo": Check("gpu_bits", "zoo", 90, "computed, or the operator is named"),
    "speed": Check(
        "gpu_speed", "speed", 150, "of a usual loop: `fast` 1.00, `exact` 1.03, 1.3 with 8 slices", alone=True
    ),
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
    options = parser.parse_args()
    if options.logs is not None:
        options.logs.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + options.seconds
    title = device_name(options.device)
    results = Results(options.output / file_name(title), title, "gpu", CHECKS)

    def run(name: str) -> Line:
        seconds = min(CHECKS[name].seconds, deadline - time.monotonic())
        return run_check(name, CHECKS[name], options.device, seconds, options.logs)

    def add(line: Line) -> None:
        print(json.dumps(line), flush=True)
        results.add(line)

    jobs = options.jobs or max(1, min(6, (os.cpu_count() or 1) // 3))
    with ThreadPoolExecutor(jobs) as pool:
        for future in as_completed([pool.submit(run, name) for name in options.only if not CHECKS[name].alone]):
            add(future.result())
    for name in options.only:
        if CHECKS[name].alone:
            add(run(name))
    raise SystemExit(FAILED if results.verdicts(options.only)["fail"] else 0)


if __name__ == "__main__":
    main()
