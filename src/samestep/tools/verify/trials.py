"""Trials of a subject under chosen conditions, each combination once, and their records."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Any

from samestep.config import DeviceKind, Recipe
from samestep.errors import RunError
from samestep.launcher.failure import Failure
from samestep.launcher.launch import LaunchConfig, RankError
from samestep.number_text import plural
from samestep.tools.launch import run_on_ranks
from samestep.tools.verify.texts import restore_files

PLAIN = 0  # number of processes of plain Python: one process, in which nothing is divided

Note = Mapping[str, Any]


@dataclass(frozen=True)
class Record:
    """Record of one trial."""

    processes: int
    folder: Path  # folder of the trial, with notes, tensors and output
    events: tuple[tuple[Note, ...], ...]  # notes of each rank in order
    failure: Failure | None = None
    label: str = ""  # description, if the trial was killed and resumed
    resumed_at: int | None = None  # first step after the resumption

    def notes(self, kind: str, rank: int = 0) -> list[Note]:
        """Return the notes of one rank of one kind."""
        if self.events:
            return [note for note in self.events[rank] if note["kind"] == kind]
        return []

    @cached_property
    def steps(self) -> dict[int, tuple[Note, ...]]:
        """Notes of all ranks on the steps that every rank finished, by number."""
        ranks = range(len(self.events))
        by_rank = [{note["step"]: note for note in self.notes("step", rank)} for rank in ranks]
        shared = set(by_rank[0]).intersection(*by_rank[1:]) if by_rank else set()
        return {number: tuple(steps[number] for steps in by_rank) for number in sorted(shared)}

    def completed(self) -> Record:
        """Return this record; a run that failed gives no results to compare with.

        Raises:
            RankError: the run failed.
        """
        if self.failure is not None:
            raise RankError(self.failure)
        return self

    @property
    def modules(self) -> list[Note]:
        """Modules that the script gives to `samestep.parallel`, in order, with their options."""
        return self.notes("module")

    @property
    def is_exact(self) -> bool:
        """Whether the script promises equal bits."""
        reductions = {note["options"].get("reduction") for note in self.modules}
        return reductions == {"exact"}

    @property
    def end(self) -> Note:
        """Note of rank 0 on its end, regular or not; empty if the rank was killed."""
        return next(iter([*self.notes("end"), *self.notes("unfinished")]), {})

    @cached_property
    def texts(self) -> dict[str, list[str]]:
        """Lines that rank 0 printed, and those of the files that it has written, by quantity."""
        printed = []
        file = self.folder / "output-0.log"
        if file.exists():
            printed = file.read_text(encoding="utf-8", errors="replace").splitlines()
        return {"printed": printed, "files": list(self.end.get("files", []))}


def described(processes: int) -> str:
    """Return a number of processes as text."""
    if processes == PLAIN:
        return "plain Python"
    return plural(processes, "process")


def read_record(folder: Path, processes: int, failure: Failure | None = None) -> Record:
    """Read the record of a trial; a line that a killed rank did not complete is dropped."""
    events: list[tuple[Note, ...]] = []
    for rank in range(processes or 1):
        file = folder / f"rank-{rank}.jsonl"
        lines = []
        if file.exists():
            lines = file.read_text(encoding="utf-8").split("\n")[:-1]
        events.append(tuple(map(json.loads, lines)))
    return Record(processes, folder, tuple(events), failure)


def join(first: Record, second: Record, label: str) -> Record:
    """Join the records of a killed trial and of its resumption; of both, the second counts."""
    begin = min(second.steps, default=max(first.steps, default=0) + 1)
    events: list[tuple[Note, ...]] = []
    for rank in range(second.processes):
        # Rank 0 stands in for a rank that the first trial lacks: all ranks have equal notes.
        before = first.notes("step", min(rank, first.processes - 1))
        earlier = (note for note in before if note["step"] < begin)
        events.append((*earlier, *second.events[rank]))
    return Record(second.processes, second.folder, tuple(events), second.failure, label, begin)


def steps_before(folder: Path, begin: Mapping[str, str]) -> int:
    """Return the steps of a killed trial before its resumption, by hashes of the weights."""
    steps = read_record(folder, 1).notes("step")
    equal = (note["step"] for note in reversed(steps) if note["weights"].items() <= begin.items())
    return int(next(equal, 0))


@dataclass(frozen=True, kw_only=True)
class Subject:
    """Recipe or script under verification."""

    name: str
    recipe: Recipe | None = None
    script: Path | None = None
    arguments: tuple[str, ...] = ()  # command-line arguments of the script
    is_unchanged: bool = False  # the script does not import Samestep: it runs as by `samestep run`


@dataclass(frozen=True, kw_only=True)
class Interventions:
    """Changes made for an experiment; a quantity that is held constant cannot be the cause."""

    double: bool = False
    perturbed: bool = False  # the weights move by a unit in the last place before each step
    single_thread: bool = False
    # Of the parameter groups, by step from 1.
    learning_rates: tuple[tuple[float, ...], ...] | None = None
    seed_generators: bool = False  # generators of the model are seeded before each of its calls
    without_norms: bool = False  # layers with statistics of a batch are in evaluation mode
    eval_mode: bool = False  # the model is in evaluation mode
    # Read every sample and collate every batch twice; record those that differ.
    repeat_samples: bool = False
    reads_alone: bool = False  # each rank reads whole batches, without the others
    other_orders: bool = False  # each rank has its own order of sets and of directory entries

    def __str__(self) -> str:
        changed = (name for name, value in vars(self).items() if value not in (None, False))
        return ", ".join(name.replace("_", " ") for name in changed)


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """Settings of all trials of a verification."""

    steps: int | None = None  # None runs a script to the end
    interventions: Interventions = field(default_factory=Interventions)
    device: DeviceKind = "auto"  # of a recipe
    requires_bits: bool | None = None  # None: as the subject promises
    accuracy: float = 0.0  # of gradients that ranks exchange in fewer bits than the weights have
    patience: float = 120.0  # seconds without progress after which a run ends


@dataclass(frozen=True, kw_only=True)
class Trial(Conditions):
    """One run of the subject with a record."""

    folder: Path  # output folder; each rank writes `rank-R.jsonl`
    processes: int
    reference: Path | None = None  # folder of the trial with tensors; None writes them
    kill_at: int | None = None  # the last rank kills itself in this step
    killed: Path | None = None  # folder of the killed trial that this one resumes

    @property
    def scratch(self) -> Path:
        """Folder of a script's checkpoints, which also replaces `{folder}` in its arguments."""
        return (self.killed or self.folder) / "scratch"


