"""Trials of a subject under given conditions, each combination once, and their records."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Any

from samestep.checkpoint.store import CheckpointFolder
from samestep.config import DeviceKind, Recipe, Reduction
from samestep.errors import RunError
from samestep.launcher.failure import Failure
from samestep.launcher.launch import LaunchConfig, RankError, StoppedError, run_workers
from samestep.launcher.pickling import ByName
from samestep.launcher.watchdog import HANG_AFTER
from samestep.tools.timing import stop_errors
from samestep.units import plural

_WORKER = "samestep.tools.verify_engine.worker"

Note = Mapping[str, Any]


@dataclass(frozen=True)
class StepRecord:
    """Notes of all ranks on one step."""

    by_rank: tuple[Note, ...]  # notes of each rank; equal on all ranks except for the microbatches

    @cached_property
    def microbatches(self) -> dict[int, Note]:
        """Notes on each microbatch, from the rank that owns it."""
        return {int(number): note for rank in self.by_rank for number, note in rank["microbatches"].items()}

    @property
    def main(self) -> Note:
        """Notes of rank 0."""
        return self.by_rank[0]

    @property
    def threads(self) -> set[int]:
        """Numbers of threads of the ranks."""
        return {rank["threads"] for rank in self.by_rank}


@dataclass(frozen=True)
class Record:
    """Record of one trial."""

    processes: int
    folder: Path  # folder of the trial, with notes and tensors
    events: tuple[tuple[Note, ...], ...]  # notes of each rank in order
    failure: Failure | None = None
    label: str = ""  # description, if the trial was killed and resumed

    @cached_property
    def steps(self) -> dict[int, StepRecord]:
        """Steps that every rank finished, by number."""
        by_rank = [{note["step"]: note for note in notes if note["kind"] == "step"} for notes in self.events]
        shared = set(by_rank[0]).intersection(*by_rank[1:]) if by_rank else set()
        return {number: StepRecord(tuple(steps[number] for steps in by_rank)) for number in sorted(shared)}

    @property
    def engine(self) -> Note:
        """Description of the engine, from rank 0; empty if the trial built no engine."""
        return next(iter(self.notes("engine")), {})

    @property
    def config(self) -> Note:
        """Step configuration of the engine."""
        config: Note = self.engine.get("config", {})
        return config

    def notes(self, kind: str) -> list[Note]:
        """Return the notes of rank 0 of one kind."""
        return [note for note in self.events[0] if note["kind"] == kind] if self.events else []


def read_record(folder: Path, processes: int, failure: Failure | None = None) -> Record:
    """Read the record of a trial; a line that a killed rank did not complete is dropped."""
    events: list[tuple[Note, ...]] = []
    for rank in range(processes):
        file = folder / f"rank-{rank}.jsonl"
        text = file.read_text(encoding="utf-8") if file.exists() else ""
        events.append(tuple(json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()))
    return Record(processes, folder, tuple(events), failure)


def join(first: Record, second: Record, label: str) -> Record:
    """Join the records of a killed trial and of its resumption; a step in both counts from the second."""
    events: list[tuple[Note, ...]] = []
    for rank in range(max(first.processes, second.processes)):
        # Rank 0 stands in for a rank that one of the two lacks: notes differ in microbatches only.
        before = first.events[min(rank, first.processes - 1)]
        after = second.events[min(rank, second.processes - 1)]
        remaining = [note for note in before if note["kind"] != "step" or note["step"] not in second.steps]
        if rank >= first.processes:
            remaining = [{**note, "microbatches": {}} if note["kind"] == "step" else note for note in remaining]
        events.append((*remaining, *after))
    return Record(second.processes, second.folder, tuple(events), second.failure, label)


@dataclass(frozen=True, kw_only=True)
class Subject:
    """Recipe or script under verification."""

    name: str
    recipe: Recipe | None = None
    script: Path | None = None  # Python file that uses `samestep.start`, `Engine` and `loader`
    arguments: tuple[str, ...] = ()  # command-line arguments of the script


@dataclass(frozen=True, kw_only=True)
class Interventions:
    """Changes made for an experiment; a quantity that is held constant cannot be the cause of a difference."""

    reduction: Reduction | None = None
    double: bool = False
    single_thread: bool = False
    learning_rates: tuple[tuple[float, ...], ...] | None = None  # of the parameter groups, by step from 1
    seed_generators: bool = False
    reset_state: bool = False  # reset state that steps do not average to its first values, before every forward
    eval_module: str | None = None  # name of the module to set, with its children, to evaluation mode
    extra_forward: bool = False  # compute an additional forward before that of every microbatch and discard the result
    repeat_samples: bool = False  # read every sample and collate every microbatch twice; record those that differ
    other_orders: bool = False  # each rank has its own order of sets and of directory entries

    def __str__(self) -> str:
        changed = {name.replace("_", " "): value for name, value in vars(self).items() if value not in (None, False)}
        return ", ".join(f"{name} {value}" if isinstance(value, str) else name for name, value in changed.items())


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """Settings of all trials of a verification."""

    steps: int | None  # a recipe adds the last batch of the epoch and an evaluation; None runs a script to the end
    device: DeviceKind = "auto"
    interventions: Interventions = field(default_factory=Interventions)  # float64, or a reduction
    tolerance: float | None = None  # largest allowed relative difference; None requires equal bits
    patience: float = 120.0  # seconds without progress after which a rank ends


@dataclass(frozen=True, kw_only=True)
class Trial(Conditions):
    """One run of the subject with a record."""

    folder: Path  # output folder; each rank writes `rank-R.jsonl`
    processes: int
    writes_tensors: bool = False  # write tensors, so that other trials can measure distances from them
    reference: Path | None = None  # folder of a trial with tensors
    checks_additivity: bool = False  # compare the loss of every microbatch with that of its pieces
    kill_at: int | None = None  # the last rank kills itself in this step; every step before writes a checkpoint
    checkpoint: Path | None = None  # checkpoint to resume from
    after: int = 0  # only the steps after this one are recorded
    scratch: Path | None = None  # files of a script; by default a new folder

    @property
    def own_folder(self) -> Path:
        """Folder of a script's checkpoints, which also replaces `{folder}` in its arguments."""
        return self.scratch or self.folder / "scratch"


