"""Checks with several ranks on GPUs: `nccl` with ranks that share one GPU, `gpus` with a GPU for each.

NCCL refuses two ranks with the same host and the same GPU. With `SAMESTEP_SHARE_GPU=nccl` each rank claims a host of
its own, so that NCCL connects them by sockets. Everything above the transport is that of several GPUs: torch's process
group, its streams and watchdog, communicators, kernels. Ranks take turns on the GPU: times of messages mean nothing.

Each check runs in a process of its own with a time limit. The results are rewritten after each check, in
`results/gpu/DATE-DEVICE-nccl.json` or `DATE-DEVICES-gpus.json`, without names of hosts and addresses. The exit code is
3 if a check failed. With `--device cpu` every check that has a meaning on a CPU runs with gloo, at a small size.
"""

from __future__ import annotations

import argparse
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from gpu_checks import FAILED, HERE, Check, Line, Results, Target, cut, device_name, file_name, run_check

INPUT = 2  # exit code
_FAILURES = 3  # of a check, on the screen


@dataclass(frozen=True)
class Suite:
    """Checks of one kind of machine, in the order of value: the time may not suffice for the last ones."""

    seconds: int  # time limit of all checks
    checks: dict[str, Check]


SUITES: dict[Target, Suite] = {
    "nccl": Suite(
        480,
        {
            "facts": Check("gpu_machine", "facts", 60, "versions; doctor finds no fault", sharing="nccl"),
            "raw": Check("gpu_raw", "raw", 150, "collectives and messages of torch alone, 2 and 4 ranks"),
            "bits": Check("gpu_ranks", "bits", 200, "one digest on 1, 2, 3 and 4 ranks under exact", sharing="nccl"),
            "layouts": Check("gpu_ranks", "layouts", 200, "fsdp, hsdp, tp and pp agree with 1 rank", sharing="nccl"),
            "faults": Check("gpu_faults", "faults", 300, "reports have the rank and code of the cause", sharing="nccl"),
            "host": Check("gpu_links", "host", 60, "time of the host in each call", sharing="nccl"),
        },
    ),
    "gpus": Suite(
        300,
        {
            "facts": Check("gpu_machine", "facts", 60, "versions and topology; doctor finds no fault"),
            "links": Check("gpu_links", "links", 90, "the exact reduction adds; times and memory of each call"),
            "bits": Check("gpu_ranks", "bits", 90, "one digest on 1, 2, 3, ... all GPUs under exact"),
            "speed": Check("gpu_scaling", "scaling", 120, "fast within 1.03 of DDP on one GPU and on all"),
            "layouts": Check("gpu_ranks", "layouts", 90, "fsdp, hsdp, tp and pp agree with 1 GPU"),
            "faults": Check("gpu_faults", "faults", 200, "reports have the rank and code of the cause"),
        },
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite", choices=SUITES)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", nargs="+", metavar="CHECK", help="run only these checks")
    parser.add_argument("--seconds", type=float, help="time limit of all checks (default: 480 and 300)")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "gpu", help="folder of the results")
    options = parser.parse_args()
    suite = SUITES[options.suite]
    names = options.only or list(suite.checks)
    unknown = sorted(set(names) - set(suite.checks))
    if unknown:
        parser.error(f"unknown checks: {unknown}; expected: {[*suite.checks]}")
    title = _title(options.suite, options.device, parser)
    results = Results(options.output / file_name(title, options.suite), title, options.suite, suite.checks)
    deadline = time.monotonic() + (options.seconds or suite.seconds)
    print(f"make {options.suite}: {title}", flush=True)
    for name in names:
        check = suite.checks[name]
        line = run_check(name, check, options.device, min(check.seconds, deadline - time.monotonic()))
        results.add(line)
        _show(line)
    counts = results.verdicts(names)
    print(f"{counts['pass']} passed, {counts['fail']} failed, {counts['skipped']} without a verdict: {results.path}")
    raise SystemExit(FAILED if counts["fail"] else 0)


def _title(suite: str, device: str, parser: argparse.ArgumentParser) -> str:
    """Return the name of the device, with the number of GPUs of several; leave one GPU to ranks that share it."""
    if device == "cpu":
        return device
    if suite == "nccl":
        os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    import torch

    count = torch.cuda.device_count()
    if suite == "nccl" and count < 1:
        parser.error("torch sees no GPU; expected: one; fix: make nccl DEVICE=cpu")
    if suite == "gpus" and count < 2:
        parser.error(f"torch sees {count} GPUs; expected: 2 to 8; fix: make nccl for one GPU, or make gpus DEVICE=cpu")
    return device_name(device) if suite == "nccl" else f"{count}x {device_name(device)}"


def _show(line: Line) -> None:
    """Print the verdict of a check and what was expected, with the first failures."""
    texts = [f"{line['verdict']:7} {line['check']:8} {line.get('seconds', 0):4.0f} s  {line['expected']}"]
    texts += [f"        {' '.join(failure.split())}" for failure in line.get("failures", [])[:_FAILURES]]
    if line.get("skipped"):
        texts.append(f"        {line['skipped']}")
    width = shutil.get_terminal_size(fallback=(120, 24)).columns
    for text in texts:
        print(cut(text, width), flush=True)


if __name__ == "__main__":
    main()
