"""Test losses of one script on 1, 2, 4 and 8 processes: with DistributedDataParallel by hand, and unchanged.

`examples/digits.py` runs under `samestep run`; `digits_ddp.py` is the same script changed as tutorials of DDP do. Both
print the loss on all test images after each epoch.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from machine import describe_machine, machine_line, markdown_table, save

HERE = Path(__file__).parent
TOOLS = Path(sys.executable).parent
LINE = re.compile(r"^epoch +\d+  test loss (\d+\.\d+)", re.MULTILINE)
EXAMPLE = HERE.parent / "examples" / "digits.py"


def command(name: str, processes: int, epochs: int) -> list[str]:
    """Return the command that trains on some processes."""
    if name == "DDP":
        torchrun = [str(TOOLS / "torchrun"), "--standalone", "--nproc-per-node", str(processes)]
        return [*torchrun, str(HERE / "digits_ddp.py"), str(epochs)]
    return [str(TOOLS / "samestep"), "run", "--processes", str(processes), str(EXAMPLE), str(epochs)]


def losses(name: str, processes: int, epochs: int) -> list[float]:
    """Train in a new folder, and return the printed losses.

    Raises:
        subprocess.CalledProcessError: the training failed.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            command(name, processes, epochs), cwd=folder, env=environment, check=True, stdout=subprocess.PIPE, text=True
        )
    return [float(loss) for loss in LINE.findall(done.stdout)]


def page(result: dict[str, Any]) -> str:
    epochs = len(result["results"][0]["losses"])
    rows = [
        [line["name"], str(line["processes"]), *(f"{loss:.4f}" for loss in line["losses"])]
        for line in result["results"]
    ]
    header = ["script", "processes", *(f"epoch {number}" for number in range(1, epochs + 1))]
    return (
        f"# Test losses on several numbers of processes\n\n{machine_line(result['machine'])}\n\n"
        "`examples/digits.py` unchanged under `samestep run`, and with DDP as in\n"
        "tutorials (`digits_ddp.py`): 128 samples on each process, so 8 processes make an eighth of the steps.\n\n"
        f"{markdown_table(header, rows)}\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--output", type=Path, default=HERE / "results" / "digits_curves.json")
    options = parser.parse_args()
    result: dict[str, Any] = {"machine": describe_machine(), "results": []}
    for name in ("DDP", "Samestep"):
        for processes in options.processes:
            line = {"name": name, "processes": processes, "losses": losses(name, processes, options.epochs)}
            result["results"].append(line)
            print(line, flush=True)
            save(options.output, result, page(result))


if __name__ == "__main__":
    main()