class TrialRunner:
    """Runs the trials of one verification in subfolders of `folder`; `progress` gets a text before each trial."""

    def __init__(
        self,
        subject: Subject,
        conditions: Conditions,
        folder: Path,
        *,
        preload: tuple[str, ...],
        progress: Callable[[str], None],
    ) -> None:
        self.subject, self.conditions = subject, conditions
        self._folder, self._preload, self._progress = folder, (*preload, _WORKER), progress
        self._numbers = count(1)
        self._records: dict[tuple[int, Interventions, bool, Path | None], Record] = {}

    def run(
        self, processes: int, reference: Record | None = None, *, checks_additivity: bool = False, **changes: Any
    ) -> Record:
        """Return the record of a run under the interventions of all trials and `changes` of these.

        The run measures distances from `reference` or, without one, writes tensors.
        """
        interventions = replace(self.conditions.interventions, **changes)
        key = (processes, interventions, checks_additivity, reference.folder if reference else None)
        if key not in self._records:
            self._report(plural(processes, "process"), interventions)
            options = {"writes_tensors": reference is None, "checks_additivity": checks_additivity}
            self._records[key] = self._launch(processes, interventions, reference, **options)
        return self._records[key]

    def repeat(self, record: Record, **changes: Any) -> Record:
        """Repeat a run and measure distances from the first."""
        interventions = replace(self.conditions.interventions, **changes)
        self._report(f"{plural(record.processes, 'process')} again", interventions)
        return self._launch(record.processes, interventions, record)

    def run_killed(self, processes: int, kill_at: int, resume_on: int, reference: Record) -> Record:
        """Run until the last rank is killed in a step, then resume the newest checkpoint on other processes.

        Raises:
            RunError: the run ended before the kill.
        """
        label = f"{processes}, killed in step {kill_at}, then {resume_on}"
        self._progress(label)
        interventions = self.conditions.interventions
        first = self._launch(processes, interventions, reference, kill_at=kill_at)
        if first.failure is None or first.failure.by_signal is None:
            raise RunError(
                f"the run on {processes} processes ended before a rank was killed in step {kill_at}",
                expected="a training step with this number",
                fix="choose --kill-at within the first --steps and within an epoch",
                code="E_NOTHING_OBSERVED",
            )
        # A script resumes by itself from the contents of its folder.
        newest = None
        if self.subject.recipe is not None and kill_at > 1:
            newest = CheckpointFolder(first.folder / "checkpoints").find("last")
        scratch = first.folder / "scratch"
        resumed = self._launch(resume_on, interventions, reference, checkpoint=newest, scratch=scratch)
        return join(first, resumed, label)

    def _report(self, run: str, interventions: Interventions) -> None:
        self._progress(", ".join(filter(None, (run, str(interventions)))))

    def _launch(self, processes: int, interventions: Interventions, reference: Record | None, **options: Any) -> Record:
        """Run a trial with further `options` of `Trial`."""
        folder = self._folder / f"trial-{next(self._numbers)}"
        folder.mkdir()
        conditions = vars(self.conditions) | {"interventions": interventions}
        origin = reference.folder if reference else None
        trial = Trial(**conditions, folder=folder, processes=processes, reference=origin, **options)
        run, failure = ByName(_WORKER, "run"), None
        own_seeds = interventions.other_orders
        config = LaunchConfig(HANG_AFTER, grace=None, log_dir=folder / "logs", has_own_hash_seeds=own_seeds)
        with stop_errors("the verification was stopped before the certificate"):
            try:
                result = run_workers(
                    run, self.subject, trial, processes=processes, launch_config=config, preload=self._preload
                )
            except RankError as error:
                result, failure = None, error.failure
            if result is not None and (result.value or result.stop_signal is not None):
                raise StoppedError("stopped")
        if trial.kill_at is None:
            shutil.rmtree(trial.own_folder, ignore_errors=True)  # otherwise checkpoints of all trials occupy the disk
        return read_record(folder, processes, failure)
