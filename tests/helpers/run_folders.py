"""Synthetic directories of runs, for tests of tools that read runs."""

import json
import math
from pathlib import Path
from typing import Any

import yaml
from PIL import Image

START = 1_795_300_000.0
PER_EPOCH = 10


def step_event(number: int, time: float, **changes: Any) -> dict[str, Any]:
    """Return the event of one step."""
    return {
        "time": time,
        "event": "step",
        "step": number,
        "epoch": (number - 1) // PER_EPOCH,
        "step_in_epoch": (number - 1) % PER_EPOCH + 1,
        "steps_in_epoch": PER_EPOCH,
        "loss": 2.0 * math.exp(-number / 50) + 0.1 * math.sin(number),
        "lr": 0.1,
        "grad_norm": 1.0 + 0.5 * math.cos(number),
        "skipped": False,
        "samples_per_second": 64.0,
        "data_seconds": 0.05,
        **changes,
    }


def events_of(steps: int) -> list[dict[str, Any]]:
    """Return events of steps half a second apart, of an evaluation after each epoch, and of the end."""
    events: list[dict[str, Any]] = []
    for number in range(1, steps + 1):
        time = START + 0.5 * number
        events.append(step_event(number, time))
        if number % PER_EPOCH == 0:
            events.append(
                {
                    "time": time + 0.1,
                    "event": "evaluation",
                    "step": number,
                    "epoch": number // PER_EPOCH,
                    "epochs": steps // PER_EPOCH,
                    "train_loss": 2.0 * math.exp(-number / 50),
                    "is_best": True,
                    "samples_per_second": 60.0,
                    "loss": 1.9 * math.exp(-number / 50),
                    "samples": 100,
                    "accuracy": 1.0 - math.exp(-number / 20),
                }
            )
    last = START + 0.5 * steps + 0.2
    return [*events, {"time": last, "event": "end", "stopped": False, "step": steps, "seconds": 0.5 * steps}]


def make_run(folder: Path, events: list[dict[str, Any]], **recipe: Any) -> Path:
    """Write a run with events, recipe keys, one start and one checkpoint."""
    checkpoint = folder / "checkpoints" / f"step-{len(events):09}"
    checkpoint.mkdir(parents=True)
    (checkpoint / "model.safetensors").write_bytes(b"m" * 3000)
    (checkpoint / "optimizer.safetensors").write_bytes(b"o" * 1000)
    (folder / "checkpoints" / "best").symlink_to(checkpoint.name)
    data = {"epochs": 3, "batch_size": 32, "optimizer": {"name": "sgd", "options": {"lr": 0.1}}, **recipe}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(data, sort_keys=False), encoding="utf-8")
    start = {
        "started": "2026-11-21T22:26:40+0000",
        "samestep": "0.1.0",
        "processes": 2,
        "strategy": "ddp",
        "cuda": None,
    }
    (folder / "environment.json").write_text(json.dumps([start]), encoding="utf-8")
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events), encoding="utf-8")
    return folder


def draw_predictions(run: Path, right: str, predicted: str) -> None:
    """Write what `samestep eval --report` writes about one sample."""
    overlays = run / "evaluation" / "overlays"
    overlays.mkdir(parents=True)
    Image.new("RGB", (8, 8), "red").save(overlays / "sample-000003.png")
    samples = [{"sample": 3, "class": right, "prediction": predicted}]
    (run / "evaluation" / "samples.json").write_text(json.dumps(samples), encoding="utf-8")
