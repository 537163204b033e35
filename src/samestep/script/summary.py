"""Summary of an unchanged script: what was divided, what was whole and why, how data were read, and advice."""

from __future__ import annotations

import json
import logging
import os
import re
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from samestep.checkpoint.files import write_atomically
from samestep.distributed.logging import logger
from samestep.distributed.streams import report_line
from samestep.errors import RunError
from samestep.script.loaders import Reading
from samestep.script.records import Records, lines_of_calls
from samestep.view.in_step import Line

FILE = "summary.json"
_WITH_LINE = re.compile(r"[^\s:]+:\d+[: ]")  # messages about a line of the script


@dataclass
class Summary:
    """What is divided in one rank.

    Attributes:
        readings: how the loaders of the script read.
        size: number of ranks.
        has_host_times: calls are computed on an accelerator, so times are those of the host.
        explains: whether the lines have details.
        seeds: line and value of the last seed of each function that seeds a global generator.
        writer: has the number of written files as `files`.
        path: file that receives the summary during the run, or None.
        records: times and lines of the calls.
    """

    readings: Mapping[Hashable, Reading]
    size: int = 1
    has_host_times: bool = False
    explains: bool = False
    seeds: Mapping[str, tuple[Line, str]] = field(default_factory=dict)
    writer: Any = None
    path: Path | None = None

    def __post_init__(self) -> None:
        self.records = Records(None if self.path is None else self.write)
        self._messages: dict[str, None] = {}
        self._start = os.getcwd()

    @contextmanager
    def messages(self) -> Iterator[None]:
        """Collect messages about lines of the script, inside the block."""
        handler = logging.Handler()
        handler.emit = self._note_message  # type: ignore[method-assign]
        logger.addHandler(handler)
        try:
            yield
        finally:
            logger.removeHandler(handler)

    def _note_message(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if _WITH_LINE.match(text):
            self._messages[text] = None

    def lines(self) -> Iterator[str]:
        """Yield the lines of the summary."""
        records = list(self.records.calls.values())
        if self.size > 1 and not records:
            yield "no calls to divide: the script has called no module with parameters"
        yield from lines_of_calls(records)
        yield from self._times()
        yield from self.data_lines()
        trainings = [record for record in records if record.has_gradients]
        yield from self.records.advice(self.size)
        divided = [record.rows for record in trainings if record.way == "divided"]
        if divided and self.size > 1:
            rows = max(divided)
            yield (
                f"the batch size is global: {rows:,} rows are {-(-rows // self.size):,} on each process; "
                f"{rows * self.size:,} would need the memory per process that {rows:,} need on one process"
            )

    @property
    def speed_up(self) -> float | None:
        """Largest expected quotient of the times on one process and on all ranks; None without times."""
        divided = self.records.divided_seconds
        run = self.records.run_seconds
        if run <= 0 or self.has_host_times:
            return None
        return (divided * self.size + max(run - divided, 0.0)) / max(run, divided)

    def _times(self) -> Iterator[str]:
        records = self.records
        if self.size == 1 or not records.model_seconds:
            return
        if not records.divided_seconds:
            yield "no time of model calls was divided: not faster than one process"
            return
        share = records.divided_seconds / records.model_seconds
        text = f"{share:.0%} of the time of model calls was divided"
        if self.speed_up is None:
            yield f"{text} (by the clock of the host)"
            return
        of_run = min(records.model_seconds / records.run_seconds, 1.0)
        yield f"{text}; calls took {of_run:.0%} of the run: at most {self.speed_up:.1f} times as fast as one process"

    def data_lines(self) -> Iterator[str]:
        """Yield lines about how data sets are read."""
        counts: dict[tuple[str, str], Counter[str]] = {}
        for reading in self.readings.values():
            if reading.how:
                count = counts.setdefault((reading.dataset, reading.how), Counter())
                count.update(reading.state.samples)
        for (dataset, how), count in counts.items():
            samples = (
                f" (rank 0: {count['read']:,} of {count['needed']:,})" if count["needed"] else ""
            )
            yield f"{dataset}: {how}{samples}"
        drawing = dict.fromkeys(
            reading.dataset for reading in self.readings.values() if reading.state.draws
        )
        if drawing:
            yield (
                f"{', '.join(drawing)}: random numbers of a sample depend on the epoch and its index, equal on every "
                "number of processes, and are not those of plain Python"
            )

    def explanation(self) -> Iterator[str]:
        """Yield lines about each kind of calls, and about each line of the script that was treated in another way."""
        if self.records.calls:
            yield "calls, by line of the script:"
        for record in sorted(self.records.calls.values(), key=lambda one: -one.seconds):
            reason = f": {record.reason}" if record.reason else ""
            mode = "" if record.has_gradients else " without gradients"
            yield (
                f"  {self._place(record.line)} {record.module}: {record.calls:,} {record.way}{mode}, "
                f"{record.seconds:.2f} s, largest batch {record.rows:,}{reason}"
            )
        for backwards, steps in self.records.accumulation.most_common(1):
            yield f"  backwards before a step: {backwards} ({steps:,} steps)"
        readings = [reading for reading in self.readings.values() if reading.how]
        treated = [
            f"{self._place(one.line)} DataLoader of {one.dataset}: {one.how}" for one in readings
        ]
        treated += [
            f"{self._place(line)} {name}({value})" for name, (line, value) in self.seeds.items()
        ]
        treated += self._messages
        if self.writer is not None and self.writer.files:
            treated.append(f"files that rank 0 alone has written: {self.writer.files:,}")
        if treated:
            yield "lines of the script that run in another way on several processes:"
        yield from (f"  {line}" for line in dict.fromkeys(treated))

    def _place(self, line: Line) -> str:
        file, number = line
        relative = os.path.relpath(file, self._start)
        return f"{file if relative.startswith('..') else relative}:{number}"

    def report(self) -> None:
        """Print the lines on standard error, and write the file."""
        lines = [*self.lines(), *(self.explanation() if self.explains else ())]
        for line in dict.fromkeys(lines):
            report_line(f"samestep: {line}")
        self.write()

    def write(self) -> None:
        """Write the file, if there is one; after an error not again."""
        if self.path is None:
            return
        records = self.records
        content = {
            "processes": self.size,
            "lines": list(self.lines()),
            "explanation": list(self.explanation()),
            "calls": [asdict(record) for record in records.calls.values()],
            "seconds": {
                "divided": records.divided_seconds,
                "calls": records.model_seconds,
                "run": records.run_seconds,
            },
            "speed_up": self.speed_up,
            "accumulation": dict(records.accumulation),
        }
        try:
            write_atomically(self.path, json.dumps(content, indent=1) + "\n")
        except RunError as error:
            self.path = None
            report_line(f"samestep: {error}")
