"""Draw the picture of README: loss curves of one training on 1, 2 and 4 processes, with plain DDP and with Samestep.

Usage: `python benchmarks/curves.py`. It takes a minute on two cores, and writes `benchmarks/results/curves.json` and
`docs/pictures/curves.svg`.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

import matplotlib

matplotlib.use("svg")
from machine import describe_machine, machine_line, markdown_table, save
from matplotlib import pyplot

ROOT = Path(__file__).parents[1]
SCRIPTS = Path(__file__).parent / "curves_scripts"
PROCESSES = (1, 2, 4)
COLORS = ("#1b6ca8", "#e08214", "#7b3294")
EXPLANATION = """Digits of scikit-learn, a small convolutional net with batch norm and dropout, two epochs.
`plain.py` in `benchmarks/curves_scripts` is a loop for one device with batches of 32. `with_ddp.py` is the same with
DistributedDataParallel as PyTorch's tutorial adds it, which keeps the batch size per process and the learning rate.
The loss is that of 517 held-out images, of 1,280 that train, evaluated on rank 0."""
Curve = list[tuple[int, float]]


def measure(tool: str, processes: int, timeout: float) -> Curve:
    """Return the samples seen and the loss of the held-out samples at each evaluation.

    Raises:
        SystemExit: the run failed, or printed no curve.
    """
    programs = Path(sys.executable).parent
    if tool == "ddp":
        start = [str(programs / "torchrun"), "--standalone", "--nproc-per-node", str(processes)]
        command = [*start, str(SCRIPTS / "with_ddp.py")]
    else:
        start = [str(programs / "samestep"), "run", "--exact", "--processes", str(processes)]
        command = [*start, str(SCRIPTS / "plain.py")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout, check=False)
    curve = [(int(seen), float(loss)) for seen, loss in re.findall(r"^(\d+) (\d+\.\d+)$", done.stdout, re.MULTILINE)]
    if done.returncode or not curve:
        raise SystemExit(f"error: {' '.join(command)} ended with {done.returncode}\n{done.stdout}{done.stderr}")
    return curve


def draw(curves: dict[str, dict[str, Curve]], path: Path) -> None:
    """Write the picture: one plot per tool, with the same axes."""
    pyplot.rcParams.update({"font.size": 10, "svg.hashsalt": "samestep", "svg.fonttype": "path"})
    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.4), sharey=True, layout="constrained")
    titles = {"ddp": "plain DDP, as in the tutorial", "samestep": "samestep run --exact"}
    for axis, (tool, title) in zip(axes, titles.items(), strict=True):
        # Equal curves lie on each other: thick lines below thin ones show that each is there.
        for color, width, processes in zip(COLORS, (7, 4, 1.5), PROCESSES, strict=True):
            seen, losses = zip(*curves[tool][str(processes)], strict=True)
            label = "1 process" if processes == 1 else f"{processes} processes"
            axis.plot(seen, losses, color=color, linewidth=width if tool == "samestep" else 2, label=label)
        axis.set_title(title)
        axis.set_xlabel("training samples seen")
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False)
    axes[0].set_ylabel("held-out loss")
    figure.savefig(path, metadata={"Date": None}, facecolor="white")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "curves.json")
    parser.add_argument("--picture", type=Path, default=ROOT / "docs" / "pictures" / "curves.svg")
    parser.add_argument("--timeout", type=float, default=300, help="seconds per run")
    options = parser.parse_args()
    machine = describe_machine()
    curves: dict[str, dict[str, Curve]] = {}
    for tool in ("ddp", "samestep"):
        curves[tool] = {}
        for processes in PROCESSES:
            curves[tool][str(processes)] = measure(tool, processes, options.timeout)
            print(f"{tool} on {processes}: last loss {curves[tool][str(processes)][-1][1]:.4f}", flush=True)
    rows = [
        [tool, str(processes), f"{curve[-1][1]:.6f}"]
        for tool, curves_of_tool in curves.items()
        for processes, curve in curves_of_tool.items()
    ]
    table = markdown_table(["tool", "processes", "last loss"], rows)
    page = f"# Loss curves on 1, 2 and 4 processes\n\n{machine_line(machine)}\n\n{EXPLANATION}\n\n{table}\n"
    save(options.output, {"machine": machine, "curves": curves}, page)
    draw(curves, options.picture)
    print(table)


if __name__ == "__main__":
    main()