class TrialRunner:
    """Runs the trials of one verification in subfolders of `folder`.

    `progress` gets a text before each trial.
    """

    def __init__(
        self,
        subject: Subject,
        conditions: Conditions,
        folder: Path,
        *,
        preload: tuple[str, ...],
        progress: Callable[[str], None],
    ) -> None:
        self.subject = subject
        self.conditions = conditions
        self._folder = folder
        self._preload = preload
        self._progress = progress
        self._numbers = count(1)
        self._records: dict[tuple[int, Interventions, Path | None], Record] = {}

    def run(self, processes: int, reference: Record | None = None, **changes: Any) -> Record:
        """Return the record of a run under the interventions of all trials and `changes` of these.

        The run measures distances from `reference` or, without one, writes tensors.
        """
        # Distances belong to one reference: the same run against another one is another record.
        interventions = replace(self.conditions.interventions, **changes)
        key = (processes, interventions, reference.folder if reference else None)
        if key not in self._records:
            self._report(described(processes), interventions)
            self._records[key] = self._launch(processes, interventions, reference)
        return self._records[key]

    def repeat(self, record: Record, **changes: Any) -> Record:
        """Repeat a run and measure distances from the first."""
        interventions = replace(self.conditions.interventions, **changes)
        # Never one of the records: the comparison of two runs is the purpose.
        self._report(f"{described(record.processes)} again", interventions)
        return self._launch(record.processes, interventions, record)

    def run_killed(
        self, processes: int, kill_at: int, resume_on: int, reference: Record, **changes: Any
    ) -> Record:
        """Run until the last rank is killed in a step, then resume on `resume_on` processes.

        Raises:
            RunError: the run ended before the kill.
        """
        label = f"{processes}, killed in step {kill_at}, then {resume_on}"
        interventions = replace(self.conditions.interventions, **changes)
        self._report(label, interventions)
        first = self._launch(processes, interventions, reference, kill_at=kill_at)
        if first.failure is not None and first.failure.by_signal is None:
            return replace(first, label=label)  # it failed by itself, before the kill
        if first.failure is None:
            raise RunError(
                f"on {processes} processes, no rank was killed before the end: step {kill_at}",
                expected="a training step with this number",
                fix="choose --kill-at within the steps of the subject, and within --steps",
                code="E_NOTHING_OBSERVED",
            )
        resumed = self._launch(resume_on, interventions, reference, killed=first.folder)
        return join(first, resumed, label)

    def _report(self, run: str, interventions: Interventions) -> None:
        self._progress(", ".join(filter(None, (run, str(interventions)))))

    def _launch(
        self, processes: int, interventions: Interventions, reference: Record | None, **options: Any
    ) -> Record:
        """Run a trial with further `options` of `Trial`."""
        folder = self._folder / f"trial-{next(self._numbers)}"
        folder.mkdir()
        if reference is not None:
            options["reference"] = reference.folder
        conditions = {**vars(self.conditions), "interventions": interventions}
        trial = Trial(**conditions, folder=folder, processes=processes, **options)
        trial.scratch.mkdir(exist_ok=True)  # torch.save creates no folder
        failure = None
        try:
            run_on_ranks(
                "samestep.tools.verify.worker",
                "run",
                self.subject,
                trial,
                processes=processes or 1,
                preload=self._preload,
                config=LaunchConfig(
                    self.conditions.patience,
                    log_dir=folder / "logs",
                    has_own_hash_seeds=interventions.other_orders,
                ),
            )
        except RankError as error:
            failure = error.failure
        finally:
            # A killed trial leaves its files for the trial that resumes it, which restores both.
            for changed in (folder, trial.killed):
                if changed is not None and trial.kill_at is None:
                    restore_files(changed)
        if trial.kill_at is None:  # otherwise checkpoints of all trials occupy the disk
            shutil.rmtree(trial.scratch, ignore_errors=True)
        return read_record(folder, processes, failure)
