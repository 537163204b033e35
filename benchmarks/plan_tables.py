"""Predictions of published scaling tables: fitted to all rows but one, compared with that row.

The model has two numbers: the time of the work on one device, and the time of communication. Communication grows with
the bytes of a ring all-reduce, with the logarithm of the number of participants (trees, waits for the slowest rank), or
not at all (a part of the work that one process does alone: Amdahl, 1967).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from samestep.tools.plan.collectives import ring_bytes

# Growth of the time of communication with the number of participants.
GROWTH: dict[str, Callable[[int], float]] = {
    "ring": lambda number: ring_bytes(number, 1.0),
    "tree": math.log2,
}


@dataclass(frozen=True)
class Row:
    """A measurement.

    Attributes:
        devices: number of devices.
        steps: optimizer steps, relative to another row of the table.
        seconds: time of these steps.
        participants: devices or nodes that exchange gradients.
    """

    devices: int
    steps: float
    seconds: float
    participants: int


@dataclass(frozen=True)
class Table:
    """A published table.

    Attributes:
        name: model, devices and unit.
        source: where it was published.
        rows: measurements.
        is_one_process: one process has all devices, as in nn.DataParallel.
    """

    name: str
    source: str
    rows: tuple[Row, ...]
    is_one_process: bool = False


def epochs(times: dict[int, float]) -> tuple[Row, ...]:
    """Rows with a constant batch per device: on more devices, an epoch has fewer steps."""
    return tuple(Row(devices, 1 / devices, seconds, devices) for devices, seconds in times.items())


def fixed_batch(rates: dict[int, float], batch: int, devices_per_node: int) -> tuple[Row, ...]:
    """Rows with a constant global batch, from samples per second; nodes exchange gradients."""
    return tuple(Row(number, 1.0, batch / rate, number // devices_per_node) for number, rate in rates.items())


_NVIDIA = "NVIDIA DeepLearningExamples, PaddlePaddle/LanguageModeling/BERT, 8 A100 80GB per node"
TABLES = (
    Table("ResNet34 on V100, seconds of an epoch", "issue", epochs({1: 9.0, 2: 5.5, 8: 2.0})),
    Table(
        "ResNet50, nn.DataParallel, hours",
        "issue",
        tuple(Row(number, 1.0, hours, number) for number, hours in {1: 8.5, 2: 4.7, 4: 2.9}.items()),
        is_one_process=True,
    ),
    Table(
        "BERT-large, 128 tokens, mixed precision",
        _NVIDIA,
        fixed_batch({8: 4990, 16: 9581, 32: 19262, 64: 37526, 128: 71156, 256: 142087}, 65536, 8),
    ),
    Table(
        "BERT-large, 128 tokens, TF32",
        _NVIDIA,
        fixed_batch({8: 2428, 16: 4638, 32: 9445, 64: 18335, 128: 35526, 256: 69701}, 65536, 8),
    ),
    Table(
        "BERT-large, 512 tokens, mixed precision",
        _NVIDIA,
        fixed_batch({8: 1724, 16: 3305, 32: 6492, 64: 12884, 128: 25493, 256: 49307}, 32768, 8),
    ),
)
# BERT-large, another publication with two rows; sequences/s.
BERT_ENDS = {8: 4553.0, 256: 138294.0}
# ResNet-50 v1.5 on one and eight A100 80GB, images/s, 256 images per device: NVIDIA DeepLearningExamples,
# PyTorch/Classification/ConvNets/resnet50v1.5. Two rows per precision: the time of communication of the first precision
# predicts the second row of the other.
RESNET50 = {"TF32": {1: 938.0, 8: 7248.0}, "mixed precision": {1: 2470.0, 8: 16621.0}}
_RESNET50_BATCH = 256


@dataclass(frozen=True)
class Fit:
    """Time of the work of one device, and of communication per unit of its growth."""

    work: float
    communication: float
    growth: Callable[[int], float]

    def seconds(self, row: Row) -> float:
        """Return the predicted time of a row."""
        share = 1 / row.devices if row.steps == 1.0 else row.steps
        return self.work * share + self.communication * row.steps * self.growth(row.participants)


def fit(rows: Sequence[Row], growth: Callable[[int], float]) -> Fit:
    """Return the least squares of relative errors."""
    units = [Fit(1.0, 0.0, growth), Fit(0.0, 1.0, growth)]
    columns = [[unit.seconds(row) / row.seconds for row in rows] for unit in units]
    (a, b), (_, d) = (
        [sum(x * y for x, y in zip(first, second, strict=True)) for second in columns] for first in columns
    )
    e, f = (sum(column) for column in columns)
    determinant = a * d - b * b
    return Fit((e * d - b * f) / determinant, (a * f - b * e) / determinant, growth)


def left_out_errors(table: Table, growth: str) -> list[float]:
    """Return the relative error of each row, predicted from all others."""
    grows = (lambda number: 1.0) if table.is_one_process else GROWTH[growth]
    errors = []
    for number, row in enumerate(table.rows):
        others = [other for position, other in enumerate(table.rows) if position != number]
        errors.append(fit(others, grows).seconds(row) / row.seconds - 1)
    return errors


def bert_end_error() -> float:
    """Return the error of 256 devices, from 8 devices of that table and the communication of the other table."""
    table, growth = TABLES[2], GROWTH["ring"]
    other = fit(table.rows, growth)
    work = 65536 / BERT_ENDS[8] * 8
    seconds = Fit(work, other.communication, growth).seconds(Row(256, 1.0, 0.0, 32))
    return 65536 / seconds / BERT_ENDS[256] - 1


def resnet50_error() -> float:
    """Return the error of images/s on 8 devices in mixed precision."""
    first, second = (_RESNET50_BATCH * 8 / RESNET50["TF32"][8], _RESNET50_BATCH / RESNET50["TF32"][1])
    seconds = _RESNET50_BATCH / RESNET50["mixed precision"][1] + first - second
    return _RESNET50_BATCH * 8 / seconds / RESNET50["mixed precision"][8] - 1


def main() -> None:
    for table in TABLES:
        for growth in ["alone"] if table.is_one_process else GROWTH:
            shown = ", ".join(
                f"{row.devices}: {100 * error:+.1f} %"
                for row, error in zip(table.rows, left_out_errors(table, growth), strict=True)
            )
            print(f"{table.name} ({growth}): {shown}")
    print(f"BERT-large, 256 devices from 8 and the table above: {100 * bert_end_error():+.1f} %")
    print(f"ResNet-50, 8 devices in mixed precision from TF32: {100 * resnet50_error():+.1f} %")


if __name__ == "__main__":
    main()
