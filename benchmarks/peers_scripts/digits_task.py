"""Data, model and report of the scripts for `peers.py`."""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import TensorDataset

from samestep.torchvision_import import make_torchvision_importable

make_torchvision_importable()  # Lightning and Transformers import torchvision if it is installed

SEED = 0
BATCH_SIZE = 64  # over all processes
EPOCHS = 2
HELD_OUT = 361  # not divisible by 2, 3 or 4
CLASSES = 10


def parse() -> argparse.Namespace:
    """Parse the arguments that all scripts have in common."""
    parser = argparse.ArgumentParser()
    parser.add_argument("output", type=Path, help="folder for the reports")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--dropout", type=float, nargs="+", default=[0.2], help="one training each")
    parser.add_argument("--reduction", choices=["exact", "fast"], default="exact", help="Samestep only")
    parser.add_argument("--drop-last", action="store_true", help="drop incomplete batches in training; Accelerate only")
    return parser.parse_args()


def build_datasets() -> tuple[TensorDataset, TensorDataset]:
    """Return the training and the held-out images `(1, 8, 8)` with their labels."""
    images, labels = load_digits(return_X_y=True)
    split = train_test_split(images / 16, labels, test_size=HELD_OUT, random_state=0, stratify=labels)
    train, held_out, train_labels, held_out_labels = (torch.as_tensor(part) for part in split)
    return (
        TensorDataset(train.float().reshape(-1, 1, 8, 8), train_labels),
        TensorDataset(held_out.float().reshape(-1, 1, 8, 8), held_out_labels),
    )


def build_model(dropout: float) -> nn.Sequential:
    """Return a small convolutional net. The caller sets the seed."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(dropout),
        nn.Linear(32 * 4 * 4, CLASSES),
    )


def build_optimizer(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def report(
    output: Path,
    model: nn.Sequential,
    *,
    processes: int,
    steps: int,
    samples: int,
    accuracy: float,
    **details: float,
) -> None:
    """Write the result of a training as JSON, and its weights next to it. Call on one process.

    Args:
        output: folder; the file name is the dropout of the model.
        model: trained model.
        processes: number of processes according to the tool.
        steps: optimizer steps.
        samples: samples that the tool's evaluation counted.
        accuracy: result of the tool's evaluation.
        details: further values of the report.
    """
    weights = {name: tensor.detach().contiguous() for name, tensor in model.state_dict().items()}
    digest = hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in weights.values())).hexdigest()
    dropout = next(module.p for module in model if isinstance(module, nn.Dropout))
    torch.save(weights, output / f"{dropout}.pt")
    values = {
        "processes": processes,
        "sha256": digest,
        "steps": steps,
        "samples": samples,
        "accuracy": accuracy,
        **details,
    }
    (output / f"{dropout}.json").write_text(json.dumps(values))
