"""The command of an image classification tutorial at the defaults, compared with a plain PyTorch loop on one device.

Both train resnet34 on class folders of a few small images with a global batch of 16. The runs are interleaved: each
round trains every contender once with one seed. The time of an epoch includes training, evaluation and the saved
weights. The first epoch is left out, because it starts the loader processes.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
from machine import Spread, describe_machine, machine_line, markdown_table, save
from PIL import Image

HERE = Path(__file__).parent
PATTERNS = ("horizontal", "vertical", "diagonal", "checkered", "rings")
PLAIN = "plain PyTorch loop"
Epochs = list[dict[str, float]]


@dataclass(frozen=True)
class Contender:
    """One way to train.

    Attributes:
        processes: number of ranks; 0 for the plain loop.
        settings: recipe settings in addition to those of all contenders; options of the plain loop.
    """

    name: str
    processes: int
    settings: tuple[str, ...] = ()


SYNC = ("step.batch_norm=sync", "microbatches=4")
CONTENDERS = (
    Contender(PLAIN, 0, ("--threads", "1")),
    Contender("Samestep, 1 process", 1),
    Contender("Samestep, 2 processes, `step.batch_norm=sync microbatches=4`", 2, SYNC),
    Contender("Samestep, 4 processes, `step.batch_norm=sync microbatches=4`", 4, SYNC),
    Contender("Samestep, 4 processes, `microbatches=4`", 4, ("microbatches=4",)),
    Contender("Samestep, 1 process, `microbatches=8`", 1, ("microbatches=8",)),
    Contender("plain PyTorch loop, one thread per core", 0),
    Contender("Samestep, 1 process, `step.threads=2`", 1, ("step.threads=2",)),
)


def draw_images(folder: Path, per_class: int, seed: int) -> None:
    """Write JPEGs of five textures with random period, phase, colors and noise, one folder per texture."""
    random = numpy.random.default_rng(seed)
    for pattern in PATTERNS:
        (folder / pattern).mkdir(parents=True)
        for number in range(per_class):
            height, width = random.integers(72, 112, 2)
            y, x = numpy.mgrid[:height, :width]
            period, phase = random.uniform(9, 22), random.uniform(0, 2 * math.pi, 2)
            center = random.uniform(0.2, 0.8, 2) * (height, width)
            wave = {
                "horizontal": numpy.sin(2 * math.pi * y / period + phase[0]),
                "vertical": numpy.sin(2 * math.pi * x / period + phase[0]),
                "diagonal": numpy.sin(2 * math.pi * (x + y) / (1.4 * period) + phase[0]),
                "checkered": numpy.sin(2 * math.pi * x / period + phase[0])
                * numpy.sin(2 * math.pi * y / period + phase[1]),
                "rings": numpy.sin(2 * math.pi * numpy.hypot(y - center[0], x - center[1]) / period + phase[0]),
            }[pattern]
            dark, bright = random.uniform(0, 120, 3), random.uniform(100, 255, 3)
            pixels = dark + (wave[..., None] + 1) / 2 * (bright - dark) + random.normal(0, 12, (height, width, 3))
            image = Image.fromarray(pixels.clip(0, 255).astype(numpy.uint8))
            image.save(folder / pattern / f"{number:03}.jpg", quality=90)


def run(contender: Contender, options: argparse.Namespace, data: Path, folder: Path, seed: int) -> Epochs:
    """Train once, and return accuracy and seconds of each epoch.

    Raises:
        SystemExit: the run failed.
    """
    if contender.processes == 0:
        sizes = ["--image-size", options.image_size, "--epochs", options.epochs, "--batch-size", options.batch_size]
        arguments = ["--data", data, "--output", folder, "--model", options.model, "--lr", options.lr, "--seed", seed]
        output = _call([sys.executable, HERE / "tutorial_plain.py", *arguments, *sizes, *contender.settings], folder)
        return [json.loads(line) for line in output.splitlines()]
    settings = [
        f"data.options.path={data / 'train'}",
        f"data.options.evaluation_path={data / 'val'}",
        f"data.options.image_size={options.image_size}",
        f"model.name=torchvision:{options.model}",
        f"batch_size={options.batch_size}",
        f"epochs={options.epochs}",
        f"optimizer.options.lr={options.lr}",
        "schedule.warmup_epochs=0",
        f"step.seed={seed}",
        *contender.settings,
    ]
    samestep = [sys.executable, "-m", "samestep", "train", "images", "--name", "a", "--device", "cpu"]
    _call([*samestep, "--processes", contender.processes, *settings], folder)
    return _epochs_of(folder / "runs" / "a" / "events.jsonl")


def _call(command: list[Any], folder: Path) -> str:
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"error: exit status {done.returncode} of {' '.join(words)}\n{done.stdout}\n{done.stderr}")
    return done.stdout


def _epochs_of(file: Path) -> Epochs:
    """Return accuracy and seconds of each epoch; an epoch ends when the next one can begin."""
    events = [json.loads(line) for line in file.read_text().splitlines()]
    evaluations = [event for event in events if event["event"] == "evaluation"]
    began = next(event["time"] for event in events if event["event"] == "step")
    epochs = []
    for event in evaluations:
        epochs.append({"accuracy": event["accuracy"], "seconds": event["time"] - began})
        began = event["time"]
    return epochs


def seconds_of(epochs: Epochs) -> float:
    """Return the median time of an epoch after the first."""
    return statistics.median(epoch["seconds"] for epoch in epochs[1:])


def rows_of(results: dict[str, list[Epochs]], samples: int) -> list[list[str]]:
    rows = []
    plain = [seconds_of(epochs) for epochs in results[PLAIN]]
    for name, runs in results.items():
        accuracies = [100 * epochs[-1]["accuracy"] for epochs in runs]
        seconds = [seconds_of(epochs) for epochs in runs]
        ratio = Spread.of([own / other for own, other in zip(seconds, plain, strict=True)])
        spread = f"{statistics.mean(accuracies):.1f} ({min(accuracies):.1f} to {max(accuracies):.1f})"
        speed = samples / statistics.median(seconds)
        times = [f"{statistics.median(seconds):.2f}", f"{ratio.median:.2f} ({ratio.least:.2f} to {ratio.most:.2f})"]
        rows.append([name, spread, f"{speed:.0f}", *times])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="one round for each seed")
    parser.add_argument("--contenders", type=int, nargs="+", default=list(range(len(CONTENDERS))), help="by number")
    parser.add_argument("--train", type=int, default=24, help="training images per class")
    parser.add_argument("--validation", type=int, default=24, help="validation images per class")
    parser.add_argument("--model", default="resnet34")
    parser.add_argument("--image-size", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--output", type=Path, default=HERE / "results" / "tutorial.json")
    options = parser.parse_args()
    contenders = [CONTENDERS[number] for number in sorted({0, *options.contenders})]
    machine = describe_machine()
    results: dict[str, list[Epochs]] = {contender.name: [] for contender in contenders}
    with tempfile.TemporaryDirectory() as name:
        data = Path(name) / "data"
        draw_images(data / "train", options.train, seed=1)
        draw_images(data / "val", options.validation, seed=2)
        for turn, seed in enumerate(options.seeds):
            for contender in contenders if turn % 2 == 0 else contenders[::-1]:
                with tempfile.TemporaryDirectory() as folder:
                    epochs = run(contender, options, data, Path(folder), seed)
                results[contender.name].append(epochs)
                accuracy, seconds = 100 * epochs[-1]["accuracy"], seconds_of(epochs)
                print(f"seed {seed}  {contender.name:<50} {accuracy:5.1f} %  {seconds:6.2f} s an epoch", flush=True)
            write(options, machine, results)
    print(options.output.with_suffix(".md").read_text())


def write(options: argparse.Namespace, machine: dict[str, Any], results: dict[str, list[Epochs]]) -> None:
    header = ["", "accuracy, % (range)", "images/s", "seconds per epoch", "ratio to the plain loop (range)"]
    table = markdown_table(header, rows_of(results, len(PATTERNS) * (options.train + options.validation)))
    text = (
        f"`{options.model}` on five classes of {options.train} images ({options.validation} for validation), "
        f"{options.image_size} pixels, batch size {options.batch_size},\n{options.epochs} epochs, seeds "
        f"{', '.join(map(str, options.seeds))}. One thread per process, except where named. "
        "Ratios are taken\nseed by seed."
    )
    page = "\n\n".join(["# The recipe of a tutorial, and a plain PyTorch loop", machine_line(machine), text, table])
    settings = {key: value for key, value in vars(options).items() if key != "output"}
    save(options.output, {"machine": machine, "settings": settings, "results": results}, page + "\n")


if __name__ == "__main__":
    main()
