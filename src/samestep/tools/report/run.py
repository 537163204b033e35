"""A run as its folder tells it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy

from samestep.errors import InputError
from samestep.recipes.parse import read_yaml
from samestep.tools.report.clock import Clock
from samestep.tools.report.event_log import DATA_SHARE, EventLog
from samestep.tools.report.json_lines import finite, number
from samestep.tools.report.ranks import RankLog, read_ranks
from samestep.tools.report.saved import SavedCheckpoint, read_saved


@dataclass(frozen=True)
class Run:
    """Everything of one run that a report shows.

    Attributes:
        name: what it is called among the runs of a report.
        recipe: as plain data; `recipe_text` is the YAML.
        starts: one entry for each time the run was started, as in `environment.json`.
        remarks: what of the folder could not be read.
    """

    folder: Path
    name: str
    recipe: dict[str, Any]
    recipe_text: str
    starts: list[dict[str, Any]]
    events: EventLog
    ranks: list[RankLog]
    checkpoints: list[SavedCheckpoint]
    remarks: list[str]

    @cached_property
    def clock(self) -> Clock:
        """Seconds of the run from times of day."""
        alive = [moment for log in self.ranks for span in log.spans for moment in (span.begin, span.end)]
        signs = numpy.concatenate([self.events.times, numpy.array(alive)])
        return Clock(signs, [(heard, goes_on) for heard, goes_on, _ in self.events.resumed])

    @property
    def state(self) -> str:
        """`finished`, `stopped`, or `not ended`: it runs still, or was killed."""
        if self.events.end is None:
            return "not ended"
        return "stopped" if self.events.end.get("stopped") is True else "finished"

    @property
    def best(self) -> dict[str, Any] | None:
        """The evaluation that was the best; the last one where none says that it is."""
        found = list(self.events.evaluations.values())
        return next((event for event in reversed(found) if event.get("is_best") is True), found[-1] if found else None)

    @property
    def last(self) -> dict[str, Any] | None:
        """The last evaluation."""
        return self.events.evaluations[max(self.events.evaluations)] if self.events.evaluations else None

    @property
    def deciding(self) -> str | None:
        """The number of an evaluation that says what is best: the first metric; the loss where there is none."""
        losses = ("train_loss", "loss", "loss_")  # the last begins the names of a loss's parts
        names = [name for name in self.events.metrics if not name.startswith(losses)]
        return next((name for name in (*names, "loss") if name in self.events.metrics), None)

    def evaluated(self, event: dict[str, Any] | None) -> dict[str, float]:
        """The loss and the metrics of an evaluation."""
        values = {name: number((event or {}).get(name)) for name in self.events.metrics}
        return {name: value for name, value in values.items() if value is not None}

    def typical(self, curve: str) -> float | None:
        """The median of a curve of steps."""
        found = self.events.curves[curve].series(self.clock).extremes()
        return None if found is None else found["median"]

    def data_share(self) -> float | None:
        """The mean share of a step that was spent waiting for data."""
        found = self.events.curves[DATA_SHARE].series(self.clock).extremes()
        return None if found is None else found["mean"]


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """The runs in these folders, called by the folders' names, or by the whole paths where two have one name.

    Raises:
        InputError: one is no run, cannot be read, or is given twice.
    """
    real = [folder.resolve() for folder in folders]
    for place, folder in enumerate(real):
        if folder in real[:place]:
            raise InputError(f"{folders[place]} is given twice", rule="each run once", do="leave one of them out")
    names = [folder.name for folder in real]
    unique = len(set(names)) == len(names)
    return [read_run(folder, name if unique else str(folder)) for folder, name in zip(folders, names, strict=True)]


def read_run(folder: Path, name: str) -> Run:
    """One run.

    Raises:
        InputError: it is none, or cannot be read.
    """
    path = folder / "recipe.yaml"
    if not path.is_file():
        raise InputError(f"{folder} is not a run", rule="a run directory has a recipe.yaml", do="look at the path")
    try:
        recipe = dict(read_yaml(path))
        events = EventLog(folder / "events.jsonl", finite(recipe.get("batch_size")))
        ranks = read_ranks(folder / "ranks")
        starts, remarks = _starts(folder / "environment.json")
        lost = {"events.jsonl": events.unreadable, **{f"ranks/rank-{log.rank}.jsonl": log.unreadable for log in ranks}}
        remarks += [_passed_over(file, count) for file, count in lost.items() if count]
        text, checkpoints = path.read_text(encoding="utf-8"), read_saved(folder / "checkpoints")
    except OSError as error:
        raise InputError(
            f"{error.filename or folder} cannot be read: {error.strerror}",
            rule="a report reads all of a run",
            do="look at who may read it",
        ) from error
    return Run(folder, name, recipe, text, starts, events, ranks, checkpoints, remarks)


def _starts(path: Path) -> tuple[list[dict[str, Any]], list[str]]:
    if not path.is_file():
        return [], []
    try:
        found = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        return [], [f"{path.name} cannot be read: {error}"]
    entries = found if isinstance(found, list) else [found]
    return [entry for entry in entries if isinstance(entry, dict)], []


def _passed_over(file: str, count: int) -> str:
    lines = "1 line" if count == 1 else f"{count} lines"
    return f"{lines} of {file} could not be read and {'is' if count == 1 else 'are'} left out"
