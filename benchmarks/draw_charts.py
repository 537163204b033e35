"""Charts of the documentation from files in `results`: `digits-curves.svg`, `exactness.svg` in `docs/pictures`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

HERE = Path(__file__).parent
RESULTS = HERE / "results"
PICTURES = HERE.parent / "docs" / "pictures"
GPU = RESULTS / "gpu" / "2026-11-28-NVIDIA-H200.json"
COLORS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728")
WIDTHS = (7.0, 5.0, 3.0, 1.2)  # lines that cover one another stay visible
MODELS = {
    "gpt-8": "GPT, batch 8",
    "gpt-32": "GPT, batch 32",
    "resnet-16": "ResNet-18, batch 16",
    "resnet-64": "ResNet-18, batch 64",
    "unet-16": "U-Net, batch 16",
}


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def draw_curves() -> Figure:
    """Return two panels with the losses of each number of processes."""
    results = read(RESULTS / "digits_curves.json")["results"]
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    titles = {"DDP": "DistributedDataParallel by hand", "Samestep": "samestep run, script unchanged"}
    for panel, (name, title) in zip(panels, titles.items(), strict=True):
        lines = [line for line in results if line["name"] == name]
        for line, color, width in zip(lines, COLORS, WIDTHS, strict=True):
            epochs = range(1, len(line["losses"]) + 1)
            label = f"{line['processes']} process{'es' if line['processes'] > 1 else ''}"
            panel.plot(epochs, line["losses"], color=color, linewidth=width, label=label)
        panel.set(title=title, xlabel="epoch", xticks=list(epochs), ylim=(0, None))
        panel.legend(frameon=False)
    panels[0].set_ylabel("test loss")
    return figure


def costs() -> list[tuple[str, float, str]]:
    """Return label, ratio and color of each bar."""
    cases = {case["case"]: case["rows"] for case in read(RESULTS / "plain_loop.json")["results"]}
    bars = []
    for case, label in MODELS.items():
        row = next(row for row in cases[case] if row["contender"] == "parallel" and row["processes"] == 2)
        bars.append((f"fast, 2 processes: {label}", row["ratio"]["median"], COLORS[0]))
    for case, label in (("exact-gpt-8", "GPT, batch 8"), ("exact-resnet-16", "ResNet-18, batch 16")):
        for row in cases[case]:
            if row["contender"] == "parallel, exact":
                bars.append((f"exact, {row['processes']} processes: {label}", row["ratio"]["median"], COLORS[1]))
    speed = next(check for check in read(GPU)["checks"] if check["check"] == "speed")["numbers"]
    for count in (1, 8):
        ratio = speed[f"ResNet-50, exact, microbatches={count}"]["ratio"]["loop with clipping and item"]
        plural = "es" if count > 1 else ""
        bars.append((f"exact, {count} microbatch{plural} on one GPU: ResNet-50", ratio, COLORS[3]))
    return bars


def draw_costs() -> Figure:
    """Return horizontal bars on a logarithmic axis that begins at the speed of the comparison."""
    labels, ratios, colors = zip(*reversed(costs()), strict=True)
    figure = Figure(figsize=(8, 3.8), layout="constrained")
    panel: Axes = figure.subplots()
    panel.barh(labels, [ratio - 0.5 for ratio in ratios], left=0.5, color=colors)
    panel.axvline(1, color="black", linewidth=1)
    for number, ratio in enumerate(ratios):
        panel.text(ratio * 1.04, number, f"{ratio:.2f}" if ratio < 10 else f"{ratio:.0f}", va="center")
    panel.set(xscale="log", xlim=(0.5, 45), xlabel="time of a step, relative to DDP (CPUs) or a plain loop (GPU)")
    panel.set_xticks([0.5, 1, 2, 5, 10, 20], labels=["0.5", "1", "2", "5", "10", "20"])
    panel.minorticks_off()
    return figure


def main() -> None:
    mpl.rcParams["svg.hashsalt"] = "samestep"  # the same file from the same numbers
    for name, draw in (("digits-curves", draw_curves), ("exactness", draw_costs)):
        draw().savefig(PICTURES / f"{name}.svg", metadata={"Date": None}, facecolor="white")


if __name__ == "__main__":
    main()
