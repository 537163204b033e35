"""Loss curves of one recipe with three groups of batch norm: the whole batch, each microbatch, and all microbatches.

Needs matplotlib (`pip install -c constraints.txt -e '.[dev]'`) and a few minutes.
"""

import argparse
import json
import subprocess
from pathlib import Path

# Dropout masks depend on the number of microbatches, so dropout is off; all other settings are those of the recipe.
SETTINGS = ["batch_size=16", "model.options.dropout=0", "optimizer.options.lr=0.02"]
RUNS = {
    "whole batch": ("1", ["microbatches=1"]),
    "8 microbatches, each by itself": ("2", ["microbatches=8", "step.batch_norm=microbatch"]),
    "8 microbatches, sync": ("2", ["microbatches=8", "step.batch_norm=sync"]),
}
STYLES = {
    "whole batch": ("black", "-", 4.0),
    "8 microbatches, each by itself": ("tab:red", "-", 2.0),
    "8 microbatches, sync": ("tab:cyan", "--", 2.0),
}
STEPS = 60

Events = list[dict[str, float]]


def train(name: str, epochs: int, folder: Path) -> Path:
    """Train once and return the run directory."""
    processes, settings = RUNS[name]
    command = ["samestep", "train", "digits", "--processes", processes, "--runs", str(folder), "--json"]
    completed = subprocess.run(
        [*command, "--set", f"epochs={epochs}", *SETTINGS, *settings], check=True, stdout=subprocess.PIPE, text=True
    )
    return Path(json.loads(completed.stdout)["run"])


def events(run: Path, kind: str) -> Events:
    """Return the events of one kind."""
    lines = (run / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == kind]


def plot(runs: dict[str, Path], picture: Path) -> None:
    """Plot the training loss of the first steps and of all epochs."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    first, whole = figure.subplots(1, 2)
    for name, run in runs.items():
        color, line, width = STYLES[name]
        processes, _ = RUNS[name]
        style = {"color": color, "linestyle": line, "linewidth": width}
        steps, epochs = events(run, "step")[:STEPS], events(run, "evaluation")
        first.plot([step["step"] for step in steps], [step["loss"] for step in steps], **style)
        label = f"{name} ({processes} process{'es' if processes != '1' else ''})"
        whole.plot(
            [epoch["epoch"] for epoch in epochs], [epoch["train_loss"] for epoch in epochs], label=label, **style
        )
    first.set(title="loss of each batch", xlabel="step")
    whole.set(title="training loss of each epoch", xlabel="epoch", yscale="log")
    whole.legend()
    for panel in (first, whole):
        panel.grid(alpha=0.3)
    figure.savefig(picture, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder of the three runs")
    parser.add_argument("--picture", type=Path, default=Path("batch-norm-curves.png"))
    options = parser.parse_args()
    runs = {name: train(name, options.epochs, options.runs) for name in RUNS}
    plot(runs, options.picture)
    print(f"{'':26}{'train loss':>12}{'loss':>10}{'accuracy':>10}")
    for name, run in runs.items():
        last = events(run, "evaluation")[-1]
        print(f"{name:26}{last['train_loss']:12.4f}{last['loss']:10.4f}{last['accuracy']:10.2%}")


if __name__ == "__main__":
    main()
